from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core import recommend
from lightning_hybrid.core.causes import CAUSES, causes_of_slowness
from lightning_hybrid.core.conditions import UNKNOWN, Cause, Condition, Evidence
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.state import DeviceState, ReplicaRecord

GIB = 2**30


def gpu(**changes: Any) -> DeviceState:
    """A GPU at work with nothing wrong."""
    healthy: dict[str, Any] = {
        "kind": "cuda",
        "name": "NVIDIA L40S",
        "clock_event_reasons": (),
        "sm_clock_mhz": 2400,
        "sm_clock_max_mhz": 2520,
        "memory_clock_mhz": 9000,
        "memory_clock_max_mhz": 9001,
        "temperature_celsius": 60,
        "temperature_slowdown_celsius": 90,
        "power_w": 330.0,
        "power_limit_w": 350.0,
        "pcie_width": 16,
        "memory_others_bytes": 0,
        "memory_total_bytes": 40 * GIB,
        "host_steal_frac": 0.0,
        "host_throttled_frac": 0.0,
        "host_cpu_cores": 8.0,
    }
    return DeviceState(**(healthy | changes))


def condition(speed_per_s: float | None = 100.0, wait_frac: float | None = 0.0, **changes: Any) -> Condition:
    return Condition(speed_per_s=speed_per_s, devices=(gpu(**changes),), wait_frac=wait_frac)


def found(slow: Condition, *others: Condition, threshold_frac: float = 0.25) -> list[str]:
    others = others or (condition(), condition())
    return [cause.name for cause in causes_of_slowness(slow, others, threshold_frac=threshold_frac)]


BAD: dict[str, tuple[dict[str, Any], tuple[Evidence, ...]]] = {
    "thermal_throttling": (
        {"clock_event_reasons": ("hw_slowdown", "hw_thermal_slowdown"), "temperature_celsius": 91},
        (
            Evidence("clock_event_reasons", "hw_thermal_slowdown", None),
            Evidence("temperature_celsius", 91, 90),
            Evidence("sm_clock_mhz", 2400, 2016.0),
        ),
    ),
    "hardware_slowdown": (
        {"clock_event_reasons": ("hw_power_brake_slowdown",), "sm_clock_mhz": 2100},
        (
            Evidence("clock_event_reasons", "hw_power_brake_slowdown", None),
            Evidence("sm_clock_mhz", 2100, 2016.0),
        ),
    ),
    "power_cap": (
        {"clock_event_reasons": ("sw_power_cap",), "power_w": 198.0, "power_limit_w": 200.0},
        (
            Evidence("clock_event_reasons", "sw_power_cap", None),
            Evidence("power_w", 198.0, 200.0),
            Evidence("sm_clock_mhz", 2400, 2016.0),
        ),
    ),
    "low_clocks": (
        {"clock_event_reasons": ("applications_clocks_setting",), "sm_clock_mhz": 1005},
        (
            Evidence("sm_clock_mhz", 1005, 2016.0),
            Evidence("clock_event_reasons", "applications_clocks_setting", None),
        ),
    ),
    "co_tenants": (
        {"memory_others_bytes": 10 * GIB},
        (Evidence("memory_others_bytes", 10 * GIB, 2.0 * GIB),),
    ),
    "narrow_pcie": ({"pcie_width": 4}, (Evidence("pcie_width", 4, 16),)),
    "host_steal": ({"host_steal_frac": 0.3}, (Evidence("host_steal_frac", 0.3, 0.05),)),
    "cpu_quota": (
        {"host_throttled_frac": 0.5, "host_cpu_cores": 1.5},
        (Evidence("host_throttled_frac", 0.5, 0.05), Evidence("host_cpu_cores", 1.5, None)),
    ),
    "dataloader_wait": ({"wait_frac": 0.6}, (Evidence("wait_frac", 0.6, 0.1),)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reading_of_a_slow_replica_is_named_with_its_numbers(name: str) -> None:
    reading, evidence = BAD[name]

    assert causes_of_slowness(condition(50.0, **reading), [condition(), condition()]) == (
        Cause(name=name, evidence=evidence),
    )


def test_every_cause_has_a_case_above_and_a_remedy() -> None:
    assert tuple(BAD) == CAUSES == tuple(recommend._REMEDIES)


@pytest.mark.parametrize("name", BAD)
def test_what_all_replicas_have_alike_explains_nothing(name: str) -> None:
    reading, _ = BAD[name]

    assert found(condition(30.0, **reading), condition(**reading), condition(**reading)) == ["unknown"]
    assert found(condition(30.0, **reading), condition(**reading), condition()) == ["unknown"]


@pytest.mark.parametrize("name", BAD)
def test_one_of_many_fast_replicas_that_has_it_too_refutes_nothing(name: str) -> None:
    reading, _ = BAD[name]

    assert found(condition(30.0, **reading), condition(**reading), condition(), condition()) == [name]


@pytest.mark.parametrize("name", BAD)
def test_another_straggler_with_the_same_trouble_refutes_nothing(name: str) -> None:
    reading, _ = BAD[name]

    others = [condition(35.0, **reading), condition(), condition(), condition(40.0, **reading), condition()]
    assert found(condition(30.0, **reading), *others) == [name]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reading_of_a_replica_that_is_not_slow_is_no_cause(name: str) -> None:
    reading, _ = BAD[name]
    wait_frac = 0.15 if name == "dataloader_wait" else 0.0

    assert found(condition(95.0, **(reading | {"wait_frac": wait_frac}))) == []


@pytest.mark.parametrize("name", BAD)
def test_nothing_is_claimed_where_the_reading_of_the_fast_replicas_is_not_known(name: str) -> None:
    reading, _ = BAD[name]
    unread = Condition(speed_per_s=100.0, devices=(DeviceState(kind="cuda"),))

    assert found(condition(50.0, **reading), unread) == ["unknown"]


def test_nothing_is_claimed_where_nothing_was_read() -> None:
    bare, unread = Condition(speed_per_s=10.0), Condition(speed_per_s=10.0, devices=(DeviceState(kind="cuda"),))

    assert causes_of_slowness(bare, [condition()]) == (UNKNOWN,)
    assert causes_of_slowness(unread, [condition()]) == (UNKNOWN,)


@pytest.mark.parametrize("name", sorted(DeviceState.__dataclass_fields__.keys() - {"kind", "unknown"}))
def test_any_single_missing_reading_takes_no_other_cause_away(name: str) -> None:
    reading = {key: value for bad, _ in BAD.values() for key, value in bad.items()}
    reading |= {"clock_event_reasons": ("hw_thermal_slowdown", "sw_power_cap"), name: None}
    named = found(condition(30.0, **reading))

    assert "unknown" not in named
    assert named == [each for each in CAUSES if each in named]
    assert ("narrow_pcie" in named) == (name != "pcie_width")


def test_several_causes_come_in_order_each_with_its_own_evidence() -> None:
    slow = condition(30.0, 0.5, host_steal_frac=0.2, memory_others_bytes=8 * GIB, clock_event_reasons=("sw_power_cap",))
    causes = causes_of_slowness(slow, [condition()])

    assert [cause.name for cause in causes] == ["power_cap", "co_tenants", "host_steal", "dataloader_wait"]
    assert causes[2].evidence == (Evidence("host_steal_frac", 0.2, 0.05),)


def test_a_lower_power_limit_that_is_reached_is_a_cause_although_all_are_capped() -> None:
    capped = {"clock_event_reasons": ("sw_power_cap",)}
    low = condition(50.0, power_w=195.0, power_limit_w=200.0, **capped)

    assert causes_of_slowness(low, [condition(**capped)]) == (
        Cause(name="power_cap", evidence=(Evidence("power_limit_w", 200.0, 350.0), Evidence("power_w", 195.0, 200.0))),
    )
    assert found(condition(50.0, power_w=120.0, power_limit_w=200.0)) == ["unknown"]
    assert found(low, condition(name="NVIDIA L4", **capped)) == ["unknown"]


def test_a_device_that_rests_clocks_down_of_itself() -> None:
    assert found(condition(50.0, clock_event_reasons=("gpu_idle",), sm_clock_mhz=210)) == ["unknown"]
    assert found(condition(50.0, clock_event_reasons=None, sm_clock_mhz=210)) == ["unknown"]


def test_a_slow_memory_clock_is_a_low_clock() -> None:
    (cause,) = causes_of_slowness(condition(50.0, memory_clock_mhz=405), [condition()])

    assert cause == Cause(name="low_clocks", evidence=(Evidence("memory_clock_mhz", 405, pytest.approx(7200.8)),))


def test_heat_is_not_told_a_second_time_as_a_hardware_slowdown() -> None:
    assert found(condition(50.0, clock_event_reasons=("hw_slowdown", "sw_thermal_slowdown"))) == ["thermal_throttling"]
    assert found(condition(50.0, clock_event_reasons=("hw_slowdown",))) == ["hardware_slowdown"]


def test_a_little_more_of_what_others_have_too_is_no_cause() -> None:
    assert found(condition(50.0, host_steal_frac=0.08), condition(host_steal_frac=0.05)) == ["unknown"]
    assert found(condition(50.0, sm_clock_mhz=2000), condition(sm_clock_mhz=2020)) == ["unknown"]
    assert found(condition(50.0, pcie_width=8), condition(pcie_width=8)) == ["unknown"]


def test_the_worst_device_of_a_replica_of_several_counts() -> None:
    slow = Condition(speed_per_s=50.0, devices=(gpu(), gpu(pcie_width=1), gpu()))

    assert found(slow) == ["narrow_pcie"]


def test_a_replica_is_compared_with_how_it_was_itself() -> None:
    before, now = condition(100.0), condition(60.0, memory_others_bytes=20 * GIB)

    assert found(now, before) == ["co_tenants"]
    assert found(before, now) == []


def test_a_replica_that_waits_but_steps_fast_has_a_slow_loader_and_no_slow_device() -> None:
    slow = condition(100.0, 0.7, clock_event_reasons=("hw_thermal_slowdown",))

    assert found(slow) == ["dataloader_wait"]


@pytest.mark.parametrize("others", [[], [condition(None)], [condition(None), Condition(speed_per_s=None)]])
def test_without_two_speeds_nobody_is_slow(others: list[Condition]) -> None:
    assert causes_of_slowness(condition(1.0), others) == ()
    assert causes_of_slowness(condition(None, clock_event_reasons=("sw_power_cap",)), [condition()]) == ()


def test_the_threshold_is_the_callers() -> None:
    assert found(condition(70.0), threshold_frac=0.5) == []
    assert found(condition(70.0), threshold_frac=0.4) == ["unknown"]
    with pytest.raises(ConfigError, match=r"threshold_frac must be at least 0, got -1"):
        causes_of_slowness(condition(), [], threshold_frac=-1)


def test_a_condition_is_what_the_record_tells() -> None:
    device = gpu()
    record = ReplicaRecord(replica=0, wall_s=4.0, wait_s=1.0, device=device)

    assert Condition.of(record, 7.0) == Condition(speed_per_s=7.0, devices=(device,), wait_frac=0.25)
    assert Condition.of(ReplicaRecord(replica=0), None) == Condition(speed_per_s=None)


def test_a_cause_in_words_has_its_numbers_and_limits() -> None:
    assert UNKNOWN.format() == "unknown"
    (cause,) = causes_of_slowness(condition(50.0, **BAD["thermal_throttling"][0]), [condition()])
    assert cause.format() == (
        "thermal throttling (clock_event_reasons hw_thermal_slowdown; temperature_celsius 91, limit 90;"
        " sm_clock_mhz 2,400, limit 2,016)"
    )


# --- any readings ----------------------------------------------------------------------------------------------------

NUMBERS = st.none() | st.floats() | st.integers(-1, 2**64)
REASONS = st.none() | st.lists(st.sampled_from(["gpu_idle", "sw_power_cap", "hw_slowdown", "sw_thermal_slowdown"]))
READ = [each.name for each in fields(DeviceState) if each.name.endswith(("_mhz", "_celsius", "_w", "_bytes", "_frac"))]
STATES = st.fixed_dictionaries(
    {"clock_event_reasons": REASONS.map(lambda each: None if each is None else tuple(each)), "pcie_width": NUMBERS},
    optional=dict.fromkeys(READ, NUMBERS),
).map(lambda read: DeviceState(kind="cuda", name="a", **read))
CONDITIONS = st.builds(
    Condition, speed_per_s=NUMBERS, devices=st.lists(STATES, max_size=2).map(tuple), wait_frac=NUMBERS
)


@given(slow=CONDITIONS, others=st.lists(CONDITIONS, max_size=3))
@settings(deadline=None, max_examples=60)
def test_whatever_was_read_there_is_an_answer_in_order(slow: Condition, others: list[Condition]) -> None:
    causes = causes_of_slowness(slow, others)
    names = [cause.name for cause in causes]

    assert names in ([], ["unknown"]) or names == [name for name in CAUSES if name in names]
    for cause in causes:
        assert cause.format()
        assert all(evidence.value is not None for evidence in cause.evidence)
        assert bool(cause.evidence) == (cause != UNKNOWN)
