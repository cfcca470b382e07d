"""Foundations: trees of arrays, seeds, disk, signals and processes. Imports only `shoal.errors`."""
