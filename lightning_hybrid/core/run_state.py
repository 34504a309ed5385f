"""The state of the system as one pass over a loader has shown it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.latency import LatencyWindow
from lightning_hybrid.core.recording import RecordedStep
from lightning_hybrid.core.state import BalanceSnapshot
from lightning_hybrid.core.system_state import MemoryState, ModelInfo, ParallelConfig, SystemState, performance_of


def state_of_run(
    snapshot: BalanceSnapshot,
    steps: Iterable[RecordedStep],
    *,
    world_size: int,
    backend: str | None = None,
    model: ModelInfo | None = None,
    communication: CommunicationState | None = None,
    timestamp_s: float | None = None,
) -> SystemState:
    """What is known of the devices, the model, their performance and communication after a pass.

    Args:
        snapshot: The final records of all replicas.
        steps: The steps that latency is counted of.
        world_size: How many ranks there are.
        backend: Of their process group.
        model: What the model is made of.
        communication: What the links carry.
        timestamp_s: Unix time of the end of the pass.
    """
    window = LatencyWindow()
    for step in sorted(steps, key=lambda step: step.start_s):
        window.observe(step.seconds, step.stop - step.start)
    devices = tuple(record.device for record in snapshot.replicas if record.device is not None)
    parallel = ParallelConfig(
        world_size=world_size, data_parallel_size=len(snapshot.replicas), mode=snapshot.mode, backend=backend
    )
    samples_per_s = snapshot.samples_done / snapshot.wall_s if snapshot.wall_s > 0 else None
    performance = performance_of(window.latency(), samples_per_s, model, devices, parallel)
    return SystemState(
        devices=devices,
        model=model,
        performance=replace(performance, communication_frac=_communication_frac(snapshot)),
        memory=MemoryState.of(devices),
        communication=communication,
        parallel=parallel,
        timestamp_s=timestamp_s,
    )


def _communication_frac(snapshot: BalanceSnapshot) -> float | None:
    """Share of the time of all replicas' steps that went into collectives; ``None`` where one has not measured it."""
    in_steps_s = inside_s = 0.0
    for record in snapshot.replicas:
        if record.collective_s is None:
            return None
        inside_s += record.collective_s
        in_steps_s += record.busy_s + record.collective_s
    return inside_s / in_steps_s if in_steps_s > 0 else None
