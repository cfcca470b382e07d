"""What commands share that train many runs of one folder at the same time on one engine.

heads.py     trains runs at the same time, each in its own head process, on workers that they share
head.py      that process
findings.py  the result of a run: its score and learning curve; a table and a plot of several
"""
