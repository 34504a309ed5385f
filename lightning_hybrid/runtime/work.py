"""What a replica is given to run, and the interface of those who give it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_hybrid.core.state import Mode


@dataclass(frozen=True, slots=True)
class Work:
    """Positions ``start`` to ``stop`` in loader order, to be run as one step.

    It is ``cell``, or all cells from there to ``last_cell``, which follow each other up or down. ``ghost`` work is run
    so that collectives match, and then taken back; ``spare`` work only keeps a loader with workers alive and is never
    run.
    """

    start: int
    stop: int
    cell: int | None = None
    mode: Mode = "static"
    """Who dealt it out; ``static`` for works that were fixed before the epoch began."""
    ghost: bool = False
    spare: bool = False
    last_cell: int | None = None

    @property
    def cells(self) -> range:
        """The cells, in the order in which they were handed out."""
        if self.cell is None:
            return range(0)
        last = self.cell if self.last_cell is None else self.last_cell
        return range(self.cell, last - 1, -1) if last < self.cell else range(self.cell, last + 1)

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


class Exhausted(Exception):
    """There is no more work for this replica in this epoch."""


class Dealer(Protocol):
    """Gives a replica its work. `take` and `begin` are called on the loop's thread, in the same order of works."""

    mode: Mode

    def take(self, *, may_wait: bool) -> Work | None:
        """The next work to load, ``None`` when there is none right now.

        Raises:
            Exhausted: there will be none.
        """
        ...

    def begin(self, work: Work) -> bool:
        """Whether a loaded work may be run; ``False`` when another replica took it."""
        ...

    def done(self, work: Work) -> None:
        """Notes that ``work`` was run."""
        ...

    def finish(self) -> None:
        """Called once when the loop has run out of work; waits until no replica is still running."""
        ...


class Sizer(Protocol):
    """Decides how many cells are run as one step."""

    @property
    def step_cost(self) -> float:
        """Compute cost of the cells that had best be run as one step."""
        ...

    def has_room(self, start: int, stop: int) -> bool:
        """Whether positions ``start`` to ``stop`` are not too many for one step."""
        ...


class StaticDealer:
    """A fixed list of works: for runs without re-distribution.

    Args:
        works: What this replica runs, in order.
        sizer: Decides how many of them that follow each other are run as one; each alone where it is left out.
    """

    mode: Mode = "static"

    def __init__(self, works: list[Work], sizer: Sizer | None = None) -> None:
        self._works, self._sizer = deque(works), sizer

    def take(self, *, may_wait: bool) -> Work | None:
        """The next work of the list, with as many of those behind it as have room in one step."""
        if not self._works:
            raise Exhausted
        work = self._works.popleft()
        while self._sizer is not None and self._works and _follow(work, self._works[0]):
            following = self._works[0]
            if not self._sizer.has_room(work.start, following.stop):
                break
            work = replace(work, stop=following.stop, last_cell=self._works.popleft().cell)
        return work

    def begin(self, work: Work) -> bool:
        """Always: nobody else can take it."""
        return True

    def done(self, work: Work) -> None:
        """Nothing to note."""

    def finish(self) -> None:
        """Nothing to wait for."""


def _follow(work: Work, following: Work) -> bool:
    return work.stop == following.start and not (work.ghost or following.ghost)
