"""The size of a step at which most is done per second."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.size_search import SizeSearch

Seconds = Callable[[int], float]
SIZES = range(8, 513, 8)


def _saturates(size: int) -> float:
    return 0.2 + 0.01 * size


def _peaks(size: int) -> float:
    return 0.05 + 0.01 * size * (1 if size <= 40 else 1 + (size - 40) / 80)


def _flat(size: int) -> float:
    return 0.01 * size


def _run(search: SizeSearch, seconds: Seconds, steps: int, noise: float = 0.0, seed: int = 0) -> float:
    """Work per second over ``steps`` steps."""
    rng, work, took_s = random.Random(seed), 0.0, 0.0
    for _ in range(steps):
        size, step_s = search.size, seconds(search.size) * rng.lognormvariate(0, noise)
        search.observe(size, size, step_s)
        work, took_s = work + size, took_s + step_s
    return work / took_s


def _best(seconds: Seconds) -> float:
    return max(size / seconds(size) for size in SIZES)


@pytest.mark.parametrize("seconds", [_saturates, _peaks, _flat])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_it_ends_near_the_best_size_and_costs_little(seconds: Seconds, noise: float) -> None:
    ends, lost = [], []
    for seed in range(50):
        search = SizeSearch(8, 32, 512)
        lost.append(1 - _run(search, seconds, 400, noise, seed) / _best(seconds))
        ends.append(search.best_size / seconds(search.best_size) / _best(seconds))

    assert statistics.quantiles(ends, n=20)[0] >= 0.93
    assert statistics.mean(lost) <= 0.05


def test_noise_of_a_tenth_is_survived() -> None:
    ends = []
    for seed in range(50):
        search = SizeSearch(8, 32, 512)
        _run(search, _saturates, 400, 0.1, seed)
        ends.append(search.best_size / _saturates(search.best_size) / _best(_saturates))

    assert statistics.median(ends) >= 0.93


def test_among_equal_sizes_the_smallest_is_taken() -> None:
    search = SizeSearch(8, 64, 512)
    _run(search, _flat, 200)

    assert search.is_settled
    assert search.best_size == 8


def test_what_does_not_fit_is_left_at_once() -> None:
    search, tried = SizeSearch(4, 128, 128), []
    for _ in range(100):
        tried.append(search.size)
        if search.size > 100:
            search.limit(100)
        else:
            search.observe(search.size, search.size, 0.2 + 0.01 * search.size)

    assert len(dict.fromkeys(tried)) <= 8
    assert search.is_settled
    assert 96 <= search.best_size <= 100


def test_it_follows_what_changes() -> None:
    search = SizeSearch(8, 32, 64)
    _run(search, _flat, 100)
    assert search.best_size == 8
    _run(search, _saturates, 3000)

    assert search.best_size >= 48


def test_steps_of_other_sizes_do_not_count() -> None:
    search = SizeSearch(1, 32, 64)
    for _ in range(50):
        search.observe(10, 10, 1.0)

    assert search.attempts == 0
    assert search.size == 32


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="unit must be at least 1, got 0"):
        SizeSearch(0, 1, 1)
