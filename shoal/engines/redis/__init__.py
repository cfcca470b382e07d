"""Workers that come and go, over a Redis server that may lose everything it holds.

    address.py    where the server is, and the secrets to get in; never in a command, a log or a run's folder
    envelope.py   messages: sealed, fenced by run and epoch, checked before anything is believed
    fleet.py      who is there: runs and machines, and which machine works for which run
    head.py       the engine: a transport over lists
    machine.py    `shoal worker`: one process for each machine, with its workers as children
    local.py      `shoal redis start`: a server on this machine with safe settings
    rig.py        a server and workers of one's own, to try things on

The head's task table is the truth. Whatever is lost on the way is sent again: a head that lost its server, or whose
registration is gone, begins a new epoch, and everything from before is void.
"""
