from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.speed import SpeedEstimate, SpeedModel


def model_of(*seconds: float, cost: float = 10.0, window_steps: int = 5) -> SpeedModel:
    model = SpeedModel(window_steps)
    for step_s in seconds:
        model.observe(cost, step_s)
    return model


def test_a_speed_is_unknown_before_the_first_step() -> None:
    model = SpeedModel(5)

    assert model.speed_per_s is None
    assert model.step_s is None


def test_a_speed_is_the_cost_of_a_second() -> None:
    model = model_of(2.0, 2.0, 2.0)

    assert model.speed_per_s == 5.0
    assert model.step_s == 2.0


def test_one_slow_step_does_not_move_the_speed() -> None:
    assert model_of(2.0, 2.0, 60.0, 2.0).speed_per_s == 5.0


def test_steps_of_unequal_cost_count_by_their_pace() -> None:
    model = SpeedModel(5)
    for cost, seconds in ((10, 2.0), (5, 1.0), (20, 4.0)):
        model.observe(cost, seconds)

    assert model.speed_per_s == 5.0
    assert model.step_s == 2.0


def test_a_first_step_of_its_shape_counts_while_there_is_no_other() -> None:
    model = SpeedModel(5)
    model.observe(10, 20.0, first_of_shape=True)

    assert model.speed_per_s == 0.5
    assert model.step_s == 20.0


def test_a_first_step_of_its_shape_is_left_out_as_soon_as_there_is_another() -> None:
    model = SpeedModel(5)
    model.observe(10, 20.0, first_of_shape=True)
    model.observe(10, 2.0)

    assert model.speed_per_s == 5.0
    assert model.step_s == 2.0


def test_a_later_first_step_of_another_shape_moves_nothing() -> None:
    model = model_of(2.0)
    model.observe(3, 50.0, first_of_shape=True)

    assert model.speed_per_s == 5.0
    assert model.step_s == 2.0


@pytest.mark.parametrize(("cost", "seconds"), [(0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0)])
def test_a_step_without_cost_or_time_says_nothing(cost: float, seconds: float) -> None:
    model = model_of(2.0)
    model.observe(cost, seconds)
    model.observe(cost, seconds, first_of_shape=True)

    assert model.speed_per_s == 5.0
    assert SpeedModel(5).speed_per_s is None


@pytest.mark.parametrize("window_steps", [1, 2, 3, 4, 5, 8, 9])
def test_a_slowdown_is_followed_within_half_a_window(window_steps: int) -> None:
    model = model_of(*[1.0] * 50, window_steps=window_steps)
    for _ in range(window_steps // 2 + 1):
        model.observe(10, 3.0)

    assert model.speed_per_s == pytest.approx(10 / 3)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=5), st.integers(5, 9))
@settings(deadline=None)
def test_a_speed_is_the_median_of_the_newest_steps(seconds: list[float], window_steps: int) -> None:
    model = model_of(*seconds, cost=1.0, window_steps=window_steps)

    assert model.step_s == pytest.approx(statistics.median(seconds))
    assert model.speed_per_s == pytest.approx(1 / statistics.median(seconds))


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.001, 1000)), min_size=1, max_size=90), st.integers(1, 9))
@settings(deadline=None)
def test_whatever_the_steps_all_numbers_are_ones_that_a_device_can_have(
    steps: list[tuple[float, float]], window_steps: int
) -> None:
    model = SpeedModel(window_steps)
    for cost, seconds in steps:
        model.observe(cost, seconds)
        estimate = model.estimate()

        assert estimate is not None
        assert 0 < estimate.speed_per_s < math.inf
        assert 0 < estimate.step_s < math.inf
        assert 0 <= estimate.overhead_s <= (1 + 1e-9) * estimate.usual_cost / estimate.speed_per_s
        assert estimate.error_frac is None or 0 <= estimate.error_frac < math.inf


def test_a_steady_device_is_known_ever_more_exactly() -> None:
    errors = {5: 0.0, 64: 0.0}
    for seed in range(100):
        noise = random.Random(seed)
        seconds = [math.exp(noise.gauss(0, 0.1)) for _ in range(64)]
        for num in errors:
            speed = model_of(*seconds[:num], cost=1.0).speed_per_s
            assert speed is not None
            errors[num] += math.log(speed) ** 2 / 100

    assert math.sqrt(errors[64]) < 0.025
    assert math.sqrt(errors[64]) < 0.5 * math.sqrt(errors[5])


@pytest.mark.parametrize(("noise_frac", "within_steps"), [(0.0, 3), (0.02, 3), (0.1, 6)])
def test_a_device_that_halves_its_speed_is_followed_within_a_few_steps(noise_frac: float, within_steps: int) -> None:
    for seed in range(30):
        noise = random.Random(seed)
        model = SpeedModel(5)
        for factor in [1.0] * 60 + [2.0] * within_steps:
            model.observe(10, factor * math.exp(noise.gauss(0, noise_frac)))

        assert model.speed_per_s is not None
        assert model.speed_per_s < 7.0  # it was 10


def test_one_step_of_ten_times_the_length_moves_nothing_at_any_time() -> None:
    model = SpeedModel(5)
    for number in range(1, 101):
        model.observe(10, 20.0 if number % 11 == 0 else 2.0)
        assert model.speed_per_s == 5.0


def test_the_error_is_what_it_says() -> None:
    told, real = [], []
    for seed in range(100):
        noise = random.Random(seed)
        estimate = model_of(*(math.exp(noise.gauss(0, 0.2)) for _ in range(64)), cost=1.0).estimate()
        assert estimate is not None
        assert estimate.error_frac is not None
        told.append(estimate.error_frac)
        real.append(math.log(estimate.speed_per_s) ** 2)

    assert statistics.mean(told) == pytest.approx(math.sqrt(statistics.mean(real)), rel=0.35)


def test_the_error_is_not_known_of_three_steps() -> None:
    estimate = model_of(1.0, 1.1, 0.9).estimate()

    assert estimate is not None
    assert estimate.error_frac is None


# --- overhead -------------------------------------------------------------------------------------------------------


def costly(
    overhead: float,
    speed: float,
    *,
    costs: tuple[float, ...] = (1, 9, 4, 16, 2, 7),
    num: int = 40,
    usual_cost: float | None = 8.0,
    noise_frac: float = 0.0,
) -> SpeedEstimate:
    noise = random.Random(3)
    model = SpeedModel(5, usual_cost)
    for step in range(num):
        seconds = overhead + costs[step % len(costs)] / speed
        model.observe(costs[step % len(costs)], seconds * math.exp(noise.gauss(0, noise_frac)))
    estimate = model.estimate()
    assert estimate is not None
    return estimate


def test_an_overhead_is_told_from_the_cost() -> None:
    estimate = costly(0.5, 4.0)

    assert estimate.overhead_s == pytest.approx(0.5)
    assert estimate.predict_s(12.0) == pytest.approx(0.5 + 12.0 / 4.0)
    assert estimate.speed_per_s == pytest.approx(8.0 / (0.5 + 8.0 / 4.0))


def test_steps_that_are_all_overhead_cost_nothing_more_when_they_are_heavier() -> None:
    estimate = costly(0.5, 1e12)

    assert estimate.predict_s(1000.0) == pytest.approx(0.5, rel=1e-6)


def test_without_an_overhead_there_is_none() -> None:
    assert costly(0.0, 4.0).overhead_s == pytest.approx(0.0, abs=1e-12)


def test_an_overhead_shows_through_noise() -> None:
    assert costly(0.5, 4.0, noise_frac=0.05, num=64).overhead_s == pytest.approx(0.5, rel=0.2)


def test_equal_costs_show_no_overhead() -> None:
    assert costly(0.5, 4.0, costs=(8,)).overhead_s == 0.0


def test_one_odd_last_batch_shows_no_overhead() -> None:
    model = SpeedModel(5)
    for _ in range(30):
        model.observe(10, 2.0)
    model.observe(3, 1.9)
    estimate = model.estimate()

    assert estimate is not None
    assert estimate.overhead_s == 0.0


def test_an_overhead_is_found_where_costs_are_sorted() -> None:
    estimate = costly(0.5, 4.0, costs=tuple(16.0 * 0.95**k for k in range(60)), num=60)

    assert estimate.overhead_s == pytest.approx(0.5, rel=0.01)


def test_the_overhead_stays_known_while_the_device_drifts() -> None:
    model = SpeedModel(5, 8.0)
    for step in range(60):
        speed = 4.0 * (1.0 - step / 120)
        model.observe((1, 9, 4, 16, 2, 7)[step % 6], (2.0 + (1, 9, 4, 16, 2, 7)[step % 6]) / speed)
    estimate = model.estimate()

    assert estimate is not None
    assert estimate.overhead_s * estimate.speed_per_s / (
        8.0 - estimate.overhead_s * estimate.speed_per_s
    ) == pytest.approx(2.0 / 8.0, rel=0.05)
    assert estimate.speed_per_s == pytest.approx(2.0 * 8.0 / 10.0, rel=0.1)


def test_equal_devices_with_light_and_with_heavy_steps_are_equally_fast() -> None:
    light, heavy = costly(0.5, 4.0, costs=(1, 2, 1, 3)), costly(0.5, 4.0, costs=(20, 40, 30))

    assert light.speed_per_s == pytest.approx(heavy.speed_per_s, rel=1e-6)
    assert light.step_s < heavy.step_s


def test_a_mean_speed_is_that_of_all_steps_together() -> None:
    estimate = costly(0.5, 4.0)

    # ten steps of cost 80 in all would have taken 10 * 0.5 + 80 / 4 = 25 s
    assert estimate.mean_speed_per_s(80.0, 10, 25.0) == pytest.approx(estimate.speed_per_s)
    assert estimate.mean_speed_per_s(80.0, 10, 50.0) == pytest.approx(0.5 * estimate.speed_per_s)
    assert estimate.mean_speed_per_s(0.0, 0, 0.0) is None
