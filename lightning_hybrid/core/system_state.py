"""The state of the whole job in one record: devices, model, performance, memory, communication, parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.hardware import peak_flops_per_s
from lightning_hybrid.core.latency import Latency
from lightning_hybrid.core.records import Record
from lightning_hybrid.core.state import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo(Record):
    """What a model is made of, as one rank sees it.

    Parameters that modules share count once. Bytes are those of this rank's part, whether memory is taken for them or
    not: on the meta device none is. A field that is ``None`` is not known; ``unknown`` has the reason.
    """

    name: str | None = None
    """Class of the module."""
    num_parameters: int | None = None
    """Elements of all parameters, of the whole model where they are sharded as DTensor."""
    num_trainable_parameters: int | None = None
    """Those of them that require a gradient."""
    num_local_parameters: int | None = None
    """Elements that this rank holds."""
    num_meta_parameters: int | None = None
    """Elements on the meta device, which have a shape and no memory."""
    num_buffers: int | None = None
    """Elements of all buffers that this rank holds."""
    parameter_bytes: int | None = None
    buffer_bytes: int | None = None
    num_parameters_by_dtype: Mapping[str, int] = field(default_factory=dict, hash=False)
    """``num_parameters`` by the type that torch says they have, without ``torch.``."""
    parameter_bytes_by_dtype: Mapping[str, int] = field(default_factory=dict, hash=False)
    """``parameter_bytes`` by the type that is really stored; quantised tensors store others than they say."""
    flops_per_sample: float | None = None
    """Floating-point operations of this rank for one sample of the counted step: two per multiply and add."""
    flops_per_sample_by_dtype: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The same by the type that is computed in; ``tfloat32`` where the device rounds ``float32`` to it."""
    unknown: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceState(Record):
    """How fast the job is. Percentiles are exact over the ``num_steps`` newest steps."""

    num_steps: int = 0
    latency_p50_s: float | None = None
    latency_p90_s: float | None = None
    latency_p99_s: float | None = None
    samples_per_s: float | None = None
    """Samples per second of all replicas together."""
    flops_per_s: float | None = None
    """Floating-point operations per second of all devices together."""
    model_flop_utilization_frac: float | None = None
    """``flops_per_s`` over what the devices could do at their dense peaks, 0..1."""
    communication_frac: float | None = None
    """Share of the steps' time spent in collectives, 0..1; ``None`` where it is not measured."""
    unknown: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryState(Record):
    """Memory of all devices together; a sum is ``None`` where it is not known of one of them."""

    used_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    """Of tensors of this job's processes."""
    reserved_bytes: int | None = None
    """Held by their caching allocators, tensors included."""
    highest_used_frac: float | None = None
    """Of the device with the least room, among those of which it is known."""
    highest_host_used_frac: float | None = None
    num_out_of_memory: int | None = None
    """Steps that ran out of memory so far."""

    @classmethod
    def of(cls, devices: Sequence[DeviceState], *, num_out_of_memory: int | None = None) -> MemoryState:
        """The memory of ``devices``."""
        return cls(
            used_bytes=_sum(devices, lambda device: device.memory_used_bytes),
            total_bytes=_sum(devices, lambda device: device.memory_total_bytes),
            allocated_bytes=_sum(devices, lambda device: device.memory_allocated_bytes),
            reserved_bytes=_sum(devices, lambda device: device.memory_reserved_bytes),
            highest_used_frac=_highest(device.memory_frac for device in devices),
            highest_host_used_frac=_highest(map(_host_frac, devices)),
            num_out_of_memory=num_out_of_memory,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(Record):
    """How the job is spread over ranks.

    Raises:
        ConfigError: a number of ranks is 0, or the degrees are all known and do not multiply to the number of ranks.
    """

    world_size: int = 1
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    mode: Mode | None = None
    """How work is dealt out to replicas."""
    backend: str | None = None
    """Of the process group, as torch names it: gloo, nccl."""

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        degrees = {name: getattr(self, name) for name in _DEGREES}
        for name, value in {"world_size": self.world_size, **degrees}.items():
            if value == 0:
                raise ConfigError(name, value, "be at least 1")
        tensor, pipeline, data = degrees.values()
        if tensor and pipeline and data and tensor * pipeline * data != self.world_size:
            raise ConfigError("world_size", self.world_size, f"be {tensor} x {pipeline} x {data}, the degrees' product")


_DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemState(Record):
    """The state of the whole job at one time.

    Raises:
        ConfigError: a field holds what it cannot; names the field, its value and the rule.

    Example:
        >>> state = SystemState(devices=(DeviceState(kind="cpu"),), parallel=ParallelConfig(), timestamp_s=0)
        >>> state.to_json()
        '{"devices":[{"kind":"cpu"}],"parallel":{"world_size":1},"timestamp_s":0.0}'
        >>> SystemState.from_json(state.to_json()) == state
        True
    """

    devices: tuple[DeviceState, ...] = ()
    """One per rank, in their order."""
    model: ModelInfo | None = None
    performance: PerformanceState | None = None
    memory: MemoryState | None = None
    communication: CommunicationState | None = None
    parallel: ParallelConfig | None = None
    timestamp_s: float | None = None
    """Unix time."""


def performance_of(
    latency: Latency,
    samples_per_s: float | None,
    model: ModelInfo | None,
    devices: Sequence[DeviceState],
    parallel: ParallelConfig | None = None,
) -> PerformanceState:
    """What is known of a job's performance, with its model FLOP utilisation (Chowdhery et al. 2022, appendix B).

    Utilisation is the throughput over that of devices which do nothing but the model's operations, at the dense peak
    of the type that each operation is computed in. Where a replica is several ranks, its operations are those of the
    counted rank times their number; where it is a pipeline they are not known, because stages differ.

    Args:
        latency: Of the newest steps.
        samples_per_s: Samples per second of all replicas together.
        model: The model, with its FLOPs per sample of one rank.
        devices: Those that ran it, one per rank.
        parallel: How many ranks a replica has; ``None``: one.
    """
    measured: dict[str, float | None] = {"samples_per_s": samples_per_s}
    unknown: dict[str, str] = {}
    reason = None if samples_per_s is not None else "the throughput is not known"
    flops = _replica_flops(model, parallel)
    if isinstance(flops, str):
        reason = reason or flops
    elif samples_per_s is not None:
        measured["flops_per_s"] = samples_per_s * sum(flops.values())
        seconds = _ideal_seconds_per_sample(flops, devices)
        if isinstance(seconds, str):
            reason = seconds
        else:
            measured["model_flop_utilization_frac"] = samples_per_s * seconds
    if reason is not None:
        unknown = {name: reason for name in _UTILIZATION if measured.get(name) is None}
    return PerformanceState(
        num_steps=latency.num_steps,
        latency_p50_s=latency.p50_s,
        latency_p90_s=latency.p90_s,
        latency_p99_s=latency.p99_s,
        unknown=unknown,
        **measured,
    )


_UTILIZATION = ("flops_per_s", "model_flop_utilization_frac")


def _replica_flops(model: ModelInfo | None, parallel: ParallelConfig | None) -> dict[str, float] | str:
    """FLOPs per sample of a replica by type, or why they are not known."""
    if model is None or model.flops_per_sample is None:
        reasons = {} if model is None else model.unknown
        return reasons.get("flops_per_sample", "the operations of a sample were not counted")
    if parallel is not None and (parallel.pipeline_parallel_size or 1) > 1:
        return "operations were counted in one stage of a pipeline"
    num_ranks = (parallel and parallel.tensor_parallel_size) or 1
    return {dtype: flops * num_ranks for dtype, flops in model.flops_per_sample_by_dtype.items()}


def _ideal_seconds_per_sample(flops: Mapping[str, float], devices: Sequence[DeviceState]) -> float | str:
    """Seconds per sample of all devices together at their dense peaks, or why they are not known."""
    if not devices or not any(flops.values()):
        return "no device is known" if not devices else "no operation was counted"
    samples_per_s = 0.0
    for device in devices:
        peaks = {dtype: peak_flops_per_s(device.name, dtype) for dtype, count in flops.items() if count}
        missing = next((dtype for dtype, peak in peaks.items() if peak is None), None)
        if missing is not None:
            return f"no data sheet peak of {missing} is known for {device.name or device.kind}"
        samples_per_s += 1.0 / sum(flops[dtype] / peak for dtype, peak in peaks.items() if peak)
    return 1.0 / samples_per_s


def _sum(devices: Sequence[DeviceState], of: Callable[[DeviceState], int | None]) -> int | None:
    values = [value for value in map(of, devices) if value is not None]
    return sum(values) if values and len(values) == len(devices) else None


def _highest(fracs: Iterable[float | None]) -> float | None:
    return max((frac for frac in fracs if frac is not None), default=None)


def _host_frac(device: DeviceState) -> float | None:
    if device.host_memory_used_bytes is None or not device.host_memory_total_bytes:
        return None
    return device.host_memory_used_bytes / device.host_memory_total_bytes
