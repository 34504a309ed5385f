"""Finds the size of a step at which most is done per second, while the steps do their work.

From where it begins it doubles the size while that gains, else halves it while that loses nothing; then it tries sizes
of a quarter more or less around the best, and rests. Now and then a neighbour of the best is tried again, so that it
follows what changes. A size counts as better when it gains ``min_gain_frac``; among equals the smallest is taken, as it
needs least memory.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from lightning_hybrid.core.errors import ConfigError

_KEPT = 64
"""Newest rates of each size that are kept."""
_SAME_FRAC = 0.15
"""A step counts for a size that it differs from by no more than this."""
_CLEARLY_WORSE = 0.75
_FINE = 1.25
_MOST_TRIED = 12
"""Sizes that are tried before it rests."""
_PATIENCE = 10
"""How many windows at most are spent on a size whose steps vary."""


class SizeSearch:
    """A search on one replica; sizes are samples.

    Args:
        unit: Sizes are multiples of this.
        start: The size to begin with.
        most: The largest size.
        min_gain_frac: By how much a larger size must be better.
        window_steps: Steps by which a size is judged at least, beside the first one, which may have to compile or tune;
            up to ten times as many where their times vary.
        rest_steps: Steps between two trials once the best is found.

    Raises:
        ConfigError: ``unit``, ``start`` or ``most`` is less than 1.
    """

    def __init__(
        self,
        unit: int,
        start: int,
        most: int,
        *,
        min_gain_frac: float = 0.03,
        window_steps: int = 4,
        rest_steps: int = 200,
    ) -> None:
        for name, value in (("unit", unit), ("start", start), ("most", most)):
            if value < 1:
                raise ConfigError(name, value, "be at least 1")
        self._unit, self._most = unit, max(unit, most)
        self._min_gain_frac, self._window_steps, self._rest_steps = min_gain_frac, window_steps, rest_steps
        self._rates: dict[int, deque[float]] = {}
        self._tried: set[int] = set()
        self._seen = self._rested = 0
        self._turn = 1
        self.best_size = self._whole(start)
        """The best size so far."""
        self.size = self.best_size
        """The size to run now."""
        self._plan: list[int] = []
        self._phase = "first"

    @property
    def is_settled(self) -> bool:
        """Whether the best size is found, until something changes."""
        return self._phase == "rest"

    @property
    def attempts(self) -> int:
        """How many sizes were tried."""
        return len(self._tried)

    def limit(self, most: int) -> None:
        """Larger sizes do not fit, or do again."""
        most = max(self._unit, most)
        if most == self._most:
            return
        grows = most > self._most
        self._most = most
        self._plan = [size for size in self._plan if size <= most]
        for size in [size for size in self._rates if size > self._whole(most)]:
            del self._rates[size]
        if self.best_size > most:
            self.best_size = self._whole(most)
        if self.size > most:
            self.size, self._seen = self.best_size, 0
            self._phase = "first"
        elif grows and self.is_settled:
            self._next()

    def observe(self, size: int, work: float, seconds: float) -> None:
        """A step of ``size`` did ``work`` in ``seconds``."""
        if seconds <= 0 or work <= 0 or abs(size - self.size) > _SAME_FRAC * self.size:
            return
        if self.size not in self._rates:
            self._rates[self.size] = deque(maxlen=_KEPT)
            self._tried.add(self.size)
            return  # the first step of a size may compile or tune
        rates = self._rates[self.size]
        rates.append(work / seconds)
        self._seen += 1
        if self._phase == "rest":
            self._rested += 1
            if self._rested >= self._rest_steps:
                self._rested = 0
                self._look_around()
            return
        best = self._rate(self.best_size)
        is_hopeless = best is not None and self._seen >= 2 and median(list(rates)[-2:]) < _CLEARLY_WORSE * best
        if (is_hopeless and self.size != self.best_size) or (self._seen >= self._window_steps and self._is_sure()):
            self._judge()

    def _is_sure(self) -> bool:
        """Whether more steps of this size would hardly change the verdict."""
        if self._seen >= _PATIENCE * self._window_steps:
            return True
        rate, best = self._rate(self.size), self._rate(self.best_size)
        assert rate is not None
        error_frac = self._error_frac(self.size)
        if best is None or self.size == self.best_size:
            return error_frac < self._min_gain_frac / 2
        away = abs(rate / best - 1 - (self._min_gain_frac if self.size > self.best_size else -self._min_gain_frac / 3))
        return away > 2 * math.hypot(error_frac, self._error_frac(self.best_size))

    def _error_frac(self, size: int) -> float:
        """Standard error of the median rate of a size, by the rates' median distance from it."""
        rates, middle = self._rates[size], self._rate(size)
        assert middle is not None
        spread = 1.48 * median(abs(rate / middle - 1) for rate in rates)
        return 1.25 * spread / math.sqrt(len(rates))

    def _judge(self) -> None:
        tried, rate, best = self.size, self._rate(self.size), self._rate(self.best_size)
        assert rate is not None
        gains = best is None or rate > best * (1 + self._min_gain_frac)
        loses_nothing = best is None or rate >= best * (1 - self._min_gain_frac / 3)
        is_better = gains if tried > self.best_size else loses_nothing
        before = self.best_size
        if is_better:
            self.best_size = tried
        if self._phase == "first":
            self._phase = "up"
        elif self._phase == "up" and not is_better:
            self._phase = "down" if before == min(self._rates) else "fine"
        elif self._phase == "down" and not is_better:
            self._phase = "fine"
        self._next()

    def _next(self) -> None:
        """Chooses the size to run next."""
        self._seen = 0
        if self._phase == "rest":
            self._phase = "up"
        if self._phase == "up":
            size = self._whole(2 * self.best_size)
            if size > self.best_size:
                self.size = size
                return
            self._phase = "down" if self.best_size == min(self._rates, default=self.best_size) else "fine"
        if self._phase == "down":
            size = self._whole(self.best_size // 2)
            if size < self.best_size and self.best_size == min(self._rates, default=self.best_size):
                self.size = size
                return
            self._phase = "fine"
        untried = [size for size in (self._near(1), self._near(-1)) if size not in self._rates]
        if untried and len(self._rates) < _MOST_TRIED:
            self.size = untried[0]
            return
        self._phase, self._rested, self.size = "rest", 0, self.best_size

    def _look_around(self) -> None:
        """Tries a neighbour of the best again."""
        self._turn = -self._turn
        size = self._near(self._turn)
        if size == self.best_size:
            return
        newest = list(self._rates[self.best_size])[-2 * self._window_steps :]
        self._rates = {self.best_size: deque(newest, maxlen=_KEPT)}  # what others did long ago tells nothing
        self.size, self._seen = size, 0
        self._phase = "up" if self._turn > 0 else "down"

    def _near(self, turn: int) -> int:
        """The next size above or below the best that is worth trying."""
        size = self.best_size
        wanted = (
            max(size + self._unit, round(size * _FINE)) if turn > 0 else min(size - self._unit, round(size / _FINE))
        )
        return self._whole(wanted)

    def _rate(self, size: int) -> float | None:
        rates = self._rates.get(size)
        return median(rates) if rates else None

    def _whole(self, size: int) -> int:
        """The multiple of the unit next to a size, within the bounds."""
        units = max(1, round(size / self._unit))
        return min(units, max(1, self._most // self._unit)) * self._unit
