"""Signals to stop: raised at once, or as soon as that can be done without losing them or anything else."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest

from shoal.base import signals
from shoal.errors import Stopped


def signalled() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_at_once_but_not_in_a_held_block() -> None:
    done = []

    def held() -> None:
        with signals.held():
            signalled()
            done.append("the rest of it")

    for stopping in (signalled, held):
        with signals.listening(), pytest.raises(Stopped):
            stopping()
    assert done


def test_one_that_was_lost_comes_again() -> None:
    with signals.listening():
        with contextlib.suppress(Stopped):  # as Python does around a destructor
            signalled()
        with pytest.raises(Stopped), signals.held():
            pass


def test_cleaning_up_is_not_interrupted() -> None:
    done = []

    def cleaning() -> None:
        try:
            signalled()
        finally:
            with signals.held():
                done.append("in finally")
            try:
                raise OSError
            except OSError:
                with signals.held():
                    done.append("in a handler there")

    with signals.listening(), pytest.raises(Stopped):
        cleaning()
    assert len(done) == 2
    with signals.held():
        done.append("after")
    assert done[-1] == "after"


def test_not_where_jax_calls_python() -> None:
    its: dict[str, Callable[[], None]] = {"signalled": signalled}
    exec("def hashed():\n    signalled()", {"__name__": "jax._src.core"} | its, its)  # noqa: S102
    with signals.listening():
        its["hashed"]()
        with pytest.raises(Stopped), signals.held():
            pass
