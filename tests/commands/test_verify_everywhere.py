"""The promise as a whole: every algorithm on every engine, with workers and heads killed."""

from pathlib import Path

import pytest

from shoal import algos
from tests.support.cli import shoal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ENGINES = "serial,processes:1,processes:3,mpi:2,ray:2,redis:2"


@pytest.mark.parametrize("algo", algos.ALGORITHMS)
def test_same_result_everywhere(algo: str, tmp_path: Path) -> None:
    words = [f"--engines={ENGINES}", "--kill-workers", "--kill-head", "--iterations=4"]
    code, out, err = shoal("verify", algo, "CartPole-v1", *words, cwd=tmp_path, timeout=1100)
    assert code == 0, out + err
    assert "Equal: all 17 ways" in out
