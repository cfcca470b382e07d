"""The contract of engines for ranks of an MPI job. Run under mpirun by test_mpi.py, on the first rank."""

from typing import Any

import numpy as np
import pytest

import shoal
from shoal.engines.base import Engine
from shoal.errors import EngineClosed, UsageError
from tests.engines.contract import Contract, WorkersContract
from tests.support import tasks


class TestMPI(Contract):
    def make(self, **options: Any) -> Engine:
        options.pop("workers", None)
        return shoal.engine("mpi", **options)

    test_workers_do_not_load_jax = WorkersContract.test_workers_do_not_load_jax
    test_workers_have_one_blas_thread = WorkersContract.test_workers_have_one_blas_thread

    def test_a_shared_value_reaches_every_rank(self) -> None:
        with self.make() as engine:
            for scale in (1.0, 2.0):  # the first is forgotten when it is no longer used
                shared = engine.share(np.full(1000, scale))
                assert engine.map(tasks.total, range(40), shared) == [1000 * scale + i for i in range(40)]
            assert len(set(engine.map(tasks.pid, range(40)))) == 2

    def test_one_engine_at_a_time(self) -> None:
        with self.make() as engine:
            with pytest.raises(UsageError, match="Close it before"):
                self.make()
            assert engine.map(tasks.echo, [1, 2]) == [1, 2]

    def test_number_of_workers_is_that_of_the_ranks(self) -> None:
        with pytest.raises(UsageError, match="mpirun -n 8"):
            shoal.engine("mpi", workers=7)
        with self.make() as engine:
            assert engine.workers == 2
            assert len(set(engine.map(tasks.pid, range(40)))) == 2

    def test_close_with_tasks_in_flight_leaves_the_ranks_usable(self) -> None:
        engine = self.make()
        futures = [engine.submit(tasks.nap, 0.5) for _ in range(6)]
        engine.close()
        with pytest.raises(EngineClosed):
            futures[-1].result(5)
        with self.make() as after:
            assert after.map(tasks.echo, range(5)) == list(range(5)), "late results of the first are not mistaken"
