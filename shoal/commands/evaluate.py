"""Evaluate the newest policy of a run, or a policy file, on an engine made for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from shoal import engines
from shoal.base.seeding import MAX_SEED
from shoal.errors import UsageError
from shoal.policies.policy import SavedPolicy
from shoal.runs.folder import policy_file
from shoal.runs.trust import trust_policy
from shoal.sampling.evaluation import Evaluation, evaluate_policy


def evaluate_run(
    run: str, root: Path, *, count: int = 100, seed: int = 0, sample: bool = False, engine: str = "processes",
    workers: int | None = None, allow: Collection[str] = (),
) -> Evaluation:  # fmt: skip
    """Play `count` episodes with the newest policy of a run, or with a policy file."""
    problems = engines.engine_problems(engine, workers)
    if count < 1:
        problems.append(f"episodes must be at least 1, not {count}")
    if not 0 <= seed <= MAX_SEED:
        problems.append(f"seed must be in 0..{MAX_SEED}, not {seed}")
    if problems:
        raise UsageError(problems)
    saved = SavedPolicy.load(policy_file(run, root))
    trust_policy(run, root, saved.env, allow)
    with engines.make(engine, workers) as pool:
        return evaluate_policy(pool, saved, count, seed, sample)
