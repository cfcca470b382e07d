"""Simulated workers exchange the messages of real ones."""

import pytest

from bench.redis import utilisation

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("count", [1, 30])
def test_sleepers_do_every_task(count: int) -> None:
    assert 0 < utilisation(count, naps=5, seconds=0.02) < 5  # a figure, not a timing: that is for the bench
