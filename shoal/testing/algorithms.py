"""The contract of algorithms as a test suite. Derive a class from `AlgorithmContract` in a pytest module:

from shoal.testing.algorithms import AlgorithmContract

class TestPPO(AlgorithmContract):
    algorithm = ppo                                     # the module: `Config` and `train`
    config = ppo.Config(batch_steps=256, hidden=(16,))  # small: every test but learning uses it
    learner = ppo.Config(lr=3e-3, hidden=(16,))         # learns the identity in `iterations` (default: `config`)
    iterations = 30                                     # (default: 120)
    invalid = {"lr": -1.0, "gamma": 2.0}                # each of these settings must be refused (default: none)
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from shoal import engines
from shoal.algos.base import Algorithm, AlgorithmConfig, Step
from shoal.base.trees import Tree, digest, digests
from shoal.engines.base import Engine
from shoal.envs.make import EnvSpec
from shoal.errors import EnvironmentFault
from shoal.learning import xla
from shoal.policies.policy import SavedPolicy
from shoal.runs.folder import RunDir
from shoal.sampling.evaluation import evaluate_policy
from shoal.testing import environments

IDENTITY, DRIFT, NOT_FINITE = (
    f"{environments.__name__}:testing/{name}-v0" for name in ("Identity", "Drift", "NotFinite")
)
GOAL = 10**6  # environment steps at which schedules end: far beyond these tests


class AlgorithmContract:
    """What Shoal promises of every algorithm, held against one of them."""

    algorithm: ClassVar[Algorithm]
    config: ClassVar[AlgorithmConfig]
    learner: ClassVar[AlgorithmConfig]
    iterations: ClassVar[int] = 120
    """Iterations after which `learner` has learned the identity."""
    threshold: ClassVar[float] = 0.94 * environments.OPTIMUM
    """Mean return that counts as learned."""
    invalid: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "learner"):
            cls.learner = cls.config

    @pytest.fixture(autouse=True)
    def _learner_threads(self) -> None:
        xla.start(1)

    def steps(
        self, engine: Engine, config: AlgorithmConfig, env: EnvSpec, seed: int = 0, state: Tree | None = None
    ) -> Iterator[Step]:
        """Train; the caller takes as many steps as it needs."""
        return self.algorithm.train(config, env, engine, seed, GOAL, state)

    def digests(self, count: int, engine: str = "serial", workers: int | None = None, seed: int = 0) -> list[str]:
        """Train for some iterations; return the digest of each."""
        with engines.make(engine, workers) as made:
            steps = self.steps(made, self.config, EnvSpec(DRIFT), seed)
            return [digest(next(steps).learned) for _ in range(count)]

    def test_learns_the_identity_and_starts_from_what_was_learned(self, tmp_path: Path) -> None:
        """Learning is tested by learning."""
        score = "eval/mean_reward" if self.learner.score_episodes else "rollout/ep_rew_mean"
        with engines.make("serial") as engine:
            steps = self.steps(engine, self.learner, EnvSpec(IDENTITY))
            taken = [next(steps) for _ in range(self.iterations)]
            scores = [step.metrics.get(score, 0.0) for step in taken]
            assert scores[-1] > self.threshold > scores[0], "random actions reach 2, the best policy 8"
            file = tmp_path / "learned.safetensors"
            file.write_bytes(taken[-1].policy.to_bytes())
            again = next(self.steps(engine, replace(self.learner, start=str(file)), EnvSpec(IDENTITY)))
            assert evaluate_policy(engine, again.policy, 16).mean > 0.8 * self.threshold
            learned, kept, new = (step.policy.weights["params"] for step in (taken[-1], again, taken[0]))
            far, near = np.abs(new - learned).mean(), np.abs(kept - learned).mean()
            assert near < far, "the setting `start` has no effect: see shoal.policies.start.first_weights"

    def test_same_seed_same_bits_on_any_number_of_workers(self) -> None:
        """The seed determines the result; the engine and the number of workers do not."""
        serial = self.digests(3)
        assert self.digests(3, "processes", workers=3) == serial
        assert not set(self.digests(3, seed=1)) & set(serial)

    def test_survives_a_killed_worker(self) -> None:
        """A worker killed after every iteration, with the lanes that it holds, costs time and changes nothing."""
        found = []
        with engines.make("processes", workers=2) as engine:
            steps = self.steps(engine, self.config, EnvSpec(DRIFT))
            for _ in range(3):
                found.append(digest(next(steps).learned))
                _kill_worker(engine)
            found.append(digest(next(steps).learned))
        assert found == self.digests(4)

    def test_resumes_in_the_middle_of_a_run(self, tmp_path: Path) -> None:
        """A state that went through a checkpoint continues with the same bits."""
        run = RunDir(tmp_path)
        run.checkpoints.mkdir()
        with engines.make("serial") as engine:
            steps = self.steps(engine, self.config, EnvSpec(DRIFT))
            whole = [next(steps) for _ in range(3)]
            run.save(3, whole[2].state(), whole[2].policy, keep=1)
            expected = [digests(next(steps).state()) for _ in range(3)]
            resumed = self.steps(engine, self.config, EnvSpec(DRIFT), state=run.load().state)
            for later, parts in enumerate(expected, start=1):
                found = digests(next(resumed).state())
                differs = [name for name in sorted(parts | found) if parts.get(name) != found.get(name)]
                assert differs == [], f"differ {later} iterations after a resume: does the state lack something?"
        assert digest(SavedPolicy.load(run.policy_file).weights) == digest(whole[2].policy.weights)

    def test_a_state_stays_as_it_was_while_training_continues(self) -> None:
        """Interrupting an iteration saves the previous one, so its state must not change meanwhile."""
        with engines.make("serial") as engine:
            steps = self.steps(engine, self.config, EnvSpec(DRIFT))
            for step in [next(steps) for _ in range(3)][-1:]:
                before = digest(step.state())
                next(steps)
                assert digest(step.state()) == before

    @pytest.mark.parametrize("what", ["reward", "observation"])
    def test_values_that_are_not_finite_are_refused(self, what: str) -> None:
        """Nothing is learned from NaN."""
        with engines.make("serial") as engine:
            steps = self.steps(engine, self.config, EnvSpec(NOT_FINITE, {"what": what}))
            with pytest.raises(EnvironmentFault, match="nan"):
                list(itertools.islice(steps, 3))

    def test_every_problem_is_reported_at_once(self) -> None:
        """Valid settings have no problems; invalid ones are all named in one go."""
        assert self.config.problems() == []
        assert self.learner.problems() == []
        problems = replace(self.config, **dict(self.invalid)).problems()
        assert [name for name in self.invalid if not any(name in problem for problem in problems)] == []

    def test_what_it_declares_is_true(self) -> None:
        """The number of steps per iteration and the required metrics are as declared."""
        with engines.make("serial") as engine:
            steps = self.steps(engine, self.config, EnvSpec(DRIFT))
            first, second = next(steps).metrics, next(steps).metrics
        taken = second["time/total_timesteps"] - first["time/total_timesteps"]
        assert taken > 0
        assert self.config.steps_per_iteration in (None, taken)
        assert min(second["time/sample_seconds"], second["time/learn_seconds"]) >= 0
        assert self.config.lanes >= 1


def _kill_worker(engine: Engine) -> None:
    """Kill the oldest worker, and wait until the engine has noticed."""
    pid, deadline = engine.pids[0], time.monotonic() + 60
    os.kill(pid, signal.SIGKILL)
    while pid in engine.pids:
        assert time.monotonic() < deadline, "the engine did not notice the death of a worker"
        time.sleep(0.01)
