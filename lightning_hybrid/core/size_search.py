"""The size of steps at which a device works fastest, found while it runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

from lightning_hybrid.core.errors import ConfigError

_RUNGS_PER_DOUBLING = 3
_JUMPS = (3, 2, 1)
"""Distances in rungs at which neighbours are looked at, the farthest first."""
_MOST_RATES = 64
_MOST_SIZES = 512
_LEAST_STEPS = 2
_TURNS_FROM_STEPS = 4
_CLEARLY_WORSE = 0.75
_NEAR_FRAC = 0.9
"""A step counts as one of the size that was asked for from this part of it on."""
_SURE = 1.5
"""Standard errors that make it sure that a larger size is better."""
_VERY_SURE = 3.0
"""That make it sure that it is not: to stay small for good costs more than to be too large."""
_UNSURE = 0.5
"""Standard errors that the larger of two sizes is given in advance where neither is sure to be better."""
_USUAL_NOISE = 0.1
_USUAL_WEIGHT = 4
"""The noise of a step's time that is assumed before steps show theirs, and how many steps that counts for."""
_DIFFERENCE_MAD = 0.9539
"""Median absolute difference of two values over their standard deviation, for normal noise: 0.6745 * sqrt(2)."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2)."""


class SizeSearch:
    """Finds the size of steps, in samples, at which a device does the most work in a second.

    Sizes are rungs of a ladder: the start, times powers of 2 ** (1 / 3), in whole units, with the most on top. It is a
    hill climb by pattern search (Hooke and Jeeves, Direct Search, 1961): from the best size so far it looks a doubling
    up while that pays, then a doubling down, then at nearer neighbours, down to one rung; then it is settled. A larger
    size must gain, unless it is not sure that it does not; a smaller one may lose next to nothing.

    The throughput of a size is a median over its steps, and its first step is left out, which pays for compilation. A
    look ends when the difference is sure, seen against how the times of steps scatter, or after a number of steps: the
    less sure it is, the less it costs. One that is clearly worse ends after two steps. Every now and then, when
    settled, the nearest neighbours are looked at anew, so that the size follows a device that changes.

    Args:
        unit: Sizes are multiples of this.
        start: The first size to be tried.
        most: The largest.
        min_gain_frac: A size whose throughput is within this of the best is as good; of such, small ones are preferred.
        window_steps: The most steps of one look.
        recheck_steps: Steps after which the neighbours of a settled size are looked at again.

    Raises:
        ConfigError: an argument is out of its range.

    Example:
        >>> search = SizeSearch(unit=1, start=4, most=64)
        >>> while not search.is_settled:
        ...     search.observe(search.size, work=search.size, seconds=max(16, search.size) / 1000)
        >>> search.best_size
        16
    """

    __slots__ = (
        "_best",
        "_judged",
        "_jumps",
        "_min_gain",
        "_misses",
        "_most",
        "_probe",
        "_rates",
        "_recheck_steps",
        "_settled_steps",
        "_start",
        "_tried",
        "_unit",
        "_window_steps",
    )

    def __init__(
        self,
        unit: int,
        start: int,
        most: int,
        *,
        min_gain_frac: float = 0.03,
        window_steps: int = 48,
        recheck_steps: int = 200,
    ) -> None:
        for name, value, least in (
            ("unit", unit, 1),
            ("start", start, unit),
            ("most", most, unit),
            ("window_steps", window_steps, _LEAST_STEPS),
            ("recheck_steps", recheck_steps, 1),
        ):
            _check_whole(name, value, least)
        if not 0 <= min_gain_frac < 1:
            raise ConfigError("min_gain_frac", min_gain_frac, "be at least 0 and below 1")
        self._unit, self._start, self._most = unit, start - start % unit, most - most % unit
        self._min_gain = min_gain_frac
        self._window_steps, self._recheck_steps = window_steps, recheck_steps
        self._rates: dict[int, _Rates] = {}
        self._judged: set[int] = set()
        """Sizes that were looked at and found no better than the best one."""
        self._best = min(self._start, self._most)
        self._probe: int | None = self._best
        self._jumps: tuple[int, ...] = _JUMPS
        self._misses = self._settled_steps = 0
        self._tried: set[int] = {self._best}

    @property
    def size(self) -> int:
        """The size to use now, in samples; in a longer look the best one takes its turns."""
        if self._probe is None or self._is_turn_of_best(self._probe):
            return self._best
        return self._probe

    @property
    def best_size(self) -> int:
        """The best size so far, in samples."""
        return self._best

    @property
    def is_settled(self) -> bool:
        """Whether no other size is being looked at."""
        return self._probe is None

    @property
    def attempts(self) -> int:
        """How many sizes have been tried; counted up to 512."""
        return len(self._tried)

    def limit(self, most: int) -> None:
        """Sets another largest size, as memory allows.

        Raises:
            ConfigError: ``most`` is no whole number of at least one unit.
        """
        _check_whole("most", most, self._unit)
        most -= most % self._unit
        if most == self._most:
            return
        self._most = most
        self._rates = {size: rates for size, rates in self._rates.items() if size <= most}
        self._judged = {size for size in self._judged if size <= most}
        self._jumps = _JUMPS
        if self._best > most:
            self._best = max(self._rates, key=lambda size: self._rates[size].level, default=most)
            self._judged.discard(self._best)
        self._look_on()

    def observe(self, size: int, work: float, seconds: float) -> None:
        """Records a finished step; one without size, work or time says nothing.

        Args:
            size: Samples of the step; steps of other sizes than were asked for are left out.
            work: Its cost units.
            seconds: It took.
        """
        if not (size > 0 and 0 < work < math.inf and 0 < seconds < math.inf):
            return
        key = self._asked_as(size)
        if key is not None:
            self._rates.setdefault(key, _Rates()).add(work / seconds)
        self._misses = 0 if key == self.size else self._misses + 1
        if self._probe is None:
            self._rest()
        elif self._misses > self._window_steps:  # steps do not get that large
            self._give_up(self._probe)
        elif key is not None:
            self._judge(self._probe)

    def _asked_as(self, size: int) -> int | None:
        """The size that was asked for of a step that came out like this."""
        if size in self._rates or size == self.size:
            return size
        return self.size if _NEAR_FRAC * self.size <= size <= self.size else None

    def _judge(self, probe: int) -> None:
        """Ends the look at a size as soon as it tells enough."""
        seen, best = self._rates.get(probe), self._rates.get(self._best)
        if seen is None or best is None or min(len(seen.logs), len(best.logs)) < _LEAST_STEPS:
            return
        if probe == self._best:
            self._look_on()
            return
        is_larger = probe > self._best
        gain = seen.level - best.level
        over = gain - (0.5 if is_larger else -0.5) * self._min_gain
        error = _MEDIAN_ERROR * self._noise() * math.sqrt(1.0 / len(seen.logs) + 1.0 / len(best.logs))
        if gain < math.log(_CLEARLY_WORSE):
            self._reject(probe)
            return
        favours_larger = (over > 0) == is_larger
        is_sure = abs(over) > (_SURE if favours_larger else _VERY_SURE) * error
        if is_sure or len(seen.logs) >= self._window_steps:
            # what stays unsure is decided for the larger one of the two
            over += 0.0 if is_sure else _UNSURE * (error if is_larger else -error)
            self._accept(probe) if over > 0 else self._reject(probe)

    def _is_turn_of_best(self, probe: int) -> bool:
        seen, best = self._rates.get(probe), self._rates.get(self._best)
        if seen is None or best is None or len(seen.logs) < _TURNS_FROM_STEPS:
            return False
        return len(best.logs) < len(seen.logs)

    def _accept(self, probe: int) -> None:
        self._judged.add(self._best)
        self._best = probe
        self._look_on()

    def _reject(self, probe: int) -> None:
        self._judged.add(probe)
        self._look_on()

    def _give_up(self, probe: int) -> None:
        self._misses = 0
        if probe == self._best:
            self._probe = None
        else:
            self._reject(probe)

    def _rest(self) -> None:
        """Waits until it is time to look at the neighbours again, and forgets what they were like."""
        self._settled_steps += 1
        if self._settled_steps < self._recheck_steps:
            return
        self._rates = {size: rates for size, rates in self._rates.items() if size == self._best}
        self._judged.clear()
        self._jumps = (1,)
        self._look_on()

    def _look_on(self) -> None:
        """Chooses what to look at next, or settles."""
        best = self._rates.get(self._best)
        is_known = best is not None and len(best.logs) >= _LEAST_STEPS
        self._probe = self._next() if is_known else self._best
        self._misses = self._settled_steps = 0
        if len(self._tried) < _MOST_SIZES:
            self._tried.add(self._best if self._probe is None else self._probe)

    def _next(self) -> int | None:
        """The first neighbour with nothing known against it, or anything on the way to it."""
        for jump, sign in itertools.product(self._jumps, (1, -1)):
            size = self._neighbour(sign * jump)
            low, high = min(size, self._best), max(size, self._best)
            if size != self._best and not any(low <= known <= high for known in self._judged - {self._best}):
                return size
        return None

    def _neighbour(self, rungs: int) -> int:
        """The size that many rungs above or below the best one; that itself where there is none."""
        rung = round(_RUNGS_PER_DOUBLING * math.log2(self._best / self._start)) + rungs
        exact: float = self._start * 2.0 ** (rung / _RUNGS_PER_DOUBLING)
        size = round(exact / self._unit) * self._unit
        if rungs < 0:
            return max(self._unit, min(size, self._best - self._unit))
        size = max(size, self._best + self._unit)
        return self._most if size >= _NEAR_FRAC * self._most else size

    def _noise(self) -> float:
        """Standard deviation of the log throughput of a step."""
        changes = [abs(b - a) for rates in self._rates.values() for a, b in itertools.pairwise(rates.logs)]
        if not changes:
            return _USUAL_NOISE
        squares = len(changes) * (statistics.median(changes) / _DIFFERENCE_MAD) ** 2
        return math.sqrt((squares + _USUAL_WEIGHT * _USUAL_NOISE**2) / (len(changes) + _USUAL_WEIGHT))


class _Rates:
    """Logs of the throughput of the newest steps of a size, without its first one."""

    __slots__ = ("_is_first", "logs")

    def __init__(self) -> None:
        self.logs: deque[float] = deque(maxlen=_MOST_RATES)
        self._is_first = True

    def add(self, rate_per_s: float) -> None:
        if not self._is_first:
            self.logs.append(math.log(rate_per_s))
        self._is_first = False

    @property
    def level(self) -> float:
        return statistics.median(self.logs) if self.logs else -math.inf


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(name, value, f"be a whole number of at least {least}")
