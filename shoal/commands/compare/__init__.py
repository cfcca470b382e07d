"""`shoal compare`: several algorithms, or optimizers of one algorithm, with several seeds on one task.

plan.py       the runs to train, each with its folder and settings
overrides.py  the settings that --set gives
session.py    trains and scores the runs on one engine
heads.py      runs that train at the same time, each in its own head process, on workers that they share
head.py       that process
findings.py   the results: scores, learning curves, a table and a plot
"""
