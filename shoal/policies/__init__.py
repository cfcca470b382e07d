"""Policies: features, networks and action heads."""
