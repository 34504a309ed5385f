"""What other replicas said last, as a table of numbers: decisions need sums and arrays of it, and often."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from lightning_hybrid.core.cost import FloatArray
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import ReplicaRecord

_SPEED, _STEP_S, _RESERVED, _RESERVED_COST, _UNRESERVED, _UNRESERVED_COST, _AHEAD_COST, FINISHED = range(8)
ROW_LEN = 8
"""Numbers in the row of a replica."""


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


def speed_of(record: ReplicaRecord) -> float | None:
    """Cost units per second, ``None`` while it is not known."""
    return record.speed_per_s if record.cost_speed_per_s is None else record.cost_speed_per_s


class Others:
    """The other replicas that are known; every array is in the order of ``replicas``.

    Args:
        replicas: Their numbers.
        rows: What `row_of` makes of each, shape ``(len(replicas), ROW_LEN)``.
    """

    def __init__(self, replicas: list[int], rows: FloatArray) -> None:
        self.replicas, self._rows = replicas, rows
        self.num_known = len(replicas)
        self._sums: list[float] = np.add.reduce(rows, axis=0).tolist()
        self.speed = self._sums[_SPEED]
        """Cost units per second of all together; of those that are measured."""
        self.num_unmeasured = 0
        if math.isnan(self.speed):
            self.num_unmeasured = int(np.isnan(rows[:, _SPEED]).sum())
            self.speed = float(np.nansum(rows[:, _SPEED]))

    @cached_property
    def measured(self) -> list[float | None]:
        """Cost units per second of each, ``None`` where not known."""
        return [None if math.isnan(speed) else speed for speed in self._rows[:, _SPEED].tolist()]

    @cached_property
    def speeds(self) -> FloatArray:
        """Cost units per second; zero where not known."""
        speeds = self._rows[:, _SPEED]
        return np.where(np.isnan(speeds), 0.0, speeds) if self.num_unmeasured else speeds

    @cached_property
    def speed_error_frac(self) -> float:
        """Standard error of the mean speed, over that speed, if these are a sample of many."""
        if self.speed <= 0:
            return math.inf
        num, speeds = self.num_known, self.speeds
        variance = max(0.0, float(speeds @ speeds) / num - (self.speed / num) ** 2)
        error: float = math.sqrt(variance * num) / self.speed
        return error

    @property
    def num_finished(self) -> int:
        """How many run nothing any more."""
        return int(self._sums[FINISHED])

    @property
    def reserved(self) -> tuple[int, float]:
        """Cells reserved so far, and their cost."""
        return int(self._sums[_RESERVED]), self._sums[_RESERVED_COST]

    @property
    def unreserved(self) -> tuple[int, float]:
        """Cells claimed and not reserved, and their cost."""
        return int(self._sums[_UNRESERVED]), self._sums[_UNRESERVED_COST]

    @property
    def unreserved_costs(self) -> FloatArray:
        """Cost of the cells that each has claimed and not reserved."""
        return self._rows[:, _UNRESERVED_COST]

    @property
    def steps_s(self) -> FloatArray:
        """Seconds of a usual step; infinite where not known."""
        return self._rows[:, _STEP_S]

    @cached_property
    def ahead_s(self) -> FloatArray:
        """Seconds of what was reserved and not begun."""
        return _quotient(self._rows[:, _AHEAD_COST], self.speeds, 0.0)

    @cached_property
    def half_done_s(self) -> FloatArray:
        """Seconds until each is free, if its present step is half done."""
        return 0.5 * self.steps_s + self.ahead_s

    @cached_property
    def half_done_cost(self) -> float:
        """What they will yet do until then, as far as is known."""
        return self.cost_within(self.half_done_s)

    def cost_within(self, seconds: FloatArray) -> float:
        """What they do together, each in its own time; an infinite one is not known, and counts for nothing."""
        is_known = np.isfinite(seconds)
        return float(self.speeds[is_known] @ seconds[is_known])

    @cached_property
    def work_s(self) -> FloatArray:
        """Seconds of what each has claimed and not reserved; infinite where its speed is not known."""
        return _quotient(self.unreserved_costs, self.speeds, math.inf)


def _quotient(costs: FloatArray, speeds: FloatArray, unknown: float) -> FloatArray:
    found: FloatArray = np.divide(costs, speeds, out=np.full(len(costs), unknown), where=speeds > 0)
    return found
