import os
import traceback
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.base.host import available_cores
from shoal.engines.fingerprint import canary
from tests.engines.contract import Contract
from tests.support import tasks


class TestSerial(Contract):
    def make(self, **options: Any) -> shoal.Engine:
        return shoal.engine("serial")


def test_tasks_run_in_this_process() -> None:
    with shoal.engine("serial") as engine:
        assert engine.submit(tasks.pid, 0).result() == os.getpid()


@pytest.mark.processes
def test_same_arithmetic_as_a_worker() -> None:
    with shoal.engine("serial") as serial, shoal.engine("processes", workers=1) as processes:
        assert serial.submit(_canary, 0).result() == processes.submit(_canary, 0).result(30)


@pytest.mark.processes
def test_few_frames_between_submit_and_task() -> None:
    with shoal.engine("serial") as serial, shoal.engine("processes", workers=1) as processes:
        assert serial.submit(_frames, 0).result()[-2:] == ["submit", "run"]
        assert processes.submit(_frames, 0).result(30)[-3:] == ["main", "serve", "run"]


@pytest.mark.processes
def test_cores_that_workers_share() -> None:
    with shoal.engine("serial") as serial, shoal.engine("processes", workers=1) as processes:
        assert serial.shared_cores == processes.shared_cores == available_cores()


def _frames(_: int) -> list[str]:
    return [frame.name for frame in traceback.extract_stack()[:-1]]


def _canary(_: int) -> str:
    np.ones(1)
    return canary()
