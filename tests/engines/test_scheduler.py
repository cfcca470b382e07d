"""The scheduler alone: examples, a machine that kills, hangs, duplicates and delays, and ten thousand workers."""

import random
import time
from collections import deque

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.engines.scheduler import Command, Fail, GiveUp, Notice, Resolve, Scheduler, Send, Ship
from shoal.errors import NoWorkers, PoisonTask


def sends(commands: list[Command]) -> list[tuple[int, int]]:
    return [(c.worker, c.task) for c in commands if isinstance(c, Send)]


def ticket(commands: list[Command], task: int) -> int:
    return next(c.ticket for c in commands if isinstance(c, Send) and c.task == task)


def unfinished(scheduler: Scheduler) -> int:
    return len(scheduler._tasks)


def warmed_up(workers: int, seconds: float = 0.001) -> Scheduler:
    """A scheduler that knows how long its tasks take; brief as they are, it sends a second one ahead."""
    scheduler = Scheduler()
    scheduler.joined(0.0, 99)
    first = scheduler.submit(0.0, 0, "task")
    scheduler.received(0.0, 99, ticket(first, 0), None, seconds)
    scheduler.left(0.0, 99, "left")
    for worker in range(workers):
        scheduler.joined(0.0, worker)
    return scheduler


def test_idle_workers_come_before_second_tasks() -> None:
    scheduler = warmed_up(3)
    placed = [sends(scheduler.submit(0.0, task, "task")) for task in range(1, 8)]
    assert [p[0][0] for p in placed[:3]] == [0, 1, 2]
    assert sorted(p[0][0] for p in placed[3:6]) == [0, 1, 2]
    assert placed[6] == [], "both places of all three are taken"


def test_long_tasks_are_not_sent_ahead() -> None:
    scheduler = Scheduler()
    scheduler.joined(0.0, 0)
    first = scheduler.submit(0.0, 1, "task")
    assert sends(scheduler.submit(0.0, 2, "task")) == []
    later = scheduler.received(5.0, 0, ticket(first, 1), None, 5.0)
    assert sends(later) == [(0, 2)]
    assert sends(scheduler.submit(5.0, 3, "task")) == []
    assert sends(scheduler.joined(5.0, 1)) == [(1, 3)], "a worker that joins finds it"


def test_the_last_tasks_wait_for_the_first_worker_to_finish() -> None:
    scheduler = warmed_up(2, seconds=0.1)
    first = [scheduler.submit(0.0, task, "task") for task in range(1, 5)]
    assert [sends(placed) for placed in first] == [[(0, 1)], [(1, 2)], [], []], "two are left, for two workers"
    assert sends(scheduler.submit(0.0, 5, "task")) == [(0, 3)], "many are left: the oldest of them is sent ahead"
    later = scheduler.received(0.05, 1, ticket(first[1], 2), None, 0.05)
    assert sends(later) == [(1, 4)]
    assert sends(scheduler.received(0.08, 1, ticket(later, 4), None, 0.03)) == [(1, 5)]


def test_a_task_without_a_key_gets_its_turn_among_those_that_have_one() -> None:
    scheduler = warmed_up(1, seconds=0.1)
    running = [(0, scheduler.submit(0.0, 1, "task", "a")), (1, scheduler.submit(0.0, 2, "task", "b"))]
    assert sends(scheduler.submit(0.0, 3, "task")) == [], "no room"
    later = scheduler.received(0.1, 0, ticket(running[0][1], 1), None, 0.1)
    assert sends(later) == [], "it may be that another worker is done first"
    assert sends(scheduler.submit(0.1, 4, "task", "a")) == [(0, 4)]
    assert sends(scheduler.received(0.2, 0, ticket(running[1][1], 2), None, 0.1)) == [(0, 3)], "now it is the oldest"


def test_the_first_tasks_of_keys_are_spread_evenly() -> None:
    scheduler = warmed_up(2, seconds=0.1)
    homes = [sends(scheduler.submit(0.0, task, "task", f"lane {task}"))[0][0] for task in range(1, 5)]
    assert homes == [0, 1, 0, 1], "a worker that is slow at first gets as many"


def test_what_was_cancelled_says_nothing_about_how_long_tasks_take() -> None:
    scheduler = warmed_up(1, seconds=0.3)
    for task in range(1, 30):
        scheduler.received(0.0, 0, ticket(scheduler.submit(0.0, task, "task"), task), None, None)
    assert scheduler.telemetry.tasks == 1
    assert sends(scheduler.submit(0.0, 98, "task", "a")) == [(0, 98)]
    assert sends(scheduler.submit(0.0, 99, "task", "a")) == [], "long ones are not sent ahead"


def test_only_the_running_task_is_blamed() -> None:
    scheduler = warmed_up(0)
    killed: list[Command] = []
    scheduler.submit(0.0, 1, "culprit")
    scheduler.submit(0.0, 2, "bystander")
    for worker in range(3):
        scheduler.joined(0.0, worker)
        killed += scheduler.left(0.0, worker, "died")
    assert [(c.task, type(c.error)) for c in killed if isinstance(c, Fail)] == [(1, PoisonTask)]
    assert sends(scheduler.joined(0.0, 5)) == [(5, 2)]


def test_no_task_is_blamed_when_only_the_connection_was_lost() -> None:
    scheduler = Scheduler()
    scheduler.submit(0.0, 1, "innocent")
    for worker in range(10):
        scheduler.joined(0.0, worker)
        assert scheduler.left(0.0, worker, "was called away", fault=False) == []
    assert sends(scheduler.joined(0.0, 10)) == [(10, 1)]
    assert scheduler.telemetry.lost_workers == 0


def test_key_stays_until_its_worker_is_lost() -> None:
    scheduler = warmed_up(2)
    first = scheduler.submit(0.0, 1, "task", key="lane")
    (home, _), *_ = sends(first)
    scheduler.received(0.0, home, ticket(first, 1), None)
    scheduler.submit(0.0, 2, "task")
    scheduler.submit(0.0, 3, "task")
    assert sends(scheduler.submit(0.0, 4, "task", key="lane")) == [(home, 4)], "although another has less to do"
    commands = scheduler.left(0.0, home, "died")
    assert {worker for worker, _ in sends(commands)} <= {1 - home}


def test_key_that_finds_a_home_while_tasks_wait() -> None:
    scheduler = warmed_up(2)
    filling = [scheduler.submit(0.0, task, "task") for task in range(1, 5)]
    running = {worker: ticket(commands, task) for commands in filling for worker, task in sends(commands)}
    for task in (5, 6):
        assert sends(scheduler.submit(0.0, task, "task", key="lane")) == [], "no worker has room"
    assert sends(scheduler.received(0.0, 0, running[0], None, 0.001)) == [(0, 5)]
    assert sends(scheduler.received(0.0, 1, running[1], None, 0.001)) == [], "not to another worker"


def test_idle_worker_takes_over_a_key_after_a_while() -> None:
    scheduler = warmed_up(2)
    tickets = {}
    for task in range(1, 5):
        commands = scheduler.submit(0.0, task, "task", key=f"k{task}")
        (worker, _), *_ = sends(commands)
        tickets[task] = (worker, ticket(commands, task))
    for worker, number in tickets.values():
        scheduler.received(0.0, worker, number, None, 0.001)
    homes = {f"k{task}": worker for task, (worker, _) in tickets.items()}
    mine = [key for key, worker in homes.items() if worker == 0]
    for task, key in enumerate(mine * 4, start=10):
        scheduler.submit(1.0, task, "task", key=key)
    assert sends(scheduler.tick(1.001)) == [], "not at once: its own tasks may be about to come"
    assert sends(scheduler.tick(1.5))[0][0] == 1


def test_shared_values_are_shipped_once() -> None:
    scheduler = warmed_up(1)
    commands = scheduler.submit(0.0, 1, "task", needs=[7]) + scheduler.submit(0.0, 2, "task", needs=[7, 8])
    assert [c.shared for c in commands if isinstance(c, Ship)] == [7, 8]
    assert scheduler.forget(7) == [0]
    assert scheduler.forget(7) == []


def test_silent_worker_is_given_up() -> None:
    scheduler = Scheduler(lease=10)
    scheduler.joined(0.0, 0)
    scheduler.submit(0.0, 1, "task")
    for now in (4.0, 8.0):
        scheduler.tick(now)
    scheduler.heard(8.0, 0)
    assert scheduler.tick(12.0) + scheduler.tick(16.0) + scheduler.tick(17.0) == []
    commands = scheduler.tick(19.0)
    assert [c.worker for c in commands if isinstance(c, GiveUp)] == [0]
    assert any("no sign of life for 11 s" in c.text for c in commands if isinstance(c, Notice))
    assert sends(scheduler.joined(19.0, 1)) == [(1, 1)]


def test_a_head_that_was_stopped_does_not_blame_its_workers() -> None:
    scheduler = Scheduler(lease=10, task_timeout=10)
    scheduler.joined(100.0, 0)
    scheduler.submit(100.0, 1, "task")
    scheduler.tick(100.0)
    assert scheduler.tick(200.0) == [], "Ctrl-Z and fg: no worker could be heard meanwhile"
    assert [type(c) for c in scheduler.tick(204.0)] == []


def test_slow_task_costs_its_worker_only_with_a_timeout() -> None:
    for limit, given_up in ((None, []), (5.0, [0])):
        scheduler = Scheduler(task_timeout=limit)
        scheduler.joined(0.0, 0)
        scheduler.submit(0.0, 1, "task")
        scheduler.tick(4.0)
        scheduler.heard(8.0, 0)
        assert [c.worker for c in scheduler.tick(8.0) if isinstance(c, GiveUp)] == given_up


def test_no_worker_connects() -> None:
    scheduler = Scheduler(patience=60)
    scheduler.submit(0.0, 1, "task")
    assert scheduler.tick(59.0) == []
    (command,) = scheduler.tick(61.0)
    assert isinstance(command, Fail)
    assert isinstance(command.error, NoWorkers)


def test_late_and_duplicate_results_change_nothing() -> None:
    scheduler = Scheduler()
    scheduler.joined(0.0, 0)
    old = ticket(scheduler.submit(0.0, 1, "task"), 1)
    scheduler.left(0.0, 0, "gave no sign of life")
    new = ticket(scheduler.joined(0.0, 1), 1)
    assert scheduler.received(0.0, 0, old, "late") == []
    assert scheduler.received(0.0, 1, old, "mixed up") == []
    assert Resolve(1, "right") in scheduler.received(0.0, 1, new, "right")
    assert scheduler.received(0.0, 1, new, "again") == []


class Chaos(RuleBasedStateMachine):
    """Workers that run what they are sent, in order, unless something happens to them."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(attempts=3, lease=10, task_timeout=100, patience=1e9)
        self.now = 0.0
        self.next_task = self.next_worker = 0
        self.queues: dict[int, deque[tuple[int, int]]] = {}  # what each living worker was sent
        self.hung: set[int] = set()
        self.old_results: list[tuple[int, int]] = []
        self.held: dict[int, set[int]] = {}
        self.needs: dict[int, int] = {}
        self.outcomes: dict[int, str] = {}
        self.losses: dict[int, int] = {}

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Ship):
                assert command.shared not in self.held[command.worker], "shipped twice"
                self.held[command.worker].add(command.shared)
            elif isinstance(command, Send):
                assert command.task not in self.outcomes, "sent although it is done"
                assert self.needs[command.task] in self.held[command.worker], "sent before what it needs"
                self.queues[command.worker].append((command.ticket, command.task))
                assert len(self.queues[command.worker]) <= 2
            elif isinstance(command, Resolve):
                assert command.task not in self.outcomes, "resolved twice"
                assert command.outcome == f"result {command.task}"
                self.outcomes[command.task] = "done"
            elif isinstance(command, Fail):
                assert command.task not in self.outcomes
                assert isinstance(command.error, PoisonTask)
                assert self.losses[command.task] == 3, "blamed for fewer losses than it was running at"
                self.outcomes[command.task] = "poison"
            elif isinstance(command, GiveUp):
                assert command.worker in self.hung, "gave up a worker that was well"
                self.lose(command.worker)

    def lose(self, worker: int) -> None:
        queue = self.queues.pop(worker)
        self.hung.discard(worker)
        self.old_results += [(worker, ticket) for ticket, _ in queue]
        if queue:
            self.losses[queue[0][1]] = self.losses.get(queue[0][1], 0) + 1

    @rule(key=st.sampled_from([None, "a", "b", "c"]), shared=st.integers(0, 2))
    def submit(self, key: str | None, shared: int) -> None:
        task, self.next_task = self.next_task, self.next_task + 1
        self.needs[task] = shared
        self.obey(self.scheduler.submit(self.now, task, f"task {task}", key, [shared]))

    @rule()
    def join(self) -> None:
        worker, self.next_worker = self.next_worker, self.next_worker + 1
        self.queues[worker] = deque()
        self.held[worker] = set()
        self.obey(self.scheduler.joined(self.now, worker))

    @precondition(lambda self: any(self.queues.values()))
    @rule(data=st.data(), seconds=st.sampled_from([0.001, 1.0]))
    def finish(self, data: st.DataObject, seconds: float) -> None:
        worker = data.draw(st.sampled_from([w for w, queue in self.queues.items() if queue]))
        if worker in self.hung:
            return
        ticket, task = self.queues[worker].popleft()
        self.old_results.append((worker, ticket))
        self.obey(self.scheduler.received(self.now, worker, ticket, f"result {task}", seconds))

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.queues)))
        self.lose(worker)
        self.obey(self.scheduler.left(self.now, worker, "died"))

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        self.hung.add(data.draw(st.sampled_from(sorted(self.queues))))

    @precondition(lambda self: self.old_results)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        worker, ticket = data.draw(st.sampled_from(self.old_results))
        assert self.scheduler.received(self.now, worker, ticket, "stale") == []

    @rule(seconds=st.sampled_from([0.001, 0.05, 4.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.queues:
            if worker not in self.hung:
                self.obey(self.scheduler.heard(self.now, worker))
        self.obey(self.scheduler.tick(self.now))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert unfinished(self.scheduler) == self.next_task - len(self.outcomes)

    @invariant()
    def no_worker_idles_while_free_tasks_wait(self) -> None:
        in_flight = sum(map(len, self.queues.values()))
        if any(not queue for queue in self.queues.values()):
            waiting = unfinished(self.scheduler) - in_flight
            backlog = sum(len(w.waiting) for w in self.scheduler._workers.values())
            assert waiting <= backlog

    def teardown(self) -> None:
        """With a healthy worker, whatever is left gets done."""
        self.join()
        for _ in range(10_000):
            if not unfinished(self.scheduler):
                break
            self.now += 0.5
            for worker in list(self.queues):
                if worker not in self.hung:
                    self.obey(self.scheduler.heard(self.now, worker))
                    if self.queues[worker]:
                        ticket, task = self.queues[worker].popleft()
                        self.obey(self.scheduler.received(self.now, worker, ticket, f"result {task}", 0.001))
            self.obey(self.scheduler.tick(self.now))
        assert len(self.outcomes) == self.next_task


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_ten_thousand_workers() -> None:
    """Cost per task does not grow with the number of workers, and all of them are kept busy."""
    rng = random.Random(0)
    scheduler = Scheduler()
    workers, tasks = 10_000, 40_000
    running: dict[int, tuple[int, int]] = {}
    done = 0

    def obey(commands: list[Command]) -> None:
        nonlocal done
        for command in commands:
            if isinstance(command, Send):
                running.setdefault(command.worker, (command.ticket, command.task))
            elif isinstance(command, Resolve):
                done += 1

    begun = time.process_time()
    for worker in range(workers):
        obey(scheduler.joined(0.0, worker))
    for task in range(tasks):
        obey(scheduler.submit(0.0, task, "task", key=task % 5000 if task % 2 else None))
    assert len(running) == workers
    while running:
        worker = rng.choice(list(running)) if len(running) < 50 else next(iter(running))
        ticket, _ = running.pop(worker)
        obey(scheduler.received(1.0, worker, ticket, None, 1.0))
        if not running and unfinished(scheduler):
            obey(scheduler.tick(100.0))
    assert done + unfinished(scheduler) == tasks
    assert (time.process_time() - begun) / tasks < 1e-3
