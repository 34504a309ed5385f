"""One replica of a simulation: the Trainer's own claims and views, over keys and clocks that are not real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.claims import Claimant
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.others import FINISHED, row_of
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.simulated import Origin, SimulatedStep, Workload
from lightning_hybrid.core.speed import SpeedModel
from lightning_hybrid.core.state import DeviceState, ReplicaRecord
from lightning_hybrid.core.versions import QueueVersion

DEALT = Origin(None, False)


class NoLock:
    """Stands in for a lock where there is one thread."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def notify_all(self) -> None:
        """Nobody waits."""


class SimulatedKeys:
    """The shared keys, in a dictionary; counts the requests."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.requests = 0

    def add(self, key: str, amount: int) -> int:
        """Adds to a number; returns it."""
        self.requests += 1
        value: int = self.values.get(key, 0) + amount
        self.values[key] = value
        return value

    def put(self, key: str, value: bytes) -> None:
        """Replaces what is at ``key``."""
        self.requests += 1
        self.values[key] = value

    def create(self, key: str, value: bytes) -> bytes:
        """What is at ``key``: ``value``, unless there was something."""
        self.requests += 1
        created: bytes = self.values.setdefault(key, value)
        return created

    def get_many(self, keys: Sequence[str]) -> list[Any]:
        """What is at each key, ``None`` where there is nothing."""
        self.requests += 1
        return [self.values.get(key) for key in keys]


class VirtualWorld(Protocol):
    """What a replica needs of the simulation that it is part of."""

    workload: Workload
    config: HybridConfig
    now_s: float
    period_s: float
    keys: SimulatedKeys
    published: npt.NDArray[np.object_]
    rows: npt.NDArray[np.float64]

    def clock(self) -> float:
        """The virtual time."""

    def newest_version(self) -> int:
        """The newest plan version that was published."""

    def read_version(self, data: bytes, costs: Costs) -> QueueVersion:
        """The plan version of these bytes."""

    def device(self, replica: int) -> DeviceState | None:
        """What a probe would read now."""

    def wake(self, replica: SimulatedReplica, delay_s: float) -> None:
        """Lets the background thread of a replica look for something to do."""


class SimulatedReplica:
    """One replica: its claims, its loop's state, and what it measured."""

    def __init__(self, simulation: VirtualWorld, me: int, first: QueueVersion, costs: Costs, dealt: range) -> None:
        config, workload = simulation.config, simulation.workload
        self.me, self.simulation = me, simulation
        self.changed = NoLock()
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
        self.origin = DEALT
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
