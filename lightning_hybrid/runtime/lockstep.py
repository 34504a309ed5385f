"""Lockstep mode: every replica takes the same number of steps; their sizes follow the measured speeds.

There is no common clock, and loaders ask for rounds ahead of time. So the first replica that needs the next block of
rounds computes it and writes it once; all others read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.load import fill_speeds
from lightning_hybrid.core.others import speed_of
from lightning_hybrid.core.partition import last_round_sizes, round_sizes
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.selector import OFF
from lightning_hybrid.core.state import Mode, ReplicaRecord
from lightning_hybrid.core.workqueue import Span
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.work import Exhausted, Work


@dataclass(frozen=True, slots=True)
class Block:
    """Rounds that were agreed on together: a plan version of lockstep mode.

    ``sizes`` are each replica's samples in every round of the block; ``None`` means that the rounds deal out the
    user's own batches. ``speeds`` are what the sizes were cut for, frozen for the block, and ``policy`` by which.
    """

    rounds: int
    sizes: tuple[int, ...] | None
    speeds: tuple[float, ...] | None
    policy: str | None = None

    def to_bytes(self) -> bytes:
        """One line of JSON behind its hash."""
        body = json.dumps([self.rounds, self.sizes, self.speeds, self.policy]).encode()
        return _digest(body) + b" " + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Block:
        """What `to_bytes` wrote.

        Raises:
            PlanError: the bytes do not hold what their hash says.
        """
        digest, _, body = data.partition(b" ")
        if _digest(body) != digest:
            raise PlanError(f"a block of rounds has hash {_digest(body)!r}, its writer says {digest!r}: {body!r}")
        rounds, sizes, speeds, policy = json.loads(body)
        return cls(rounds, None if sizes is None else tuple(sizes), None if speeds is None else tuple(speeds), policy)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


_MINDS_MEMORY = ("memory_aware", "hybrid")
"""Policies that keep within memory bounds."""


class LockstepDealer:
    """Gives a replica its part of each round.

    Args:
        board: What the replicas know of each other; not started yet.
        queue: The epoch's keys on the store.
        grid: The epoch's cells.
        config: Bounds and deadlines.
        cells: What the rounds deal out.
        max_size: Most samples of one step; ``None`` where batches must not be cut anew.
        caps: Tells the most samples that fit into each replica's memory, ``None`` where that is not known.
    """

    mode: Mode = "lockstep"

    def __init__(
        self,
        board: Board,
        queue: SharedQueue,
        grid: Grid,
        config: HybridConfig,
        *,
        cells: Span,
        max_size: int | None,
        caps: Callable[[], list[int | None]] | None = None,
    ) -> None:
        self._board, self._queue, self._grid, self._config = board, queue, grid, config
        self._me, self._world, self._max_size = board.view.me, board.view.world, max_size
        self._caps = caps or (lambda: [None] * self._world)
        self._cell, self._stop_cell = cells
        self._position, self._stop = int(grid.offsets[cells.start]), int(grid.offsets[cells.stop])
        self._block: Block | None = None
        self._block_idx = -1
        self._rounds_left = 0

    def take(self, *, may_wait: bool) -> Work | None:
        """This replica's part of the next round; a ghost when there are fewer samples than replicas."""
        self._board.check()
        if self._position >= self._stop:
            raise Exhausted
        if self._rounds_left == 0:
            self._next_block(may_wait=may_wait)
        self._rounds_left -= 1
        assert self._block is not None
        if self._block.sizes is None:
            return self._user_batch()
        return self._cut_batch(list(self._block.sizes), self._block.speeds or (1.0,) * self._world)

    def begin(self, work: Work) -> bool:
        """Always: rounds cannot be stolen."""
        return True

    def done(self, work: Work) -> None:
        """Nothing to note."""

    def finish(self) -> None:
        """Nothing to wait for: every replica takes the same number of steps."""
        self._board.check()

    def _user_batch(self) -> Work:
        cell = self._cell + self._me
        self._cell = min(self._cell + self._world, self._stop_cell)
        self._position = int(self._grid.offsets[self._cell])
        if cell >= self._stop_cell:
            return ghost_work(self._grid, "lockstep")
        return Work(*self._grid.span(cell), cell, mode="lockstep")

    def _cut_batch(self, sizes: list[int], speeds: tuple[float, ...]) -> Work:
        left = self._stop - self._position
        if left < sum(sizes):
            sizes = last_round_sizes(left, speeds, sizes)
        start = self._position + sum(sizes[: self._me])
        self._position += sum(sizes)
        if sizes[self._me] == 0:
            return ghost_work(self._grid, "lockstep")
        return Work(start, start + sizes[self._me], mode="lockstep")

    def _next_block(self, *, may_wait: bool) -> None:
        self._block_idx += 1
        key = f"block/{self._block_idx}"
        agreed = self._queue.agreed(key)
        if agreed is None:
            if may_wait and self._max_size is not None:
                self._await_first_speeds()
            agreed = self._queue.agree(key, self._propose().to_bytes())
        self._block = Block.from_bytes(agreed)
        self._rounds_left = self._block.rounds

    def _await_first_speeds(self) -> None:
        with self._board.changed:
            self._board.wait(self._knows_all_speeds, "the other replicas' first speeds")

    def _knows_all_speeds(self) -> bool:
        peers = self._board.view.published
        return len(peers) == self._world and all(peer.record.step_s is not None for peer in peers.values())

    def _propose(self) -> Block:
        """The next block by what is known now; rounds are few until the speeds are known."""
        with self._board.changed:
            peers = [self._board.view.published.get(r) for r in range(self._world)]
        known = all(peer is not None and speed_of(peer.record) is not None for peer in peers)
        aligned = self._block is None or self._block.sizes is None
        may_cut = known and all(peer is not None and peer.recut for peer in peers)
        policy = None if peers[0] is None else peers[0].policy
        if self._max_size is None or (aligned and (policy == OFF or not may_cut)):
            rounds = 1 if self._max_size is not None and policy != OFF else self._config.lockstep_block_rounds
            return Block(rounds, None, None, policy)
        records = [None if peer is None else peer.record for peer in peers]
        speeds = (1.0,) * self._world if policy == OFF else self._speeds(records)
        caps = self._caps() if policy in _MINDS_MEMORY else []
        grows = min(self._config.lockstep_block_rounds, 2 ** max(0, self._block_idx - 1))
        return Block(grows, tuple(round_sizes(speeds, self._max_size, caps)), speeds, policy)

    def _speeds(self, records: Sequence[ReplicaRecord | None]) -> tuple[float, ...]:
        measured = [None if record is None else speed_of(record) for record in records]
        errors = [0.0 if record is None else record.cost_speed_error_frac or 0.0 for record in records]
        return tuple(self._steady(fill_speeds(measured, [1.0] * self._world), max(errors)))

    def _steady(self, speeds: list[float], error_frac: float) -> list[float]:
        """The speeds that the sizes were cut for, unless one has really changed; equal ones when none differs."""
        scale = sum(speeds)
        shares = [speed / scale for speed in speeds]
        before = self._block.speeds if self._block is not None and self._block.speeds else (1.0,) * len(speeds)
        before_shares = [speed / sum(before) for speed in before]
        limit = max(self._config.speed_change_frac, 2 * error_frac)  # what may be chance moves nothing
        same = all(abs(now / old - 1) <= limit for now, old in zip(shares, before_shares, strict=True))
        return list(before) if same else speeds


def ghost_work(grid: Grid, mode: Mode) -> Work:
    """A step of the grid's first cell, to be taken back."""
    return Work(*grid.span(0), cell=0, mode=mode, ghost=True)
