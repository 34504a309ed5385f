"""What a replica makes of the others' records: who is how fast, who is busy how long, what is left."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import numpy as np

from lightning_hybrid.core.cost import FloatArray
from lightning_hybrid.core.load import fill_speeds
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import ReplicaRecord


class _Others:
    """What the other replicas that are known said last, as sums and as arrays.

    Args:
        peers: By replica; without this one.
        since_s: When a replica began its present step.
    """

    def __init__(self, peers: Mapping[int, Published], since_s: Callable[[int], float]) -> None:
        self.replicas, self.published = list(peers), list(peers.values())
        self._since_s = since_s
        self.num_known = len(self.replicas)
        records = [peer.record for peer in self.published]
        self.measured = [  # as `speed_of`, of very many
            record.speed_per_s if record.cost_speed_per_s is None else record.cost_speed_per_s for record in records
        ]
        self.num_unmeasured = self.measured.count(None)
        self.speed = sum(speed for speed in self.measured if speed is not None)

    @cached_property
    def reserved(self) -> tuple[int, float]:
        """Cells reserved so far, and their cost."""
        return sum(peer.reserved for peer in self.published), sum(peer.reserved_cost for peer in self.published)

    @cached_property
    def unreserved(self) -> tuple[int, float]:
        """Cells claimed and not reserved, and their cost."""
        return sum(peer.unreserved for peer in self.published), sum(peer.unreserved_cost for peer in self.published)

    @cached_property
    def unreserved_costs(self) -> FloatArray:
        """Cost of the cells that each has claimed and not reserved."""
        return np.array([peer.unreserved_cost for peer in self.published], dtype=np.float64)

    @cached_property
    def speeds(self) -> FloatArray:
        """Cost units per second; zero where not known."""
        return np.array([speed or 0.0 for speed in self.measured])

    @cached_property
    def steps_s(self) -> FloatArray:
        """Seconds of a usual step; infinite where not known."""
        steps = (peer.record.step_s for peer in self.published)
        return np.array([math.inf if step_s is None else step_s for step_s in steps])

    @cached_property
    def ahead_s(self) -> FloatArray:
        """Seconds of what was reserved and not begun."""
        costs = np.array([peer.ahead_cost for peer in self.published], dtype=np.float64)
        ahead_s: FloatArray = np.divide(costs, self.speeds, out=np.zeros_like(costs), where=self.speeds > 0)
        return ahead_s

    @cached_property
    def since_s(self) -> FloatArray:
        """When the present step was begun, as far as was seen."""
        return np.array([self._since_s(r) for r in self.replicas])


class _Gathered(_Others):
    """The same of a sample whose numbers were gathered from a table; see `row_of`."""

    def __init__(self, replicas: Iterable[int], rows: FloatArray, now_s: float) -> None:
        self.replicas = list(replicas)
        self.num_known = len(self.replicas)
        self._rows, self._now_s = rows, now_s
        speeds = rows[:, 0]
        self.num_unmeasured = int(np.isnan(speeds).sum())
        self.speed = float(np.nansum(speeds) if self.num_unmeasured else speeds.sum())

    @cached_property
    def measured(self) -> list[float | None]:  # type: ignore[override]  # made when it is asked for
        return [None if math.isnan(speed) else speed for speed in self._rows[:, 0].tolist()]

    @cached_property
    def reserved(self) -> tuple[int, float]:
        return int(self._rows[:, 2].sum()), float(self._rows[:, 3].sum())

    @cached_property
    def unreserved(self) -> tuple[int, float]:
        return int(self._rows[:, 4].sum()), float(self._rows[:, 5].sum())

    @cached_property
    def unreserved_costs(self) -> FloatArray:
        return self._rows[:, 5]

    @cached_property
    def speeds(self) -> FloatArray:
        speeds: FloatArray = np.nan_to_num(self._rows[:, 0])
        return speeds

    @cached_property
    def steps_s(self) -> FloatArray:
        return self._rows[:, 1]

    @cached_property
    def ahead_s(self) -> FloatArray:
        costs, speeds = self._rows[:, 6], self.speeds
        ahead_s: FloatArray = np.divide(costs, speeds, out=np.zeros_like(costs), where=speeds > 0)
        return ahead_s

    @cached_property
    def since_s(self) -> FloatArray:
        return np.full(self.num_known, self._now_s)


def row_of(peer: Published) -> tuple[float, ...]:
    """What decisions need of a replica's word, as numbers; a speed that is not known is NaN, a step endless."""
    speed, step_s = speed_of(peer.record), peer.record.step_s
    return (
        math.nan if speed is None else speed,
        math.inf if step_s is None else step_s,
        peer.reserved,
        peer.reserved_cost,
        peer.unreserved,
        peer.unreserved_cost,
        peer.ahead_cost,
        peer.record.finished,
    )


ROW_LEN = 8


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
        keeps_all: Whether ``published`` goes on to hold what the newest look did not read. Claims need it not, but
            who sums up the run does.
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
        self.record = ReplicaRecord(replica=me)
        """This replica's own newest record."""
        self.published: dict[int, Published] = {}
        """What is known of each replica, the own word too."""
        self.newest: dict[int, Published] = self.published
        """What the newest look has read: all of that, or a sample."""
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
        self._keeps_all = keeps_all
        self._known: _Others | None = None
        self._by_prior: tuple[float | None, _Others, tuple[float, float]] | None = None
        self._changed_s: dict[int, tuple[int, float]] = {}
        self._finished: set[int] = set()
        self._random = random.Random(me)

    # --- looking ------------------------------------------------------------------------------------------------

    @property
    def is_sampled(self) -> bool:
        """Whether there are too many replicas to look at all of them at once."""
        return self.world > self._look_replicas

    def to_look_at(self) -> list[int]:
        """The replicas that the next look should read."""
        if not self.is_sampled:
            return list(range(self.world))
        # finished ones have nothing left to know; nearer the end more are looked at to find those that run
        num = 1 + self._look_replicas * self.world // max(1, self._num_running)
        start, stride = self._random.randrange(self.world), self._random.randrange(1, self.world)
        while math.gcd(stride, self.world) > 1:
            stride = self._random.randrange(1, self.world)
        drawn = ((start + stride * np.arange(min(num, self.world))) % self.world).tolist()
        return [r for r in drawn if r not in self._finished and r != self.me][: self._look_replicas]

    def take_in(
        self, published: Mapping[int, Published | None], newest_version: int = 0, rows: FloatArray | None = None
    ) -> None:
        """Notes what a look has read.

        Args:
            published: By replica; ``None`` for one that has not spoken.
            newest_version: The newest plan version.
            rows: What `row_of` makes of each, where that is at hand and all have spoken.
        """
        self.looked_s = now = self.clock()
        self.looks += 1
        self.newest_version = max(self.newest_version, newest_version)
        if self.is_sampled:
            self._take_in_sample({r: peer for r, peer in published.items() if peer is not None}, rows, now)
            if not self._keeps_all:
                self.published, self._changed_s = self.newest, {}
                return
        for r, peer in published.items():
            if peer is None or peer is self.published.get(r):
                continue
            self._known = None
            self.published[r] = peer
            if r not in self._changed_s or self._changed_s[r][0] != peer.record.steps:
                self._changed_s[r] = peer.record.steps, now

    def _take_in_sample(self, sample: dict[int, Published], rows: FloatArray | None, now_s: float) -> None:
        """Notes who has finished, and of the others what they are at."""
        self.newest, self._known = sample, None
        if rows is None or rows[:, -1].any():
            self.newest = {r: peer for r, peer in sample.items() if not peer.record.finished}
            self._finished.update(sample.keys() - self.newest.keys())
            rows = None if rows is None else rows[rows[:, -1] == 0]
        if rows is not None:
            self._known = _Gathered(self.newest, rows, now_s)

    def records(self) -> list[ReplicaRecord]:
        """The newest record of every replica that is known, the own one first."""
        return [self.record, *(peer.record for r, peer in self.published.items() if r != self.me)]

    # --- speeds -------------------------------------------------------------------------------------------------

    def my_speed_and_all(self) -> tuple[float, float]:
        """Cost units per second of this replica, and of all together; those that are not known count as average."""
        mine, others = speed_of(self.record), self._others()
        if mine is not None and others.num_unmeasured == 0:
            return mine, (mine + others.speed) * self._num_running / (1 + others.num_known)
        return self._speeds_by_prior(mine)

    def knows_all_speeds(self) -> bool:
        """Whether every replica, or as many as one looks at, has been measured."""
        others = self._others()
        enough = others.num_known >= (self._look_replicas // 2 if self.is_sampled else self.world - 1)
        return speed_of(self.record) is not None and others.num_unmeasured == 0 and enough

    def _speeds_by_prior(self, mine: float | None) -> tuple[float, float]:
        others = self._others()
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
        if replica == self.me:
            return speed_of(self.record) or 0.0
        peer = self.published.get(replica)
        return 0.0 if peer is None else speed_of(peer.record) or 0.0

    def step_s(self, replica: int) -> float:
        """Seconds of a usual step; infinite while it is not known."""
        record = self.record if replica == self.me else None
        if record is None:
            peer = self.published.get(replica)
            record = None if peer is None else peer.record
        return math.inf if record is None or record.step_s is None else record.step_s

    def busy_s(self, replica: int) -> float:
        """How long a replica is expected to be busy with its current step and what it has reserved.

        A step is taken to be half done. An overdue one is expected to last as long again as it has lasted, as with
        heavy-tailed costs.
        """
        step_s = self.step_s(replica)
        if math.isinf(step_s):
            return math.inf
        since_s = self.clock() - self._since_s(replica)
        running_s = since_s if since_s > step_s + self._overdue_s else 0.5 * step_s
        speed, peer = self.speed(replica), self.published.get(replica)
        return running_s + (peer.ahead_cost / speed if peer is not None and speed > 0 else 0.0)

    def _since_s(self, replica: int) -> float:
        """When its present step was begun, as far as was seen; of a sample hardly one was seen before."""
        seen = self._changed_s.get(replica)
        return self.looked_s if seen is None else seen[1]

    # --- the others together ------------------------------------------------------------------------------------

    @property
    def others(self) -> list[int]:
        """The other replicas that are known by the newest look; the arrays below are in this order."""
        return self._others().replicas

    def speeds_of_others(self) -> FloatArray:
        """Cost units per second; zero where not known."""
        return self._others().speeds

    def steps_s_of_others(self) -> FloatArray:
        """Seconds of a usual step; infinite where not known."""
        return self._others().steps_s

    def busy_s_of_others(self) -> FloatArray:
        """How long each is expected to be busy, as `busy_s`."""
        others = self._others()
        since_s = self.clock() - others.since_s
        overdue = since_s > others.steps_s + self._overdue_s
        busy_s: FloatArray = np.where(overdue, since_s, 0.5 * others.steps_s) + others.ahead_s
        return busy_s

    def running_cost_of_others(self) -> float:
        """What the others will yet do in their current steps, as far as is known."""
        busy_s, speeds = self.busy_s_of_others(), self.speeds_of_others()
        return self._scaled(float((speeds * np.where(np.isfinite(busy_s), busy_s, 0.0)).sum()))

    def reserved_by_others(self) -> tuple[int, float]:
        """Cells that the other replicas have reserved so far, and what they cost; where all are looked at."""
        return self._others().reserved

    def unreserved_by_others(self) -> tuple[float, float]:
        """Cells that the other replicas have claimed and not reserved, by their own word, and what they cost."""
        cells, cost = self._others().unreserved
        return self._scaled(cells), self._scaled(cost)

    def last_to_end(self, num: int) -> list[int]:
        """Of the others who have unreserved cells, that many that would end last, by their own word."""
        others = self._others()
        costs, speeds = others.unreserved_costs, others.speeds
        work_s = np.divide(costs, speeds, out=np.full_like(costs, math.inf), where=speeds > 0)
        ends_s = np.where(costs > 0, self.busy_s_of_others() + work_s, -math.inf)
        last = np.argsort(-ends_s, kind="stable")[:num].tolist()
        return [others.replicas[i] for i in last if ends_s[i] > -math.inf]

    @property
    def _num_running(self) -> int:
        return self.world - len(self._finished)

    def _scaled(self, total: float) -> float:
        """A sum over the other replicas that are known, scaled up to all others where only a sample is known."""
        known = self._others().num_known
        return total * (self._num_running - 1) / known if self.is_sampled and known else total

    def _others(self) -> _Others:
        if self._known is None:
            others = {r: peer for r, peer in self.newest.items() if r != self.me}
            self._known = _Others(others, self._since_s)
        return self._known

    def all_finished(self) -> bool:
        """Whether no replica runs a step any more; false before everyone was heard of."""
        if self.is_sampled:
            return self.record.finished and len(self._finished) == self.world - 1
        return len(self.published) == self.world and all(map(self._has_finished, range(self.world)))

    def _has_finished(self, replica: int) -> bool:
        peer = self.published.get(replica)
        return peer is not None and peer.record.finished


def speed_of(record: ReplicaRecord) -> float | None:
    """Cost units per second, ``None`` while it is not known."""
    return record.speed_per_s if record.cost_speed_per_s is None else record.cost_speed_per_s
