from __future__ import annotations

import io
from dataclasses import replace

from lightning_hybrid.core.recommend import Recommendation
from lightning_hybrid.core.state import BalanceSnapshot, DeviceState, ReplicaRecord
from lightning_hybrid.reports.console import format_table, print_table

FAST = ReplicaRecord(
    replica=0,
    samples=1200,
    steps=150,
    busy_s=5.9,
    wait_s=0.05,
    wall_s=6.0,
    overhead_s=0.006,
    speed_per_s=203.4,
    cells_stolen=3,
    device=DeviceState(kind="cuda", name="NVIDIA L40S", memory_used_bytes=12 * 2**30, memory_total_bytes=45 * 2**30),
)
SLOW = ReplicaRecord(
    replica=1,
    samples=400,
    steps=50,
    busy_s=5.9,
    wait_s=0.1,
    wall_s=6.0,
    overhead_s=0.001,
    speed_per_s=67.8,
    device=DeviceState(kind="cpu", process_memory_bytes=2**29),
)
RECOMMENDATION = Recommendation(
    id="a/b",
    kind="a",
    priority="high",
    action="Do this",
    description="Because of that.",
    evidence={},
    expected_gain_s=None,
    expected_gain_frac=None,
    how_to="Like so.",
)


def snapshot_of(*replicas: ReplicaRecord, loader_idx: int = 0) -> BalanceSnapshot:
    return BalanceSnapshot(
        stage="predict", mode="queue", loader_idx=loader_idx, epoch=0, samples_total=1600, replicas=replicas
    )


def test_the_table_is_aligned_and_complete() -> None:
    assert format_table(snapshot_of(FAST, SLOW), [RECOMMENDATION]).splitlines() == [
        "lightning_hybrid, predict, queue mode: 1,600 of 1,600 samples in 6.00 s",
        "replica  device       share %  samples  speed /s  busy %  waited s  stolen  memory GiB",
        "      0  NVIDIA L40S     75.0    1,200     203.4    98.3      0.05       3  12.00 of 45.00",
        "      1  cpu             25.0      400      67.8    98.3      0.10       0  0.50 process",
        "all replicas: 266.7 samples/s, load imbalance 0.000 (0 is even), own overhead 40 us per step",
        "Recommendation (high priority): Do this.",
        "  Because of that.",
        "  Like so.",
    ]


def test_unknown_is_a_dash() -> None:
    assert format_table(snapshot_of(ReplicaRecord(replica=0))).splitlines()[1:] == [
        "replica  device  share %  samples  speed /s  busy %  waited s  stolen  memory GiB",
        "      0  -             -        0         -       -      0.00       0  -",
        "all replicas: - samples/s, load imbalance - (0 is even), own overhead - us per step",
    ]


def test_a_stream_that_goes_on_has_no_total() -> None:
    going_on = replace(snapshot_of(FAST, SLOW), samples_total=None)

    assert format_table(going_on).splitlines()[0] == "lightning_hybrid, predict, queue mode: 1,600 samples in 6.00 s"


def test_a_device_without_a_driver_reading_shows_what_is_allocated() -> None:
    record = ReplicaRecord(replica=0, device=DeviceState(kind="mps", memory_allocated_bytes=2**30))

    assert format_table(snapshot_of(record)).splitlines()[2].endswith("1.00 allocated")


def test_a_second_loader_is_named() -> None:
    assert " samples of loader 1 in " in format_table(snapshot_of(FAST, loader_idx=1))


def test_a_run_without_replicas_is_a_table_without_rows() -> None:
    assert len(format_table(snapshot_of()).splitlines()) == 3


def test_long_texts_are_wrapped() -> None:
    lines = format_table(snapshot_of(FAST, FAST, SLOW)).splitlines()

    assert max(len(line) for line in lines) <= 100


def test_printing_writes_the_table_after_a_blank_line() -> None:
    file = io.StringIO()

    print_table(snapshot_of(FAST), file=file)

    assert file.getvalue() == f"\n{format_table(snapshot_of(FAST))}\n"
