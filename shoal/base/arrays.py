"""The array type of code that runs on NumPy and on JAX."""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""A NumPy array on a worker, a JAX array in the learner. No type covers both."""
