"""What may call for another policy, measured from the replicas' records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.load import load_score
from lightning_hybrid.core.state import DeviceState, ReplicaRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressures:
    """Each is ``None`` where it is not known or not defined."""

    memory: float | None = None
    """Used part of the fullest replica's memory."""
    performance: float | None = None
    """Target over measured throughput."""
    imbalance: float | None = None
    """(max - min) / (max + min) of the replicas' load scores."""


def memory_pressure(records: Iterable[ReplicaRecord]) -> float | None:
    """Used part of the fullest replica's memory, 0..1; ``None`` where no replica's is known.

    The memory of a CPU is that of its machine.
    """
    known = [frac for record in records if record.device and (frac := _memory_frac(record.device)) is not None]
    return max(known, default=None)


def performance_pressure(target_per_s: float | None, measured_per_s: float | None) -> float | None:
    """Target over measured throughput; ``None`` without a target, or while nothing was measured."""
    return target_per_s / measured_per_s if target_per_s is not None and measured_per_s else None


def load_imbalance(scores: Iterable[float | None]) -> float | None:
    """(max - min) / (max + min) of the known load scores, 0..1; ``None`` for fewer than two, or where all are zero."""
    known = [score for score in scores if score is not None]
    if len(known) < 2 or max(known) + min(known) <= 0:
        return None
    return (max(known) - min(known)) / (max(known) + min(known))


def score_of(record: ReplicaRecord, config: HybridConfig) -> float | None:
    """Load score of a replica's device, 0..1; ``None`` where nothing of it is known."""
    if record.device is None:
        return None
    weights = config.memory_weight, config.compute_weight, config.network_weight
    return load_score(record.device.memory_frac, record.device.utilization_frac, None, weights=weights)


def _memory_frac(device: DeviceState) -> float | None:
    if device.kind != "cpu" or device.host_memory_used_bytes is None or not device.host_memory_total_bytes:
        return device.memory_frac
    return device.host_memory_used_bytes / device.host_memory_total_bytes
