"""One BLAS thread wherever results must not depend on the number of cores."""

from __future__ import annotations

from threadpoolctl import threadpool_limits


def one_thread() -> threadpool_limits:
    """Limit BLAS to one thread from now on, until the returned context manager exits."""
    return threadpool_limits(1)
