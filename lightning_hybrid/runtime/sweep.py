"""Finding the cells that a dead replica held, so that nothing is lost when a claimer dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.workqueue import Span
from lightning_hybrid.runtime.sharedqueue import Published, SharedQueue


class Sweeper:
    """Watches the others' progress and takes over cells that are neither done nor held by a live replica.

    A replica counts as dead when nothing it publishes about its work has changed for ``lease_s`` by the clock of the
    observer. Cells that nobody mentions, because a replica died between its claim and its word about it, are taken
    too once they have been missing for ``lease_s``: a living claimer speaks of a claim at once.

    Args:
        queue: The epoch's queue.
        replica: Who this is.
        lease_s: How long a replica may stand still.
        clock: Monotonic seconds.
    """

    def __init__(
        self, queue: SharedQueue, replica: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue, self._me, self._lease_s, self._clock = queue, replica, lease_s, clock
        self._seen: dict[int, tuple[object, float]] = {}
        self._missing_since: dict[int, float] = {}
        self._attempts: dict[int, int] = {}
        self._adopted: set[int] = set()

    def is_complete(self, peers: Sequence[Published | None], mine: Sequence[Span]) -> bool:
        """Whether every cell is done."""
        spans = [span for r, peer in enumerate(peers) if peer and r != self._me for span in peer.done]
        # a cell may be done twice, by a replica that was thought dead and by the one that took over
        first = self._queue.first_cell
        return int(_marked(first + self._queue.size, [*spans, *mine])[first:].sum()) >= self._queue.size

    def adopt(self, peers: Sequence[Published | None], num_cells: int) -> int | None:
        """Takes over one lost cell, ``None`` when none is known to be lost."""
        now = self._clock()
        for cell in self._lost(peers, num_cells, now):
            attempt = self._attempts.get(cell, 0)
            if self._queue.adopt_orphan(cell, attempt):
                self._adopted.add(cell)
                return cell
            # somebody else's now; should it stay lost for another lease, that one died as well
            self._attempts[cell] = attempt + 1
            self._missing_since[cell] = now
        return None

    def _lost(self, peers: Sequence[Published | None], num_cells: int, now: float) -> list[int]:
        held = [span for peer in peers if peer for span in peer.done]
        for r, peer in enumerate(peers):
            if peer and (r == self._me or self._is_alive(r, peer, now)):
                held += peer.held
        missing = np.flatnonzero(~_marked(num_cells, held))
        since = {
            int(c): self._missing_since.get(int(c), now)
            for c in missing
            if c >= self._queue.first_cell and int(c) not in self._adopted
        }
        self._missing_since = since
        return [cell for cell, start in since.items() if now - start >= self._lease_s]

    def _is_alive(self, replica: int, peer: Published, now: float) -> bool:
        state = (peer.record.steps, peer.reserved, peer.held)
        known = self._seen.get(replica)
        if known is None or known[0] != state:
            self._seen[replica] = (state, now)
            return True
        return now - known[1] < self._lease_s


def _marked(num_cells: int, spans: Iterable[Span]) -> npt.NDArray[np.bool_]:
    marks = np.zeros(num_cells, dtype=np.bool_)
    for span in spans:
        marks[span.start : span.stop] = True
    return marks
