"""Speeds and costs of recorded steps."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_hybrid.core.paces import Pace, by_known_costs, by_usual_steps


def one_after_the_other(seconds: list[float], sizes: list[float] | None = None) -> list[Pace]:
    begins_s = np.cumsum([0.0, *seconds[:-1]]).tolist()
    return list(map(Pace, begins_s, seconds, sizes or [1.0] * len(seconds)))


def test_known_costs_give_the_time_that_a_few_steps_took_together() -> None:
    steps = one_after_the_other([2.0, 4.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0], [1.0, 2.0, 1.0, 0.5, 0.5, 4.0, 4.0, 4.0])
    trace = by_known_costs(steps)
    assert trace.starts_s == (0.0, 10.0)
    assert trace.speeds == (0.5, 2.0)


@pytest.mark.parametrize(
    ("num_steps", "starts_s"), [(1, (0.0,)), (5, (0.0,)), (7, (0.0,)), (8, (0.0, 5.0)), (12, (0.0, 5.0))]
)
def test_a_short_window_at_the_end_belongs_to_the_one_before(num_steps: int, starts_s: tuple[float, ...]) -> None:
    assert by_known_costs(one_after_the_other([1.0] * num_steps)).starts_s == starts_s


def test_a_window_without_any_cost_does_not_stop_the_device() -> None:
    trace = by_known_costs(one_after_the_other([1.0] * 10, [0.0] * 5 + [2.0] * 5))
    assert trace.speeds == (1.0, 2.0)


def test_without_costs_a_step_that_took_longer_is_a_heavier_one() -> None:
    trace, costs = by_usual_steps(one_after_the_other([2.0] * 6 + [10.0] + [2.0] * 6))
    assert trace.speeds == (0.5,)
    assert costs == [1.0] * 6 + [5.0] + [1.0] * 6


def test_without_costs_a_device_that_stays_slow_is_a_slow_one() -> None:
    trace, costs = by_usual_steps(one_after_the_other([1.0] * 20 + [3.0] * 20))
    assert trace.starts_s == (0.0, 20.0)
    assert trace.speeds == pytest.approx((1.0, 1 / 3))
    assert costs == pytest.approx([1.0] * 40)


def test_noise_is_no_change_of_the_device() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        trace, costs = by_usual_steps(one_after_the_other(rng.lognormal(0.0, 1.0, 60).tolist()))
        assert len(trace.speeds) == 1
        assert np.median(costs) == pytest.approx(1.0, abs=0.02)


def test_a_change_is_found_under_noise() -> None:
    rng = np.random.default_rng(0)
    seconds = rng.lognormal(0.0, 0.3, 120) * np.repeat([1.0, 3.0], 60)
    trace, _ = by_usual_steps(one_after_the_other(seconds.tolist()))
    assert len(trace.speeds) == 2
    assert trace.speeds[0] / trace.speeds[1] == pytest.approx(3.0, rel=0.15)


def test_a_smaller_last_batch_is_no_faster_device() -> None:
    trace, costs = by_usual_steps(one_after_the_other([4.0] * 10 + [1.0], [4.0] * 10 + [1.0]))
    assert trace.speeds == (1.0,)
    assert costs == [4.0] * 10 + [1.0]


def test_steps_at_the_same_time_make_one_piece() -> None:
    steps = [Pace(0.0, 1.0, 1.0)] * 5 + [Pace(0.0, 2.0, 1.0)] * 5
    assert by_known_costs(steps).speeds == (1.0,)
