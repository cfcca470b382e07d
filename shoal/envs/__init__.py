"""Environments: how to make them by name, and those that Shoal brings along."""
