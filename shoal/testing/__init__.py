"""Redis for tests: a server with workers on this machine (`redis_rig`), and faults to inject (`redis_faults`)."""
