"""What a run is made from: an algorithm, the settings of the run and those of the algorithm."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal import __version__, algos
from shoal.algos.base import AlgorithmConfig, Step, checked
from shoal.base.trees import Tree
from shoal.engines import user_code
from shoal.engines.base import Engine
from shoal.engines.fingerprint import code_digest, fingerprint
from shoal.envs.make import EnvSpec
from shoal.envs.wrappers import users_modules
from shoal.errors import UsageError
from shoal.learning import xla
from shoal.policies.policy import SavedPolicy
from shoal.runs.folder import RunRecord, policy_file
from shoal.runs.settings import Settings
from shoal.runs.trust import folders_of, modules_of_run

log = logging.getLogger("shoal.run")

_PACKAGES = ("jax", "jaxlib", "optax", "numpy", "gymnasium")
_LEARNER_CODE = ("learning", "algos/base.py", "algos/search.py")  # besides the algorithm's own module


@dataclass(frozen=True)
class RunSpec:
    """A run before it has a folder."""

    algo: str
    settings: Settings
    config: AlgorithmConfig

    @staticmethod
    def from_record(record: RunRecord, changes: Mapping[str, Any] | None = None) -> RunSpec:
        """Rebuild the spec of a recorded run; `changes` replace settings."""
        settings = Settings(**record["settings"] | dict(changes or {}))
        return RunSpec(record["algo"], settings, make_config(record["algo"], record["config"]))

    def to_record(self) -> RunRecord:
        """Describe the run, with the versions that its results depend on."""
        return {
            "algo": self.algo,
            "settings": asdict(self.settings),
            "config": asdict(self.config),
            "versions": versions(self.algo, self.settings.users_modules),
            "fingerprint": fingerprint(),
            "schedule_ends": {"0": self.schedule_end},
            "folders": folders_of(modules_of_run(self.algo, asdict(self.settings))),
        }

    def completed(self) -> RunSpec:
        """Fill in the number of learner threads, which the network decides."""
        threads = self.settings.learner_threads or xla.threads_for(self.config.hidden)
        return replace(self, settings=replace(self.settings, learner_threads=threads))

    def problems(self) -> list[str]:
        """Describe everything that is wrong with the settings, separately and in combination."""
        problems = self.settings.problems() + self.config.problems()
        if self.settings.vector and self.config.samples != "fragments":
            remedy = ": use --batch fragments" if hasattr(self.config, "batch") else ""
            problems.append(f"vector is for fragments, and {self.algo} plays {self.config.samples} here{remedy}")
        if self.settings.iterations is not None and self.config.scheduled and self.config.steps_per_iteration is None:
            problems.append(
                f"linear schedules end at a number of environment steps, and how many {self.settings.iterations} "
                f"iterations of whole episodes take is not known in advance: use --steps N instead of --iterations, or "
                f"constant schedules"
            )
        if self.settings.eval_every and self.config.score_episodes:
            problems.append(
                f"{self.algo} evaluates its policy in every iteration already, as eval/mean_reward: add "
                f"--score-episodes 0 to evaluate by --eval-every instead"
            )
        return problems

    def steps(
        self, config: AlgorithmConfig, engine: Engine, state: Tree | None = None, env: EnvSpec | None = None
    ) -> Iterator[Step]:
        """Begin to learn on an engine, from the start or from a state; `env` is that of the settings by default."""
        settings, algorithm = self.settings, algos.load(self.algo)
        steps = algorithm.train(config, env or settings.env_spec, engine, settings.seed, self.schedule_end, state)
        return steps if algos.is_builtin(self.algo) else checked(steps, algos.short_name(self.algo))

    @property
    def schedule_end(self) -> int:
        """Environment steps at which schedules end: the goal."""
        steps = self.config.steps_per_iteration
        if self.settings.iterations is None or not self.config.scheduled or steps is None:
            return self.settings.steps
        return self.settings.iterations * steps

    def schedule_ends(self, record: RunRecord) -> dict[int, int]:
        """Return where schedules end, by the iteration after which each end holds."""
        known = record.get("schedule_ends", {"0": self.schedule_end})
        return {int(after): end for after, end in known.items()}

    def start_content(self) -> bytes:
        """Read the policy file that the run starts from; empty if it starts from none."""
        name = self.config.start
        if name is None:
            return b""
        path = policy_file(name, Path(self.settings.runs))
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"the policy {path} of --from {name} cannot be read: {error.strerror}") from None
        SavedPolicy.load(path)  # refuses a file that is no policy, such as an export
        return content

    def located_config(self) -> AlgorithmConfig:
        """Return the algorithm's settings with the path of the policy to start from."""
        return located(self.config, Path(self.settings.runs))


def start_from(config: AlgorithmConfig, path: Path) -> AlgorithmConfig:
    """Start from the policy at this path, if the run starts from a policy at all."""
    return config if config.start is None else replace(config, start=str(path))


def located(config: AlgorithmConfig, root: Path) -> AlgorithmConfig:
    """Make the path of the policy to start from absolute, for runs in another folder."""
    return config if config.start is None else start_from(config, policy_file(config.start, root).absolute())


def make_config(algo: str, values: Mapping[str, Any]) -> AlgorithmConfig:
    """Build the settings of an algorithm from JSON, which has lists for tuples."""
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return algos.load(algo).Config(**made)


def versions(algo: str, modules: Iterable[str]) -> dict[str, str]:
    """List the versions that a run's results depend on, and digests of the algorithm's and the user's modules."""
    module = algos.load(algo)
    names = (*_PACKAGES, *module.Config.packages)
    code = code_digest(*_LEARNER_CODE, *([f"algos/{algo}.py"] if algos.is_builtin(algo) else []))
    if not algos.is_builtin(algo):
        code += "+" + user_code.content_digest(algos.module_of(algo))
    return (
        {"shoal": __version__, "python": platform.python_version(), "algorithm": code}
        | {name: metadata.version(name) for name in names}
        | {f"code of {name}": user_code.content_digest(user_code.load(name)) for name in modules}
    )


def warn_of_changes(record: RunRecord) -> None:
    """Warn if this is not the software and arithmetic that a run was started with."""
    modules = users_modules(record["settings"]["env"], record["settings"].get("wrap", ()))
    then, now = record["versions"] | record["fingerprint"], versions(record["algo"], modules) | fingerprint()
    differs = [
        f"{key} {then.get(key)} then, {now.get(key)} now" for key in sorted(then | now) if then.get(key) != now.get(key)
    ]
    if differs:
        log.warning(
            "the run was started with other versions, so its bits may differ from here on: %s", "; ".join(differs)
        )
