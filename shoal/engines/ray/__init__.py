"""Workers as Ray actors: on this machine, or on all nodes of a cluster while they come and go.

head.py      the engine: starts actors where there is room, sends and receives
actors.py    what runs on the nodes
session.py   this process's connection to Ray, which it starts or joins
"""
