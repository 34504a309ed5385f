"""What is simulated, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.traces import SpeedTrace, lower_bound_s


class Origin(NamedTuple):
    """How a replica came by a cell."""

    policy: str | None
    """By which the plan version was ordered; ``None`` before there was one."""
    is_stolen: bool
    """Whether another replica had claimed it, or died with it."""


class SimulatedStep(NamedTuple):
    """One step: ``cell`` on ``replica`` from ``start_s`` to ``end_s`` of virtual time."""

    replica: int
    cell: int
    start_s: float
    end_s: float
    origin: Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is simulated.

    ``costs`` are what the cells really cost; the scheduler sees them only if ``costs_known``, else it takes all cells
    for equal. ``memory_capacities`` bound the memory cost of a cell on each replica over time; a cell above it is
    run again in halves, and these again until they fit: it takes ``out_of_memory_factor`` times as long if it must be
    halved once, and as much longer again for every further time.
    """

    costs: Costs
    traces: tuple[SpeedTrace, ...]
    costs_known: bool = True
    memory_capacities: tuple[SpeedTrace, ...] | None = None
    out_of_memory_factor: float = 2.5
    store_latency_s: float = 2e-4
    """Seconds of one request to the store."""
    first_rounds: int = 1
    """Steps of every replica that are dealt out before any speed is known."""
    starts_s: tuple[float, ...] | None = None
    """When the loop of each replica begins; ``None``: all at 0."""
    overheads_s: tuple[float, ...] | None = None
    """Seconds between two steps of each replica without waiting for work: loader and hooks. ``None``: none."""

    def step_end_s(self, replica: int, cell: int, start_s: float) -> float:
        """When the step of a cell that starts now ends."""
        cost = float(self.costs.compute[cell])
        cost *= 1.0 + (self.out_of_memory_factor - 1.0) * self._halvings(replica, cell, start_s)
        return self.traces[replica].end_s(start_s, cost)

    def fits(self, replica: int, cell: int, time_s: float) -> bool:
        """Whether the replica's memory is enough for the cell at that time."""
        return self._halvings(replica, cell, time_s) == 0

    def _halvings(self, replica: int, cell: int, time_s: float) -> int:
        """How often a cell must be halved until its parts fit."""
        if self.memory_capacities is None or self.costs.memory is None:
            return 0
        excess = float(self.costs.memory[cell]) / max(self.memory_capacities[replica].at(time_s), 1e-9)
        return math.ceil(math.log2(excess)) if excess > 1 else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedRun:
    """What came of it."""

    workload: Workload
    steps: list[SimulatedStep]
    makespan_s: float
    store_requests: int
    claims: int
    cells_stolen: int
    out_of_memory: int
    """Steps whose cell did not fit its replica."""
    untold: frozenset[tuple[int, int]] = frozenset()
    """Replica and cell of steps that ended before their replica died, which it had told nobody. They do not count, and
    others ran these cells again."""

    @property
    def bound_s(self) -> float:
        """The shortest time that any schedule could take."""
        return lower_bound_s(self.workload.costs.compute, self.workload.traces)

    @property
    def over_bound(self) -> float:
        """Makespan over the bound."""
        return self.makespan_s / self.bound_s if self.steps else 1.0

    @property
    def exactly_once_violations(self) -> int:
        """Cells that were run more or less often than once."""
        told = [step.cell for step in self.steps if (step.replica, step.cell) not in self.untold]
        counts = np.bincount(np.array(told, dtype=np.int64), minlength=len(self.workload.costs))
        return int((counts != 1).sum())

    @property
    def busy_s(self) -> npt.NDArray[np.float64]:
        """Seconds that each replica worked."""
        busy = np.zeros(len(self.workload.traces))
        for step in self.steps:
            busy[step.replica] += step.end_s - step.start_s
        return busy

    @property
    def idle_frac(self) -> float:
        """Share of the replicas' time in which they did not work, 0..1."""
        if not self.steps:
            return 0.0
        return 1.0 - float(self.busy_s.sum()) / (len(self.workload.traces) * self.makespan_s)
