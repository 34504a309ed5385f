"""The ranges of cells that a replica has claimed, and how far it has come in each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import RangeKey, Span


@dataclass(slots=True, eq=False)
class OwnedRange:
    """One range; ``handed`` to ``stop`` are positions in its version of the queue.

    Cells below ``handed`` were given to the loader, below ``begun`` to the step; those below ``reserved`` are out of
    thieves' reach, those from ``stop`` on were stolen. A swept cell has neither ``key`` nor ``version``, and its
    position is its number.
    """

    key: RangeKey | None
    handed: int
    begun: int
    reserved: int
    stop: int
    version: QueueVersion | None = None
    is_stolen: bool = False
    """Whether it was another replica's before."""

    def cell_at(self, position: int) -> int:
        """The cell of the grid at a position."""
        return position if self.version is None else int(self.version.cells[position])

    def cost(self, start: int, stop: int) -> float:
        """Compute cost of some of its cells; zero where it is not known."""
        return 0.0 if self.version is None or start >= stop else self.version.cost(start, stop)

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

    def add(
        self, key: RangeKey, version: QueueVersion | None = None, *, first: bool = False, is_stolen: bool = False
    ) -> OwnedRange:
        """A range that was claimed or stolen; ``first``: to be run before the others."""
        start = key.start
        owned = OwnedRange(key, start, start, start, start + key.size, version, is_stolen)
        if first:
            self._ranges.appendleft(owned)
        else:
            self._ranges.append(owned)
        return owned

    def add_swept(self, cell: int) -> None:
        """A cell that was taken over from a dead replica."""
        self._ranges.append(OwnedRange(None, handed=cell, begun=cell, reserved=cell + 1, stop=cell + 1, is_stolen=True))

    def add_again(self, cell: int) -> None:
        """A cell of its own that is handed out once more, before all others."""
        self._ranges.appendleft(OwnedRange(None, handed=cell, begun=cell, reserved=cell + 1, stop=cell + 1))

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
        for item in self._ranges:
            if item.key is not None and item.reserved < item.stop:
                return item
        return None

    def versions(self) -> set[int]:
        """Numbers of the plan versions that the ranges come from."""
        return {item.version.number for item in self._ranges if item.version is not None}

    def open(self) -> list[OwnedRange]:
        """The ranges that may hold cells to steal."""
        return [item for item in self._ranges if item.is_open]

    def spans(self) -> list[Span]:
        """The cells that have not begun."""
        spans: list[Span] = []
        for item in self._ranges:
            for position in range(item.begun, item.stop):
                append_cell(spans, item.cell_at(position))
        return spans

    # plain loops: these are asked several times per step

    @property
    def num_reserved(self) -> int:
        """Cells that are reserved and have not begun."""
        num = 0
        for item in self._ranges:
            num += item.reserved - item.begun if item.reserved > item.begun else 0
        return num

    @property
    def cost_reserved(self) -> float:
        """What they cost."""
        cost = 0.0
        for item in self._ranges:
            cost += item.cost(item.begun, item.reserved)
        return cost

    @property
    def cost_unbegun(self) -> float:
        """Cost of the cells that have not begun."""
        return sum(item.cost(item.begun, item.stop) for item in self._ranges)

    @property
    def num_unreserved(self) -> int:
        """Cells that are neither reserved nor known to be stolen."""
        num = 0
        for item in self._ranges:
            num += item.stop - item.reserved if item.stop > item.reserved else 0
        return num

    @property
    def cost_unreserved(self) -> float:
        """What they cost."""
        cost = 0.0
        for item in self._ranges:
            cost += item.cost(item.reserved, item.stop)
        return cost

    @property
    def num_unhanded(self) -> int:
        """Cells that the loader has not got."""
        return sum(max(0, item.stop - item.handed) for item in self._ranges)

    @property
    def num_unbegun(self) -> int:
        """Cells that have not begun."""
        return sum(max(0, item.stop - item.begun) for item in self._ranges)


def append_cell(spans: list[Span], cell: int) -> None:
    """Adds a cell to a list of spans, to the last one where it is the next."""
    if spans and spans[-1].stop == cell:
        spans[-1] = Span(spans[-1].start, cell + 1)
    else:
        spans.append(Span(cell, cell + 1))
