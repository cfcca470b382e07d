"""Workers as Ray actors, on this machine or on all nodes of a cluster while nodes join and leave.

engine.py      the engine and its options
transport.py   starts actors, sends messages to them and receives their answers
nodes.py       the cluster's nodes: how many workers each holds, and which one gets the next
watchers.py    one actor per other machine that reads its process table
actors.py      the code that runs on the nodes
session.py     this process's connection to Ray, which it starts or joins
"""
