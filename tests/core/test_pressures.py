from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.core.pressures import load_imbalance, memory_pressure, performance_pressure
from lightning_hybrid.core.state import DeviceState, ReplicaRecord


def records(*devices: DeviceState | None) -> list[ReplicaRecord]:
    return [ReplicaRecord(replica=r, device=device) for r, device in enumerate(devices)]


def gpu(used: int | None, total: int | None) -> DeviceState:
    return DeviceState(kind="cuda", memory_used_bytes=used, memory_total_bytes=total)


def test_memory_pressure_is_that_of_the_fullest_replica() -> None:
    assert memory_pressure(records(gpu(30, 80), gpu(72, 80), gpu(8, 10))) == 0.9


def test_unknown_memory_is_no_pressure() -> None:
    assert memory_pressure([]) is None
    assert memory_pressure(records(None, gpu(None, 80), gpu(30, None), gpu(30, 0))) is None
    assert memory_pressure(records(None, gpu(20, 80))) == 0.25


def test_the_memory_of_a_cpu_is_that_of_its_machine() -> None:
    cpu = DeviceState(kind="cpu", host_memory_used_bytes=6, host_memory_total_bytes=8)

    assert memory_pressure(records(cpu)) == 0.75
    assert memory_pressure(records(DeviceState(kind="cpu"))) is None


def test_the_machine_is_not_the_memory_of_a_gpu() -> None:
    busy_host = DeviceState(kind="cuda", host_memory_used_bytes=8, host_memory_total_bytes=8)

    assert memory_pressure(records(busy_host)) is None


@pytest.mark.parametrize(
    ("target_per_s", "measured_per_s", "pressure"),
    [(80.0, 100.0, 0.8), (100.0, 50.0, 2.0), (None, 50.0, None), (100.0, None, None), (100.0, 0.0, None)],
)
def test_performance_pressure_needs_a_target(
    target_per_s: float | None, measured_per_s: float | None, pressure: float | None
) -> None:
    assert performance_pressure(target_per_s, measured_per_s) == pressure


@pytest.mark.parametrize(
    ("scores", "imbalance"),
    [
        ([0.2, 0.6], 0.5),
        ([0.5, 0.5, 0.5], 0.0),
        ([0.0, 0.7], 1.0),
        ([0.2, None, 0.6], 0.5),
        ([0.0, 0.0], None),
        ([0.4], None),
        ([None, 0.4], None),
        ([], None),
    ],
)
def test_load_imbalance_is_the_spread_of_the_scores(scores: list[float | None], imbalance: float | None) -> None:
    assert load_imbalance(scores) == (None if imbalance is None else pytest.approx(imbalance))


@given(st.lists(st.none() | st.floats(0, 1)))
def test_load_imbalance_is_a_fraction_where_it_is_defined(scores: list[float | None]) -> None:
    imbalance = load_imbalance(scores)

    assert imbalance is None or 0 <= imbalance <= 1
