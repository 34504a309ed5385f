"""What a driver says, made into values that can be believed: a value in its range, or the reason why there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_NO_U32 = 0xFFFF_FFFF
_NO_U64 = 0xFFFF_FFFF_FFFF_FFFF
_MOST_BYTES = 1 << 46
"""64 TiB: more than any device has, and less than what drivers say that do not know."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands in for a value that cannot be had.

    ``lasting``: it never can be had here, so there is no use in asking again. ``lost``: the whole device is gone.
    """

    reason: str
    lasting: bool = False
    lost: bool = False


def within(value: float, least: float, most: float) -> Any:
    """``value`` where it lies from ``least`` to ``most``, else `Unknown`; sentinels of drivers lie outside."""
    if value in (_NO_U32, _NO_U64) or math.isnan(value) or not least <= value <= most:
        return Unknown(f"the driver says {value:g}, which cannot be")
    return value


def frac(percent: float) -> Any:
    """0..1 from 0..100."""
    found = within(percent, 0, 100)
    return found if isinstance(found, Unknown) else found / 100


def num_bytes(value: int, most: int = _MOST_BYTES) -> Any:
    """A number of bytes of up to ``most``."""
    return within(value, 0, most)


def mhz(value: int) -> Any:
    """A clock of up to 20 GHz."""
    return within(value, 0, 20_000)


def celsius(value: int) -> Any:
    """A temperature at which electronics can be."""
    return within(value, -55, 250)


def watts(milliwatts: int) -> Any:
    """Power of up to 20 kW."""
    found = within(milliwatts, 0, 20_000_000)
    return found if isinstance(found, Unknown) else found / 1000


def count(value: int) -> Any:
    """A number of events."""
    return within(value, 0, 1 << 60)


class Rate:
    """Units per second from a counter, ``most_per_s`` at most.

    The counter's first value, one that went back (it wrapped, or the driver started anew), and one that no device can
    have reached give no rate, and the next is counted from there.
    """

    def __init__(self, most_per_s: float) -> None:
        self._most_per_s = most_per_s
        self._last: tuple[int, float] | None = None

    def update(self, value: Any, now_s: float) -> Any:
        """The rate since the last call.

        Args:
            value: The counter, or `Unknown`.
            now_s: Seconds of a monotonic clock.
        """
        found = value if isinstance(value, Unknown) else count(value)
        last, self._last = self._last, None if isinstance(found, Unknown) else (found, now_s)
        if isinstance(found, Unknown):
            return found
        if last is None:
            return Unknown("a rate needs two readings")
        if found < last[0]:
            return Unknown("the counter went backwards")
        if now_s <= last[1]:
            return Unknown("the clock stood still")
        rate = (found - last[0]) / (now_s - last[1])
        return rate if rate <= self._most_per_s else Unknown(f"the counter jumped by {found - last[0]}")


class Energy:
    """Joules since the first reading, from a counter in millijoules.

    A counter that went back, or ran faster than 20 kW, says nothing about the time since the first reading any more.
    """

    _MOST_W = 20_000.0

    def __init__(self) -> None:
        self._first: int | None = None
        self._last = (0, 0.0)
        self._broken: Unknown | None = None

    def interrupt(self) -> None:
        """What the device used since the first reading is not known any more."""
        self._broken = Unknown("the device was lost since the first reading", lasting=True)

    def update(self, millijoules: int, now_s: float) -> Any:
        """The energy; ``now_s`` are seconds of a monotonic clock."""
        found = count(millijoules)
        if isinstance(found, Unknown) or self._broken is not None:
            return self._broken or found
        if self._first is None:
            self._first, self._last = found, (found, now_s)
        gained, passed_s = found - self._last[0], now_s - self._last[1]
        if gained < 0:
            self._broken = Unknown("the counter went backwards", lasting=True)
        elif gained / 1000 > self._MOST_W * (passed_s + 1.0):
            self._broken = Unknown(f"the counter jumped by {gained} mJ", lasting=True)
        if self._broken is not None:
            return self._broken
        self._last = (found, now_s)
        return (found - self._first) / 1000
