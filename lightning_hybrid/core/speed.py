"""How fast one replica works, estimated from its own steps."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedEstimate:
    """How fast a replica is: a step of ``cost`` takes ``overhead_s + cost / marginal speed``.

    ``speed_per_s`` is the speed at ``usual_cost``, with the overhead of such a step counted in, so that replicas which
    were measured on steps of unlike costs compare.
    """

    speed_per_s: float
    """Cost units per second in steps of the usual cost."""
    usual_cost: float
    overhead_s: float
    """Seconds of a step that do not depend on its cost; 0 where none shows."""
    step_s: float
    """Seconds of a step as the newest ones were."""
    error_frac: float | None
    """Standard error of the speed over the speed; ``None`` before there are enough steps to tell."""

    def predict_s(self, cost: float) -> float:
        """Seconds that a step of ``cost`` will take."""
        usual_s = self.usual_cost / self.speed_per_s
        return self.overhead_s + (usual_s - self.overhead_s) * (cost / self.usual_cost)

    def mean_speed_per_s(self, cost: float, num_steps: int, busy_s: float) -> float | None:
        """The speed at which that many steps of that cost together took ``busy_s``; ``None`` of none."""
        if not (busy_s > 0 and num_steps):
            return None
        expected_s = self.predict_s(cost) + (num_steps - 1) * self.overhead_s
        return self.speed_per_s * expected_s / busy_s


class SpeedModel:
    """Cost units per second of one replica: a median over its newest steps.

    A median follows a real change within half a window and ignores single slow steps (a page fault, a garbage
    collection). It is taken over as many of the newest steps as agree with the shorter windows within their errors
    (Lepski's rule), so a steady device is known ever more exactly, and a change is followed as soon as it can be told
    from noise. The overhead of a step comes from how the times of steps of unlike cost differ, as a weighted median
    over pairs of steps; each pair is compared on its own, so the device's speed may drift meanwhile. The first step of
    each shape is left out as soon as there are others, because it pays for compilation and autotuning.

    Args:
        window_steps: Steps of the shortest window.
        usual_cost: The cost at which the speed is told, the same for all replicas that are compared; ``None`` for the
            median of the own steps.
    """

    HISTORY_STEPS = 64
    REFIT_STEPS = 8
    """Most steps after which all windows are looked at again, while the shortest one agrees with what is known."""

    def __init__(self, window_steps: int, usual_cost: float | None = None) -> None:
        self._window_steps, self._usual_cost = window_steps, usual_cost
        self._steps: tuple[Step, ...] = ()  # replaced as a whole: another thread may be reading it
        self._max_steps = max(self.HISTORY_STEPS, window_steps)
        self._first: Step | None = None
        self._num_seen = 0
        self._fit: _Fit | None = None

    def observe(self, cost: float, seconds: float, *, first_of_shape: bool = False) -> None:
        """Records that a step of ``cost`` units took ``seconds``."""
        if not (0 < cost < math.inf and 0 < seconds < math.inf):
            return
        if first_of_shape:
            self._first = cost, seconds
        else:
            self._steps = (*self._steps[1 - self._max_steps :], (cost, seconds))
        self._num_seen += 1

    @property
    def speed_per_s(self) -> float | None:
        """Cost units per second in steps of the usual cost, ``None`` before the first step."""
        estimate = self.estimate()
        return None if estimate is None else estimate.speed_per_s

    @property
    def step_s(self) -> float | None:
        """Seconds of a step as the newest ones were, ``None`` before the first step."""
        estimate = self.estimate()
        return None if estimate is None else estimate.step_s

    def estimate(self) -> SpeedEstimate | None:
        """All that is known now, ``None`` before the first step."""
        seen, fit = self._num_seen, self._fit
        steps = self._steps or ((self._first,) if self._first else ())
        if not steps:
            return None
        newest = steps[-self._window_steps :]
        if fit is None or not (fit.num_seen == seen or self._still_fits(fit, seen, newest)):
            fit = self._fit = _fit(steps, self._usual_cost, self._window_steps, seen)
        return fit.estimate(newest)

    def _still_fits(self, fit: _Fit, seen: int, newest: Sequence[Step]) -> bool:
        # at first every step tells much
        return seen < fit.num_seen + min(self.REFIT_STEPS, 1 + fit.num_seen // 4) and fit.agrees_with(newest)


Step = tuple[float, float]
"""Cost and seconds of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    num_seen: int
    usual_cost: float
    variable_frac: float
    """Share of a usual step's time that grows with its cost."""
    usual_s: float
    noise_frac: float | None
    num_steps: int
    """Steps that agreed with each other."""

    def weight(self, cost: float) -> float:
        """Time of a step of ``cost`` over that of a usual one."""
        return 1.0 - self.variable_frac + self.variable_frac * (cost / self.usual_cost)

    def agrees_with(self, newest: Sequence[Step]) -> bool:
        """Whether the newest steps took as long as they should."""
        level_s = statistics.median(seconds / self.weight(cost) for cost, seconds in newest)
        return abs(math.log(level_s / self.usual_s)) <= _reach(self.noise_frac or 0.0, len(newest)) + _ROUNDING

    def estimate(self, newest: Sequence[Step]) -> SpeedEstimate:
        """In the terms of the outside."""
        noise_frac = self.noise_frac
        return SpeedEstimate(
            speed_per_s=self.usual_cost / self.usual_s,
            usual_cost=self.usual_cost,
            overhead_s=(1.0 - self.variable_frac) * self.usual_s,
            step_s=self.usual_s * statistics.median(self.weight(cost) for cost, _ in newest),
            error_frac=None if noise_frac is None else _MEDIAN_ERROR * noise_frac / math.sqrt(self.num_steps),
        )


_ROUNDING = 1e-6
"""Relative differences that are overlooked."""
_STEADY_WEIGHT = 2.0
"""How much evidence it takes to believe in an overhead, in steps whose costs differ by the usual cost."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)."""
_DIFFERENCE_MAD = 0.9539
"""Median absolute difference of two values over their standard deviation, for normal noise: 0.6745 * sqrt(2)."""


def _fit(steps: Sequence[Step], usual_cost: float | None, window_steps: int, num_seen: int) -> _Fit:
    usual = usual_cost or statistics.median(cost for cost, _ in steps)
    variable = _variable_frac(steps, usual)
    times_s = [seconds / (1.0 - variable + variable * (cost / usual)) for cost, seconds in steps]
    noise_frac = _noise_frac(times_s)
    usual_s, num_steps = _level(times_s, window_steps, noise_frac)
    return _Fit(
        num_seen=num_seen,
        usual_cost=usual,
        variable_frac=variable,
        usual_s=usual_s,
        noise_frac=noise_frac,
        num_steps=num_steps,
    )


def _variable_frac(steps: Sequence[Step], usual: float) -> float:
    """Share of a usual step's time that grows with the cost, 0..1; 1 where the costs hardly differ.

    With times ``T * (1 + share * x)``, ``x = cost / usual - 1``, the relative difference ``r`` of two times gives
    ``r = share * (dx - r * mean x)``, whatever ``T`` is. Least absolute errors: a weighted median of the ratios.
    """
    first_cost = steps[0][0]
    if all(cost == first_cost for cost, _ in steps):
        return 1.0
    # plain numbers: of so few steps numpy would take longer
    half = len(steps) // 2  # half the history later: costs may be sorted
    ratios = [(1.0, _STEADY_WEIGHT)]
    for (cost, time_s), (later_cost, later_s) in (*itertools.pairwise(steps), *zip(steps, steps[half:], strict=False)):
        if cost == later_cost:
            continue
        x, later_x = cost / usual - 1.0, later_cost / usual - 1.0
        r = 2.0 * (later_s - time_s) / (later_s + time_s)
        z = later_x - x - r * 0.5 * (later_x + x)
        if z:
            ratios.append((r / z, abs(z)))
    return min(1.0, max(0.0, _weighted_median(ratios)))


def _weighted_median(weighted: list[tuple[float, float]]) -> float:
    """The smallest of the values, given with their weights, up to which half of all weight lies."""
    weighted.sort()
    sums = list(itertools.accumulate(weight for _, weight in weighted))
    return weighted[bisect.bisect_left(sums, 0.5 * sums[-1])][0]


def _level(times_s: list[float], window_steps: int, noise_frac: float | None) -> tuple[float, int]:
    """What the times are around now, and of how many of the newest that is the median."""
    num = min(window_steps, len(times_s))
    level_s = statistics.median(times_s[-num:])
    least, most = -math.inf, math.inf
    while noise_frac is not None and num < len(times_s):
        reach = _reach(noise_frac, num)
        least, most = max(least, math.log(level_s) - reach), min(most, math.log(level_s) + reach)
        longer = min(2 * num, len(times_s))
        longer_s = statistics.median(times_s[-longer:])
        if not least <= math.log(longer_s) <= most:
            break
        num, level_s = longer, longer_s
    return level_s, num


def _reach(noise_frac: float, num_steps: int) -> float:
    """How far the median of that many steps may be off before it shows a change: three standard errors."""
    return 3.0 * _MEDIAN_ERROR * noise_frac / math.sqrt(num_steps)


def _noise_frac(times_s: list[float]) -> float | None:
    """Standard deviation of the times over their size, whether or not they drift; ``None`` of fewer than four."""
    if len(times_s) < 4:
        return None
    logs = [math.log(time_s) for time_s in times_s]
    return statistics.median(abs(b - a) for a, b in itertools.pairwise(logs)) / _DIFFERENCE_MAD
