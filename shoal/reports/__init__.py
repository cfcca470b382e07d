"""From metrics to tables and pictures."""
