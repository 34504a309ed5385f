"""Emulated devices as numbers: speed as a function of time, work, and the bounds that follow from them.

Nothing here reads a clock or starts a process. Times are seconds since the common start of a run; work is in cost
units, one unit being one second of a device of speed 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedCurve:
    """Speed of one device over time, constant between changes.

    ``changes`` holds ``(from_s, speed)``, in order, the first at 0. Work may end in the middle of a change: a step
    that is running when its device slows down takes as long as the rest of it takes at the new speed.

    >>> SpeedCurve(changes=((0.0, 1.0), (3.0, 0.5))).finish_s(2.0, work=2.0)
    5.0
    """

    changes: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        starts = [from_s for from_s, _ in self.changes]
        if not starts or starts[0] != 0.0 or starts != sorted(set(starts)):
            raise ValueError(f"changes must start at 0 and be in order of time, got {self.changes}")
        if not all(math.isfinite(speed) and speed > 0 for _, speed in self.changes):
            raise ValueError(f"every speed must be a finite number above 0, got {self.changes}")

    def speed_at(self, time_s: float) -> float:
        """Cost units per second at ``time_s``."""
        return [speed for from_s, speed in self.changes if from_s <= max(0.0, time_s)][-1]

    def work_between(self, start_s: float, stop_s: float) -> float:
        """Cost units that the device does between the two times, if it is never idle."""
        edges = [*(from_s for from_s, _ in self.changes[1:]), math.inf]
        work, at = 0.0, start_s
        for (_, speed), edge in zip(self.changes, edges, strict=True):
            if at < min(edge, stop_s):
                work += (min(edge, stop_s) - at) * speed
                at = min(edge, stop_s)
        return work

    def finish_s(self, start_s: float, work: float) -> float:
        """When ``work`` is done that begins at ``start_s``."""
        edges = [*(from_s for from_s, _ in self.changes[1:]), math.inf]
        at = start_s
        for (_, speed), edge in zip(self.changes, edges, strict=True):
            if at >= edge:
                continue
            if at + work / speed <= edge:
                return at + work / speed
            work -= (edge - at) * speed
            at = edge
        raise AssertionError("the last speed holds for ever")


def constant(speed: float) -> SpeedCurve:
    """A device that never changes."""
    return SpeedCurve(changes=((0.0, speed),))


def total_speed(curves: Sequence[SpeedCurve]) -> SpeedCurve:
    """One device as fast as all of ``curves`` together."""
    times = sorted({from_s for curve in curves for from_s, _ in curve.changes})
    return SpeedCurve(changes=tuple((at, sum(curve.speed_at(at) for curve in curves)) for at in times))


def ideal_s(curves: Sequence[SpeedCurve], costs: Sequence[float], start_s: float = 0.0) -> float:
    """Seconds below which no schedule can do the cells of these costs on these devices from ``start_s`` on.

    The larger of two: all devices busy to the end (with constant speeds: work / sum of speeds), and the largest cell
    alone on the device that would finish it first.
    """
    together = total_speed(curves).finish_s(start_s, sum(costs))
    largest = min(curve.finish_s(start_s, max(costs)) for curve in curves)
    return max(together, largest) - start_s


def list_schedule_s(curves: Sequence[SpeedCurve], costs: Iterable[float]) -> float:
    """Seconds that a queue without any cost of its own takes: whoever is free takes the next cell, in order.

    What a scheduler that knows neither costs nor speeds reaches; a scheduler that knows them may do better.
    """
    free = [(0.0, replica) for replica in range(len(curves))]
    for cost in costs:
        at, replica = heapq.heappop(free)
        heapq.heappush(free, (curves[replica].finish_s(at, cost), replica))
    return max(at for at, _ in free)


def equal_share_s(curves: Sequence[SpeedCurve], costs: Sequence[float]) -> float:
    """Seconds that dealing out cells by rank number takes: rank r runs cells r, r + world, ..."""
    world = len(curves)
    return max(curve.finish_s(0.0, sum(costs[rank::world])) for rank, curve in enumerate(curves))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Samples and what they cost.

    With ``sigma`` above 0 the cost of a sample is log-normal, scaled so that the mean over the samples is exactly
    ``sample_cost``: the total work does not depend on the seed.
    """

    num_samples: int
    sample_cost: float
    batch_size: int = 16
    sigma: float = 0.0
    seed: int = 0

    def sample_costs(self) -> NDArray[np.float64]:
        """Cost units of each sample, in loader order."""
        if self.sigma == 0.0:
            return np.full(self.num_samples, self.sample_cost)
        drawn = np.random.default_rng(self.seed).lognormal(0.0, self.sigma, self.num_samples)
        return drawn * (self.sample_cost / float(drawn.mean()))

    def batch_costs(self) -> list[float]:
        """Cost units of each of the loader's batches."""
        costs = self.sample_costs()
        return [float(costs[start:stop].sum()) for start, stop in self.batches()]

    def batches(self) -> list[tuple[int, int]]:
        """Start and stop of each of the loader's batches."""
        starts = range(0, self.num_samples, self.batch_size)
        return [(start, min(start + self.batch_size, self.num_samples)) for start in starts]
