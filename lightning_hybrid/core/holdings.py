"""What a replica holds of the work queue: its ranges, what its loop gets of them, and what is left.

It works in the Trainer, between a loop and a background thread, and in the simulator, driven by events. Everything it
knows of the world comes in through `Keys`, `Board` and the clock of its `Peers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.ranges import OwnedRange, OwnRanges, append_cell
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.sweep import Sweeper
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import CellQueue, Keys, Span

_VAIN_LOOKS = 4
"""Looks at samples of very many replicas, without anything worth stealing, after which a replica stops."""
_KEPT_VERSIONS = 8
"""Newest plan versions whose order is kept, for stealing from replicas that follow late."""


class Lock(Protocol):
    """Held while what the loop's thread shares with the background thread is read or changed."""

    def __enter__(self) -> object:
        """Takes it."""
        ...

    def __exit__(self, *args: Any) -> object:
        """Gives it back."""
        ...

    def notify_all(self) -> None:
        """Tells the other thread that something has changed."""
        ...


class Board(Protocol):
    """Where replicas publish what they do; see `lightning_hybrid.runtime.board`."""

    view: Peers

    @property
    def changed(self) -> Lock:
        """Guards what both threads use."""
        ...

    def look(self) -> object:
        """Reads now what the others published, into ``view``."""
        ...

    def publish(self) -> None:
        """Publishes now."""
        ...


class Holdings:
    """One replica's part of the queue.

    The methods of the first group are called on the loop's thread with ``board.changed`` held, those of the second on
    the background thread without it.

    Args:
        board: What the replicas know of each other.
        keys: What all replicas share.
        first: The epoch's first plan version.
        costs: Costs of all cells of the grid.
        config: Fractions and periods.
        prefetch: Whether the loader loads ahead of the step. Then cells are handed out before they are reserved, and
            `is_mine` tells whether they were stolen in the meantime.
        released: Whether cells may be reserved yet; before, they are only handed out to be loaded.
        dealt: Cells that were dealt out in turn before the queue begins; a dead replica's may have to be swept too.
        read_version: Makes a plan version of its bytes and the costs of all cells.
    """

    def __init__(
        self,
        board: Board,
        keys: Keys,
        first: QueueVersion,
        costs: Costs,
        config: HybridConfig,
        *,
        prefetch: bool,
        released: Callable[[], bool] = lambda: True,
        dealt: Sequence[int] = (),
        read_version: Callable[[bytes, Costs], QueueVersion] = QueueVersion.from_bytes,
    ) -> None:
        self._read_version = read_version
        self._board, self._keys, self._costs, self._config = board, keys, costs, config
        self._prefetch, self._released = prefetch, released
        self.peers = board.view
        self.me = board.view.me
        self.versions = {first.number: first}
        self.version = first
        """The newest plan version that this replica follows."""
        self.total, self.total_cost = len(first), first.cost(0, len(first))
        self.queue = CellQueue(keys, self.me, len(first), first.number)
        self.ranges = OwnRanges(prefetch=prefetch)
        self.loading: deque[tuple[OwnedRange, int]] = deque()
        """Positions that the loader has and the loop has not asked for, with the range that each came from."""
        self.reserved, self.reserved_cost = 0, 0.0
        self.claims = self.cells_stolen = 0
        self.is_starving = False
        """Whether the loop waits for work."""
        self.is_finishing = False
        """Whether the loop has run out of work."""
        self.is_planning = False
        """Whether this replica holds cells that it has sealed and not given out again."""
        self.dealt = dealt
        self._running: set[int] = set()
        self._done: list[Span] = []
        self._sweeper = None if config.lease_s is None else self._new_sweeper(config.lease_s, first, dealt)
        self._has_declined = False
        self._running_cost, self._begun_s = 0.0, 0.0
        self.step_cost = 0.0
        """Compute cost of the cells that the loop wants to run as one step; 0: each cell alone."""
        self._ahead = self._vain_looks = 0
        self._period_s = config.exchange_period_s(board.view.world)
        self._left, self._left_at_look = (float(self.total), self.total_cost), 0
        self._left_since_s = board.view.looked_s - 0.5 * self._period_s

    # --- on the loop's thread -----------------------------------------------------------------------------------

    def next_cell(self) -> int | None:
        """The cell that `hand_out` would give."""
        owned = self.ranges.next_to_hand()
        return None if owned is None else owned.cell_at(owned.handed)

    def hand_out(self, *, is_next: bool = False) -> tuple[int, bool] | None:
        """The next cell to load, and whether the background thread should see to more; ``None``: none right now.

        Args:
            is_next: Whether the cell is run in one step with the one before.
        """
        owned = self.ranges.next_to_hand()
        if owned is None:
            return None
        position = owned.handed
        owned.handed += 1
        wants_more = owned.stop - owned.handed <= 1
        if self._prefetch:
            self.loading.append((owned, position))
        else:
            wants_more = self._begin(owned, position, is_next=is_next) or wants_more
        return owned.cell_at(position), wants_more

    def is_mine(self) -> bool | None:
        """Whether the next loaded cell may be run; ``None`` while that is not settled."""
        owned, position = self.loading[0]
        if owned.reserved <= position < owned.stop:
            return None
        return position < owned.reserved

    def begin(self, *, is_next: bool = False) -> bool:
        """Notes that the next loaded cell is run now, or left because it was stolen; whether to see to more.

        Args:
            is_next: Whether the cell is run in one step with the one before.
        """
        is_mine = self.is_mine()
        owned, position = self.loading.popleft()
        if is_mine:
            return self._begin(owned, position, is_next=is_next)
        owned.begun = position + 1
        return False

    def hand_again(self, cell: int) -> None:
        """A cell that was begun here is handed out once more."""
        self.ranges.add_again(cell)

    def is_exhausted(self) -> bool:
        """Whether there will be no more work here, as far as is known."""
        if self._sweeper is not None:
            return self._sweeper.is_complete(self.peers.published, self._done)
        if self.ranges.open():
            return False
        if self.is_planning or self.peers.newest_version > self.version.number:
            return False  # what was sealed may come back to this replica
        if self.peers.is_sampled:  # nobody can tell; to stop too early costs time, but no sample
            return self.queue.unclaimed == 0 and self._vain_looks >= _VAIN_LOOKS
        return self.unreserved_anywhere() == 0

    def knows_what_is_next(self) -> bool:
        """Whether there is a cell for the loader, or it is known that there will be none."""
        return self.ranges.next_to_hand() is not None or self.is_exhausted()

    def has_nothing_to_claim(self) -> bool:
        """Whether work can only come from others, or is left to them."""
        return self.queue.unclaimed == 0 or self._has_declined

    def is_over(self) -> bool:
        """Whether no replica runs anything any more, as far as is known."""
        if self._sweeper is None:
            return self.peers.all_finished()
        # the others wait for this one's last word about what it has done
        mine = self.peers.published.get(self.me)
        return mine is not None and mine.record.finished and self.is_exhausted()

    def done(self, cell: int) -> None:
        """Notes that a cell was run."""
        if self._sweeper is not None:
            self._running.discard(cell)
            append_cell(self._done, cell)

    def describe(self, record: ReplicaRecord, *, recut: bool | None = None) -> Published:
        """What this replica publishes."""
        published = Published(
            record=record
            if record.cells_stolen == self.cells_stolen
            else replace(record, cells_stolen=self.cells_stolen),
            reserved=self.reserved,
            ranges=tuple(item.key for item in self.ranges.open() if item.key),
            recut=recut,
            reserved_cost=self.reserved_cost,
            ahead_cost=self.ranges.cost_reserved,
            unreserved=self.ranges.num_unreserved,
            unreserved_cost=self.ranges.cost_unreserved,
            version=self.version.number,
        )
        if self._sweeper is None:
            return published
        held = [*self.ranges.spans(), *(Span(cell, cell + 1) for cell in self._running)]
        return replace(published, done=tuple(self._done), held=tuple(held))

    def _begin(self, owned: OwnedRange, position: int, *, is_next: bool) -> bool:
        owned.begun = position + 1
        cost = owned.cost(position, position + 1)
        self._running_cost = self._running_cost + cost if is_next else cost
        self._begun_s = self.peers.clock()
        if self._sweeper is not None:
            self._running.add(owned.cell_at(position))
        return not self._suffice(owned.reserved - owned.begun)

    def _suffice(self, num_reserved: int) -> bool:
        """Whether so many reserved cells last until the loop has begun another."""
        return num_reserved > self._ahead // 2

    # --- what is left ------------------------------------------------------------------------------------------------

    def unreserved_anywhere(self) -> int:
        """Cells that no replica has reserved, as far as this one knows."""
        if self.peers.is_sampled:
            return max(self.ranges.num_unreserved, round(self._left[0] * self._left_frac()))
        return max(0, self.total - self.reserved - self.peers.reserved_by_others()[0])

    def unreserved_cost(self) -> float:
        """What they cost."""
        if self.peers.is_sampled:
            return max(self.ranges.cost_unreserved, self._left[1] * self._left_frac())
        return max(0.0, self.total_cost - self.reserved_cost - self.peers.reserved_by_others()[1])

    def _note_left(self) -> None:
        """Of very many replicas: estimates what was left at the newest look, from the counter and a sample of them."""
        if not self.peers.is_sampled or self.peers.looks == self._left_at_look:
            return
        self._left_at_look = self.peers.looks
        self.queue.look()
        cells, cost = self.peers.unreserved_by_others()
        self._left = (
            self.queue.unclaimed + self.ranges.num_unreserved + cells,
            self.version.cost(*self.queue.free) + self.ranges.cost_unreserved + cost,
        )
        peers = self.peers
        left_s = self._left[1] / peers.my_speed_and_all()[1]
        self._left_since_s = peers.looked_s - 0.5 * self._config.exchange_period_s(peers.world, left_s=left_s)
        peers.left_s = left_s if peers.knows_all_speeds() else None

    def _left_frac(self) -> float:
        """How much of that is left now, if all have gone on since they published it."""
        if self._left[1] <= 0:
            return 0.0
        age_s = self.peers.clock() - self._left_since_s
        return max(0.0, 1.0 - self.peers.my_speed_and_all()[1] * age_s / self._left[1])

    def time_left_s(self) -> float:
        """Seconds that all replicas need for what nobody has reserved."""
        return self.unreserved_cost() / self.peers.my_speed_and_all()[1]

    def adopt(self, version: QueueVersion) -> None:
        """Goes on with a newer plan version; ranges that were claimed before stay what they are."""
        share = version.share_key(self.me)
        with self._board.changed:
            self.versions[version.number] = self.version = version
            self._forget_old_versions()
            self._vain_looks = 0
            self.queue = CellQueue(self._keys, self.me, version.num_to_claim, version.number)
            self._has_declined = False
            if share is not None:
                self.ranges.add(share, version)
            self._board.changed.notify_all()

    def _forget_old_versions(self) -> None:
        """Keeps those that own ranges come from, and the newest; by older ones nobody steals."""
        in_use = self.ranges.versions() | set(sorted(self.versions)[-_KEPT_VERSIONS:])
        self.versions = {number: version for number, version in self.versions.items() if number in in_use}

    def _new_sweeper(self, lease_s: float, first: QueueVersion, dealt: Sequence[int]) -> Sweeper:
        self._running.update(dealt[self.me :: self.peers.world])
        cells = np.concatenate((first.cells, np.asarray(dealt, dtype=np.int64)))
        return Sweeper(self._keys, self.me, lease_s, cells=cells, clock=self.peers.clock)
