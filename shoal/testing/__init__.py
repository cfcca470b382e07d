"""Help for tests: a Redis server and workers of one's own, faults to inject."""
