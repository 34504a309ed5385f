"""Runs the Trainer's own queue, policies and selector in virtual time.

A discrete-event simulation: a replica's loop and its background thread are events on one time line, every request to
the store takes its latency, and everything that decides is the code that decides in the Trainer
(`lightning_hybrid.core.claims`, `.policies`, `.selector`, `.cost`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.claims import Claimant
from lightning_hybrid.core.conductor import Conductor
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.others import FINISHED, ROW_LEN, row_of
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.planner import QueuePlanner
from lightning_hybrid.core.policies import MemoryBounds, NoMemoryBounds, policy_named
from lightning_hybrid.core.selector import Selector
from lightning_hybrid.core.speed import SpeedModel
from lightning_hybrid.core.state import DeviceState, ReplicaRecord
from lightning_hybrid.core.statistics import History
from lightning_hybrid.core.traces import SpeedTrace, lower_bound_s
from lightning_hybrid.core.versions import QueueVersion, is_heavy_first, opening_cells, opening_version


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


_DEALT = Origin(None, False)
_MEMORY_BYTES = 2**30
"""Memory of every simulated device; what counts is the used part of it."""


class _NoLock:
    """Stands in for a lock where there is one thread."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def notify_all(self) -> None:
        """Nobody waits."""


class _Keys:
    """The shared keys, in a dictionary; counts the requests."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.requests = 0

    def add(self, key: str, amount: int) -> int:
        self.requests += 1
        value: int = self.values.get(key, 0) + amount
        self.values[key] = value
        return value

    def put(self, key: str, value: bytes) -> None:
        self.requests += 1
        self.values[key] = value

    def create(self, key: str, value: bytes) -> bytes:
        self.requests += 1
        created: bytes = self.values.setdefault(key, value)
        return created

    def get_many(self, keys: Sequence[str]) -> list[Any]:
        self.requests += 1
        return [self.values.get(key) for key in keys]


class _Replica:
    """One replica: its claims, its loop's state, and what it measured."""

    def __init__(self, simulation: Simulation, me: int, first: QueueVersion, costs: Costs, dealt: range) -> None:
        config, workload = simulation.config, simulation.workload
        self.me, self.simulation = me, simulation
        self.changed = _NoLock()
        self.view = Peers(
            me,
            len(workload.traces),
            simulation.clock,
            # who sweeps for what the dead have left must see everyone
            look_replicas=config.look_replicas if config.lease_s is None else len(workload.traces),
            overdue_s=simulation.period_s,
            keeps_all=me == 0,  # who conducts needs them
        )
        self.claimant = Claimant(
            self,
            simulation.keys,
            first,
            costs,
            config,
            prefetch=False,
            dealt=dealt,
            read_version=simulation.read_version,
        )
        self.first_cells = list(dealt[me :: self.view.world])
        self.speed = SpeedModel(config.speed_window_steps)
        self.num_steps, self.cost, self.busy_s = 0, 0.0, 0.0
        self.finished = False
        self._is_new = False
        self._device: DeviceState | None = None
        self._next_device_s = math.inf if workload.memory_capacities is None else 0.0
        self.origin = _DEALT
        self.is_running = False
        self.wake_s = math.inf

    def look(self) -> None:
        """Reads what the others published."""
        simulation, looked_at = self.simulation, self.view.to_look_at()
        simulation.keys.requests += 1
        version, index = simulation.newest_version(), np.array(looked_at, dtype=np.int64)
        if not self.view.is_sampled:
            self.view.take_in(dict(zip(looked_at, simulation.published[index], strict=True)), version)
            return
        rows = simulation.rows[index]
        spoken = ~np.isnan(rows[:, FINISHED])
        if not spoken.all():
            rows, index = rows[spoken], index[spoken]
        self.view.take_in_sample(index.tolist(), simulation.published[index].tolist(), rows, version)

    def publish(self) -> None:
        """Publishes what this replica knows of itself."""
        self.simulation.keys.requests += 1
        published = self.claimant.describe(self.refresh())
        self.simulation.published[self.me] = published
        if self.view.is_sampled:
            self.simulation.rows[self.me] = row_of(published)

    def refresh(self) -> ReplicaRecord:
        """The newest record, with what was measured."""
        if self._is_new:
            self._is_new = False
            estimate = self.speed.estimate()
            self.view.record = ReplicaRecord(
                replica=self.me,
                samples=self.num_steps,
                steps=self.num_steps,
                cost=self.cost,
                busy_s=self.busy_s,
                speed_per_s=None if estimate is None else estimate.speed_per_s,
                step_s=None if estimate is None else estimate.step_s,
                cells_stolen=self.claimant.cells_stolen,
                finished=self.finished,
                device=self._device,
            )
        return self.view.record

    def read_device(self) -> None:
        """Reads the state of the device, as is done every now and then."""
        simulation = self.simulation
        if simulation.now_s >= self._next_device_s:
            self._next_device_s = simulation.now_s + simulation.config.device_period_s
            self._device = simulation.device(self.me)
            self._is_new = True

    def take(self) -> int | None:
        """The next cell to run."""
        if self.first_cells:
            return self.first_cells.pop(0)
        owned, handed = self.claimant.ranges.next_to_hand(), self.claimant.hand_out()
        if owned is None or handed is None:
            return None
        self.origin = Origin(owned.version.policy if owned.version else None, owned.is_stolen)
        if handed[1]:
            self.simulation.wake(self, 0.0)
        return handed[0]

    def learn(self, step: SimulatedStep, cost: float) -> None:
        """Notes a finished step."""
        self.claimant.done(step.cell)
        self.speed.observe(cost, step.end_s - step.start_s)
        self.num_steps += 1
        self.cost += cost
        self.busy_s += step.end_s - step.start_s
        self._is_new = True

    def finish(self) -> None:
        """Notes that there is no more work, and tells the others."""
        self.claimant.is_starving, self.claimant.is_finishing = False, True
        self.finished = self._is_new = True
        self.publish()


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
        self.keys = _Keys()
        self.period_s = config.exchange_period_s(len(workload.traces))
        self._version: tuple[bytes, QueueVersion] | None = None
        self.published: npt.NDArray[np.object_] = np.full(len(workload.traces), None, dtype=object)
        """By replica, what it has said last, ``None`` before its first word; an array, so that samples are fast."""
        self.rows = np.full((len(workload.traces), ROW_LEN), math.nan)
        self._events: list[tuple[float, int, Callable[..., None], _Replica, Any]] = []
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
        self.replicas = [_Replica(self, r, version, seen, range(*dealt)) for r in range(world)]
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

    def wake(self, replica: _Replica, delay_s: float) -> None:
        """Lets the background thread of a replica look for something to do."""
        at_s = self.now_s + delay_s
        if at_s < replica.wake_s:
            replica.wake_s = at_s
            self._at(at_s, self._turn, replica)

    # --- events -------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, handler: Callable[..., None], replica: _Replica, argument: Any = None) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, handler, replica, argument))

    def _free(self, replica: _Replica) -> None:
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

    def _stepped(self, replica: _Replica, step: SimulatedStep) -> None:
        replica.is_running = False
        self._steps.append(step)
        replica.learn(step, self._seen[step.cell])
        if replica.num_steps == 1:
            self._exchange(replica, again=False)
        if self.workload.overheads_s is None:
            self._free(replica)
        else:
            self._at(self.now_s + self.workload.overheads_s[replica.me], self._free, replica)

    def _starve(self, replica: _Replica) -> None:
        claimant = replica.claimant
        if claimant.is_exhausted():
            self._finish(replica)
            return
        claimant.is_starving = True
        self.wake(replica, 0.0)

    def _finish(self, replica: _Replica) -> None:
        replica.finish()
        self._open -= 1

    def _turn(self, replica: _Replica) -> None:
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

    def _exchange(self, replica: _Replica, *, again: bool = True) -> None:
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

    def _is_dead(self, replica: _Replica) -> bool:
        trace = self.workload.traces[replica.me]
        return trace.speeds[-1] == 0 and self.now_s >= trace.starts_s[-1]
