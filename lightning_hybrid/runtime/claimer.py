"""Queue mode: a replica claims, reserves and steals cells on a background thread, ahead of its loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lightning_hybrid.core import workqueue
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.state import Mode, ReplicaRecord
from lightning_hybrid.core.workqueue import Span
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.peers import Peers
from lightning_hybrid.runtime.ranges import OwnedRange, OwnRanges
from lightning_hybrid.runtime.sharedqueue import Published, RangeKey, SharedQueue
from lightning_hybrid.runtime.sweep import Sweeper
from lightning_hybrid.runtime.thief import Thief
from lightning_hybrid.runtime.work import Exhausted, Work


class QueueDealer:
    """Gives a replica cells as it asks for them; which, is settled on the background thread of its `Board`.

    Args:
        board: What the replicas know of each other; not started yet.
        queue: The epoch's queue.
        grid: The epoch's cells.
        config: Thresholds, periods and deadlines.
        replica: Who this is.
        prior: Relative speeds of the replicas until they have been measured.
        prefetch: Whether the loader loads ahead of the step. Then cells are handed out before they are reserved, and
            `begin` tells whether they were stolen in the meantime.
        released: Whether cells may be reserved yet; before, they are only handed out to be loaded.
    """

    mode: Mode = "queue"

    def __init__(
        self,
        board: Board,
        queue: SharedQueue,
        grid: Grid,
        config: HybridConfig,
        *,
        replica: int,
        prior: list[float],
        prefetch: bool,
        released: Callable[[], bool] = lambda: True,
    ) -> None:
        self._board, self._queue, self._grid, self._config = board, queue, grid, config
        self._me, self._prefetch, self._released = replica, prefetch, released
        self.peers = Peers(board, replica, prior)
        self._ranges = OwnRanges(prefetch=prefetch)
        self._thief = Thief(board, queue, self.peers, self._ranges)
        self._reserved_total = 0
        self._ahead = 0
        self._starving = self._finishing = False
        self._running: set[int] = set()
        self._done: list[Span] = []
        self._sweeper = Sweeper(queue, replica, config.lease_s) if config.lease_s is not None else None
        self.before_wait: Callable[[], None] = lambda: None
        """Called on the loop's thread before it waits for work, where what is done must be told exactly."""
        board.describe = self._describe
        board.errand = self._errand

    # --- on the loop's thread -----------------------------------------------------------------------------------

    def take(self, *, may_wait: bool) -> Work | None:
        """The next cell to load, ``None`` when there is none right now and ``may_wait`` is false."""
        with self._board.changed:
            if self._ranges.next_to_hand() is None:
                if self._sweeper is not None:
                    self.before_wait()
                # a claim from the shared queue depends on nobody else, so it may be waited for in any case
                self._wait(
                    lambda: (
                        self._ranges.next_to_hand() is not None
                        or self._is_exhausted()
                        or (not may_wait and self._queue.unclaimed == 0)
                    ),
                    "work to claim",
                )
            owned = self._ranges.next_to_hand()
            if owned is None:
                if self._is_exhausted():
                    raise Exhausted
                return None
            cell = owned.handed
            owned.handed += 1
            if not self._prefetch:
                self._begin_cell(owned, cell)
            if owned.stop - owned.handed <= 1:
                self._board.wake()  # time to restock
        return Work(*self._grid.span(cell), cell, mode="queue")

    def begin(self, work: Work) -> bool:
        """Whether the cell may be run; ``False`` when it was stolen while it was loaded."""
        if not self._prefetch:
            return True
        cell = work.cell
        assert cell is not None
        with self._board.changed:
            owned = self._ranges.holder_of(cell)
            if owned.reserved <= cell < owned.stop:
                self._wait(lambda: not owned.reserved <= cell < owned.stop, f"leave to run cell {cell}")
            mine = cell < owned.reserved
            if mine:
                self._begin_cell(owned, cell)
            else:
                owned.begun = cell + 1
            return mine

    def done(self, work: Work) -> None:
        """Notes that a cell was run."""
        if self._sweeper is None:
            return
        assert work.cell is not None
        with self._board.changed:
            self._running.discard(work.cell)
            self._note_done(work.cell)

    def finish(self) -> None:
        """Waits until no replica runs any more, so that an alarm reaches this one before its next collective."""
        self._finishing = True
        self._board.exchange_soon()
        with self._board.changed:
            self._board.wait(self._is_over, "the other replicas to finish")

    @property
    def cells_stolen(self) -> int:
        """Cells that this replica took from others' claims."""
        return self._thief.cells_stolen

    def _begin_cell(self, owned: OwnedRange, cell: int) -> None:
        owned.begun = cell + 1
        if self._sweeper is not None:
            self._running.add(cell)
        if owned.reserved - owned.begun <= self._ahead // 2:
            self._board.wake()  # time to reserve more

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self._starving = True
        self._board.wake()
        try:
            self._board.wait(ready, what)
        finally:
            self._starving = False

    def _note_done(self, cell: int) -> None:
        if self._done and self._done[-1].stop == cell:
            self._done[-1] = Span(self._done[-1].start, cell + 1)
        else:
            self._done.append(Span(cell, cell + 1))

    def _is_exhausted(self) -> bool:
        if self._sweeper is not None:
            return self._sweeper.is_complete(self._board.peers, self._done)
        return self._unreserved_anywhere() == 0 and not self._ranges.open()

    def _is_over(self) -> bool:
        if self._sweeper is not None:
            # the others wait for this one's last word about what it has done
            mine = self._board.peers[self._me] if self._board.peers else None
            return mine is not None and mine.record.finished and self._is_exhausted()
        return self.peers.all_finished()

    # --- on the background thread -------------------------------------------------------------------------------

    def _describe(self, record: ReplicaRecord) -> Published:
        with self._board.changed:
            published = Published(
                record=replace(record, cells_stolen=self._thief.cells_stolen),
                reserved=self._reserved_total,
                ranges=tuple(item.key for item in self._ranges.open() if item.key),
                recut=self._board.recut,
            )
            if self._sweeper is None:
                return published
            held = [*self._ranges.spans(), *(Span(cell, cell + 1) for cell in self._running)]
            return replace(published, done=tuple(self._done), held=tuple(held))

    def _errand(self) -> float:
        if self._finishing:
            self._board.look()
        elif self._reserve() or self._restock():
            return 0.0
        step_s = self._board.record.step_s
        poll_s = self._config.endgame_poll_s if step_s is None else min(self._config.endgame_poll_s, 0.1 * step_s)
        return max(poll_s, 1e-3) if self._starving or self._finishing else math.inf

    def _reserve(self) -> bool:
        """Reserves what the loop will need next; whether anything was asked of the store."""
        if not self._released():
            return False
        with self._board.changed:
            owned = self._ranges.next_to_reserve()
            held = self._ranges.num_reserved
        if owned is None or owned.key is None:
            return False
        near_end = self._is_near_end()
        size = self._cells_to_reserve(held)
        if size and (near_end or self._ahead == 0):
            self._board.look()  # what was published a period ago counts too many cells as left
            size = self._cells_to_reserve(held)
        if not size or (self._ahead == 0 and self._declines()):
            return False
        won = self._queue.reserve(owned.key, size)
        with self._board.changed:
            owned.reserved = won.stop
            if won.size < size:
                owned.stop = won.stop
            self._reserved_total += won.size
            self._board.changed.notify_all()
        if near_end:
            self._board.publish()
        return True

    def _is_near_end(self) -> bool:
        """Whether what is left takes so little time that a publishing period makes a difference."""
        left_s = self._unreserved_anywhere() / sum(self.peers.cells_per_s())
        return left_s < 5 * self._config.publish_period_s

    def _cells_to_reserve(self, held: int) -> int:
        """How many cells to reserve now that ``held`` wait; near the end none before the loop asks."""
        self._ahead = self._reserve_ahead()
        if held > self._ahead // 2 or (held == 0 and self._ahead == 0 and not self._starving):
            return 0
        return max(1, self._ahead - held)

    def _reserve_ahead(self) -> int:
        """How many cells may wait out of thieves' reach, now."""
        left = self._unreserved_anywhere()
        step_s = self._board.record.step_s
        if step_s is None:
            return int(left > 4 * self.peers.world)
        return workqueue.reserve_size(
            cells_left=left,
            step_s=step_s,
            all_cells_per_s=sum(self.peers.cells_per_s()),
            reserve_frac=self._config.reserve_frac,
            ahead_s=self._config.reserve_ahead_s,
        )

    def _declines(self) -> bool:
        mine = self._board.record.step_s
        if mine is None:
            return False
        replicas = range(self.peers.world)
        steps_s = [mine if r == self._me else self.peers.step_s(r) for r in replicas]
        busy_s = [self._board.busy_s(r) for r in replicas]
        return workqueue.declines(self._me, self._unreserved_anywhere(), steps_s, busy_s)

    def _restock(self) -> bool:
        """Claims or steals when the loader is about to run out; whether anything was won."""
        with self._board.changed:
            unhanded, unbegun = self._ranges.num_unhanded, self._ranges.num_unbegun
        if unhanded > 1:
            return False
        if self._queue.unclaimed:
            speeds = self.peers.cells_per_s()
            size = workqueue.claim_size(self._queue.unclaimed, speeds[self._me], sum(speeds), self._config.claim_frac)
            return self._own(self._queue.claim(size))
        if self._starving or (unhanded == 0 and unbegun <= 1):
            return self._own(self._thief.steal(unbegun, is_idle=self._starving)) or self._sweep()
        return False

    def _sweep(self) -> bool:
        if self._sweeper is None:
            return False
        cell = self._sweeper.adopt(self._board.peers, self._grid.num_cells)
        if cell is None:
            return False
        with self._board.changed:
            self._ranges.add_swept(cell)
            self._board.changed.notify_all()
        return True

    def _own(self, won: RangeKey | None) -> bool:
        if won is None:
            return False
        with self._board.changed:
            self._ranges.add(won)
            self._board.changed.notify_all()
        self._board.publish()
        return True

    def _unreserved_anywhere(self) -> int:
        """Cells that no replica has reserved, as far as this one knows."""
        return max(0, self._queue.size - self._reserved_total - self.peers.reserved_by_others())
