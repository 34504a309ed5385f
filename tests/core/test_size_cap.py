"""The cap on the size of steps where memory cannot be read."""

from __future__ import annotations

import random
import statistics

import pytest

from lightning_hybrid.core.size_cap import SizeCap


def _run(cap: SizeCap, capacity: float, asked: int, steps: int) -> list[int]:
    """The sizes of ``steps`` steps of batches of ``asked`` on a device that ``capacity`` samples fit into."""
    sizes = []
    for _ in range(steps):
        size = asked if cap.cap is None else max(1, min(asked, int(cap.cap)))
        sizes.append(size)
        if size > capacity:
            cap.fail(size)
        else:
            cap.succeed(size)
    return sizes


def test_nothing_is_capped_before_a_failure() -> None:
    cap = SizeCap()
    cap.succeed(64)

    assert cap.cap is None


def test_a_failure_halves_the_size() -> None:
    cap = SizeCap()
    cap.fail(64)

    assert cap.cap == 32


def test_a_failure_leads_back_to_a_size_that_has_run() -> None:
    cap = SizeCap()
    cap.fail(64)
    for _ in range(4):
        cap.succeed(32)
    assert cap.cap == 48
    cap.fail(48)

    assert cap.cap == 32


def test_a_size_that_ran_once_and_fails_now_is_not_believed_any_more() -> None:
    cap = SizeCap()
    cap.fail(64)
    for _ in range(4):
        cap.succeed(32)
    cap.fail(32)

    assert cap.cap == 16


@pytest.mark.parametrize("limit", [*range(3, 40), 64, 99, 100, 101, 127, 250, 500])
@pytest.mark.parametrize("over", [1.01, 1.28, 2.0])
def test_it_settles_just_below_the_limit_in_few_attempts(limit: int, over: float) -> None:
    asked, cap = max(limit + 1, int(limit * over)), SizeCap()
    sizes = _run(cap, limit, asked, 300)

    assert len(set(sizes)) <= 8
    assert max(size for size in sizes[100:] if size <= limit) >= 0.9 * limit - 1


def test_limit_100_asked_128() -> None:
    sizes = _run(SizeCap(), 100, 128, 60)

    assert list(dict.fromkeys(sizes)) == [128, 64, 96, 112, 104]
    assert sizes[-1] == 96


def test_it_grows_back_when_there_is_more_memory_again() -> None:
    cap = SizeCap()
    _run(cap, 40, 100, 100)
    sizes = _run(cap, 100, 100, 1500)

    assert sizes[-1] == 100


def test_little_is_wasted_while_the_capacity_changes_at_random() -> None:
    wasted, ends = [], []
    for seed in range(50):
        rng, cap, done, failed = random.Random(seed), SizeCap(), 0, 0
        for _ in range(20):
            capacity = rng.uniform(30, 100)
            sizes = _run(cap, capacity, 100, 100)
            done += sum(sizes)
            failed += sum(size for size in sizes if size > capacity)
            ends.append(max(size for size in sizes[-20:] if size <= capacity) / capacity)
        wasted.append(failed / done)

    assert statistics.mean(wasted) <= 0.05
    assert statistics.median(ends) >= 0.8


def test_single_samples_work() -> None:
    assert _run(SizeCap(), 1, 4, 30)[-1] == 1
