"""How fast a recorded device was over time, and so what its cells cost."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_hybrid.core.cost import FloatArray
from lightning_hybrid.core.traces import SpeedTrace

_WINDOW_STEPS = 5
"""Steps over which a device counts as equally fast where costs are known; the fewest of a piece where they are not."""
_LEAST_CHANGE = 0.02
"""A relative change of speed that is overlooked."""
_CHANGE_ERRORS = 4.0
"""How many standard errors a change of speed must have, being the largest of many."""
_DIFFERENCE_MAD = 0.9539
"""Median absolute difference of two values over their standard deviation, for normal noise: 0.6745 * sqrt(2)."""


class Pace(NamedTuple):
    """A step on its device."""

    begin_s: float
    seconds: float
    size: float
    """Cost units where they are known, else samples."""


def by_known_costs(steps: Sequence[Pace]) -> SpeedTrace:
    """The device's speed where the costs of its steps are known: over a few steps what these were together."""
    total = sum(step.size for step in steps) / sum(step.seconds for step in steps)
    speeds = []
    for first, stop in _windows(len(steps)):
        window = steps[first:stop]
        speeds.append(sum(step.size for step in window) / sum(step.seconds for step in window) or total)
    return _trace([steps[first].begin_s for first, _ in _windows(len(steps))], speeds)


def by_usual_steps(steps: Sequence[Pace]) -> tuple[SpeedTrace, list[float]]:
    """The device's speed, and the costs of its steps, where these are not known.

    Between changes that stand out from the noise a device was as fast as its median step; one that took longer was a
    heavier one.
    """
    paces = np.array([step.size / step.seconds for step in steps])
    edges = _changes(np.log(paces))
    speeds = [float(np.median(paces[first:stop])) for first, stop in itertools.pairwise(edges)]
    costs = [
        step.seconds * speed
        for speed, (first, stop) in zip(speeds, itertools.pairwise(edges), strict=True)
        for step in steps[first:stop]
    ]
    return _trace([steps[first].begin_s for first in edges[:-1]], speeds), costs


def _windows(num_steps: int) -> list[tuple[int, int]]:
    """Windows of a few steps; what would be too short a window at the end belongs to the one before."""
    firsts = list(range(0, max(1, num_steps - _WINDOW_STEPS // 2), _WINDOW_STEPS))
    return list(itertools.pairwise([*firsts, num_steps]))


def _trace(starts_s: Sequence[float], speeds: Sequence[float]) -> SpeedTrace:
    found: dict[float, float] = {}
    for start_s, speed in zip((0.0, *starts_s[1:]), speeds, strict=True):
        if not found or start_s > next(reversed(found)):
            found[start_s] = speed
    return SpeedTrace(tuple(found), tuple(found.values()))


def _changes(logs: FloatArray) -> list[int]:
    """Where the level of a series changes, its two ends included: binary segmentation (Scott and Knott, 1974)."""
    noise = statistics.median(np.abs(np.diff(logs)).tolist()) / _DIFFERENCE_MAD if len(logs) > 1 else 0.0
    edges, open_parts = {0, len(logs)}, [(0, len(logs))]
    while open_parts:
        first, stop = open_parts.pop()
        edge = _change(logs[first:stop], noise)
        if edge is not None:
            edges.add(first + edge)
            open_parts += [(first, first + edge), (first + edge, stop)]
    return sorted(edges)


def _change(logs: FloatArray, noise: float) -> int | None:
    num = len(logs)
    if num < 2 * _WINDOW_STEPS:
        return None
    left = np.arange(_WINDOW_STEPS, num - _WINDOW_STEPS + 1)
    sums = np.cumsum(logs)
    differences = np.abs(sums[left - 1] / left - (sums[-1] - sums[left - 1]) / (num - left))
    errors = differences * np.sqrt(left * (num - left) / num)
    edge = int(left[errors.argmax()])
    stands_out = errors.max() > _CHANGE_ERRORS * noise
    # a mean moves with a single heavy step, a median does not
    is_lasting = abs(np.median(logs[:edge]) - np.median(logs[edge:])) > _LEAST_CHANGE
    return edge if stands_out and is_lasting else None
