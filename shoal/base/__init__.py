"""What everything else stands on: trees of arrays, seeds, disk, signals, processes. Imports nothing else of Shoal."""
