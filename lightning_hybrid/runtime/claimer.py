"""Queue mode: a replica's claims are settled on a background thread, ahead of its loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_hybrid.core.claims import Claimant
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import Mode, ReplicaRecord
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.work import Exhausted, Sizer, Work


class QueueDealer:
    """Gives a replica cells as it asks for them; which, is settled on the background thread of its `Board`.

    Args:
        board: What the replicas know of each other; not started yet.
        queue: The epoch's keys on the store.
        grid: The epoch's cells.
        first: The epoch's first plan version.
        costs: Costs of all cells of the grid.
        config: Thresholds, periods and deadlines.
        prefetch: Whether the loader loads ahead of the step. Then cells are handed out before they are reserved, and
            `begin` tells whether they were stolen in the meantime.
        released: Whether cells may be reserved yet; before, they are only handed out to be loaded.
        dealt: Cells that were dealt out in turn before the queue begins.
        sizer: Decides how many cells are run as one step; each alone where it is left out.
    """

    mode: Mode = "queue"

    def __init__(
        self,
        board: Board,
        queue: SharedQueue,
        grid: Grid,
        first: QueueVersion,
        costs: Costs,
        config: HybridConfig,
        *,
        prefetch: bool,
        released: Callable[[], bool] = lambda: True,
        dealt: Sequence[int] = (),
        sizer: Sizer | None = None,
    ) -> None:
        self._sizer = sizer
        self._board, self._grid, self._prefetch, self._leases = board, grid, prefetch, config.lease_s is not None
        self.keys = queue.store
        """What the replicas share."""
        self.claimant = Claimant(
            board, queue.store, first, costs, config, prefetch=prefetch, released=released, dealt=dealt
        )
        self.before_wait: Callable[[], None] = lambda: None
        """Called on the loop's thread before it waits for work, where what is done must be told exactly."""
        board.describe = self._describe
        board.errand = self.claimant.turn

    # --- on the loop's thread -----------------------------------------------------------------------------------

    def take(self, *, may_wait: bool) -> Work | None:
        """The next cell to load, ``None`` when there is none right now and ``may_wait`` is false."""
        claimant = self.claimant
        with self._board.changed:
            if self._sizer is not None:
                claimant.step_cost = self._sizer.step_cost
            if claimant.ranges.next_to_hand() is None:
                if self._leases:
                    self.before_wait()
                # a claim from the shared queue depends on nobody else, so it may be waited for in any case
                self._wait(
                    lambda: claimant.knows_what_is_next() or (not may_wait and claimant.has_nothing_to_claim()),
                    "work to claim",
                )
            handed = claimant.hand_out()
            if handed is None:
                if claimant.is_exhausted():
                    raise Exhausted
                return None
            cell, wants_more = handed
            work = Work(*self._grid.span(cell), cell, mode="queue")
            while (larger := self._with_next(work)) is not None:
                work, handed = larger, claimant.hand_out(is_next=True)
                wants_more = handed is not None and handed[1]
            if wants_more:
                self._board.wake()
        return work

    def begin(self, work: Work) -> bool:
        """Whether the cell may be run; ``False`` when it was stolen while it was loaded."""
        if not self._prefetch:
            return True
        claimant, mine = self.claimant, []
        with self._board.changed:
            for cell in work.cells:
                if claimant.is_mine() is None:
                    self._wait(lambda: claimant.is_mine() is not None, f"leave to run cell {cell}")
                if claimant.is_mine():
                    mine.append(cell)
                if claimant.begin(is_next=bool(mine)):
                    self._board.wake()
            if 0 < len(mine) < len(work.cells):
                for cell in mine:  # the batch holds what others run now, so what is left of it is loaded again
                    claimant.hand_again(cell)
            return len(mine) == len(work.cells)

    def done(self, work: Work) -> None:
        """Notes that a cell was run."""
        if self._leases:
            with self._board.changed:
                for cell in work.cells:
                    self.claimant.done(cell)

    def finish(self) -> None:
        """Waits until no replica runs any more, so that an alarm reaches this one before its next collective."""
        self.claimant.is_finishing = True
        self._board.exchange_soon()
        with self._board.changed:
            self._board.wait(self.claimant.is_over, "the other replicas to finish")

    @property
    def cells_stolen(self) -> int:
        """Cells that this replica took from others' claims."""
        return self.claimant.cells_stolen

    def _with_next(self, work: Work) -> Work | None:
        """The work together with the cell that would be handed out next, if they are run as one step."""
        cell = None if self._sizer is None else self.claimant.next_cell()
        if self._sizer is None or cell is None:
            return None
        step = cell - work.cells[-1]
        if step not in (1, -1) or (len(work.cells) > 1 and step != work.cells.step):
            return None
        start, stop = self._grid.span(cell)
        start, stop = min(start, work.start), max(stop, work.stop)
        return replace(work, start=start, stop=stop, last_cell=cell) if self._sizer.has_room(start, stop) else None

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self.claimant.is_starving = True
        self._board.wake()
        try:
            self._board.wait(ready, what)
        finally:
            self.claimant.is_starving = False

    def _describe(self, record: ReplicaRecord) -> Published:
        with self._board.changed:
            return self.claimant.describe(record, recut=self._board.recut)
