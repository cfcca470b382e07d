"""What learners share: JAX set up for reproducible bits, advantage estimates, the replay buffer."""
