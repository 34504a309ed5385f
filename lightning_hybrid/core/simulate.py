"""Runs the Trainer's own queue, policies and selector in virtual time.

A discrete-event simulation: a replica's loop and its background thread are events on one time line, every request to
the store takes its latency, and everything that decides is the code that decides in the Trainer
(`lightning_hybrid.core.claims`, `.policies`, `.selector`, `.cost`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.conductor import Conductor
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.others import ROW_LEN
from lightning_hybrid.core.planner import QueuePlanner
from lightning_hybrid.core.policies import MemoryBounds, NoMemoryBounds, policy_named
from lightning_hybrid.core.selector import Selector
from lightning_hybrid.core.simulated import SimulatedRun, SimulatedStep, Workload
from lightning_hybrid.core.simulated_replica import SimulatedKeys, SimulatedReplica
from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.core.statistics import History
from lightning_hybrid.core.versions import QueueVersion, is_heavy_first, opening_cells, opening_version

_MEMORY_BYTES = 2**30
"""Memory of every simulated device; what counts is the used part of it."""


class _Capacities:
    """The replicas' memory as it is now, for the policies."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def bound(self, replica: int) -> float | None:
        capacities = self._simulation.workload.memory_capacities
        return None if capacities is None else capacities[replica].at(self._simulation.now_s)


class Simulation:
    """One run in virtual time.

    Args:
        workload: Cells and devices.
        config: As in the Trainer; with its ``policy``.
    """

    def __init__(self, workload: Workload, config: HybridConfig) -> None:
        self.workload, self.config = workload, config
        self.selector, self.history = Selector(config), History(config)
        self.now_s = 0.0
        self.keys = SimulatedKeys()
        self.period_s = config.exchange_period_s(len(workload.traces))
        self._version: tuple[bytes, QueueVersion] | None = None
        self.published: npt.NDArray[np.object_] = np.full(len(workload.traces), None, dtype=object)
        """By replica, what it has said last, ``None`` before its first word; an array, so that samples are fast."""
        self.rows = np.full((len(workload.traces), ROW_LEN), math.nan)
        self._events: list[tuple[float, int, Callable[..., None], SimulatedReplica, Any]] = []
        self._serial = 0
        self._steps: list[SimulatedStep] = []
        self._out_of_memory = 0
        self._open = len(workload.traces)
        world, num_cells = len(workload.traces), len(workload.costs)
        seen = workload.costs if workload.costs_known else Costs.equal(num_cells)
        self._seen = seen.compute.tolist()
        policy = policy_named(self.selector.policy, config)
        heavy_first = workload.costs_known and is_heavy_first(seen)
        dealt = opening_cells(num_cells, workload.first_rounds * world, heavy_first=heavy_first)
        version = opening_version(policy, seen, dealt, world, costs_known=workload.costs_known)
        self.replicas = [SimulatedReplica(self, r, version, seen, range(*dealt)) for r in range(world)]
        leader = self.replicas[0]
        bounds: MemoryBounds = NoMemoryBounds() if workload.memory_capacities is None else _Capacities(self)
        self._conductor = Conductor(
            leader.view,
            QueuePlanner(leader.claimant, leader, self.keys, seen, config, bounds),
            policy,
            config,
            selector=self.selector,
            history=self.history,
            stage="simulate",
        )

    def run(self) -> SimulatedRun:
        """Runs until every replica has stopped; replicas that die stop there."""
        period_s, world = self.period_s, len(self.replicas)
        for replica in self.replicas:
            self._at(self.workload.starts_s[replica.me] if self.workload.starts_s else 0.0, self._free, replica)
            # background threads do not tick together
            self._at(period_s * (replica.me + 1) / world, self._exchange, replica)
        while self._events and self._open:
            self.now_s, _, handler, replica, argument = heapq.heappop(self._events)
            if argument is None:
                handler(replica)
            else:
                handler(replica, argument)
        return SimulatedRun(
            workload=self.workload,
            steps=self._steps,
            makespan_s=max((step.end_s for step in self._steps), default=0.0),
            store_requests=self.keys.requests,
            claims=sum(replica.claimant.claims for replica in self.replicas),
            cells_stolen=sum(replica.claimant.cells_stolen for replica in self.replicas),
            out_of_memory=self._out_of_memory,
            untold=self._untold(),
        )

    def _untold(self) -> frozenset[tuple[int, int]]:
        if self.config.lease_s is None:
            return frozenset()
        dead = {replica.me for replica in self.replicas if self._is_dead(replica)}
        told = {
            (r, cell)
            for r in dead
            if self.published[r] is not None
            for span in self.published[r].done
            for cell in range(span.start, span.stop)
        }
        return frozenset((step.replica, step.cell) for step in self._steps if step.replica in dead) - told

    def clock(self) -> float:
        """The virtual time."""
        return self.now_s

    def newest_version(self) -> int:
        """The newest plan version that was published."""
        version: int = self.keys.values.get("version", 0)
        return version

    def read_version(self, data: bytes, costs: Costs) -> QueueVersion:
        """The plan version of these bytes; all replicas share it, so that it is in memory once."""
        if self._version is None or self._version[0] is not data:
            self._version = data, QueueVersion.from_bytes(data, costs)
        return self._version[1]

    def device(self, replica: int) -> DeviceState | None:
        """What a probe would read now: memory and speed that are not left for a step are taken by somebody else."""
        capacities, trace = self.workload.memory_capacities, self.workload.traces[replica]
        if capacities is None:
            return None
        total = max(capacities[replica].speeds)
        used_frac = 1.0 - capacities[replica].at(self.now_s) / total if total > 0 else 1.0
        return DeviceState(
            kind="simulated",
            memory_used_bytes=round(used_frac * _MEMORY_BYTES),
            memory_total_bytes=_MEMORY_BYTES,
            utilization_frac=1.0 - trace.at(self.now_s) / max(trace.speeds) if max(trace.speeds) > 0 else None,
        )

    def wake(self, replica: SimulatedReplica, delay_s: float) -> None:
        """Lets the background thread of a replica look for something to do."""
        at_s = self.now_s + delay_s
        if at_s < replica.wake_s:
            replica.wake_s = at_s
            self._at(at_s, self._turn, replica)

    # --- events -------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, handler: Callable[..., None], replica: SimulatedReplica, argument: Any = None) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, handler, replica, argument))

    def _free(self, replica: SimulatedReplica) -> None:
        """The loop asks for its next cell."""
        cell = replica.take()
        if cell is None:
            self._starve(replica)
            return
        replica.claimant.is_starving = False
        replica.is_running = True
        end_s = self.workload.step_end_s(replica.me, cell, self.now_s)
        if math.isinf(end_s):
            self._open -= 1  # it died in this step
            replica.is_running = False
            return
        self._out_of_memory += not self.workload.fits(replica.me, cell, self.now_s)
        self._at(end_s, self._stepped, replica, SimulatedStep(replica.me, cell, self.now_s, end_s, replica.origin))

    def _stepped(self, replica: SimulatedReplica, step: SimulatedStep) -> None:
        replica.is_running = False
        self._steps.append(step)
        replica.learn(step, self._seen[step.cell])
        if replica.num_steps == 1:
            self._exchange(replica, again=False)
        if self.workload.overheads_s is None:
            self._free(replica)
        else:
            self._at(self.now_s + self.workload.overheads_s[replica.me], self._free, replica)

    def _starve(self, replica: SimulatedReplica) -> None:
        claimant = replica.claimant
        if claimant.is_exhausted():
            self._finish(replica)
            return
        claimant.is_starving = True
        self.wake(replica, 0.0)

    def _finish(self, replica: SimulatedReplica) -> None:
        replica.finish()
        self._open -= 1

    def _turn(self, replica: SimulatedReplica) -> None:
        """The background thread does one thing, which takes as long as its requests."""
        claimant = replica.claimant
        if self.now_s < replica.wake_s or claimant.is_finishing or self._is_dead(replica):
            return
        replica.wake_s = math.inf
        replica.refresh()
        before = self.keys.requests
        pause_s = claimant.turn()
        took_s = (self.keys.requests - before) * self.workload.store_latency_s
        if claimant.is_starving and not replica.is_running and claimant.knows_what_is_next():
            claimant.is_starving = False
            self._at(self.now_s + took_s, self._free, replica)
        if math.isfinite(pause_s):
            self.wake(replica, took_s + pause_s)

    def _exchange(self, replica: SimulatedReplica, *, again: bool = True) -> None:
        """The background thread publishes and looks, as it does every period."""
        if replica.claimant.is_finishing or self._is_dead(replica):
            return
        replica.read_device()
        replica.publish()
        replica.look()
        if replica.me == 0:
            self._conductor.observe()
        self.wake(replica, 0.0)
        if again:
            view = replica.view
            period_s = self.config.exchange_period_s(view.world, view.record.step_s, view.left_s)
            self._at(self.now_s + period_s, self._exchange, replica)

    def _is_dead(self, replica: SimulatedReplica) -> bool:
        trace = self.workload.traces[replica.me]
        return trace.speeds[-1] == 0 and self.now_s >= trace.starts_s[-1]
