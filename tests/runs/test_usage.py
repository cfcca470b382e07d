import pytest

from shoal.runs.usage import Usage


def usage(
    workers: int,
    lanes: int,
    cores: int | None,
    sampling: float,
    learning: float,
    busy_share: float,
    overlap: float = 0.0,
) -> Usage:  # fmt: skip
    found = Usage(workers, lanes, cores)
    for _ in range(4):
        found.add(sampling / 4, learning / 4, busy_share * sampling / 4 * min(workers, lanes), overlap / 4)
    return found


@pytest.mark.parametrize(
    ("case", "limit", "words"),
    [
        (usage(2, 8, 2, 1, 3, 0.9), "learner", "More workers would not help"),
        (usage(2, 8, 8, 1, 3, 0.9), "learner", "--workers 8 would save up to 19%"),
        (usage(2, 8, 8, 9, 1, 0.9), "environment", "--workers 8 would save up to 68%"),
        (usage(2, 8, None, 9, 1, 0.9), "environment", "--workers 8 would save up to 68%"),
        (usage(2, 2, 2, 9, 1, 0.9), "environment", "on all 2 cores"),
        (usage(4, 4, None, 9, 1, 0.9), "lanes", "4 lanes keep at most 4 workers busy"),
        (usage(2, 8, 2, 9, 1, 0.9), "environment", "on all 2 cores"),
        (usage(4, 4, 8, 9, 1, 0.9), "lanes", "4 lanes keep at most 4 workers busy"),
        (usage(6, 8, 2, 9, 1, 0.3), "cores", "6 workers compete for 2.*Use --workers 2"),
        (usage(4, 8, 8, 9, 1, 0.3), "engine", "use --workers 2, which is as fast, or larger batches"),
        (usage(4, 8, 8, 9, 1, 0.55), "engine", "use --workers 3, which is as fast, or larger batches"),
        (usage(1, 8, 8, 9, 1, 0.3), "engine", "use larger batches"),
        # Acting and learning at once: 10 s in all, of which the shorter of the two is hidden behind the longer.
        (
            usage(2, 8, 8, 4, 10, 0.9, 4),
            "learner",
            "not help.*100% .* learning, 40% overlaps with sampling",
        ),
        (usage(2, 8, 8, 10, 8, 0.9, 8), "environment", "--workers 8 would save up to 20%"),
        (usage(2, 8, 8, 10, 2, 0.9, 2), "environment", "--workers 8 would save up to 75%"),
    ],
)
def test_what_limits_and_what_to_do(case: Usage, limit: str, words: str) -> None:
    import re

    assert case.limit() == limit
    assert re.search(words, case.advice())
    assert "while sampling, workers are busy" in case.advice(), "the numbers that show it"


def test_nothing_measured_yet() -> None:
    nothing = Usage(2, 8, 2)
    assert (nothing.limit(), nothing.suited()) == ("", 2)
    assert "not measured" in nothing.advice()
