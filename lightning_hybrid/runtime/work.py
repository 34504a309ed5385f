"""What a replica is given to run, and the interface of those who give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_hybrid.core.state import Mode


@dataclass(frozen=True, slots=True)
class Work:
    """Positions ``start`` to ``stop`` in loader order, to be run as one step.

    ``ghost`` work is run so that collectives match, and then taken back; ``spare`` work only keeps a loader with
    workers alive and is never run.
    """

    start: int
    stop: int
    cell: int | None = None
    mode: Mode = "static"
    """Who dealt it out; ``static`` for works that were fixed before the epoch began."""
    ghost: bool = False
    spare: bool = False

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


class StaticDealer:
    """A fixed list of works: for runs without re-distribution.

    Args:
        works: What this replica runs, in order.
    """

    mode: Mode = "static"

    def __init__(self, works: list[Work]) -> None:
        self._works = iter(works)

    def take(self, *, may_wait: bool) -> Work | None:
        """The next work of the list."""
        for work in self._works:
            return work
        raise Exhausted

    def begin(self, work: Work) -> bool:
        """Always: nobody else can take it."""
        return True

    def done(self, work: Work) -> None:
        """Nothing to note."""

    def finish(self) -> None:
        """Nothing to wait for."""
