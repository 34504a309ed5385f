from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_hybrid.core.communication import CommunicationState, GroupLink, HostLink, PairLink
from lightning_hybrid.core.state import BalanceSnapshot, DeviceState, ReplicaRecord
from lightning_hybrid.reports.scalars import (
    custom_scalars_layout,
    device_scalars,
    link_scalars,
    overhead_us_per_step,
    scalars,
)


def snapshot_of(*replicas: ReplicaRecord, loader_idx: int = 0) -> BalanceSnapshot:
    return BalanceSnapshot(
        stage="validate", mode="queue", loader_idx=loader_idx, epoch=0, samples_total=80, replicas=replicas
    )


def test_every_known_number_has_its_tag() -> None:
    gpu = DeviceState(
        kind="cuda",
        name="NVIDIA L40S",
        memory_used_bytes=3 * 2**30,
        memory_total_bytes=12 * 2**30,
        memory_allocated_bytes=2**30,
        utilization_frac=0.75,
        host_cpu_frac=0.5,
        host_memory_used_bytes=2 * 2**30,
        host_memory_total_bytes=8 * 2**30,
        process_memory_bytes=2**29,
        timestamp_s=1.0,
    )
    fast = ReplicaRecord(
        replica=0, samples=30, steps=10, busy_s=3.0, wall_s=4.0, overhead_s=0.001, speed_per_s=10.0, device=gpu
    )
    slow = ReplicaRecord(replica=1, samples=10, steps=5, busy_s=1.0, wall_s=4.0, overhead_s=0.001, speed_per_s=5.0)

    assert scalars(snapshot_of(fast, slow)) == {
        "balance/validate/share_frac/replica0": 0.75,
        "balance/validate/share_frac/replica1": 0.25,
        "balance/validate/speed_samples_per_s/replica0": 10.0,
        "balance/validate/speed_samples_per_s/replica1": 5.0,
        "balance/validate/busy_frac/replica0": 0.75,
        "balance/validate/busy_frac/replica1": 0.25,
        "balance/validate/load_imbalance": 0.5,
        "balance/validate/throughput_samples_per_s": 10.0,
        "balance/validate/overhead_us_per_step": 200.0,
        "devices/validate/memory_used_gib/replica0": 3.0,
        "devices/validate/memory_allocated_gib/replica0": 1.0,
        "devices/validate/memory_frac/replica0": 0.25,
        "devices/validate/utilization_frac/replica0": 0.75,
        "devices/validate/host_cpu_frac/replica0": 0.5,
        "devices/validate/host_memory_used_gib/replica0": 2.0,
        "devices/validate/process_memory_gib/replica0": 0.5,
    }


def test_a_replica_with_longer_samples_is_not_shown_as_slow() -> None:
    short = ReplicaRecord(replica=0, samples=30, cost=30.0, speed_per_s=10.0, cost_speed_per_s=10.0)
    long = ReplicaRecord(replica=1, samples=10, cost=30.0, speed_per_s=3.3, cost_speed_per_s=10.0)
    shown = scalars(snapshot_of(short, long))

    assert shown["balance/validate/speed_samples_per_s/replica0"] == pytest.approx(10 / 1.5)
    assert shown["balance/validate/speed_samples_per_s/replica1"] == pytest.approx(10 / 1.5)


def test_the_share_of_collectives_is_shown_where_there_are_some() -> None:
    record = ReplicaRecord(replica=3, busy_s=3.0, collective_s=1.0)

    assert scalars(snapshot_of(record))["performance/validate/communication_frac/replica3"] == 0.25


def test_links_have_their_tags() -> None:
    state = CommunicationState(
        depth="quick",
        backend="nccl",
        device_kind="cuda",
        pairs=(
            PairLink(
                first=0,
                second=1,
                latency_s=2e-5,
                bandwidth_bytes_per_s=8.0 * 2**30,
                concurrent_bandwidth_bytes_per_s=6.0 * 2**30,
            ),
        ),
        group=GroupLink(num_ranks=4, all_reduce_latency_s=5e-5, all_reduce_bytes_per_s=2.0 * 2**30),
        hosts=(HostLink(rank=1, pinned_bytes_per_s=16.0 * 2**30),),
        message_bytes=4096,
        num_exchanges=1,
        num_all_reduces=1,
    )

    assert link_scalars(state, "test") == {
        "performance/test/link_latency_us": pytest.approx(20.0),
        "performance/test/link_gib_per_s": 8.0,
        "performance/test/link_contention_frac": 0.25,
        "performance/test/all_reduce_latency_us": pytest.approx(50.0),
        "performance/test/all_reduce_bus_gib_per_s": 3.0,
        "performance/test/host_to_device_pinned_gib_per_s/rank1": 16.0,
    }


def test_what_is_not_known_is_left_out() -> None:
    assert scalars(snapshot_of(ReplicaRecord(replica=0, device=DeviceState(kind="cpu")))) == {}
    assert scalars(snapshot_of()) == {}


def test_a_known_zero_is_kept() -> None:
    idle = ReplicaRecord(replica=0, wall_s=2.0, device=DeviceState(kind="cuda", utilization_frac=0.0))

    assert scalars(snapshot_of(idle)) == {
        "balance/validate/busy_frac/replica0": 0.0,
        "balance/validate/throughput_samples_per_s": 0.0,
        "devices/validate/utilization_frac/replica0": 0.0,
    }


def test_all_values_are_floats() -> None:
    record: dict[str, Any] = {"samples": 4, "wall_s": 2, "busy_s": 1, "speed_per_s": 4}

    assert {type(value) for value in scalars(snapshot_of(ReplicaRecord(replica=0, **record))).values()} == {float}


def test_a_second_loader_keeps_the_tags() -> None:
    record = ReplicaRecord(replica=0, samples=4, wall_s=2.0)

    assert scalars(snapshot_of(record, loader_idx=1)) == scalars(snapshot_of(record, loader_idx=0))


def test_overhead_is_that_of_the_worst_replica_and_unknown_before_the_first_step() -> None:
    light = ReplicaRecord(replica=0, steps=2, overhead_s=0.0001)
    heavy = ReplicaRecord(replica=1, steps=2, overhead_s=0.0003)

    assert overhead_us_per_step(snapshot_of(light, heavy)) == 150.0
    assert overhead_us_per_step(snapshot_of(ReplicaRecord(replica=0))) is None


def test_the_shared_charts_show_all_replicas_of_their_stage_only() -> None:
    layout = custom_scalars_layout(["validate", "test"])
    records = [ReplicaRecord(replica=r, samples=1, wall_s=1.0, busy_s=1.0, speed_per_s=1.0) for r in (0, 11)]
    tags = [*scalars(snapshot_of(*records)), "my-balance/validate/share_frac/replica0"]

    shown = {
        category: {
            title: [tag for tag in tags if any(re.match(pattern, tag) for pattern in patterns)]
            for title, (_, patterns) in charts.items()
        }
        for category, charts in layout.items()
    }

    assert shown == {
        "balance of validate": {
            "share of the samples, one line per replica": [
                "balance/validate/share_frac/replica0",
                "balance/validate/share_frac/replica11",
                "my-balance/validate/share_frac/replica0",
            ],
            "speed in samples per second, one line per replica": [
                "balance/validate/speed_samples_per_s/replica0",
                "balance/validate/speed_samples_per_s/replica11",
            ],
            "busy fraction, one line per replica": [
                "balance/validate/busy_frac/replica0",
                "balance/validate/busy_frac/replica11",
            ],
        },
        "balance of test": {
            "share of the samples, one line per replica": [],
            "speed in samples per second, one line per replica": [],
            "busy fraction, one line per replica": [],
        },
    }


def test_every_known_number_of_a_gpu_has_its_tag_and_unit() -> None:
    gpu = DeviceState(
        kind="cuda",
        active=True,
        memory_used_bytes=3 * 2**30,
        memory_total_bytes=12 * 2**30,
        memory_reserved_bytes=2**30,
        memory_others_bytes=2**29,
        utilization_frac=0.75,
        sm_active_frac=0.5,
        sm_clock_mhz=1400,
        clock_event_reasons=("sw_power_cap",),
        temperature_celsius=61,
        power_w=300.5,
        energy_j=2500.0,
        pcie_generation=4,
        pcie_tx_bytes_per_s=2.0**30,
        nvlink_rx_bytes_per_s=2.0**31,
        ecc_uncorrected=0,
        xid_events=(31, 79),
        host_load_average=1.5,
        timestamp_s=1.0,
    )

    assert device_scalars("fit", {3: gpu}) == {
        "devices/fit/memory_used_gib/rank3": 3.0,
        "devices/fit/memory_frac/rank3": 0.25,
        "devices/fit/memory_reserved_gib/rank3": 1.0,
        "devices/fit/memory_others_gib/rank3": 0.5,
        "devices/fit/utilization_frac/rank3": 0.75,
        "devices/fit/sm_active_frac/rank3": 0.5,
        "devices/fit/sm_clock_mhz/rank3": 1400.0,
        "devices/fit/temperature_celsius/rank3": 61.0,
        "devices/fit/power_w/rank3": 300.5,
        "devices/fit/energy_kj/rank3": 2.5,
        "devices/fit/pcie_tx_gib_per_s/rank3": 1.0,
        "devices/fit/nvlink_rx_gib_per_s/rank3": 2.0,
        "devices/fit/host_load_average/rank3": 1.5,
        "device_health/fit/active/rank3": 1.0,
        "device_health/fit/power_capped/rank3": 1.0,
        "device_health/fit/thermally_slowed/rank3": 0.0,
        "device_health/fit/pcie_generation/rank3": 4.0,
        "device_health/fit/ecc_uncorrected/rank3": 0.0,
        "device_health/fit/newest_xid/rank3": 79.0,
    }


def test_a_lost_device_is_shown_as_lost_and_a_silent_one_not_at_all() -> None:
    lost = DeviceState(kind="cuda", active=False, error="the GPU is lost", timestamp_s=1.0)

    assert device_scalars("fit", {0: lost}) == {"device_health/fit/active/rank0": 0.0}
    assert device_scalars("fit", {0: DeviceState(kind="cuda", power_w=1.0).silent("it does not answer")}) == {}


def test_devices_can_be_left_out() -> None:
    record = ReplicaRecord(replica=0, samples=4, device=DeviceState(kind="cuda", utilization_frac=0.5))

    assert scalars(snapshot_of(record), devices=False) == {"balance/validate/share_frac/replica0": 1.0}


def test_charts_of_devices_are_those_that_have_a_line() -> None:
    layout = custom_scalars_layout([], ["fit"], ["power_w", "host_cpu_frac", "pcie_width"])

    assert layout == {
        "devices in fit": {
            "power, W, one line per rank": ("Multiline", ["(.*-)?devices/fit/power_w/rank.*"]),
            "CPU use of the machine, 0 to 1, one line per rank": (
                "Multiline",
                ["(.*-)?devices/fit/host_cpu_frac/rank.*"],
            ),
        }
    }
