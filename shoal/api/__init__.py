"""The Python API, but for `shoal.load`, which needs much less and is in `runs/load.py`.

The command line does the same with flags, and gives the same digests. `import shoal` offers everything here by name.
"""
