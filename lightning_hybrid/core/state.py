"""Frozen records of what was measured: one device, one replica, the whole run.

Every field that may be unknown is ``None`` when it is; an unknown value is never logged and never counted as zero.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from lightning_hybrid.core.device_state import DeviceState as DeviceState

Mode = Literal["queue", "lockstep", "static"]
"""How an epoch is dealt out: ``static`` means without re-distribution."""


class StepShape(NamedTuple):
    """The size of a finished step, and what it took."""

    number: int
    """Which step of its replica it was, from 1 on."""
    samples: int
    elements: int | None
    """Elements of all tensors of its batch."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRecord:
    """What one replica has done so far in an epoch of one loader, published by itself.

    ``busy_s`` is time inside the user's step without waiting in collectives; ``wait_s`` is time the loop waited for
    data or for work; ``overhead_s`` is this package's own time on the loop's thread.
    """

    replica: int
    samples: int = 0
    cost: float | None = None
    """Cost units of the finished steps, ``None`` where nobody counted them."""
    steps: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    collective_s: float | None = None
    """Time of the finished steps inside collectives, waits for other ranks included; ``busy_s`` is without it.
    ``None`` in queue mode, where steps have none, and on devices that run them asynchronously."""
    wall_s: float = 0.0
    overhead_s: float = 0.0
    speed_per_s: float | None = None
    """Samples per second of busy time, by the current estimate; lower where samples are longer."""
    step_s: float | None = None
    """Seconds of one usual step, by the current estimate."""
    cost_speed_per_s: float | None = None
    """Cost units per second of busy time in steps of the usual cost, by the current estimate; devices compare by it."""
    cost_speed_error_frac: float | None = None
    """Standard error of that speed over the speed."""
    mean_cost_speed_per_s: float | None = None
    """The same speed as a mean over the whole epoch."""
    cost_version: int = 0
    """Version of the learnt cost parameters that costs are counted in; 0 where none were learnt."""
    newest_steps: tuple[StepShape, ...] = ()
    """The newest steps, where costs are being learnt from them."""
    cells_stolen: int = 0
    """Cells that this replica took from others' claims."""
    failed_samples: int = 0
    """Samples that could not be run and were left out; they count as finished too."""
    memory_failures: int = 0
    """Steps that ran out of memory; they were run again in parts."""
    memory_bound: float | None = None
    """Memory cost above which a cell has to be run in parts here; ``None`` where none had to, or none is known."""
    micro_batch_size: float | None = None
    """Mean samples of the newest steps, or of the parts in which they had to be run."""
    finished: bool = False
    device: DeviceState | None = None

    def to_json(self) -> str:
        """The record as one line of JSON, with the compact form of the device's state."""
        found = {name: getattr(self, name) for name in _RECORD_NAMES}
        if self.device is not None:
            found["device"] = self.device.to_dict(compact=True)
        return json.dumps(found, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> ReplicaRecord:
        """The record that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        device = fields.pop("device")
        newest_steps = tuple(StepShape(*step) for step in fields.pop("newest_steps"))
        return cls(
            **fields, newest_steps=newest_steps, device=None if device is None else DeviceState.from_dict(device)
        )

    @property
    def busy_frac(self) -> float | None:
        """Share of the wall time spent in the user's step, 0..1."""
        return min(1.0, self.busy_s / self.wall_s) if self.wall_s > 0 else None

    @property
    def collective_frac(self) -> float | None:
        """Share of the time of its steps that went into collectives, 0..1."""
        step_s = None if self.collective_s is None else self.busy_s + self.collective_s
        return self.collective_s / step_s if self.collective_s is not None and step_s else None

    @property
    def mean_speed_per_s(self) -> float | None:
        """Samples per second of busy time over the whole epoch."""
        return self.samples / self.busy_s if self.samples and self.busy_s > 0 else None

    @property
    def overhead_s_per_step(self) -> float | None:
        """This package's own seconds on the loop's thread, per step."""
        return self.overhead_s / self.steps if self.steps else None


_RECORD_NAMES = tuple(each.name for each in fields(ReplicaRecord))


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSnapshot:
    """The newest records of all replicas in one epoch of one loader."""

    stage: Literal["predict", "validate", "test"]
    mode: Mode
    loader_idx: int
    epoch: int
    samples_total: int | None
    """``None`` for a stream that goes on."""
    replicas: tuple[ReplicaRecord, ...]
    samples_reused: int = 0
    """Samples beside ``samples_total`` that are not run, because an equal one is."""

    @property
    def samples_done(self) -> int:
        """Samples finished by all replicas together."""
        return sum(record.samples for record in self.replicas)

    @property
    def samples_failed(self) -> int:
        """Samples that could not be run, of all replicas together."""
        return sum(record.failed_samples for record in self.replicas)

    @property
    def error_frac(self) -> float | None:
        """Share of the finished samples that could not be run, 0..1."""
        return self.samples_failed / self.samples_done if self.samples_done else None

    @property
    def wall_s(self) -> float:
        """Seconds since the epoch's first step, of the replica that has run longest."""
        return max((record.wall_s for record in self.replicas), default=0.0)

    def share_frac(self, record: ReplicaRecord) -> float | None:
        """Share of the finished samples that ``record``'s replica did, 0..1."""
        return record.samples / self.samples_done if self.samples_done else None

    @property
    def cost_per_sample(self) -> float | None:
        """Cost units of the mean finished sample of all replicas, ``None`` where some replica has not counted them."""
        costs = [record.cost for record in self.replicas if record.samples]
        known = [cost for cost in costs if cost is not None]
        return sum(known) / self.samples_done or None if known and len(known) == len(costs) else None

    def speed_of(self, record: ReplicaRecord) -> float | None:
        """Samples of mean cost per second of ``record``'s replica, now: longer samples do not make it slower."""
        if self.cost_per_sample is None or record.cost_speed_per_s is None:
            return record.speed_per_s
        return record.cost_speed_per_s / self.cost_per_sample

    def mean_speed_of(self, record: ReplicaRecord) -> float | None:
        """The same over the whole epoch."""
        if self.cost_per_sample is None or record.mean_cost_speed_per_s is None:
            return record.mean_speed_per_s
        return record.mean_cost_speed_per_s / self.cost_per_sample

    @property
    def load_imbalance(self) -> float | None:
        """(max - min) / (max + min) of the replicas' busy time; 0 when all worked equally long."""
        if len(self.replicas) < 2:
            return None
        busy = [record.busy_s for record in self.replicas]
        return (max(busy) - min(busy)) / (max(busy) + min(busy)) if max(busy) > 0 else None

    @property
    def throughput_per_s(self) -> float | None:
        """Samples per second of all replicas together."""
        return self.samples_done / self.wall_s if self.wall_s > 0 else None
