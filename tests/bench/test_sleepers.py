"""Pretended workers speak as real ones do."""

import pytest

from bench.redis import use

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("count", [1, 30])
def test_sleepers_do_every_task(count: int) -> None:
    assert 0 < use(count, naps=5, seconds=0.02) < 5  # a figure, not a timing: that is for the bench
