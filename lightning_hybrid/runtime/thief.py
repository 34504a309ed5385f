"""Stealing what another replica has claimed and not begun."""

from __future__ import annotations

from collections import Counter

from lightning_hybrid.core import workqueue
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.peers import Peers
from lightning_hybrid.runtime.ranges import OwnRanges
from lightning_hybrid.runtime.sharedqueue import RangeKey, SharedQueue


class Thief:
    """Takes cells from the tails of others' ranges; on the background thread only.

    Args:
        board: What the replicas publish.
        queue: Where the ranges' counters are.
        peers: Who is how fast.
        ranges: The own ranges, which others steal from.
    """

    def __init__(self, board: Board, queue: SharedQueue, peers: Peers, ranges: OwnRanges) -> None:
        self._board, self._queue, self._peers, self._ranges = board, queue, peers, ranges
        self.cells_stolen = 0
        """Cells taken so far."""

    def steal(self, backlog: int, *, is_idle: bool) -> RangeKey | None:
        """Takes cells from the replica that would end last, if this one would finish them earlier.

        Args:
            backlog: Cells that this replica has yet to begin.
            is_idle: Whether its loop waits for work; else it is taken to be half through a step.
        """
        me = self._peers.me
        published = self._board.look()
        self._learn_thefts()
        owned = [(r, item) for r, peer in enumerate(published) if peer and r != me for item in peer.ranges]
        counts = self._queue.unreserved(item for _, item in owned)
        loot = [(r, item, count) for (r, item), count in zip(owned, counts, strict=True) if count]
        left = Counter[int]()
        for r, _, count in loot:
            left[r] += count
        if not left:
            return None
        ends_s = {r: self._board.busy_s(r) + count * self._peers.step_s(r) for r, count in left.items()}
        victim = max(ends_s, key=lambda r: (ends_s[r], -r))
        speeds = self._peers.cells_per_s()
        if (backlog + (1.0 if is_idle else 1.5)) / speeds[me] >= ends_s[victim]:
            return None
        _, item, count = max((entry for entry in loot if entry[0] == victim), key=lambda entry: entry[1].start)
        size = workqueue.steal_size(left[victim], speeds[me], speeds[victim])
        won = self._queue.steal(item, min(count, size))
        self.cells_stolen += won.size if won else 0
        return won

    def _learn_thefts(self) -> None:
        """Notices own ranges whose last cells were stolen, so that the loop does not wait for them."""
        with self._board.changed:
            open_ranges = self._ranges.open()
        left = self._queue.unreserved(item.key for item in open_ranges if item.key)
        with self._board.changed:
            for item, count in zip(open_ranges, left, strict=True):
                item.stop = item.reserved + count
            self._board.changed.notify_all()
