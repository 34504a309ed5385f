"""The arithmetic of the shared work queue: who owns what after an atomic add, and how much to ask for.

A queue of ``n`` cells is one 64-bit counter that holds how many cells were taken from the head (low 31 bits) and from
the tail (the next 31). Every claim is one atomic fetch-and-add, and the value that it returns tells the claimer which
cells are its own, whatever the others do at the same time. Claims at the two ends that run into each other are cut:
the later one gets what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

MAX_CELLS = 2**30
"""Most cells of one queue; the other half of each field is room for claims that overshoot."""

_FIELD = 31
_MASK = 2**_FIELD - 1
TAIL_UNIT = 2**_FIELD
"""What one cell taken from the tail adds to the counter."""


Floats = Sequence[float] | npt.NDArray[np.float64]


class Span(NamedTuple):
    """Cells ``start`` to ``stop``; empty when they are equal."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of cells."""
        return self.stop - self.start


def taken(value: int) -> tuple[int, int]:
    """Cells taken from the head and from the tail in counter ``value``; together they may exceed the queue."""
    return value & _MASK, value >> _FIELD


def remaining(value: int, num_cells: int) -> int:
    """Cells of a queue of ``num_cells`` that nobody has taken."""
    head, tail = taken(value)
    return max(0, num_cells - head - tail)


def head_claim(value: int, size: int, num_cells: int) -> Span:
    """Cells won by adding ``size`` to the head, given the counter's ``value`` after the addition."""
    head, tail = taken(value)
    free_stop = max(0, num_cells - tail)
    start = min(head - size, num_cells)  # not less where the tail overshot: what was won before stays won
    return Span(start, max(start, min(head, free_stop)))


def tail_claim(value: int, size: int, num_cells: int) -> Span:
    """Cells won by adding ``size * TAIL_UNIT``, given the counter's ``value`` after the addition."""
    head, tail = taken(value)
    stop = max(min(head, num_cells), num_cells - (tail - size))
    start = max(min(head, num_cells), num_cells - tail)
    return Span(min(start, stop), stop)


class Keys(Protocol):
    """Atomic counters and small values, shared by all replicas. Every call is safe from any thread.

    `get_many` returns ``None`` for keys that nobody has written; it never waits.
    """

    def add(self, key: str, amount: int) -> int:
        """Adds to the counter at ``key`` (0 where there was none) and returns its new value."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Writes ``value``."""
        ...

    def create(self, key: str, value: bytes) -> bytes:
        """Writes ``value``, which must not be empty, unless somebody did before, and returns what is there now."""
        ...

    def get_many(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values at ``keys``, ``None`` where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class RangeKey:
    """A range that a replica claimed: its counter's key, its first position and size, and its plan version."""

    key: str
    start: int
    size: int
    version: int = 0


class CellQueue:
    """One replica's view of a queue of positions 0 to ``size``.

    Nothing here waits or decides; every method is one request to the keys, whatever the contention.

    Args:
        keys: Shared by the replicas.
        replica: Who this is.
        size: How many positions the queue has.
        version: Which plan version's queue this is.
    """

    def __init__(self, keys: Keys, replica: int, size: int, version: int = 0) -> None:
        if size > MAX_CELLS:
            raise ValueError(f"size must be at most {MAX_CELLS}, got {size}")
        self._keys, self._replica, self._version = keys, replica, version
        self._key = f"queue/{version}"
        self._serial = 0
        self.size = size
        self.free = Span(0, size)
        """Positions that nobody had claimed when this replica last looked."""

    @property
    def unclaimed(self) -> int:
        """How many positions nobody had claimed when this replica last looked."""
        return self.free.size

    def claim(self, size: int, *, from_tail: bool = False) -> RangeKey | None:
        """Claims up to ``size`` positions with one atomic add, ``None`` when the queue is used up."""
        if self.free.size == 0:
            return None
        value = self._keys.add(self._key, size * TAIL_UNIT if from_tail else size)
        self._note(value)
        won = (tail_claim if from_tail else head_claim)(value, size, self.size)
        return self._own(won.start, won.size) if won.size else None

    def look(self) -> None:
        """Reads what is left to claim."""
        self._note(int(self._keys.get_many([self._key])[0] or 0))

    def seal(self) -> RangeKey | None:
        """Claims all that is left; nobody else claims anything of this queue any more."""
        return self.claim(self.size)

    def reserve(self, owned: RangeKey, size: int) -> Span:
        """Puts the next ``size`` positions of an own range out of thieves' reach.

        The returned ones are this replica's; fewer than ``size`` mean that thieves took all the others.
        """
        won = head_claim(self._keys.add(owned.key, size), size, owned.size)
        return Span(owned.start + won.start, owned.start + won.stop)

    def steal(self, victim: RangeKey, size: int) -> RangeKey | None:
        """Takes up to ``size`` positions from the tail of somebody's range, ``None`` when nothing was left there."""
        won = tail_claim(self._keys.add(victim.key, size * TAIL_UNIT), size, victim.size)
        return self._own(victim.start + won.start, won.size, victim.version) if won.size else None

    def unreserved(self, ranges: Iterable[RangeKey]) -> list[Span]:
        """Which positions of each range neither its owner nor a thief has taken."""
        ranges = list(ranges)
        values = self._keys.get_many([item.key for item in ranges]) if ranges else []
        return [_untaken(int(value or 0), item) for value, item in zip(values, ranges, strict=True)]

    def _note(self, value: int) -> None:
        head, tail = taken(value)
        start = min(head, self.size)
        self.free = Span(start, max(start, self.size - tail))

    def _own(self, start: int, size: int, version: int | None = None) -> RangeKey:
        version = self._version if version is None else version
        key = f"range/{self._replica}/{self._version}.{self._serial}"
        self._serial += 1
        return RangeKey(key, start, size, version)


def _untaken(value: int, item: RangeKey) -> Span:
    head, tail = taken(value)
    start = item.start + min(head, item.size)
    return Span(start, max(start, item.start + item.size - tail))


def declines(me: int, cells_left: int, steps_s: Floats, busy_s: Floats) -> bool:
    """Whether replica ``me``, free now, leaves the remaining equal cells to the others because they end sooner.

    Gives each cell to the replica with the earliest completion, ``busy_s`` being how long each is expected to be busy
    with what it runs now. A replica that would get none of the cells declines; the one with the earliest completion
    never does.
    """
    mine_s = steps_s[me]
    steps, busy = np.asarray(steps_s, dtype=np.float64), np.asarray(busy_s, dtype=np.float64)
    is_sooner = busy + steps < mine_s
    is_sooner[me] = False
    steps = steps[is_sooner]
    if not (steps > 0).all():
        return cells_left > 0
    # cells that each would end before mine; it gets them all first
    sooner = np.ceil((mine_s - busy[is_sooner]) / steps) - 1
    return 0 < cells_left <= float(sooner.sum())
