"""Policies: networks, action distributions, and both together."""
