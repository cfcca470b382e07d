"""A run: its settings, its folder, its loop, and the trackers that follow it."""
