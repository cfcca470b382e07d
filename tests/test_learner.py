"""How the head uses JAX."""

import threading

import pytest

from shoal import learner


def test_two_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=10)
    first, second = learner.together(meeting.wait, meeting.wait)
    assert {first, second} == {0, 1}


def test_what_goes_wrong_in_either_call_is_raised() -> None:
    for calls in ((lambda: 1 // 0, lambda: 2), (lambda: 2, lambda: 1 // 0)):
        with pytest.raises(ZeroDivisionError):
            learner.together(*calls)
