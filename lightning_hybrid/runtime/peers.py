"""What a replica makes of the others' records: who is how fast, who is busy how long, what is left."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_hybrid.core.cost import fill_speeds
from lightning_hybrid.runtime.board import Board


class Peers:
    """The replicas of an epoch, as replica ``me`` sees them now.

    Args:
        board: What they publish.
        me: Who looks.
        prior: Relative speeds of all replicas until they have been measured.
    """

    def __init__(self, board: Board, me: int, prior: list[float]) -> None:
        self._board, self.me, self._prior = board, me, prior
        self.newer_prior: Callable[[], list[float]] | None = None
        """Makes the prior from what is known by now, where it can be had."""

    @property
    def world(self) -> int:
        """Number of replicas."""
        return len(self._prior)

    def step_s(self, replica: int) -> float:
        """Seconds of a usual step; infinite while it is not known."""
        peer = self._board.peers[replica]
        return math.inf if peer is None or peer.record.step_s is None else peer.record.step_s

    def cells_per_s(self) -> list[float]:
        """Speed of every replica in cells per second: measured where it is known, else by the prior."""
        steps_s = [None if peer is None else peer.record.step_s for peer in self._board.peers] or [None] * self.world
        steps_s[self.me] = self._board.record.step_s
        if None in steps_s and self.newer_prior is not None:
            self._prior = self.newer_prior()
        return fill_speeds([None if step is None else 1.0 / step for step in steps_s], self._prior)

    def reserved_by_others(self) -> int:
        """Cells that the other replicas have reserved so far."""
        return sum(peer.reserved for r, peer in enumerate(self._board.peers) if peer and r != self.me)

    def all_finished(self) -> bool:
        """Whether no replica runs a step any more; false before the first look."""
        peers = self._board.peers
        return bool(peers) and all(peer is not None and peer.record.finished for peer in peers)
