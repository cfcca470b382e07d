"""`shoal up`: a Ray cluster inside an allocation, for as long as one command runs.

    job.py          one rank of a job: leads or follows
    allocation.py   rank, size, CPUs and time limit, from the variables of the launcher and the scheduler
    link.py         the connection between rank 0 and another rank, and its messages
    roster.py       the other ranks, as rank 0 sees them
    node.py         Ray on one machine
    driver.py       the user's command
    leader.py       rank 0: start the nodes, run the driver, stop everything
    follower.py     every other rank
    script.py       batch scripts

Rank 0 leaves its address and a secret in a file in a folder that all ranks share. All further communication uses one
TCP connection per rank, so that either end notices at once when the other dies.
"""
