"""Policy files with known weights."""

from pathlib import Path
from typing import Any

import numpy as np

from shoal.base import seeding
from shoal.policies.policy import Policy, SavedPolicy


def saved_policy(path: Path, distribution: Any, hidden: tuple[int, ...] = (4,), normalise: bool = True) -> SavedPolicy:
    policy = Policy((3,), "<f4", distribution, hidden, normalise=normalise)
    weights = {
        "params": policy.init(seeding.rng(9, "weights")) + np.float32(0.1),
        "mean": np.full(3, 0.5, np.float32),
        "scale": np.full(3, 2.0, np.float32),
    }
    saved = SavedPolicy(policy, weights, {"id": "Walk-v0"})
    path.write_bytes(saved.to_bytes())
    return saved
