"""The ranges of cells that a replica has claimed, and how far it has come in each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lightning_hybrid.core.workqueue import Span
from lightning_hybrid.runtime.sharedqueue import RangeKey


@dataclass(slots=True, eq=False)
class OwnedRange:
    """One range; all fields but ``key`` are cell numbers.

    Cells below ``handed`` were given to the loader, below ``begun`` to the step; those below ``reserved`` are out of
    thieves' reach, those from ``stop`` on were stolen. A swept cell has no ``key``.
    """

    key: RangeKey | None
    handed: int
    begun: int
    reserved: int
    stop: int

    @property
    def is_open(self) -> bool:
        """Whether it may hold cells that are not reserved."""
        return self.key is not None and self.reserved < self.stop


class OwnRanges:
    """All ranges of a replica, in the order in which they are run.

    Args:
        prefetch: Whether cells are handed to the loader before they are reserved.
    """

    def __init__(self, *, prefetch: bool) -> None:
        self._prefetch = prefetch
        self._ranges: deque[OwnedRange] = deque()

    def add(self, key: RangeKey) -> None:
        """A range that was claimed or stolen."""
        start = key.start
        self._ranges.append(OwnedRange(key, handed=start, begun=start, reserved=start, stop=start + key.size))

    def add_swept(self, cell: int) -> None:
        """A cell that was taken over from a dead replica."""
        self._ranges.append(OwnedRange(None, handed=cell, begun=cell, reserved=cell + 1, stop=cell + 1))

    def next_to_hand(self) -> OwnedRange | None:
        """The range whose next cell the loader may get."""
        for item in self._ranges:
            if item.handed < (item.stop if self._prefetch else item.reserved):
                return item
        return None

    def next_to_reserve(self) -> OwnedRange | None:
        """The range that the loop comes to next of those that may hold unreserved cells."""
        while self._ranges and self._ranges[0].begun >= self._ranges[0].handed >= self._ranges[0].stop:
            self._ranges.popleft()
        return next((item for item in self._ranges if item.is_open), None)

    def holder_of(self, cell: int) -> OwnedRange:
        """The range that ``cell`` was handed out from and has not begun."""
        return next(item for item in self._ranges if item.begun <= cell < item.handed)

    def open(self) -> list[OwnedRange]:
        """The ranges that may hold cells to steal."""
        return [item for item in self._ranges if item.is_open]

    def spans(self) -> list[Span]:
        """The cells that have not begun."""
        return [Span(item.begun, item.stop) for item in self._ranges if item.begun < item.stop]

    @property
    def num_reserved(self) -> int:
        """Cells that are reserved and have not begun."""
        return sum(max(0, item.reserved - item.begun) for item in self._ranges)

    @property
    def num_unhanded(self) -> int:
        """Cells that the loader has not got."""
        return sum(max(0, item.stop - item.handed) for item in self._ranges)

    @property
    def num_unbegun(self) -> int:
        """Cells that have not begun."""
        return sum(max(0, item.stop - item.begun) for item in self._ranges)
