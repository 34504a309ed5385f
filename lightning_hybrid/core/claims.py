"""What one replica does with the work queue: claim, reserve, steal, decline, and follow to the next plan version.

The same object works in the Trainer, driven by a background thread and a loop, and in the simulator, driven by events.
Everything it knows of the world comes in through `Keys`, `Board` and the clock of its `Peers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hybrid.core.published import Published
from lightning_hybrid.core.reserving import Reserving
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import RangeKey, Span

_MOST_VICTIMS = 8
"""Of a sample of very many replicas, whose ranges are looked at when there is nothing else to do."""
_SLOWEST_POLL = 50
"""Vain looks after which a replica without work does not look less often any more."""


class Claimant(Reserving):
    """One replica's part of the queue: what it holds, and how it comes to more, on the background thread."""

    def turn(self) -> float:
        """Does what is most worth doing; returns in how many seconds it wants to be called again."""
        if self._has_enough():
            return math.inf
        self._note_left()
        if self.is_finishing:
            self._board.look()
        elif self._follow() or (self._reserve() and self._reserves_more()) or self._restock():
            return 0.0
        step_s, poll_s = self.peers.record.step_s, self._config.endgame_poll_s
        poll_s = max(poll_s if step_s is None else min(poll_s, 0.1 * step_s), 1e-3)
        if self.peers.is_sampled:  # so many would ask too much of the store
            poll_s = max(poll_s, 0.1 * self._period_s)
        if self.is_starving:
            return min(poll_s * 1.2 ** min(self._vain_looks, _SLOWEST_POLL), self._config.publish_period_s)
        return poll_s if self.is_finishing else math.inf

    def _has_enough(self) -> bool:
        """Whether there is nothing to do before the loop begins its next cell."""
        if self.is_starving or self.is_finishing or self.peers.newest_version > self.version.number:
            return False
        with self._board.changed:
            return self._suffice(self.ranges.num_reserved) and self.ranges.num_unhanded > 1

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

    # --- claiming -----------------------------------------------------------------------------------------------

    def _restock(self) -> bool:
        """Claims or steals when the loader is about to run out; whether anything was won."""
        with self._board.changed:
            unhanded, unbegun = self.ranges.num_unhanded, self.ranges.num_unbegun
        if not self.is_starving and (unhanded > 1 or self._claims_one_by_one()):
            return False
        if self.queue.unclaimed and self._claim():
            return True
        if self.is_starving or (unhanded == 0 and unbegun <= 1):
            has_won = self._own(self._steal(), is_stolen=True)
            self._vain_looks = 0 if has_won else self._vain_looks + 1
            return has_won or self._sweep()
        return False

    def _claims_one_by_one(self) -> bool:
        """Whether cells are only claimed when the loop waits for one: until it is known who is fast."""
        if self.peers.record.step_s is None or not self.queue.unclaimed:
            return False
        return not (self.version.is_uniform or self.peers.knows_all_speeds())

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
        if not version.is_uniform:  # or what is heavy waits behind what is heavy
            cost = min(cost, self._cost_surely_in_time())
        most = version.max_claim_costs[self.me]
        size = version.num_within(*free, cost if most is None else min(cost, most), from_tail=from_tail)
        size = min(size, version.num_fitting(self.me, *free, from_tail=from_tail))
        return size or self._one_if_it_pays(version, free.stop - 1 if from_tail else free.start)

    def _one_if_it_pays(self, version: QueueVersion, position: int) -> int:
        if version.is_uniform:
            return int(version.fits(self.me, position))
        # what is too heavy for anyone to end in time must be begun at once, by who is fastest
        return int(
            self._surely_ends_in_time(version, position) or self._ends_first(version, position, self._held_cost())
        )

    def _first_claim_size(self, version: QueueVersion, *, from_tail: bool) -> int:
        """While it is not known who is fast, and whose memory is short: light cells, one or a tenth of a period's."""
        if not from_tail:
            return 0
        free, mine = self.queue.free, self.peers.my_speed_and_all()[0]
        size = version.num_within(*free, 0.1 * self._period_s * mine, from_tail=True) if self.peers.is_sampled else 1
        return min(max(1, size), version.num_fitting(self.me, *free, from_tail=True))

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
        loot = self._loot(self.peers.last_to_end(_MOST_VICTIMS) if self.peers.is_sampled else None)
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

    def _loot(self, owners: Sequence[int] | None = None) -> list[tuple[int, RangeKey, Span]]:
        """What others, or some of them, have claimed and not reserved: owner, range, and the positions."""
        newest = self.peers.newest()
        owned = [
            (r, item)
            for r, peer in (newest.items() if owners is None else ((r, newest[r]) for r in owners))
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
        if not fitting or running_s + (self._unbegun_cost() + last) / mine >= victim_ends_s:
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
