from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.state import BalanceSnapshot, DeviceState, ReplicaRecord, StepShape

FINITE = st.floats(allow_nan=False, allow_infinity=False)
DEVICES = st.builds(
    DeviceState,
    kind=st.sampled_from(["cpu", "cuda"]),
    name=st.none() | st.text(),
    memory_used_bytes=st.none() | st.integers(0, 2**40),
    utilization_frac=st.none() | FINITE,
)
RECORDS = st.builds(
    ReplicaRecord,
    replica=st.integers(0, 7),
    samples=st.integers(0),
    busy_s=FINITE,
    speed_per_s=st.none() | FINITE,
    cost=st.none() | FINITE,
    newest_steps=st.lists(
        st.builds(StepShape, st.integers(1), st.integers(1), st.none() | st.integers(0), FINITE), max_size=3
    ).map(tuple),
    finished=st.booleans(),
    device=st.none() | DEVICES,
)


def snapshot_of(*records: ReplicaRecord) -> BalanceSnapshot:
    return BalanceSnapshot(stage="predict", mode="queue", loader_idx=0, epoch=1, samples_total=100, replicas=records)


@given(RECORDS)
@settings(deadline=None)
def test_a_record_comes_back_from_its_json(record: ReplicaRecord) -> None:
    text = record.to_json()

    assert "\n" not in text
    assert ReplicaRecord.from_json(text) == record
    assert ReplicaRecord.from_json(text.encode()) == record


@pytest.mark.parametrize(
    ("used", "total", "frac"),
    [(30, 120, 0.25), (0, 120, 0.0), (None, 120, None), (30, None, None), (30, 0, None)],
)
def test_the_used_share_of_memory_is_known_where_both_parts_are(
    used: int | None, total: int | None, frac: float | None
) -> None:
    assert DeviceState(kind="cuda", memory_used_bytes=used, memory_total_bytes=total).memory_frac == frac


@pytest.mark.parametrize(("busy_s", "wall_s", "frac"), [(3.0, 4.0, 0.75), (5.0, 4.0, 1.0), (0.0, 4.0, 0.0)])
def test_the_busy_share_is_never_more_than_one(busy_s: float, wall_s: float, frac: float) -> None:
    assert ReplicaRecord(replica=0, busy_s=busy_s, wall_s=wall_s).busy_frac == frac


@pytest.mark.parametrize(
    ("collective_s", "busy_s", "frac"), [(1.0, 3.0, 0.25), (0.0, 3.0, 0.0), (None, 3.0, None), (0.0, 0.0, None)]
)
def test_the_share_of_collectives_is_of_the_whole_step_time(
    collective_s: float | None, busy_s: float, frac: float | None
) -> None:
    assert ReplicaRecord(replica=0, collective_s=collective_s, busy_s=busy_s).collective_frac == frac


def test_nothing_is_said_of_a_replica_that_has_not_begun() -> None:
    record = ReplicaRecord(replica=0)

    assert record.busy_frac is None
    assert record.overhead_s_per_step is None
    assert record.speed_per_s is None


def test_overhead_is_counted_per_step() -> None:
    assert ReplicaRecord(replica=0, overhead_s=0.5, steps=4).overhead_s_per_step == 0.125


def test_a_snapshot_adds_up_its_replicas() -> None:
    fast = ReplicaRecord(replica=0, samples=30, busy_s=6.0, wall_s=8.0)
    slow = ReplicaRecord(replica=1, samples=10, busy_s=2.0, wall_s=10.0)
    snapshot = snapshot_of(fast, slow)

    assert snapshot.samples_done == 40
    assert snapshot.wall_s == 10.0
    assert snapshot.throughput_per_s == 4.0
    assert snapshot.share_frac(slow) == 0.25
    assert snapshot.load_imbalance == 0.5


@pytest.mark.parametrize("records", [(), (ReplicaRecord(replica=0),), (ReplicaRecord(replica=0),) * 2])
def test_a_snapshot_of_nothing_done_says_so(records: tuple[ReplicaRecord, ...]) -> None:
    snapshot = snapshot_of(*records)

    assert snapshot.samples_done == 0
    assert snapshot.throughput_per_s is None
    assert snapshot.load_imbalance is None
    assert [snapshot.share_frac(record) for record in records] == [None] * len(records)


def test_one_replica_has_no_imbalance() -> None:
    assert snapshot_of(ReplicaRecord(replica=0, busy_s=3.0)).load_imbalance is None


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=8))
@settings(deadline=None)
def test_imbalance_lies_between_zero_and_one(busy: list[float]) -> None:
    record = ReplicaRecord(replica=0)
    imbalance = snapshot_of(*(replace(record, busy_s=seconds) for seconds in busy)).load_imbalance

    assert imbalance is not None
    assert 0 <= imbalance < 1
    assert (imbalance == 0) == (len(set(busy)) == 1)


def costly(
    replica: int, samples: int, cost: float | None, speed_per_s: float, cost_speed_per_s: float | None
) -> ReplicaRecord:
    return ReplicaRecord(
        replica=replica,
        samples=samples,
        cost=cost,
        busy_s=samples / speed_per_s,
        speed_per_s=speed_per_s,
        cost_speed_per_s=cost_speed_per_s,
        mean_cost_speed_per_s=cost_speed_per_s,
    )


def test_speeds_are_told_in_samples_of_mean_cost() -> None:
    light, heavy = costly(0, 30, 30.0, 10.0, 10.0), costly(1, 10, 90.0, 1.0, 9.0)
    snapshot = snapshot_of(light, heavy, ReplicaRecord(replica=2, cost=0.0))

    assert snapshot.cost_per_sample == 3.0
    assert [snapshot.speed_of(record) for record in snapshot.replicas] == [pytest.approx(10 / 3), 3.0, None]
    assert [snapshot.mean_speed_of(record) for record in snapshot.replicas] == [pytest.approx(10 / 3), 3.0, None]


def test_speeds_are_told_in_samples_where_a_replica_has_not_counted_costs() -> None:
    snapshot = snapshot_of(costly(0, 30, 30.0, 10.0, 10.0), costly(1, 10, None, 1.0, None))

    assert snapshot.cost_per_sample is None
    assert [snapshot.speed_of(record) for record in snapshot.replicas] == [10.0, 1.0]
    assert [snapshot.mean_speed_of(record) for record in snapshot.replicas] == [10.0, 1.0]


def test_samples_that_cost_nothing_are_told_as_samples() -> None:
    snapshot = snapshot_of(costly(0, 30, 0.0, 10.0, None))

    assert snapshot.cost_per_sample is None
    assert snapshot.speed_of(snapshot.replicas[0]) == 10.0
