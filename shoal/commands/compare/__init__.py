"""`shoal compare`: several algorithms, or optimizers of one algorithm, with several seeds on one task.

plan.py       the runs to train, each with its folder and settings
overrides.py  the settings that --set gives
session.py    trains and scores the runs on one engine, and makes the table
"""
