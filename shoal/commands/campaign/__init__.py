"""What `compare` and `sweep` share: many runs of one folder that train at the same time on one engine.

runs.py      a planned run and its folder; refuses folders that hold runs with other settings
heads.py     trains runs at the same time, each in its own head process, on workers that they share
head.py      that process
findings.py  the result of a run: its score and learning curve; a table and a plot of several
report.py    the files at the end
progress.py  what the console shows meanwhile
"""
