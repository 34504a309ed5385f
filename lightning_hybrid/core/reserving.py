"""What a replica takes out of its claims for its loop: cells that nobody can steal any more, as few as will do."""

from __future__ import annotations

from lightning_hybrid.core.prospects import Prospects
from lightning_hybrid.core.ranges import OwnedRange


class Reserving(Prospects):
    """A replica's holdings, and how much of them it reserves ahead of its loop."""

    def _reserve(self) -> bool:
        """Reserves what the loop will need next; whether anything was asked of the keys."""
        if not self._released():
            return False
        with self._board.changed:
            owned = self.ranges.next_to_reserve()
            held, held_cost = self.ranges.num_reserved, self.ranges.cost_reserved
        if owned is None or self._suffice(held):
            return False
        size = self._cells_to_reserve(owned, held, held_cost)
        if size and self._should_look():
            self._board.look()  # what was published a period ago counts too many cells as left
            self._note_left()
            size = self._cells_to_reserve(owned, held, held_cost)
        if not size:
            return False
        if self._ahead == 0:
            return self._reserve_what_pays()
        return self._reserve_head(owned, size)

    def _reserves_more(self) -> bool:
        """Whether more may have to be reserved at once: because the loop waits, or another range is next."""
        if self.is_starving:
            return True
        with self._board.changed:
            owned = self.ranges.next_to_reserve()
        return owned is not None and owned.key is not None and owned.reserved == owned.key.start

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

    def _should_look(self) -> bool:
        """Whether it matters for what is reserved now what the others did since they were looked at."""
        if not self.peers.is_sampled:
            return self._ahead == 0 or self._is_near_end()
        age_s = self.peers.clock() - self.peers.looked_s
        if age_s < 0.1 * self._period_s:
            return False  # so many would ask too much of the store
        return age_s > self._config.exchange_period_s(self.peers.world, left_s=self.peers.left_s) or self._is_near_end()

    def _is_near_end(self) -> bool:
        """Whether what is left takes so little time that a publishing period makes a difference."""
        left_s = self.peers.left_s  # of very many: as it was at the newest look
        return (self.time_left_s() if left_s is None else left_s) < 5 * self._config.publish_period_s

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
        held_s = min(self._config.reserve_frac * time_left_s, self._reserve_ahead_s())
        more = version.num_within(owned.reserved, owned.stop, held_s * mine - held_cost)
        next_s = version.cost(owned.reserved, owned.reserved + 1) / mine
        running_s = max(step_s, self._running_cost / mine)
        if more == 0 and held_cost == 0 and held_s > 0 and time_left_s >= running_s + next_s:
            more = 1  # it would surely end before all is done, behind a whole step that runs now
        return min(more, version.num_fitting(self.me, owned.reserved, owned.stop))

    def _reserve_ahead_s(self) -> float:
        """Most seconds of work out of thieves' reach; of very many replicas none hears of a change any sooner."""
        ahead_s, peers = self._config.reserve_ahead_s, self.peers
        if self.step_cost:  # what waits is between all and half of this, and should be enough for a step
            ahead_s = max(ahead_s, 2 * self.step_cost / peers.my_speed_and_all()[0])
        if not peers.is_sampled:
            return ahead_s
        return max(ahead_s, self._config.exchange_period_s(peers.world, peers.record.step_s, peers.left_s))

    def _pays(self, owned: OwnedRange, position: int) -> bool:
        """Whether this replica, free now, should run a cell, and not leave it to others who would end it sooner."""
        version = owned.version
        mine = self.peers.record.step_s
        if version is None or version.is_dealt or self.unreserved_anywhere() == 0:
            return True  # with nothing left it was stolen, and to reserve it shows that
        return version.fits(self.me, position) and (mine is None or self._pays_at(version, position))
