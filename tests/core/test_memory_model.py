"""How many bytes a step takes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.memory_model import TRUST_FACTOR, MemoryModel

Peak = Callable[[int, int], float]


def _peaks(rng: random.Random, *, is_quadratic: bool) -> Peak:
    fixed, linear = rng.uniform(0, 50e6), rng.uniform(1e3, 1e4)
    quadratic = rng.uniform(5, 50) if is_quadratic else 0.0
    return lambda samples, length: fixed + linear * samples * length + quadratic * samples * length**2


def _learnt(rng: random.Random, peak: Peak, steps: int = 20) -> MemoryModel:
    model = MemoryModel()
    for _ in range(steps):
        samples, length = rng.choice([8, 16, 32, 64]), rng.randint(5, 256)
        model.observe(samples, samples * length, round(peak(samples, length) * rng.gauss(1, 0.05)))
    return model


@pytest.mark.parametrize("is_quadratic", [False, True])
def test_predictions_are_hardly_ever_too_low_and_never_much_too_high(is_quadratic: bool) -> None:
    ratios = []
    for seed in range(200):
        rng = random.Random(seed)
        peak = _peaks(rng, is_quadratic=is_quadratic)
        model = _learnt(rng, peak)
        samples, length = rng.choice([8, 16, 32, 64]), rng.randint(5, 256)
        predicted = model.predict(samples, samples * length)
        assert predicted is not None
        ratios.append(predicted / peak(samples, length))

    assert sum(1.0 <= ratio <= 1.25 for ratio in ratios) >= 0.95 * len(ratios)


def test_nothing_is_known_before_a_measurement() -> None:
    model = MemoryModel()

    assert model.predict(4, 40) is None
    assert model.most_samples(10, 1e9, at_most=64) is None


def test_one_measurement_scales_with_the_elements() -> None:
    model = MemoryModel()
    model.observe(4, 400, 4000)

    assert model.predict(8, 800) == pytest.approx(2 * 4000 * 1.25)


@pytest.mark.parametrize("seed", range(10))
def test_more_samples_take_more(seed: int) -> None:
    rng = random.Random(seed)
    model = _learnt(rng, _peaks(rng, is_quadratic=True))
    predicted = [model.predict(samples, samples * 77.0) for samples in range(1, 200)]

    assert predicted == sorted(predicted, key=lambda number: number or 0.0)


def test_as_many_samples_as_the_budget_allows() -> None:
    model = MemoryModel()
    for samples in (8, 16, 32):
        model.observe(samples, None, 1000 * samples)
    most = model.most_samples(None, 20_000, at_most=64)

    assert most is not None
    assert 15 <= most <= 20
    assert model.most_samples(None, 10, at_most=64) == 0


def test_sizes_grow_in_steps() -> None:
    model = MemoryModel()
    model.observe(4, None, 4000)
    most = model.most_samples(None, 1e12, at_most=10_000)

    assert most is not None
    assert 4 <= most <= 4 * TRUST_FACTOR


def test_a_failure_raises_predictions_above_what_there_was_and_measurements_lower_them_again() -> None:
    model = MemoryModel()
    for _ in range(5):
        model.observe(10, None, 1000)
    model.failed(20, None, 3000)
    after = model.predict(20, None)
    assert after is not None
    assert after > 3000
    for _ in range(100):
        model.observe(10, None, 1000)

    assert model.predict(20, None) == pytest.approx(2000, rel=0.01)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples must be at least 1, got 0"):
        MemoryModel().observe(0, None, 10)
    with pytest.raises(ConfigError, match="peak_bytes must be at least 0, got -1"):
        MemoryModel().observe(1, None, -1)
