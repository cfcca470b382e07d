"""No result changes by accident: every golden case has the digests that it had before."""

import shutil
from pathlib import Path

import pytest

from shoal.engines.fingerprint import canary
from shoal.runs.folder import RunDir
from tests.golden.__main__ import differences, measure, stored
from tests.golden.cases import FIXTURES
from tests.golden.runner import SAVED, digests, key, shoal

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_every_case_has_its_digests() -> None:
    here, known = key(), stored()
    if here not in known:
        pytest.skip(f"no golden digests for this machine ({here}); compare with: make golden BASE=COMMIT")
    _, found = measure(ROOT)
    assert not differences(known[here], found)


@pytest.mark.parametrize("algo", FIXTURES)
def test_saved_runs_still_load_evaluate_and_resume(algo: str, tmp_path: Path) -> None:
    run = shutil.copytree(SAVED / algo, tmp_path / algo)
    shoal(["evaluate", algo, "--episodes", "3", "--engine", "serial", "--runs", str(tmp_path)])
    resume = ["resume", algo, "--iterations", "3", "--engine", "serial", "--runs", str(tmp_path)]
    if algo == "nevergrad" and RunDir(run).record()["fingerprint"]["canary"] != canary():
        # CMA proposes other weights on a CPU with other arithmetic, which a resume must notice.
        with pytest.raises(RuntimeError, match="computes other bits"):
            shoal(resume)
        return
    shoal(resume)
    assert len(digests(run)) == 3
