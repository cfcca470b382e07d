"""Evaluate the newest policy of a run, or a policy file, on an engine made for it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from shoal import engines
from shoal.base.seeding import MAX_SEED
from shoal.engines import user_code
from shoal.engines.base import Engine
from shoal.envs.wrappers import users_modules
from shoal.errors import UsageError
from shoal.policies.policy import SavedPolicy
from shoal.runs.folder import policy_file
from shoal.runs.settings import notebook_problems
from shoal.runs.trust import trust_policy
from shoal.sampling.evaluation import Evaluation, evaluate_policy

log = logging.getLogger("shoal.evaluate")


def evaluate_run(
    run: str, root: Path, *, count: int = 100, seed: int = 0, sample: bool = False, engine: str | Engine = "processes",
    workers: int | None = None, allow: Collection[str] = (),
) -> Evaluation:  # fmt: skip
    """Play `count` episodes with the newest policy of a run, or with a policy file."""
    problems = evaluation_problems(count, seed, engine, workers)
    if problems:
        raise UsageError(problems)
    saved = SavedPolicy.load(policy_file(run, root))
    trust_policy(run, root, saved.env, allow)
    return evaluate_saved(saved, count, seed, sample, engine, workers)


def evaluation_problems(count: int, seed: int, engine: str | Engine, workers: int | None) -> list[str]:
    """Describe everything that is wrong with the arguments of an evaluation."""
    problems = [] if isinstance(engine, Engine) else engines.engine_problems(engine, workers)
    if count < 1:
        problems.append(f"episodes must be at least 1, not {count}")
    if not 0 <= seed <= MAX_SEED:
        problems.append(f"seed must be in 0..{MAX_SEED}, not {seed}")
    return problems


def evaluate_saved(
    saved: SavedPolicy, count: int, seed: int, sample: bool, engine: str | Engine, workers: int | None
) -> Evaluation:
    """Play `count` episodes with a policy, on an engine that exists or one by name."""
    modules = users_modules(saved.env["id"], saved.env.get("wrap", ()))
    saved = _with_code_of_now(saved, modules)
    if isinstance(engine, Engine):
        return evaluate_policy(engine, saved, count, seed, sample)
    if problems := notebook_problems(saved.env["id"], modules, engine):
        raise UsageError(problems)
    with engines.make(engine, workers) as pool:
        return evaluate_policy(pool, saved, count, seed, sample)


def _with_code_of_now(saved: SavedPolicy, modules: Iterable[str]) -> SavedPolicy:
    """Let workers expect the user's code as it is now, and warn if the policy was trained with other code.

    Imports no more than the `modules` of the environment, which the caller trusts, whatever else a file may list.
    """
    then = saved.env.get("code", {})
    now = {name: user_code.content_digest(user_code.load(name)) for name in modules if name in then}
    for name in [name for name in now if then[name] != now[name]]:
        log.warning(
            "the code of %s has changed since the policy was trained (%s then, %s now), so its returns may differ",
            name, then[name], now[name],
        )  # fmt: skip
    return replace(saved, env={**saved.env, "code": now})
