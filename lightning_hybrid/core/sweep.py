"""Finding the cells that a dead replica held, so that nothing is lost when a claimer dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.published import Published
from lightning_hybrid.core.workqueue import Keys, Span

_NO_CELLS = np.empty(0, dtype=np.int64)


class Sweeper:
    """Watches the others' progress and takes over cells that are neither done nor held by a live replica.

    A replica counts as dead when nothing it publishes about its work has changed for ``lease_s`` by the clock of the
    observer. Cells that nobody mentions, because a replica died between its claim and its word about it, are taken
    too once they have been missing for ``lease_s``: a living claimer speaks of a claim at once.

    Args:
        keys: The epoch's keys.
        replica: Who this is.
        lease_s: How long a replica may stand still.
        cells: The cells that the queue deals out.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        keys: Keys,
        replica: int,
        lease_s: float,
        *,
        cells: npt.NDArray[np.int64],
        clock: Callable[[], float],
    ) -> None:
        self._keys, self._me, self._lease_s, self._clock = keys, replica, lease_s, clock
        self._first = int(cells.min()) if len(cells) else 0
        self._others = np.ones(int(cells.max()) + 1 - self._first if len(cells) else 0, dtype=np.bool_)
        self._others[cells - self._first] = False
        self._seen: dict[int, tuple[object, float]] = {}
        self._missing_since: dict[int, float] = {}
        self._attempts: dict[int, int] = {}
        self._adopted: set[int] = set()

    def is_complete(self, peers: Mapping[int, Published], mine: Sequence[Span]) -> bool:
        """Whether every cell is done."""
        spans = [span for r, peer in peers.items() if r != self._me for span in peer.done]
        # a cell may be done twice, by a replica that was thought dead and by the one that took over
        return bool(self._marked([*spans, *mine]).all())

    def adopt(self, peers: Mapping[int, Published], unclaimed: npt.NDArray[np.int64] = _NO_CELLS) -> int | None:
        """Takes over one lost cell, ``None`` when none is known to be lost.

        Args:
            peers: What the replicas have published.
            unclaimed: Cells that are still in the queue: nobody holds them, and they are not lost.
        """
        now = self._clock()
        for cell in self._lost(peers, unclaimed, now):
            attempt = self._attempts.get(cell, 0)
            mine = str(self._me).encode()
            if self._keys.create(f"orphan/{cell}/{attempt}", mine) == mine:
                self._adopted.add(cell)
                return cell
            # somebody else's now; should it stay lost for another lease, that one died as well
            self._attempts[cell] = attempt + 1
            self._missing_since[cell] = now
        return None

    def _lost(self, peers: Mapping[int, Published], unclaimed: npt.NDArray[np.int64], now: float) -> list[int]:
        held = [span for peer in peers.values() for span in peer.done]
        for r, peer in peers.items():
            if r == self._me or self._is_alive(r, peer, now):
                held += peer.held
        marks = self._marked(held)
        marks[unclaimed - self._first] = True
        missing = (np.flatnonzero(~marks) + self._first).tolist()
        since = {c: self._missing_since.get(c, now) for c in missing if c not in self._adopted}
        self._missing_since = since
        return [cell for cell, start in since.items() if now - start >= self._lease_s]

    def _is_alive(self, replica: int, peer: Published, now: float) -> bool:
        state = (peer.record.steps, peer.reserved, peer.held)
        known = self._seen.get(replica)
        if known is None or known[0] != state:
            self._seen[replica] = (state, now)
            return True
        return now - known[1] < self._lease_s

    def _marked(self, spans: Iterable[Span]) -> npt.NDArray[np.bool_]:
        marks: npt.NDArray[np.bool_] = self._others.copy()
        first = self._first
        for span in spans:
            marks[max(0, span.start - first) : max(0, span.stop - first)] = True
        return marks
