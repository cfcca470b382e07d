"""Sampling: lanes on the head (lanes, batch, scores, population) and on workers (lane, vector_lane, tasks, ...)."""
