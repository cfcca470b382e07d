"""Range checks for the fields of a settings dataclass, which report all problems at once."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable


def field_problems(
    settings: object,
    *,
    at_least_one: Iterable[str] = (),
    above_zero: Iterable[str] = (),
    not_negative: Iterable[str] = (),
    fractions: Iterable[str] = (),
    finite: Iterable[str] = (),
) -> list[str]:
    """Describe each named field that is out of range or infinite; a field that is None is not checked."""
    rules = (
        (at_least_one, lambda value: value >= 1, "at least 1"),
        (above_zero, lambda value: value > 0, "above 0"),
        (not_negative, lambda value: value >= 0, "0 or more"),
        (fractions, lambda value: 0 <= value <= 1, "in 0..1"),
        (finite, math.isfinite, "a finite number"),
    )
    found = []
    for names, holds, expected in rules:
        for name in names:
            value = operator.attrgetter(name)(settings)
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(map(holds, values)):
                found.append(f"{name} must be {expected}, not {value}")
            elif math.inf in values:
                found.append(f"{name} must be a finite number, not {value}")
    return found
