"""Devices and costs from texts."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.traces import SpeedTrace
from lightning_hybrid.core.workloads import devices, drawn_costs, traces_for


def traces(speeds: object, *, seed: int = 0, total_cost: float = 10.0) -> tuple[SpeedTrace, ...]:
    return traces_for(devices(speeds, seed=seed), total_cost)  # type: ignore[arg-type]  # wrong ones are cases too


# --- devices --------------------------------------------------------------------------------------------------------


def test_speeds_in_one_string_are_separated_by_commas() -> None:
    assert traces("1, 0.5,2") == tuple(map(SpeedTrace.constant, (1.0, 0.5, 2.0)))


def test_a_count_before_the_x_makes_as_many_devices() -> None:
    assert traces("2x1,sudden:1:5:0.5") == (
        SpeedTrace.constant(1.0),
        SpeedTrace.constant(1.0),
        SpeedTrace.sudden(1.0, 5.0, 0.5),
    )


def test_entries_may_be_numbers_texts_and_traces() -> None:
    own = SpeedTrace((0.0, 1.0), (3.0, 2.0))
    assert traces([2, "drift:1:0.5:4", own, np.float64(1.5)]) == (
        SpeedTrace.constant(2.0),
        SpeedTrace.drift(1.0, 0.5, 4.0),
        own,
        SpeedTrace.constant(1.5),
    )


def test_failing_devices_stand_still_from_then_on() -> None:
    assert traces("1,failing:2:3") == (SpeedTrace.constant(1.0), SpeedTrace((0.0, 3.0), (2.0, 0.0)))


def test_periodic_devices_change_for_longer_than_the_run_takes() -> None:
    (trace,) = traces("periodic:1:0.5:4", total_cost=10.0)
    assert trace.speeds[:4] == (1.0, 0.5, 1.0, 0.5)
    assert trace.starts_s[:3] == (0.0, 2.0, 4.0)
    assert trace.starts_s[-1] >= 100.0


def test_periodic_devices_of_a_tiny_period_stay_small() -> None:
    (trace,) = traces("periodic:1:0.5:0.000001", total_cost=1e6)
    assert len(trace.speeds) <= 10_001


def test_drawn_speeds_lie_in_their_range_and_follow_the_seed() -> None:
    drawn = [trace.speeds[0] for trace in traces("100x1..8", seed=3)]
    assert all(1.0 <= speed <= 8.0 for speed in drawn)
    assert len(set(drawn)) == 100
    assert drawn == [trace.speeds[0] for trace in traces("100x1..8", seed=3)]
    assert drawn != [trace.speeds[0] for trace in traces("100x1..8", seed=4)]


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        (
            "1,fast",
            r"speeds\[1\] must be a number, LOW\.\.HIGH or one of drift:SPEED:LAST_SPEED:SECONDS, .* got 'fast'",
        ),
        ("sudden:1:2", r"speeds\[0\] must be a number.*got 'sudden:1:2'"),
        ("sudden:1:2:x", r"have a whole number of at least 1 before the x, got 'sudden:1:2:x'"),
        ("sudden:1:2:y", r"speeds\[0\] must have a number as later speed, got 'sudden:1:2:y'"),
        ("failing:1:0", "have a positive time"),
        ("drift:1:2:0", "have a positive time"),
        ("-1", "have a speed that is at least 0 and finite, got '-1'"),
        ("1e999", "have a speed that is at least 0 and finite"),
        ("0x1", "have a whole number of at least 1 before the x"),
        ("8..1", "have a low end that is not above the high end"),
        ("2x", r"speeds\[0\] must .*, got '2x'"),
        ("", r"speeds\[0\] must .*, got ''"),
        ("0,0", "have one that is positive at the start, got '0,0'"),
        ([], r"have one that is positive at the start, got \[\]"),
        ([1.0, None], r"speeds\[1\] must have a number as speed, got None"),
        ([float("nan")], r"speeds\[0\] must have a speed that is at least 0 and finite, got nan"),
    ],
)
def test_wrong_speeds_are_named(speeds: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        devices(speeds, seed=0)  # type: ignore[arg-type]  # that is the case


# --- costs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["equal", "uniform:0.5:1.5", "uniform:0:200", "lognormal:1", "lognormal:0"])
def test_drawn_costs_have_a_mean_of_one(distribution: str) -> None:
    costs = drawn_costs(distribution, 500, seed=1).compute
    assert len(costs) == 500
    assert costs.mean() == pytest.approx(1.0)
    assert (costs >= 0).all()


def test_drawn_costs_follow_the_seed() -> None:
    first = drawn_costs("lognormal:1", 50, seed=1).compute
    assert (first == drawn_costs("lognormal:1", 50, seed=1).compute).all()
    assert (first != drawn_costs("lognormal:1", 50, seed=2).compute).any()


@pytest.mark.parametrize(
    ("distribution", "num_cells", "message"),
    [
        ("gauss", 5, "costs must be one of equal, uniform:LOW:HIGH, lognormal:SIGMA, got 'gauss'"),
        ("uniform:1", 5, "costs must be one of equal"),
        ("uniform:2:1", 5, "have a low end that is not above the high end"),
        ("uniform:0:0", 5, "high end, which is positive"),
        ("lognormal:x", 5, "costs must have a number as sigma, got 'lognormal:x'"),
        ("lognormal:-1", 5, "have a sigma that is at least 0 and finite"),
        ("lognormal:1000", 5, "have a sigma of at most 10"),
        ("equal", 0, "num_cells must be at least 1, got 0"),
    ],
)
def test_wrong_distributions_are_named(distribution: str, num_cells: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drawn_costs(distribution, num_cells, seed=0)
