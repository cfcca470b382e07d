"""Workers that join and leave at any time, over a Redis server that may lose everything it holds.

    address.py      where the server is, and the secrets to log in; never in a command, a log or a run's folder
    envelope.py     messages: signed, bound to a run and an epoch, and checked before use
    records.py      the keys in Redis, and the records of heads and machines
    assignment.py   which worker works for which run
    link.py         the connections of a head or a machine to the server
    engine.py       the head's side: an engine whose transport is lists in Redis
    supervisor.py   the machine's side: the process of `shoal worker`, which runs the worker processes
    local_server.py the server of `shoal redis start`, with safe settings

The head's task table is the truth, and everything that is lost is sent again: a head that loses its server, or whose
record is gone, begins a new epoch, and everything from before is void.
"""
