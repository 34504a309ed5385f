"""How fast one replica works, estimated from its own steps."""

from __future__ import annotations

import statistics
from collections import deque


class SpeedModel:
    """Cost units per second of one replica: the median over its newest steps.

    A median follows a real change within half a window and ignores single slow steps (a page fault, a garbage
    collection). The first step of each shape is left out as soon as there are others, because it pays for compilation
    and autotuning.

    Args:
        window_steps: Steps that the median is taken over.
    """

    def __init__(self, window_steps: int) -> None:
        self._paces: deque[float] = deque(maxlen=window_steps)
        self._seconds: deque[float] = deque(maxlen=window_steps)
        self._first_pace: float | None = None
        self._first_s: float | None = None

    def observe(self, cost: float, seconds: float, *, first_of_shape: bool = False) -> None:
        """Records that a step of ``cost`` units took ``seconds``."""
        if cost <= 0 or seconds <= 0:
            return
        if first_of_shape:
            self._first_pace, self._first_s = seconds / cost, seconds
            return
        self._paces.append(seconds / cost)
        self._seconds.append(seconds)

    @property
    def speed_per_s(self) -> float | None:
        """Cost units per second, ``None`` before the first step."""
        paces = tuple(self._paces)  # a copy, because steps may be observed on another thread meanwhile
        pace = statistics.median(paces) if paces else self._first_pace
        return None if pace is None else 1.0 / pace

    @property
    def step_s(self) -> float | None:
        """Seconds of a usual step, ``None`` before the first step."""
        seconds = tuple(self._seconds)
        return statistics.median(seconds) if seconds else self._first_s


def load_score(
    memory_frac: float | None,
    compute_frac: float | None,
    network_frac: float | None,
    *,
    weights: tuple[float, float, float],
) -> float | None:
    """Weighted load of a device, 0 (free) to 1 (full), from the parts that are known.

    An unknown part is left out and the weights of the others are scaled up.
    """
    parts = [
        (weight, part)
        for weight, part in zip(weights, (memory_frac, compute_frac, network_frac), strict=True)
        if part is not None and weight > 0
    ]
    total = sum(weight for weight, _ in parts)
    return sum(weight * min(1.0, max(0.0, part)) for weight, part in parts) / total if total else None


def prior_speeds(scores: list[float | None]) -> list[float]:
    """Relative speeds before any measurement: proportional to 1 - load score, an unknown score counting as the mean.

    When every score is 1, or none is known, all replicas count as equal.
    """
    known = [score for score in scores if score is not None]
    if not known:
        return [1.0] * len(scores)
    mean = sum(known) / len(known)
    speeds = [1.0 - (mean if score is None else score) for score in scores]
    return speeds if max(speeds) > 0 else [1.0] * len(scores)


def fill_speeds(measured: list[float | None], prior: list[float]) -> list[float]:
    """Measured speeds, with the prior's proportions for replicas that have not been measured yet."""
    known = [(speed, guess) for speed, guess in zip(measured, prior, strict=True) if speed is not None and guess > 0]
    fastest = max((speed for speed in measured if speed is not None), default=1.0)
    scale = statistics.median(speed / guess for speed, guess in known) if known else fastest
    slowest = min((speed for speed, _ in known), default=1.0)
    return [
        speed if speed is not None else max(guess * scale, 0.01 * slowest)
        for speed, guess in zip(measured, prior, strict=True)
    ]
