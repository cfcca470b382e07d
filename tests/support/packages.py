"""Packages that only some virtualenvs have."""

import importlib.util

import pytest

TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not TORCH, reason="needs PyTorch: make torch")
