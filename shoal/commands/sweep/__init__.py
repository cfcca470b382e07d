"""`shoal sweep`: try many settings of one algorithm, each with several seeds, and rank them.

space.py    what is varied: lists of values, or ranges that Optuna searches
trials.py   the trials of a sweep, and the runs that they consist of
ask.py      where the settings of the next trials come from: a grid or Optuna
plan.py     checks everything before anything starts
pruning.py  the rule by which trials end early
session.py  trains, prunes and scores the trials, batch by batch
console.py  what the console shows meanwhile
results.py  the result of each trial, the file of all results, the table and the plot
"""
