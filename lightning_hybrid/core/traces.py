"""How fast a simulated device is over time: piecewise constant speeds, in cost units per second."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SpeedTrace:
    """Speed ``speeds[i]`` holds from ``starts_s[i]`` (the first is 0) to the next start; 0 is a device that stands.

    Raises:
        ValueError: a speed or a start is not a finite number, a speed is negative, or the starts do not rise from 0.
    """

    starts_s: tuple[float, ...]
    speeds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.starts_s) != len(self.speeds) or not self.speeds:
            raise ValueError(f"a trace needs one speed per start, got {len(self.speeds)} and {len(self.starts_s)}")
        rises = all(a < b < math.inf for a, b in itertools.pairwise(self.starts_s))
        if self.starts_s[0] != 0 or not rises:
            raise ValueError(f"starts_s must rise from 0, got {list(self.starts_s)}")
        for i, speed in enumerate(self.speeds):
            if not (math.isfinite(speed) and speed >= 0):
                raise ValueError(f"speeds[{i}] must be finite and not negative, got {speed!r}")

    @classmethod
    def constant(cls, speed: float) -> SpeedTrace:
        """Always the same."""
        return cls((0.0,), (speed,))

    @classmethod
    def sudden(cls, speed: float, at_s: float, later: float) -> SpeedTrace:
        """``speed`` until ``at_s``, ``later`` from there on."""
        return cls((0.0, at_s), (speed, later))

    @classmethod
    def failing(cls, speed: float, at_s: float) -> SpeedTrace:
        """``speed`` until ``at_s``, dead from there on."""
        return cls.sudden(speed, at_s, 0.0)

    @classmethod
    def drift(cls, speed: float, last: float, duration_s: float, *, steps: int = 20) -> SpeedTrace:
        """From ``speed`` to ``last`` in equal steps within ``duration_s``, ``last`` from there on."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps!r}")
        return cls(
            tuple(duration_s * i / steps for i in range(steps + 1)),
            (*(speed + (last - speed) * i / steps for i in range(steps)), last),
        )

    @classmethod
    def periodic(cls, speed: float, other: float, period_s: float, until_s: float) -> SpeedTrace:
        """``speed`` and ``other`` for half a period each, until ``until_s``; ``speed`` from there on."""
        if not 0 < period_s < math.inf:
            raise ValueError(f"period_s must be positive and finite, got {period_s!r}")
        num = 2 * max(1, math.ceil(until_s / period_s))
        starts = tuple(i * period_s / 2 for i in range(num + 1))
        return cls(starts, (*tuple(other if i % 2 else speed for i in range(num)), speed))

    def at(self, time_s: float) -> float:
        """Speed at a time."""
        return self.speeds[bisect.bisect_right(self.starts_s, time_s) - 1]

    def end_s(self, start_s: float, cost: float) -> float:
        """When a step of ``cost`` that begins at ``start_s`` ends; infinite on a device that died before."""
        if len(self.speeds) == 1:
            return start_s + cost / self.speeds[0] if self.speeds[0] > 0 else math.inf
        i = bisect.bisect_right(self.starts_s, start_s) - 1
        while True:
            stop_s = self.starts_s[i + 1] if i + 1 < len(self.starts_s) else math.inf
            speed = self.speeds[i]
            if speed > 0 and start_s + cost / speed <= stop_s:
                return start_s + cost / speed
            if math.isinf(stop_s):
                return math.inf
            cost -= speed * (stop_s - start_s)
            start_s, i = stop_s, i + 1

    def work(self, until_s: float) -> float:
        """Cost units done from 0 to ``until_s``."""
        stops = (*self.starts_s[1:], math.inf)
        return sum(
            speed * (min(stop, until_s) - start)
            for start, stop, speed in zip(self.starts_s, stops, self.speeds, strict=True)
            if start < until_s
        )


def lower_bound_s(costs: Sequence[float] | np.ndarray, traces: Sequence[SpeedTrace]) -> float:
    """The shortest time in which devices could run cells of these costs.

    For constant speeds the larger of (total cost) / (sum of speeds) and, for every k, (cost of the k largest cells) /
    (sum of the k highest speeds) (Horvath, Lam and Sethi, 1977). For changing speeds the time in which all together do
    the total.
    """
    array = np.sort(np.asarray(costs, dtype=np.float64))[::-1]
    if all(len(trace.speeds) == 1 for trace in traces):
        speeds = np.sort([trace.speeds[0] for trace in traces])[::-1]
        largest = np.cumsum(array[: len(speeds)])
        fastest = np.cumsum(speeds)[: len(largest)]
        if not len(array) or not len(speeds) or speeds[0] == 0:
            return math.inf if len(array) else 0.0
        return float(max(array.sum() / speeds.sum(), (largest / fastest).max()))
    return _time_of_total(float(array.sum()), traces)


def _time_of_total(total: float, traces: Sequence[SpeedTrace]) -> float:
    starts_s = np.concatenate([trace.starts_s for trace in traces])
    changes = np.concatenate([np.diff(trace.speeds, prepend=0.0) for trace in traces])
    order = np.argsort(starts_s, kind="stable")
    starts_s, speeds = starts_s[order], np.cumsum(changes[order])
    speeds[speeds < 1e-12 * speeds.max()] = 0.0  # sums of differences that should cancel
    done = np.append(0.0, np.cumsum(np.diff(starts_s) * speeds[:-1]))
    last = int(np.searchsorted(done, total, side="left")) - 1  # where the total is not done yet, but by the next start
    if last < 0:
        return 0.0
    return float(starts_s[last] + (total - done[last]) / speeds[last]) if speeds[last] > 0 else math.inf
