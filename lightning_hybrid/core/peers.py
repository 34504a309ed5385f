"""What a replica makes of the others' records: who is how fast, who is busy how long, what is left."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.cost import FloatArray
from lightning_hybrid.core.load import fill_speeds
from lightning_hybrid.core.others import FINISHED, ROW_LEN, Others, row_of, speed_of
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import ReplicaRecord

_OLDER_WEIGHT = 0.75
"""What a sample of the speeds of very many replicas counts for at the next look."""


class Peers:
    """The replicas of an epoch, as replica ``me`` sees them now.

    Of very many replicas each look reads only a sample, another one every time, and decisions rest on the newest sample
    alone: sums over all are then estimates.

    Args:
        me: Who looks.
        world: How many replicas there are.
        clock: Seconds, monotonic.
        look_replicas: Most replicas that one look reads.
        overdue_s: How much later than expected a step may be told.
        keeps_all: Whether ``published`` holds all that was ever read, of very many replicas too. Claims need it not,
            but who sums up the run does.
    """

    def __init__(
        self,
        me: int,
        world: int,
        clock: Callable[[], float],
        *,
        look_replicas: int = 64,
        overdue_s: float = 0.2,
        keeps_all: bool = True,
    ) -> None:
        self.me, self.world = me, world
        self.is_sampled = world > look_replicas
        """Whether there are too many replicas to look at all of them at once."""
        self.record = ReplicaRecord(replica=me)
        """This replica's own newest record."""
        self.published: dict[int, Published] = {}
        """What is known of each replica, the own word too."""
        self.looks = 0
        """How often the others were looked at."""
        self.looked_s = clock()
        """When they were looked at last."""
        self.left_s: float | None = None
        """Time to the end as it was estimated at the newest look, where that is a sample."""
        self.newest_version = 0
        """The newest plan version that anybody has published."""
        self.newer_prior: Callable[[], list[float]] | None = None
        """Makes the prior from what is known by now, where it can be had."""
        self.clock, self._look_replicas, self._overdue_s = clock, look_replicas, overdue_s
        self._prior: list[float] | None = None
        self._keeps_all = keeps_all or not self.is_sampled
        self._rows = np.zeros((0 if self.is_sampled else world, ROW_LEN))
        self._sample: Sequence[Published] = ()
        self._known: Others | None = Others([], np.zeros((0, ROW_LEN)))
        self._sampled_speeds = 0.0, 0.0
        self._since_s_of_others = np.zeros(0)
        self._by_prior: tuple[float | None, Others, tuple[float, float]] | None = None
        self._changed_s: dict[int, tuple[int, float]] = {}
        self._finished: npt.NDArray[np.bool_] = np.zeros(world if self.is_sampled else 0, dtype=np.bool_)
        self._num_finished = 0
        # a walk of its own past all replicas, so that each look of each replica sees others
        walk = random.Random(me)
        self._next, self._stride = walk.randrange(world), walk.randrange(1, world + 1)
        while math.gcd(self._stride, world) > 1:
            self._stride = walk.randrange(1, world + 1)

    # --- looking ------------------------------------------------------------------------------------------------

    def to_look_at(self) -> list[int]:
        """The replicas that the next look should read."""
        if not self.is_sampled:
            return list(range(self.world))
        # finished ones have nothing left to know; nearer the end more are looked at to find those that run
        num = min(self.world, 1 + self._look_replicas * self.world // max(1, self._num_running))
        drawn = np.arange(self._next, self._next + self._stride * num, self._stride) % self.world
        wanted = drawn != self.me
        if self._num_finished:
            wanted &= ~self._finished[drawn]
        taken = np.flatnonzero(wanted)[: self._look_replicas]
        passed = int(taken[-1]) + 1 if len(taken) == self._look_replicas else num
        self._next = (self._next + self._stride * passed) % self.world
        replicas: list[int] = drawn[taken].tolist()
        return replicas

    def take_in(self, published: Mapping[int, Published | None], newest_version: int = 0) -> None:
        """Notes what a look has read.

        Args:
            published: By replica; ``None`` for one that has not spoken.
            newest_version: The newest plan version.
        """
        spoken = {r: peer for r, peer in published.items() if peer is not None}
        if self.is_sampled:
            spoken.pop(self.me, None)
            rows = np.array([row_of(peer) for peer in spoken.values()]).reshape(-1, ROW_LEN)
            self.take_in_sample(list(spoken), list(spoken.values()), rows, newest_version)
            return
        now = self._note_look(newest_version)
        for r, peer in spoken.items():
            if peer is self.published.get(r):
                continue
            self._known = None
            self.published[r] = peer
            self._rows[r] = row_of(peer)
            if r not in self._changed_s or self._changed_s[r][0] != peer.record.steps:
                self._changed_s[r] = peer.record.steps, now

    def take_in_sample(
        self, replicas: Sequence[int], published: Sequence[Published], rows: FloatArray, newest_version: int = 0
    ) -> None:
        """Notes what a look at some of very many replicas has read; replaces the sample before.

        Args:
            replicas: Who has spoken, other than this one.
            published: What each has said.
            rows: What `lightning_hybrid.core.others.row_of` makes of that.
            newest_version: The newest plan version.
        """
        self._note_look(newest_version)
        if self._keeps_all:
            self.published.update(zip(replicas, published, strict=True))
        others = Others(list(replicas), rows)
        if others.num_finished:
            has_finished = rows[:, FINISHED] > 0
            self._num_finished += int((~self._finished[list(replicas)] & has_finished).sum())
            self._finished[list(replicas)] |= has_finished
            running = np.flatnonzero(~has_finished).tolist()
            published, others = [published[i] for i in running], Others([replicas[i] for i in running], rows[running])
        self._sample, self._known = published, others
        speed, num = self._sampled_speeds
        self._sampled_speeds = (
            _OLDER_WEIGHT * speed + others.speed,
            _OLDER_WEIGHT * num + others.num_known - others.num_unmeasured,
        )

    def _note_look(self, newest_version: int) -> float:
        self.looked_s = now = self.clock()
        self.looks += 1
        self.newest_version = max(self.newest_version, newest_version)
        return now

    def newest(self) -> dict[int, Published]:
        """What the newest look has read of those that have not finished: all that is known, or a sample."""
        if not self.is_sampled:
            return self.published
        return dict(zip(self._others.replicas, self._sample, strict=True))

    def records(self) -> list[ReplicaRecord]:
        """The newest record of every replica that is known, the own one first."""
        return [self.record, *(peer.record for r, peer in self.published.items() if r != self.me)]

    # --- speeds -------------------------------------------------------------------------------------------------

    def my_speed_and_all(self) -> tuple[float, float]:
        """Cost units per second of this replica, and of all together; those that are not known count as average."""
        mine, others = speed_of(self.record), self._others
        if mine is not None and others.num_unmeasured == 0:
            speed, num = self._sampled_speeds if self.is_sampled else (others.speed, others.num_known)
            return mine, (mine + speed) * self._num_running / (1 + num)
        return self._speeds_by_prior(mine)

    def knows_all_speeds(self) -> bool:
        """Whether every replica, or as many as one looks at, has been measured."""
        others = self._others
        enough = others.num_known >= (self._look_replicas // 2 if self.is_sampled else self.world - 1)
        return speed_of(self.record) is not None and others.num_unmeasured == 0 and enough

    @property
    def speed_error_frac(self) -> float:
        """Standard error of the speed of all together, over that speed; zero where all are looked at."""
        if not self.is_sampled:
            return 0.0
        num_looked_at, num = self._others.num_known, self._sampled_speeds[1]
        return self._others.speed_error_frac * math.sqrt(num_looked_at / num) if num else math.inf

    def _speeds_by_prior(self, mine: float | None) -> tuple[float, float]:
        others = self._others
        if self._by_prior is None or self._by_prior[0] != mine or self._by_prior[1] is not others:
            if self.newer_prior is not None:
                self._prior = self.newer_prior()
            known = (self.me, *others.replicas)
            prior = [1.0] * len(known) if self._prior is None else [self._prior[r] for r in known]
            speeds = fill_speeds([mine, *others.measured], prior)
            everyone = sum(speeds) * self._num_running / len(speeds)
            self._by_prior = mine, others, (speeds[0], everyone)
        return self._by_prior[2]

    def speed(self, replica: int) -> float:
        """Cost units per second of a replica; zero while it is not known."""
        record = self._record_of(replica)
        return 0.0 if record is None else speed_of(record) or 0.0

    def step_s(self, replica: int) -> float:
        """Seconds of a usual step; infinite while it is not known."""
        record = self._record_of(replica)
        return math.inf if record is None or record.step_s is None else record.step_s

    def busy_s(self, replica: int) -> float:
        """How long a replica is expected to be busy with its current step and what it has reserved.

        A step is taken to be half done. An overdue one is expected to last as long again as it has lasted, as with
        heavy-tailed costs.
        """
        step_s = self.step_s(replica)
        if math.isinf(step_s):
            return math.inf
        since_s = 0.0 if self.is_sampled else self.clock() - self._since_s(replica)
        running_s = since_s if since_s > step_s + self._overdue_s else 0.5 * step_s
        speed, peer = self.speed(replica), self._word_of(replica)
        return running_s + (peer.ahead_cost / speed if peer is not None and speed > 0 else 0.0)

    def _record_of(self, replica: int) -> ReplicaRecord | None:
        if replica == self.me:
            return self.record
        peer = self._word_of(replica)
        return None if peer is None else peer.record

    def _word_of(self, replica: int) -> Published | None:
        if self.is_sampled and replica in self._others.replicas:
            return self._sample[self._others.replicas.index(replica)]
        return self.published.get(replica)

    def _since_s(self, replica: int) -> float:
        """When its present step was begun, as far as was seen."""
        seen = self._changed_s.get(replica)
        return self.looked_s if seen is None else seen[1]

    # --- the others together ------------------------------------------------------------------------------------

    @property
    def others(self) -> list[int]:
        """The other replicas that are known by the newest look; the arrays below are in this order."""
        return self._others.replicas

    def speeds_of_others(self) -> FloatArray:
        """Cost units per second; zero where not known."""
        return self._others.speeds

    def steps_s_of_others(self) -> FloatArray:
        """Seconds of a usual step; infinite where not known."""
        return self._others.steps_s

    def busy_s_of_others(self) -> FloatArray:
        """How long each is expected to be busy, as `busy_s`."""
        others = self._others
        if self.is_sampled:  # nobody of a sample was seen before: how old it is tells nothing of a step
            return others.half_done_s
        since_s = self.clock() - self._since_s_of_others
        overdue = since_s > others.steps_s + self._overdue_s
        busy_s: FloatArray = np.where(overdue, since_s + others.ahead_s, others.half_done_s)
        return busy_s

    def running_cost_of_others(self) -> float:
        """What the others will yet do in their current steps, as far as is known."""
        if self.is_sampled:
            return self._scaled(self._others.half_done_cost)
        return self._others.cost_within(self.busy_s_of_others())

    def reserved_by_others(self) -> tuple[int, float]:
        """Cells that the other replicas have reserved so far, and what they cost; where all are looked at."""
        return self._others.reserved

    def unreserved_by_others(self) -> tuple[float, float]:
        """Cells that the other replicas have claimed and not reserved, by their own word, and what they cost."""
        cells, cost = self._others.unreserved
        return self._scaled(cells), self._scaled(cost)

    def last_to_end(self, num: int) -> list[int]:
        """Of the others who have unreserved cells, that many that would end last, by their own word."""
        others = self._others
        ends_s = np.where(others.unreserved_costs > 0, self.busy_s_of_others() + others.work_s, -math.inf)
        last = np.argsort(-ends_s, kind="stable")[:num].tolist()
        return [others.replicas[i] for i in last if ends_s[i] > -math.inf]

    @property
    def _others(self) -> Others:
        if self._known is None:
            replicas = [r for r in self.published if r != self.me]
            self._since_s_of_others = np.array([self._since_s(r) for r in replicas])
            self._known = Others(replicas, self._rows[replicas])
        return self._known

    @property
    def _num_running(self) -> int:
        return self.world - self._num_finished

    def _scaled(self, total: float) -> float:
        """A sum over the other replicas that are known, scaled up to all others where only a sample is known."""
        known = self._others.num_known
        return total * (self._num_running - 1) / known if self.is_sampled and known else total

    def all_finished(self) -> bool:
        """Whether no replica runs a step any more; false before everyone was heard of."""
        if self.is_sampled:
            return self.record.finished and self._num_finished == self.world - 1
        return len(self.published) == self.world and all(peer.record.finished for peer in self.published.values())
