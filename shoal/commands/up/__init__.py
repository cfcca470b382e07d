"""`shoal up`: a Ray cluster inside of an allocation, for as long as one command runs.

    allocation.py   what the launcher and the scheduler say: rank, size, CPUs, time
    link.py         how ranks find rank 0 and talk with it
    node.py         Ray on one machine: start it, watch it, and leave nothing of it behind
    leader.py       rank 0: gather the ranks, bring up the nodes, run the driver, end all
    follower.py     every other rank
    script.py       batch scripts

Rank 0 leaves its address and a secret in a file in a folder that all ranks see. Everything else goes over one TCP
connection per rank, so that either side sees at once when the other one dies.
"""
