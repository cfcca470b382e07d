from dataclasses import dataclass

from shoal.base import validation


@dataclass
class Some:
    count: int = 0
    sizes: tuple[int, ...] = (3, 0)
    rate: float = float("nan")
    share: float = 1.5
    endless: float = float("inf")
    unset: int | None = None


def test_all_problems_at_once() -> None:
    found = validation.field_problems(
        Some(),
        at_least_one=("count", "sizes", "unset"),
        above_zero=("rate", "endless"),
        not_negative=("count",),
        fractions=("share",),
        finite=("rate", "share"),
    )
    assert found == [
        "count must be at least 1, not 0",
        "sizes must be at least 1, not (3, 0)",
        "rate must be above 0, not nan",
        "endless must be a finite number, not inf",
        "share must be in 0..1, not 1.5",
        "rate must be a finite number, not nan",
    ]
