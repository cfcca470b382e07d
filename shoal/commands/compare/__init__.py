"""`shoal compare`: several algorithms, or optimizers of one, with several seeds on one task.

plan.py      what was asked for as runs, each with its folder and settings
heads.py     runs that learn at the same time, each in a process of its own, on workers that they share
head.py      that process
findings.py  what the runs gave: a table, and a picture
"""
