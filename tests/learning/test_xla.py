"""How the head uses JAX."""

import os
import re
import threading
from pathlib import Path

import pytest

from shoal.learning import xla
from tests.support.cli import shoal


def test_two_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=10)
    first, second = xla.together(meeting.wait, meeting.wait)
    assert {first, second} == {0, 1}


def test_what_goes_wrong_in_either_call_is_raised() -> None:
    for calls in ((lambda: 1 // 0, lambda: 2), (lambda: 2, lambda: 1 // 0)):
        with pytest.raises(ZeroDivisionError):
            xla.together(*calls)


# As on a machine with a single core.
ONE_CORE = """
import os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be kept to one core here")
@pytest.mark.parametrize("algo", ["ppo", "trpo"])
def test_a_single_core_gives_the_same_bits(algo: str, tmp_path: Path) -> None:
    words = ("train", algo, "CartPole-v1", "--no-preset", "--iterations=3", "--engine=serial", "--no-tensorboard")
    digests = set()
    for through in (None, ONE_CORE):
        code, out, err = shoal(*words, cwd=tmp_path, through=through)
        assert code == 0, err
        digests |= set(re.findall(r"Digest: (\w+)", out + err))
    assert len(digests) == 1, "policy and value function learn on two threads, however many cores there are"
