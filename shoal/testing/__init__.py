"""For tests, also of your own: the contract of algorithms, a Redis server with workers, and faults to inject."""
