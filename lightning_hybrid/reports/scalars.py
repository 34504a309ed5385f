"""The numbers that go to the trainer's loggers, under the names that they get there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.state import BalanceSnapshot, DeviceState, ReplicaRecord

_GIB = 2**30

_SHARED_CHARTS = {
    "share of the samples, one line per replica": "share_frac",
    "speed in samples per second, one line per replica": "speed_samples_per_s",
    "busy fraction, one line per replica": "busy_frac",
}


def scalars(snapshot: BalanceSnapshot) -> dict[str, float]:
    """Every known number of ``snapshot`` under its tag; what is not known is left out.

    The x axis is the number of samples done (``global_step`` inside ``fit``). Several loaders of one stage share their
    tags: the axis goes on counting.

    ======================================================  ========================================================
    key                                                     meaning
    ======================================================  ========================================================
    ``balance/<stage>/share_frac/replica<r>``               share of the finished samples that this replica did, 0..1
    ``balance/<stage>/speed_samples_per_s/replica<r>``      its speed now in samples of mean cost, without waiting
    ``balance/<stage>/busy_frac/replica<r>``                share of the wall time spent in the user's step, 0..1
    ``balance/<stage>/load_imbalance``                      (max - min) / (max + min) of busy times; 0 is even
    ``balance/<stage>/throughput_samples_per_s``            samples per second of all replicas together
    ``balance/<stage>/reused_samples``                      samples that were not run, because an equal one was
    ``balance/<stage>/overhead_us_per_step``                this package's own time per step, of the worst replica
    ``performance/<stage>/communication_frac/replica<r>``   share of its step time in collectives; lockstep only
    ``devices/<stage>/memory_used_gib/replica<r>``          device memory in use, by all processes
    ``devices/<stage>/memory_allocated_gib/replica<r>``     device memory allocated by this rank's process
    ``devices/<stage>/memory_frac/replica<r>``              device memory in use over its total, 0..1
    ``devices/<stage>/utilization_frac/replica<r>``         share of the last sampling period with work on it, 0..1
    ``devices/<stage>/host_cpu_frac/replica<r>``            use of all cores of the replica's machine, 0..1
    ``devices/<stage>/host_memory_used_gib/replica<r>``     RAM of the replica's machine in use
    ``devices/<stage>/process_memory_gib/replica<r>``       RAM of this rank's process (resident set)
    ======================================================  ========================================================

    Example:
        >>> records = (ReplicaRecord(replica=0, samples=3), ReplicaRecord(replica=1, samples=1))
        >>> run = dict(stage="test", mode="queue", loader_idx=0, epoch=0, samples_total=8)
        >>> scalars(BalanceSnapshot(replicas=records, **run))
        {'balance/test/share_frac/replica0': 0.75, 'balance/test/share_frac/replica1': 0.25}
    """
    found: dict[str, float | None] = {
        f"balance/{snapshot.stage}/load_imbalance": snapshot.load_imbalance,
        f"balance/{snapshot.stage}/throughput_samples_per_s": snapshot.throughput_per_s,
        f"balance/{snapshot.stage}/reused_samples": snapshot.samples_reused or None,
        f"balance/{snapshot.stage}/overhead_us_per_step": overhead_us_per_step(snapshot),
    }
    for record in snapshot.replicas:
        for name, value in _replica_numbers(snapshot, record):
            found[f"balance/{snapshot.stage}/{name}/replica{record.replica}"] = value
        found[f"performance/{snapshot.stage}/communication_frac/replica{record.replica}"] = record.collective_frac
        if record.device is not None:
            for name, value in _device_numbers(record.device):
                found[f"devices/{snapshot.stage}/{name}/replica{record.replica}"] = value
    return {tag: float(value) for tag, value in found.items() if value is not None}


def link_scalars(communication: CommunicationState, stage: str) -> dict[str, float]:
    """What is known of the links between ranks under its tags, measured before the stage began.

    ======================================================  ========================================================
    key                                                     meaning
    ======================================================  ========================================================
    ``performance/<stage>/link_latency_us``                 of a small message, of the pair where it is longest
    ``performance/<stage>/link_gib_per_s``                  of a large message, of the pair where it is lowest
    ``performance/<stage>/link_contention_frac``            1 - bandwidth of pairs at once / of each alone, 0..1
    ``performance/<stage>/all_reduce_latency_us``           of a small tensor, on the slowest rank
    ``performance/<stage>/all_reduce_bus_gib_per_s``        of a large one: tensor over time, times 2 (n - 1) / n
    ``performance/<stage>/host_to_device_gib_per_s/rank<r>``         copies from pageable memory
    ``performance/<stage>/host_to_device_pinned_gib_per_s/rank<r>``  copies from pinned memory
    ======================================================  ========================================================
    """
    group = communication.group
    found: dict[str, float | None] = {
        "link_latency_us": _us(communication.slowest_latency_s),
        "link_gib_per_s": _gib(communication.slowest_bandwidth_bytes_per_s),
        "link_contention_frac": communication.contention_frac,
        "all_reduce_latency_us": _us(group.all_reduce_latency_s),
        "all_reduce_bus_gib_per_s": _gib(group.bus_bandwidth_bytes_per_s),
    }
    for host in communication.hosts:
        found[f"host_to_device_gib_per_s/rank{host.rank}"] = _gib(host.pageable_bytes_per_s)
        found[f"host_to_device_pinned_gib_per_s/rank{host.rank}"] = _gib(host.pinned_bytes_per_s)
    return {f"performance/{stage}/{name}": value for name, value in found.items() if value is not None}


def overhead_us_per_step(snapshot: BalanceSnapshot) -> float | None:
    """This package's own microseconds per step on the loop's thread, of the replica where they are most."""
    known = [record.overhead_s_per_step for record in snapshot.replicas if record.overhead_s_per_step is not None]
    return 1e6 * max(known) if known else None


def custom_scalars_layout(stages: Iterable[str]) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """The layout for ``SummaryWriter.add_custom_scalars``: for each stage, charts that show all replicas together.

    TensorBoard otherwise gives each replica an auto-scaled chart of its own, where nobody sees the imbalance.
    """
    return {
        f"balance of {stage}": {
            # a logger's prefix comes before the tag, joined by a dash
            title: ("Multiline", [f"(.*-)?balance/{stage}/{name}/replica.*"])
            for title, name in _SHARED_CHARTS.items()
        }
        for stage in stages
    }


def _replica_numbers(snapshot: BalanceSnapshot, record: ReplicaRecord) -> Iterator[tuple[str, float | None]]:
    yield "share_frac", snapshot.share_frac(record)
    yield "speed_samples_per_s", snapshot.speed_of(record)
    yield "busy_frac", record.busy_frac


def _device_numbers(device: DeviceState) -> Iterator[tuple[str, float | None]]:
    yield "memory_used_gib", _gib(device.memory_used_bytes)
    yield "memory_allocated_gib", _gib(device.memory_allocated_bytes)
    yield "memory_frac", device.memory_frac
    yield "utilization_frac", device.utilization_frac
    yield "host_cpu_frac", device.host_cpu_frac
    yield "host_memory_used_gib", _gib(device.host_memory_used_bytes)
    yield "process_memory_gib", _gib(device.process_memory_bytes)


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / _GIB
