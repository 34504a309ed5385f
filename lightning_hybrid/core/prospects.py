"""Whether a cell is worth running on this replica, or is left to others who would end it sooner."""

from __future__ import annotations

import numpy as np

from lightning_hybrid.core import workqueue
from lightning_hybrid.core.holdings import Holdings
from lightning_hybrid.core.versions import QueueVersion

_SURE_ERRORS = 3.0
"""Standard errors that the time to the end, where it is estimated from a sample, may be off."""


class Prospects(Holdings):
    """A replica's holdings, and when it would end a cell of them or of others."""

    def _pays_at(self, version: QueueVersion, position: int) -> bool:
        if not version.is_uniform:
            return self._ends_in_time(version, position) or self._ends_first(version, position)
        mine, peers = self.peers.record.step_s, self.peers
        if mine is None:
            return True
        steps_s, busy_s = np.append(mine, peers.steps_s_of_others()), np.append(0.0, peers.busy_s_of_others())
        return not workqueue.declines(0, self.unreserved_anywhere(), steps_s, busy_s)

    def _ends_in_time(self, version: QueueVersion, position: int) -> bool:
        """Whether a cell that is begun now would end here before all that is left could be done."""
        return version.fits(self.me, position) and version.cost(position, position + 1) <= self._cost_in_time()

    def _surely_ends_in_time(self, version: QueueVersion, position: int) -> bool:
        """The same of a cell that waits behind all that is held, whatever the estimates are off."""
        return version.fits(self.me, position) and version.cost(position, position + 1) <= self._cost_surely_in_time()

    def _cost_in_time(self) -> float:
        """What this replica could do before all that is left could be done."""
        mine, everyone = self.peers.my_speed_and_all()
        return mine * (self.unreserved_cost() + self.peers.running_cost_of_others()) / everyone

    def _cost_surely_in_time(self) -> float:
        """The same behind all that is held, whatever the estimates are off."""
        return self._cost_in_time() / (1.0 + _SURE_ERRORS * self.peers.speed_error_frac) - self._held_cost()

    def _ends_first(self, version: QueueVersion, position: int, held: float = 0.0) -> bool:
        """Whether no other replica, as soon as it is free, would end a cell earlier than this one behind ``held``."""
        if not version.fits(self.me, position):
            return False
        peers, cost = self.peers, version.cost(position, position + 1)
        speeds = peers.speeds_of_others()
        can = (speeds > 0) & version.fits_each(position)[peers.others]
        ends_s = peers.busy_s_of_others()[can] + cost / speeds[can]
        return bool(((held + cost) / peers.my_speed_and_all()[0] <= ends_s).all())

    def _unbegun_cost(self) -> float:
        """What was claimed and not begun."""
        with self._board.changed:
            return self.ranges.cost_unbegun

    def _held_cost(self) -> float:
        """The same with what is yet to be done of the present cell."""
        done = self.peers.my_speed_and_all()[0] * (self.peers.clock() - self._begun_s)
        running = 0.0 if self.is_starving else max(0.0, self._running_cost - done)
        return running + self._unbegun_cost()
