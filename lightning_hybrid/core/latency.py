"""How long steps take: exact percentiles and throughput over the newest ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hybrid.core.errors import ConfigError


class Latency(NamedTuple):
    """Seconds of a step over a window of the newest ones, and samples per second of these seconds."""

    num_steps: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    samples_per_s: float | None


class LatencyWindow:
    """Keeps how long the newest steps took, and how many samples they had.

    One thread observes; others may ask meanwhile. Percentiles are exact over the window: between the two nearest times
    in order, linearly (type 7 of Hyndman and Fan 1996, numpy's own).

    Args:
        max_steps: Length of the window.

    Raises:
        ConfigError: ``max_steps`` is less than 1.

    Example:
        >>> window = LatencyWindow(max_steps=4)
        >>> for seconds in (9.0, 0.1, 0.2, 0.3, 0.4):
        ...     window.observe(seconds, num_samples=8)
        >>> window.latency().p50_s, window.latency().samples_per_s
        (0.25, 32.0)
    """

    def __init__(self, max_steps: int = 1024) -> None:
        if max_steps < 1:
            raise ConfigError("max_steps", max_steps, "be at least 1")
        self._steps = np.zeros((max_steps, 2))
        self._num_seen = 0

    def observe(self, seconds: float, num_samples: int) -> None:
        """Records a step; one that took no time or for ever is passed over."""
        if not 0 < seconds < float("inf"):
            return
        self._steps[self._num_seen % len(self._steps)] = seconds, num_samples
        self._num_seen += 1

    def latency(self) -> Latency:
        """What is known of the newest steps."""
        steps = self._steps[: self._num_seen]
        if not len(steps):
            return Latency(0, None, None, None, None)
        p50_s, p90_s, p99_s = np.percentile(steps[:, 0], (50, 90, 99)).tolist()
        total_s, num_samples = steps.sum(axis=0).tolist()
        return Latency(len(steps), p50_s, p90_s, p99_s, num_samples / total_s)
