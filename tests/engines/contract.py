"""What every engine has to pass. A new engine's test file subclasses these and says how to make one."""

import functools
from concurrent.futures import FIRST_COMPLETED, as_completed, wait
from queue import Queue
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.engines.scheduler import Scheduler
from shoal.errors import EngineClosed, EnvironmentFault, NotNameable, TaskFailed, UsageError, WireError
from tests.support import tasks


class Contract:
    """Engines of every kind."""

    def make(self, **options: Any) -> shoal.Engine:
        raise AssertionError("a test class says how to make its engine")

    def test_map_keeps_the_order_of_items(self) -> None:
        with self.make() as engine:
            assert engine.map(tasks.add, range(50), 100) == [100 + i for i in range(50)]

    def test_map_of_nothing(self) -> None:
        with self.make() as engine:
            assert engine.map(tasks.echo, []) == []

    def test_values_arrive_as_they_were(self) -> None:
        value = {
            "plain": [None, True, 1, -(2**63), 2**64 - 1, 1.5, "ä", b"\x00"],
            "tuple": (1, (2, [3])),
            3: {"nested": {}},
            "arrays": [np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros((0, 4), np.float16), np.array(2.5)],
            "scalar": np.float32(1.5),
            "column": np.arange(12.0).reshape(3, 4)[:, 1],
        }
        with self.make() as engine:
            back = engine.submit(tasks.echo, value).result(30)
        assert back["plain"] == value["plain"]
        assert back["tuple"] == value["tuple"]
        assert type(back["tuple"]) is tuple
        assert back[3] == {"nested": {}}
        for sent, got in zip([*value["arrays"], value["column"]], [*back["arrays"], back["column"]], strict=True):
            assert got.dtype == sent.dtype
            assert got.shape == sent.shape
            assert got.tobytes() == np.ascontiguousarray(sent).tobytes()
        assert type(back["scalar"]) is np.float32

    def test_arrays_that_arrive_are_read_only(self) -> None:
        with self.make() as engine:
            assert engine.submit(tasks.is_writeable, np.zeros(3)).result(30) is False
            assert not engine.submit(tasks.echo, np.zeros(3)).result(30).flags.writeable

    def test_shared_value_serves_many_tasks(self) -> None:
        with self.make() as engine:
            values = engine.share(np.ones(1000))
            assert engine.map(tasks.total, range(20), values) == [1000.0 + i for i in range(20)]
            again = engine.share(np.zeros(1000))
            assert engine.map(tasks.total, range(3), again) == [0.0, 1.0, 2.0]
            assert engine.map(tasks.total, range(3), values) == [1000.0, 1001.0, 1002.0]

    def test_shared_values_inside_containers(self) -> None:
        with self.make() as engine:
            one, two = engine.share({"a": 1}), engine.share([2])
            assert engine.submit(tasks.echo, {"x": [one, (two,)]}).result(30) == {"x": [{"a": 1}, ([2],)]}

    def test_large_values_both_ways(self) -> None:
        big = np.arange(5_000_000, dtype=np.float32)  # far more than a pipe holds
        with self.make() as engine:
            for back in engine.map(tasks.echo, [big] * 4):
                assert back[-1] == big[-1]

    def test_futures_are_standard_ones(self) -> None:
        with self.make() as engine:
            futures = [engine.submit(tasks.echo, i) for i in range(10)]
            assert sorted(future.result() for future in as_completed(futures, timeout=30)) == list(range(10))
            assert wait(futures, timeout=30, return_when=FIRST_COMPLETED).not_done == set()
            seen: Queue[int] = Queue()
            engine.submit(tasks.echo, 7).add_done_callback(lambda future: seen.put(future.result()))
            assert seen.get(timeout=30) == 7

    def test_callback_may_submit(self) -> None:
        with self.make() as engine:
            chained: Queue[Any] = Queue()
            engine.submit(tasks.echo, 1).add_done_callback(lambda f: chained.put(engine.submit(tasks.echo, 2)))
            assert chained.get(timeout=30).result(30) == 2

    def test_task_that_raises_brings_its_traceback(self) -> None:
        with self.make() as engine:
            with pytest.raises(TaskFailed, match="ValueError: no such thing") as caught:
                engine.submit(tasks.fail, "no such thing").result(30)
            assert "raise ValueError(message)" in caught.value.remote_traceback
            assert engine.map(tasks.echo, [1]) == [1], "the engine goes on"

    def test_odd_errors_are_reported_like_any_other(self) -> None:
        with self.make() as engine:
            with pytest.raises(TaskFailed, match=r"file \\udcff is missing"):
                engine.submit(tasks.fail_oddly, "surrogate").result(30)
            with pytest.raises(TaskFailed, match="GeneratorExit"):
                engine.submit(tasks.fail_oddly, "cancel").result(30)
            with pytest.raises(WireError):
                engine.submit(tasks.echo, "\udcff")

    def test_errors_of_shoal_keep_their_type(self) -> None:
        with self.make() as engine, pytest.raises(EnvironmentFault, match="it broke"):
            engine.submit(tasks.fail_as_user, "it broke").result(30)

    def test_function_that_cannot_be_named(self) -> None:
        def inner(x: int) -> int:
            return x

        with self.make() as engine:
            for function in (lambda x: x, inner, functools.partial(tasks.add, 1), Contract.make, np.ndarray.sum):
                with pytest.raises(NotNameable, match="top level"):
                    engine.submit(function, 1)

    def test_argument_that_cannot_be_sent(self) -> None:
        with self.make() as engine:
            for bad, where in (
                ({"deep": [1, {2}]}, r"\['deep'\]\[1\] it holds set"),
                (object(), "object"),
                (2**70, "64"),
            ):
                with pytest.raises(WireError, match=where):
                    engine.submit(tasks.echo, bad)
            with pytest.raises(WireError, match="dtype object"):
                engine.submit(tasks.echo, np.array([object()]))
            with pytest.raises(WireError, match="set"):
                engine.share({1})

    def test_result_that_cannot_be_sent(self) -> None:
        with self.make() as engine:
            with pytest.raises(WireError, match=r"unsendable returned.*\['set'\]"):
                engine.submit(tasks.unsendable, 1).result(30)
            assert engine.map(tasks.echo, [1]) == [1]

    def test_close_twice_and_use_after(self) -> None:
        engine = self.make()
        assert engine.map(tasks.echo, [1]) == [1]
        engine.close()
        engine.close()
        with pytest.raises(EngineClosed):
            engine.submit(tasks.echo, 1)

    def test_telemetry_counts(self) -> None:
        with self.make() as engine:
            engine.map(tasks.nap, [0.01] * 5)
            assert engine.telemetry().tasks == 5
            assert engine.telemetry().busy_seconds >= 0.05


class WorkersContract(Contract):
    """Engines with workers that can die."""

    def test_close_with_tasks_in_flight(self) -> None:
        engine = self.make(workers=1)
        futures = [engine.submit(tasks.nap, 60.0) for _ in range(5)]
        engine.close()
        for future in futures:
            with pytest.raises(EngineClosed):
                future.result(5)

    def test_shared_value_of_another_engine_is_refused(self) -> None:
        with self.make() as one, self.make() as other:
            mine, theirs = one.share("mine"), other.share("theirs")
            assert one.submit(tasks.echo, mine).result(30) == "mine"
            with pytest.raises(UsageError, match="another engine"):
                one.submit(tasks.echo, theirs)

    def test_cancel_before_it_runs(self) -> None:
        with self.make(workers=1) as engine:
            futures = [engine.submit(tasks.nap, 0.3) for _ in range(4)]
            assert futures[-1].cancel()
            assert [future.result(30) for future in futures[:-1]] == [0.3] * 3
            assert engine.map(tasks.echo, [1]) == [1]
            assert wait(futures, timeout=30).not_done == set()

    def test_worker_killed_while_it_works(self, tmp_path: Any) -> None:
        with self.make(workers=2) as engine:
            futures = [engine.submit(tasks.kill_once, str(tmp_path / "killed"))]
            futures += [engine.submit(tasks.echo, i) for i in range(20)]
            assert [future.result(30) for future in futures] == ["survived", *range(20)]
            assert engine.telemetry().lost_workers == 1

    def test_task_that_kills_three_workers_is_reported(self) -> None:
        from shoal.errors import PoisonTask

        with self.make(workers=2) as engine:
            with pytest.raises(PoisonTask, match=r"kill was running on 3 workers.*--engine serial"):
                engine.submit(tasks.kill, 1).result(60)
            assert engine.map(tasks.echo, range(5)) == list(range(5)), "the others are not harmed"

    def test_worker_that_is_stopped_is_replaced(self, tmp_path: Any) -> None:
        with self.make(workers=1, lease=5.0) as engine:
            assert engine.submit(tasks.stop_once, str(tmp_path / "stopped")).result(60) == "survived"

    def test_task_that_hangs_is_run_again(self, tmp_path: Any) -> None:
        with self.make(workers=1, task_timeout=1.0) as engine:
            assert engine.submit(tasks.hang_once, str(tmp_path / "hung")).result(60) == "survived"

    def test_equal_keys_prefer_one_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Scheduler, "STEAL_AFTER", 60.0)  # on a busy machine a worker may have to wait for its core
        with self.make(workers=2) as engine:
            engine.map(tasks.pid, range(8))
            for _ in range(5):
                first = [engine.submit(tasks.pid, 0, key=key) for key in "abcd"]
                second = [engine.submit(tasks.pid, 0, key=key) for key in "abcd"]
                assert [f.result(30) for f in first] == [f.result(30) for f in second]

    def test_workers_do_not_load_jax(self) -> None:
        with self.make(workers=1) as engine:
            engine.submit(tasks.echo, 1).result(30)
            loaded = engine.submit(tasks.modules, 0).result(30)
        assert "numpy" in loaded
        assert not {"jax", "optax", "tyro", "rich", "torch"} & set(loaded)

    def test_workers_have_one_blas_thread(self) -> None:
        with self.make(workers=1) as engine:
            assert engine.submit(tasks.variable, "OPENBLAS_NUM_THREADS").result(30) == "1"
