from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.latency import Latency, LatencyWindow


def window_of(*steps: tuple[float, int], max_steps: int = 1024) -> LatencyWindow:
    window = LatencyWindow(max_steps)
    for seconds, num_samples in steps:
        window.observe(seconds, num_samples)
    return window


def test_nothing_is_known_before_the_first_step() -> None:
    assert LatencyWindow().latency() == Latency(0, None, None, None, None)


def test_one_step_is_every_percentile() -> None:
    assert window_of((0.5, 8)).latency() == Latency(1, 0.5, 0.5, 0.5, 16.0)


def test_percentiles_lie_between_the_two_nearest_steps() -> None:
    found = window_of(*((float(seconds), 1) for seconds in range(101, 0, -1))).latency()

    assert (found.p50_s, found.p90_s, found.p99_s) == (51.0, 91.0, 100.0)


def test_only_the_newest_steps_count() -> None:
    found = window_of((100.0, 1), (100.0, 1), (1.0, 10), (3.0, 10), max_steps=2).latency()

    assert found.num_steps == 2
    assert found.p50_s == 2.0
    assert found.samples_per_s == 5.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_times_that_cannot_be_are_passed_over(seconds: float) -> None:
    assert window_of((seconds, 1)).latency().num_steps == 0


def test_a_window_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_steps must be at least 1, got 0"):
        LatencyWindow(0)


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.integers(0, 10_000)), min_size=1, max_size=40), st.integers(1, 40))
def test_percentiles_are_those_of_the_newest_steps(steps: list[tuple[float, int]], max_steps: int) -> None:
    kept = steps[-max_steps:]
    found = window_of(*steps, max_steps=max_steps).latency()

    assert found.num_steps == len(kept)
    assert found[1:4] == pytest.approx(np.percentile([seconds for seconds, _ in kept], (50, 90, 99)))
    assert found.samples_per_s == pytest.approx(sum(n for _, n in kept) / sum(s for s, _ in kept))
