"""What one replica does with the work queue: claim, reserve, steal, decline, and follow to the next plan version.

The same object works in the Trainer, driven by a background thread and a loop, and in the simulator, driven by events.
Everything it knows of the world comes in through `Keys`, `Board` and the clock of its `Peers`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from lightning_hybrid.core import workqueue
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.ranges import OwnedRange, OwnRanges, append_cell
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.sweep import Sweeper
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import CellQueue, Keys, RangeKey, Span

_VAIN_LOOKS = 4
"""Looks at samples of very many replicas, without anything worth stealing, after which a replica stops."""
_SLOWEST_POLL = 50
"""Vain looks after which a replica without work does not look less often any more."""


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


class Claimant:
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
        self._running_cost = 0.0
        self._ahead = self._vain_looks = 0
        self._left, self._left_at_look = (float(self.total), self.total_cost), 0
        self._period_s = config.exchange_period_s(board.view.world)

    # --- on the loop's thread -----------------------------------------------------------------------------------

    def hand_out(self) -> tuple[int, bool] | None:
        """The next cell to load, and whether the background thread should see to more; ``None``: none right now."""
        owned = self.ranges.next_to_hand()
        if owned is None:
            return None
        position = owned.handed
        owned.handed += 1
        wants_more = owned.stop - owned.handed <= 1
        if self._prefetch:
            self.loading.append((owned, position))
        else:
            wants_more = self._begin(owned, position) or wants_more
        return owned.cell_at(position), wants_more

    def is_mine(self) -> bool | None:
        """Whether the next loaded cell may be run; ``None`` while that is not settled."""
        owned, position = self.loading[0]
        if owned.reserved <= position < owned.stop:
            return None
        return position < owned.reserved

    def begin(self) -> bool:
        """Notes that the next loaded cell is run now, or left because it was stolen; whether to see to more."""
        is_mine = self.is_mine()
        owned, position = self.loading.popleft()
        if is_mine:
            return self._begin(owned, position)
        owned.begun = position + 1
        return False

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

    def _begin(self, owned: OwnedRange, position: int) -> bool:
        owned.begun = position + 1
        self._running_cost = owned.cost(position, position + 1)
        if self._sweeper is not None:
            self._running.add(owned.cell_at(position))
        return owned.reserved - owned.begun <= self._ahead // 2

    # --- on the background thread -------------------------------------------------------------------------------

    def turn(self) -> float:
        """Does the one thing that is most worth doing; returns in how many seconds it wants to be called again."""
        self._note_left()
        if self.is_finishing:
            self._board.look()
        elif self._follow() or self._reserve() or self._restock():
            return 0.0
        step_s, poll_s = self.peers.record.step_s, self._config.endgame_poll_s
        poll_s = max(poll_s if step_s is None else min(poll_s, 0.1 * step_s), 1e-3)
        if self.peers.is_sampled:  # so many would ask too much of the store
            poll_s = max(poll_s, 0.1 * self._period_s)
        if self.is_starving:
            return min(poll_s * 1.2 ** min(self._vain_looks, _SLOWEST_POLL), self._config.publish_period_s)
        return poll_s if self.is_finishing else math.inf

    def unreserved_anywhere(self) -> int:
        """Cells that no replica has reserved, as far as this one knows."""
        if self.peers.is_sampled:
            at_hand = self.queue.unclaimed + self.ranges.num_unreserved
            return max(at_hand, round(self._left[0] * self._left_frac()))
        return max(0, self.total - self.reserved - self.peers.reserved_by_others()[0])

    def unreserved_cost(self) -> float:
        """What they cost."""
        if self.peers.is_sampled:
            at_hand = self.version.cost(*self.queue.free) + self.ranges.cost_unreserved
            return max(at_hand, self._left[1] * self._left_frac())
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

    def _left_frac(self) -> float:
        """How much of that is left now, if all have gone on since they published it."""
        peers = self.peers
        done = peers.my_speed_and_all()[1] * (peers.clock() - peers.looked_s + 0.5 * self._period_s)
        return max(0.0, 1.0 - done / self._left[1]) if self._left[1] > 0 else 0.0

    def time_left_s(self) -> float:
        """Seconds that all replicas need for what nobody has reserved."""
        return self.unreserved_cost() / self.peers.my_speed_and_all()[1]

    def adopt(self, version: QueueVersion) -> None:
        """Goes on with a newer plan version; ranges that were claimed before stay what they are."""
        share = version.share_key(self.me)
        with self._board.changed:
            self.versions[version.number] = self.version = version
            self._vain_looks = 0
            self.queue = CellQueue(self._keys, self.me, version.num_to_claim, version.number)
            self._has_declined = False
            if share is not None:
                self.ranges.add(share, version)
            self._board.changed.notify_all()

    def open_anywhere(self) -> list[tuple[int, RangeKey, Span]]:
        """All positions that somebody has claimed and nobody reserved: owner, range and positions of each part."""
        with self._board.changed:
            mine = [item.key for item in self.ranges.open() if item.key]
        spans = self.queue.unreserved(mine)
        return self._loot() + [(self.me, item, span) for item, span in zip(mine, spans, strict=True) if span.size]

    def seal(self, published: Sequence[RangeKey]) -> list[tuple[int, Span]]:
        """Takes all that is left of the present version out of everyone's reach: (version, positions) of each part.

        Args:
            published: The ranges of all replicas that may hold cells which nobody has reserved.
        """
        parts = [self.queue.seal(), *(self.queue.steal(item, item.size) for item in published)]
        self._learn_thefts()
        return [(part.version, Span(part.start, part.start + part.size)) for part in parts if part is not None]

    # --- following ----------------------------------------------------------------------------------------------

    def _follow(self) -> bool:
        newest = self.peers.newest_version
        if newest <= self.version.number:
            return False
        (data,) = self._keys.get_many([f"version/{newest}"])
        assert isinstance(data, bytes)  # it is written before its number is
        self.adopt(self._read_version(data, self._costs))
        return True

    # --- reserving ----------------------------------------------------------------------------------------------

    def _reserve(self) -> bool:
        """Reserves what the loop will need next; whether anything was asked of the keys."""
        if not self._released():
            return False
        with self._board.changed:
            owned = self.ranges.next_to_reserve()
            held, held_cost = self.ranges.num_reserved, self.ranges.cost_reserved
        if owned is None:
            return False
        size = self._cells_to_reserve(owned, held, held_cost)
        if size and ((self._ahead == 0 and not self.peers.is_sampled) or self._is_near_end()):
            self._board.look()  # what was published a period ago counts too many cells as left
            self._note_left()
            size = self._cells_to_reserve(owned, held, held_cost)
        if not size:
            return False
        if self._ahead == 0:
            return self._reserve_what_pays()
        return self._reserve_head(owned, size)

    def _reserve_head(self, owned: OwnedRange, size: int) -> bool:
        assert owned.key is not None
        near_end = self._is_near_end()
        won = self.queue.reserve(owned.key, size)
        with self._board.changed:
            owned.reserved = won.stop
            if won.size < size:
                owned.stop = won.stop
            self.reserved += won.size
            self.reserved_cost += owned.cost(*won)
            self._board.changed.notify_all()
        version = owned.version
        may_plan = version is not None and version.shares is None and not version.is_uniform
        if near_end or (may_plan and not self.peers.is_sampled):
            self._board.publish()  # who plans must know what is no longer to be planned
        return True

    def _reserve_what_pays(self) -> bool:
        """Reserves the first own cell that should be run here, of those at the heads of the ranges."""
        with self._board.changed:
            open_ranges = self.ranges.open()[: 1 if self._prefetch else None]
        for owned in open_ranges:
            if self._pays(owned, owned.reserved):
                return self._reserve_head(owned, 1)
            version = owned.version
            if version is not None and version.is_uniform and version.fits(self.me, owned.reserved):
                return False  # nor does any other of the equal cells
        for owned in () if self._prefetch else open_ranges:
            if owned.stop - owned.reserved > 1:
                return self._set_head_apart(owned)
        return False

    def _set_head_apart(self, owned: OwnedRange) -> bool:
        """Makes a range of its own of all but the first cell, which then can be stolen alone."""
        assert owned.key is not None
        won = self.queue.steal(owned.key, owned.stop - owned.reserved - 1)
        with self._board.changed:
            owned.stop = owned.reserved + 1 if won is None else won.start
            if won is not None:
                self.ranges.add(won, owned.version, first=True)
        self._board.publish()
        return True

    def _is_near_end(self) -> bool:
        """Whether what is left takes so little time that a publishing period makes a difference."""
        return self.time_left_s() < 5 * self._config.publish_period_s

    def _cells_to_reserve(self, owned: OwnedRange, held: int, held_cost: float) -> int:
        """How many cells to reserve now that ``held`` wait; near the end none before the loop asks."""
        more = self._reserve_ahead(owned, held_cost)
        self._ahead = held + more
        if more < held or (self._ahead == 0 and not self.is_starving):
            return 0
        return max(1, more)

    def _reserve_ahead(self, owned: OwnedRange, held_cost: float) -> int:
        """How many more of its cells may wait out of thieves' reach, now."""
        version = owned.version
        assert version is not None
        if version.is_dealt:
            return owned.stop - owned.reserved
        num_left = owned.stop - owned.reserved
        step_s = self.peers.record.step_s
        if step_s is None:
            is_early = held_cost == 0 and self.unreserved_anywhere() > 4 * self.peers.world
            return int(version.is_uniform and is_early and version.fits(self.me, owned.reserved))
        if num_left == 0:
            return 0
        mine, everyone = self.peers.my_speed_and_all()
        time_left_s = self.unreserved_cost() / everyone
        held_s = min(self._config.reserve_frac * time_left_s, self._config.reserve_ahead_s)
        more = version.num_within(owned.reserved, owned.stop, held_s * mine - held_cost)
        next_s = version.cost(owned.reserved, owned.reserved + 1) / mine
        running_s = max(step_s, self._running_cost / mine)
        if more == 0 and held_cost == 0 and held_s > 0 and time_left_s >= running_s + next_s:
            more = 1  # it would surely end before all is done, behind a whole step that runs now
        return min(more, version.num_fitting(self.me, owned.reserved, owned.stop))

    def _pays(self, owned: OwnedRange, position: int) -> bool:
        """Whether this replica, free now, should run a cell, and not leave it to others who would end it sooner."""
        version = owned.version
        mine = self.peers.record.step_s
        if version is None or version.is_dealt or self.unreserved_anywhere() == 0:
            return True  # with nothing left it was stolen, and to reserve it shows that
        return version.fits(self.me, position) and (mine is None or self._pays_at(version, position))

    def _pays_at(self, version: QueueVersion, position: int) -> bool:
        if not version.is_uniform:
            return self._ends_in_time(version, position) or self._ends_first(version, position)
        mine, peers = self.peers.record.step_s, self.peers
        if mine is None:
            return True
        steps_s, busy_s = np.append(mine, peers.steps_s_of_others()), np.append(0.0, peers.busy_s_of_others())
        return not workqueue.declines(0, self.unreserved_anywhere(), steps_s, busy_s)

    def _ends_in_time(self, version: QueueVersion, position: int, backlog: float = 0.0) -> bool:
        """Whether a cell, behind ``backlog``, would end here before all that is left could be done."""
        if not version.fits(self.me, position):
            return False
        mine, everyone = self.peers.my_speed_and_all()
        end_s = (backlog + version.cost(position, position + 1)) / mine
        return end_s <= (self.unreserved_cost() + self.peers.running_cost_of_others()) / everyone

    def _ends_first(self, version: QueueVersion, position: int) -> bool:
        """Whether no other replica, free as soon as it can be, would end a cell earlier than this one, free now."""
        if not version.fits(self.me, position):
            return False
        peers, cost = self.peers, version.cost(position, position + 1)
        speeds = peers.speeds_of_others()
        can = (speeds > 0) & version.fits_each(position)[peers.others]
        ends_s = peers.busy_s_of_others()[can] + cost / speeds[can]
        return bool((cost / peers.my_speed_and_all()[0] <= ends_s).all())

    # --- claiming -----------------------------------------------------------------------------------------------

    def _restock(self) -> bool:
        """Claims or steals when the loader is about to run out; whether anything was won."""
        with self._board.changed:
            unhanded, unbegun = self.ranges.num_unhanded, self.ranges.num_unbegun
        if unhanded > 1 and not self.is_starving:
            return False
        if self.queue.unclaimed and self._claim():
            return True
        if self.is_starving or (unhanded == 0 and unbegun <= 1):
            has_won = self._own(self._steal(), is_stolen=True)
            self._vain_looks = 0 if has_won else self._vain_looks + 1
            return has_won or self._sweep()
        return False

    def _claim(self) -> bool:
        """Claims from the end that the version gives this replica, or else from the other one."""
        version, from_tail = self.version, self.version.ends[self.me] == "tail"
        for end in (from_tail, not from_tail):
            while size := self._claim_size(version, from_tail=end):
                if self._own(self.queue.claim(size, from_tail=end)):
                    self._has_declined = False
                    return True
        self.queue.look()
        self._has_declined = True
        return False

    def _claim_size(self, version: QueueVersion, *, from_tail: bool) -> int:
        """Cells to claim from one end: a fraction of the fair share of what is unclaimed, by cost, or the next one.

        Guided self-scheduling (Polychronopoulos and Kuck, 1987), weighted by speed.
        """
        free = self.queue.free
        if not free.size:
            return 0
        if not (version.is_uniform or self.peers.knows_all_speeds()):
            return self._first_claim_size(version, from_tail=from_tail)
        mine, everyone = self.peers.my_speed_and_all()
        cost = self._config.claim_frac * version.cost(*free) * mine / everyone
        if from_tail != (version.ends[self.me] == "tail"):
            cost = min(cost, mine * self._config.publish_period_s)  # soon its own end may have something for it again
        most = version.max_claim_costs[self.me]
        size = version.num_within(*free, cost if most is None else min(cost, most), from_tail=from_tail)
        size = min(size, version.num_fitting(self.me, *free, from_tail=from_tail))
        return size or self._one_if_it_pays(version, free.stop - 1 if from_tail else free.start)

    def _one_if_it_pays(self, version: QueueVersion, position: int) -> int:
        if version.is_uniform:
            return int(version.fits(self.me, position))
        if self._ends_in_time(version, position, self._backlog()):
            return 1
        return int(self.is_starving and self._ends_first(version, position))

    def _first_claim_size(self, version: QueueVersion, *, from_tail: bool) -> int:
        """While it is not known who is fast, and whose memory is short: one light cell at a time."""
        wants_one = self.is_starving or self.peers.record.step_s is None
        return int(from_tail and wants_one and version.fits(self.me, self.queue.free.stop - 1))

    def _backlog(self) -> float:
        with self._board.changed:
            return self.ranges.cost_unbegun

    def _own(self, won: RangeKey | None, *, is_stolen: bool = False) -> bool:
        if won is None:
            return False
        version = self.versions[won.version]
        with self._board.changed:
            owned = self.ranges.add(won, version, is_stolen=is_stolen)
            is_next = self.is_starving and self.ranges.next_to_reserve() is owned
            self._board.changed.notify_all()
        self.claims += 1
        if is_next and self._released() and self._pays(owned, owned.reserved):
            # before the others hear of it, or they might steal it from each other for ever
            self._reserve_head(owned, 1)
        self._board.publish()
        return True

    # --- sweeping -----------------------------------------------------------------------------------------------

    def _new_sweeper(self, lease_s: float, first: QueueVersion, dealt: Sequence[int]) -> Sweeper:
        self._running.update(dealt[self.me :: self.peers.world])
        cells = np.concatenate((first.cells, np.asarray(dealt, dtype=np.int64)))
        return Sweeper(self._keys, self.me, lease_s, cells=cells, clock=self.peers.clock)

    def _sweep(self) -> bool:
        """Takes over a cell that a dead replica has left; whether there was one."""
        if self._sweeper is None:
            return False
        self.queue.look()
        cell = self._sweeper.adopt(self.peers.published, self.version.cells[slice(*self.queue.free)])
        if cell is None:
            return False
        with self._board.changed:
            self.ranges.add_swept(cell)
            self._board.changed.notify_all()
        return True

    # --- stealing -----------------------------------------------------------------------------------------------

    def _steal(self) -> RangeKey | None:
        """Takes cells from the replica that would end last, if this one would finish them earlier."""
        self._board.look()
        self._learn_thefts()
        loot = self._loot()
        left: dict[int, float] = {}
        for owner, item, free in loot:
            left[owner] = left.get(owner, 0.0) + self._left_cost(owner, item, free)
        loot = [(r, item, free) for r, item, free in loot if self.versions[item.version].fits(self.me, free.stop - 1)]
        if not loot:
            return None
        ends_s = {r: self.peers.busy_s(r) + _time_s(left[r], self.peers.speed(r)) for r, _, _ in loot}
        victim = max(ends_s, key=lambda r: (ends_s[r], -r))
        item, free = max(
            ((item, free) for owner, item, free in loot if owner == victim),
            key=lambda entry: (self.versions[entry[0].version].cost(entry[1].stop - 1, entry[1].stop), entry[0].start),
        )
        if self.is_starving and not self._pays_at(self.versions[item.version], free.stop - 1):
            return None
        size = self._steal_size(victim, left[victim], ends_s[victim], item, free)
        won = self.queue.steal(item, size) if size else None
        self.cells_stolen += won.size if won else 0
        return won

    def _loot(self) -> list[tuple[int, RangeKey, Span]]:
        """What others have claimed and not reserved: owner, range, and the positions."""
        owned = [
            (r, item)
            for r, peer in self.peers.newest.items()
            if r != self.me
            for item in (*peer.ranges, *self._unspoken_share(r, peer))
            if item.version in self.versions
        ]
        spans = self.queue.unreserved(item for _, item in owned)
        return [(r, item, span) for (r, item), span in zip(owned, spans, strict=True) if span.size]

    def _unspoken_share(self, replica: int, peer: Published) -> list[RangeKey]:
        """What a replica owns by the newest version, which it does not know of yet."""
        share = self.version.share_key(replica) if peer.version < self.version.number else None
        return [] if share is None else [share]

    def _left_cost(self, owner: int, item: RangeKey, free: Span) -> float:
        version = self.versions[item.version]
        # what does not fit its owner stays there until it is stolen
        return version.cost(*free) if version.fits(owner, free.start) else math.inf

    def _steal_size(self, victim: int, left: float, victim_ends_s: float, item: RangeKey, free: Span) -> int:
        """Cells to take from the tail of ``free``: half of what this replica would do of the victim's backlog."""
        version = self.versions[item.version]
        mine, theirs = self.peers.my_speed_and_all()[0], self.peers.speed(victim)
        running_s = 0.0 if self.is_starving else 0.5 * max(self.peers.record.step_s or 0.0, self._running_cost / mine)
        last = version.cost(free.stop - 1, free.stop)
        fitting = version.num_fitting(self.me, *free, from_tail=True)
        if not fitting or running_s + (self._backlog() + last) / mine >= victim_ends_s:
            return 0
        share = left if math.isinf(left) else left * mine / (mine + theirs)
        return max(1, min(fitting, version.num_within(*free, share / 2, from_tail=True)))

    def _learn_thefts(self) -> None:
        """Notices own ranges whose last cells were stolen, so that the loop does not wait for them."""
        with self._board.changed:
            open_ranges = self.ranges.open()
        left = self.queue.unreserved(item.key for item in open_ranges if item.key)
        with self._board.changed:
            for item, span in zip(open_ranges, left, strict=True):
                item.stop = item.reserved + span.size
            self._board.changed.notify_all()


def _time_s(cost: float, speed: float) -> float:
    return cost / speed if speed > 0 else math.inf
