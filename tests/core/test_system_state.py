"""The record of the whole job: what it refuses, what it derives, and that nothing is lost in JSON."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.communication import CommunicationState, GroupLink, PairLink
from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.hardware import known_names
from lightning_hybrid.core.latency import Latency
from lightning_hybrid.core.system_state import (
    MemoryState,
    ModelInfo,
    ParallelConfig,
    PerformanceState,
    SystemState,
    performance_of,
)

COUNT = st.none() | st.integers(0, 2**63)
NUMBER = st.none() | st.floats(0, allow_infinity=False, allow_nan=False)
TEXT = st.text(max_size=8)
REASONS = st.dictionaries(TEXT, TEXT, max_size=3)


def _records(cls: Any, *, counts: str = "", numbers: str = "", **others: Any) -> st.SearchStrategy[Any]:
    return st.builds(cls, **dict.fromkeys(counts.split(), COUNT), **dict.fromkeys(numbers.split(), NUMBER), **others)


MODELS = _records(
    ModelInfo,
    counts="num_parameters num_trainable_parameters num_local_parameters num_meta_parameters num_buffers "
    "parameter_bytes buffer_bytes",
    numbers="flops_per_sample",
    name=st.none() | TEXT,
    num_parameters_by_dtype=st.dictionaries(TEXT, st.integers(0, 2**63), max_size=3),
    flops_per_sample_by_dtype=st.dictionaries(TEXT, st.floats(0, 1e30), max_size=3),
    unknown=REASONS,
)
PERFORMANCES = _records(
    PerformanceState,
    numbers="latency_p50_s latency_p90_s latency_p99_s samples_per_s flops_per_s model_flop_utilization_frac "
    "communication_frac",
    num_steps=st.integers(0, 2**40),
    unknown=REASONS,
)
MEMORIES = _records(
    MemoryState,
    counts="used_bytes total_bytes allocated_bytes reserved_bytes num_out_of_memory",
    numbers="highest_used_frac highest_host_used_frac",
)
COMMUNICATIONS = _records(
    CommunicationState,
    numbers="probe_s",
    depth=st.sampled_from(["quick", "full"]),
    backend=st.sampled_from(["gloo", "nccl"]),
    device_kind=st.sampled_from(["cpu", "cuda"]),
    pairs=st.lists(
        _records(PairLink, numbers="latency_s bandwidth_bytes_per_s", first=st.just(0), second=st.just(1)), max_size=3
    ).map(tuple),
    group=_records(GroupLink, numbers="all_reduce_latency_s all_reduce_bytes_per_s", num_ranks=st.integers(2, 4096)),
    message_bytes=st.integers(0, 2**40),
    num_exchanges=st.integers(0, 2**20),
    num_all_reduces=st.integers(0, 2**20),
)
PARALLELS = st.builds(
    lambda tensor, pipeline, data, mode: ParallelConfig(
        world_size=tensor * pipeline * data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
        mode=mode,
        backend="gloo",
    ),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([None, "queue", "lockstep", "static"]),
)
DEVICES = st.builds(
    DeviceState,
    kind=st.sampled_from(["cpu", "cuda"]),
    name=st.none() | TEXT,
    power_w=NUMBER,
    xid_events=st.none() | st.lists(st.integers(1, 200), max_size=2).map(tuple),
    unknown=REASONS,
)
STATES = st.builds(
    SystemState,
    devices=st.lists(DEVICES, max_size=3).map(tuple),
    model=st.none() | MODELS,
    performance=st.none() | PERFORMANCES,
    memory=st.none() | MEMORIES,
    communication=st.none() | COMMUNICATIONS,
    parallel=st.none() | PARALLELS,
    timestamp_s=NUMBER,
)


@given(STATES)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_a_state_comes_back_from_its_json(state: SystemState) -> None:
    text = state.to_json()

    assert SystemState.from_json(text) == state
    assert SystemState.from_json(text).to_json() == text
    assert "\n" not in text
    assert pickle.loads(pickle.dumps(state)) == state


def test_an_empty_state_is_written_as_nothing() -> None:
    assert SystemState().to_json() == "{}"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"devices": [{"name": "x"}]}, r"devices\[0\]\.kind must be the type of the device"),
        ({"model": {"num_parameters": 1.5}}, r"model\.num_parameters must be a whole number of at least 0, got 1\.5"),
        ({"performance": {"latency_p50_s": -1}}, r"performance\.latency_p50_s must be finite and at least 0, got -1"),
        ({"communication": {"depth": "slow"}}, "communication.depth must be one of .quick., .full."),
        ({"parallel": {"mode": "fast"}}, r"parallel\.mode must be one of 'queue', 'lockstep', 'static', got 'fast'"),
        ({"timestamp_s": "now"}, "timestamp_s must be finite and at least 0, got 'now'"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_whole_name(found: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SystemState.from_json(json.dumps(found))


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ((0, None, None, None), "world_size must be at least 1, got 0"),
        ((8, 0, 1, 8), "tensor_parallel_size must be at least 1, got 0"),
        ((8, 2, 2, 3), "world_size must be 2 x 2 x 3, the degrees' product, got 8"),
    ],
)
def test_degrees_multiply_to_the_number_of_ranks(degrees: tuple[Any, ...], message: str) -> None:
    names = ("world_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**dict(zip(names, degrees, strict=True)))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_summed_and_the_fullest_device_named() -> None:
    devices = [
        DeviceState(kind="cuda", memory_used_bytes=30, memory_total_bytes=100, memory_allocated_bytes=20),
        DeviceState(kind="cuda", memory_used_bytes=45, memory_total_bytes=50, memory_allocated_bytes=40),
    ]

    assert MemoryState.of(devices, num_out_of_memory=2) == MemoryState(
        used_bytes=75, total_bytes=150, allocated_bytes=60, highest_used_frac=0.9, num_out_of_memory=2
    )


def test_a_sum_with_an_unknown_part_is_not_known() -> None:
    devices = [
        DeviceState(kind="cuda", memory_used_bytes=30, memory_total_bytes=100),
        DeviceState(kind="cpu", host_memory_used_bytes=1, host_memory_total_bytes=4),
    ]

    assert MemoryState.of(devices) == MemoryState(highest_used_frac=0.3, highest_host_used_frac=0.25)
    assert MemoryState.of([]) == MemoryState()


# --- model FLOP utilisation -------------------------------------------------------------------------------------------

LATENCY = Latency(10, 0.1, 0.2, 0.3, 80.0)
H200, A100 = DeviceState(kind="cuda", name="NVIDIA H200"), DeviceState(kind="cuda", name="NVIDIA A100-SXM4-80GB")


def model_of(**flops: float) -> ModelInfo:
    return ModelInfo(flops_per_sample=sum(flops.values()), flops_per_sample_by_dtype=flops)


def test_utilisation_is_throughput_over_the_summed_peaks() -> None:
    found = performance_of(LATENCY, 100.0, model_of(bfloat16=1e12), [H200, A100])

    assert found.flops_per_s == 1e14
    assert found.model_flop_utilization_frac == pytest.approx(1e14 / (989.5e12 + 312e12))
    assert not found.unknown
    assert (found.num_steps, found.latency_p50_s, found.latency_p90_s, found.latency_p99_s) == (10, 0.1, 0.2, 0.3)


def test_every_operation_counts_at_the_peak_of_its_own_type() -> None:
    found = performance_of(LATENCY, 1.0, model_of(bfloat16=312e12, float32=19.5e12), [A100])

    assert found.model_flop_utilization_frac == pytest.approx(2.0)


def test_ranks_of_a_replica_share_its_samples() -> None:
    one = performance_of(LATENCY, 100.0, model_of(bfloat16=1e12), [H200])
    two = performance_of(
        LATENCY,
        100.0,
        model_of(bfloat16=0.5e12),
        [H200, H200],
        ParallelConfig(world_size=2, tensor_parallel_size=2),
    )

    assert two.flops_per_s == one.flops_per_s
    assert two.model_flop_utilization_frac == pytest.approx((one.model_flop_utilization_frac or 0) / 2)


@pytest.mark.parametrize(
    ("samples_per_s", "model", "devices", "parallel", "reason"),
    [
        (None, model_of(bfloat16=1.0), [H200], None, "the throughput is not known"),
        (1.0, None, [H200], None, "the operations of a sample were not counted"),
        (1.0, ModelInfo(unknown={"flops_per_sample": "compiled"}), [H200], None, "compiled"),
        (1.0, model_of(bfloat16=1.0), [], None, "no device is known"),
        (1.0, model_of(), [H200], None, "no operation was counted"),
        (1.0, model_of(bfloat16=1.0), [H200, DeviceState(kind="cpu")], None, "no data sheet peak of bfloat16 is known"),
        (1.0, model_of(bfloat16=1.0), [DeviceState(kind="cuda", name="NVIDIA H199")], None, "known for NVIDIA H199"),
        (1.0, model_of(complex64=1.0), [H200], None, "no data sheet peak of complex64 is known for NVIDIA H200"),
        (1.0, model_of(bfloat16=1.0), [H200], ParallelConfig(world_size=2, pipeline_parallel_size=2), "one stage"),
    ],
)
def test_utilisation_is_not_known_for_a_reason(
    samples_per_s: float | None,
    model: ModelInfo | None,
    devices: list[DeviceState],
    parallel: ParallelConfig | None,
    reason: str,
) -> None:
    found = performance_of(LATENCY, samples_per_s, model, devices, parallel)

    assert found.model_flop_utilization_frac is None
    assert reason in found.unknown["model_flop_utilization_frac"]
    assert found.samples_per_s == samples_per_s


def test_operations_per_second_are_known_without_a_data_sheet() -> None:
    found = performance_of(LATENCY, 2.0, model_of(float32=5.0), [DeviceState(kind="cpu")])

    assert found.flops_per_s == 10.0
    assert set(found.unknown) == {"model_flop_utilization_frac"}


@given(st.lists(st.sampled_from(known_names()), min_size=1, max_size=4), st.floats(1e-3, 1e6), st.floats(1, 1e15))
def test_utilisation_with_one_type_is_the_quotient(names: list[str], samples_per_s: float, flops: float) -> None:
    devices = [DeviceState(kind="cuda", name=name) for name in names]
    found = performance_of(LATENCY, samples_per_s, model_of(float32=flops), devices)
    alone = [
        1 / (performance_of(LATENCY, 1.0, model_of(float32=1.0), [each]).model_flop_utilization_frac or 0)
        for each in devices
    ]

    assert found.model_flop_utilization_frac == pytest.approx(flops * samples_per_s / sum(alone))
