import pytest

from bench import rounds
from bench.contest import scout
from bench.rounds import SideFailed, Spread
from shoal.reports.tables import interquartile_mean


def test_sides_take_turns_and_one_that_fails_does_not_stop_the_rest() -> None:
    calls: list[tuple[str, int]] = []
    said: list[str] = []

    def steady(number: int) -> float:
        calls.append(("steady", number))
        return 10.0 * (number + 1)

    def shaky(number: int) -> float:
        calls.append(("shaky", number))
        if number == 1:
            raise SideFailed("out of luck")
        return 5.0

    found = rounds.measure({"steady": steady, "shaky": shaky}, 3, said.append)
    assert calls == [(name, number) for number in range(3) for name in ("steady", "shaky")]
    assert rounds.numbers(found, "steady") == [10, 20, 30]
    assert rounds.numbers(found, "shaky") == [5, 5]
    assert rounds.ratios(found, "steady", "shaky") == [2, 6], "only rounds in which both were measured, each by itself"
    assert rounds.ratios(found, "shaky", "steady") == [0.5, 5 / 30]
    assert rounds.failure(found, "steady") is None
    assert str(rounds.failure(found, "shaky")) == "out of luck"
    assert said[1] == "  round 2 of 3: steady 20, shaky failed"


def test_other_errors_are_not_taken_for_a_side_that_failed() -> None:
    with pytest.raises(ZeroDivisionError):
        rounds.measure({"broken": lambda number: 1 / number}, 1, print)


def test_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    """A round in which the machine was ten times slower for all sides changes no ratio."""
    found = rounds.measure(
        {"a": lambda n: (30.0, 3.0, 33.0)[n], "b": lambda n: (10.0, 1.0, 11.0)[n]}, 3, lambda _: None
    )
    assert rounds.spread(rounds.ratios(found, "a", "b")) == Spread(3, 3, 3)


def test_spread() -> None:
    assert rounds.spread([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1, 10)
    assert rounds.spread([]) is None


def test_scouting_takes_the_fastest_that_works() -> None:
    def measured(setting: str) -> float:
        if setting == "broken":
            raise SideFailed("no")
        return {"slow": 1.0, "fast": 2.0}[setting]

    assert scout(["slow", "broken", "fast"], measured, lambda _: None) == "fast"
    assert scout(["broken"], measured, lambda _: None) == "broken"


@pytest.mark.parametrize(("scores", "mean"), [([7], 7), ([1, 2], 1.5), ([0, 1, 2, 3, 100], 2), ([*range(8)], 3.5)])
def test_interquartile_mean(scores: list[float], mean: float) -> None:
    assert interquartile_mean(scores) == mean
    assert interquartile_mean([0, 0, 3, 5, 5, 5, 90, 90]) == 4.5
