from __future__ import annotations

import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.device_state import DeviceProcess, DeviceState, clock_event_reasons, field_table
from lightning_hybrid.core.errors import ConfigError

FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(),
    str | None: st.none() | st.text(),
    int | None: st.none() | st.integers(-(2**63), 2**63),
    float | None: st.none() | FINITE,
    bool | None: st.none() | st.booleans(),
    tuple[str, ...] | None: st.none() | st.lists(st.text(), max_size=3).map(tuple),
    tuple[int, ...] | None: st.none() | st.lists(st.integers(0, 200), max_size=3).map(tuple),
    tuple[DeviceProcess, ...] | None: st.none()
    | st.lists(st.builds(DeviceProcess, st.integers(0), st.none() | st.integers(0)), max_size=3).map(tuple),
}
HINTS = get_type_hints(DeviceState)
STATES = st.fixed_dictionaries(
    {name: st.dictionaries(st.sampled_from(sorted(HINTS)), st.text()) if name == "unknown" else VALUES[HINTS[name]]
     for name in HINTS}
).map(lambda values: DeviceState(**values))  # fmt: skip


@given(STATES)
@settings(deadline=None)
def test_a_state_comes_back_from_its_json(state: DeviceState) -> None:
    assert DeviceState.from_json(state.to_json()) == state
    assert DeviceState.from_json(state.to_json().encode()) == state
    assert pickle.loads(pickle.dumps(state)) == state


@given(STATES)
@settings(deadline=None)
def test_the_compact_form_has_no_none_and_no_lists_that_grow(state: DeviceState) -> None:
    found = json.loads(state.to_json(compact=True))

    assert None not in found.values()
    assert not {"processes", "unknown"} & set(found)
    assert DeviceState.from_dict(found).to_dict(compact=True) == state.to_dict(compact=True)


def test_little_is_written_of_a_device_of_which_little_is_known() -> None:
    assert DeviceState(kind="cpu", host_cpu_frac=0.5).to_json() == '{"kind":"cpu","host_cpu_frac":0.5}'


def test_a_full_state_is_short_enough_to_be_published_often() -> None:
    values = {
        each.name: 123456789.0
        for each in fields(DeviceState)
        if each.name not in ("kind", "unknown", "clock_event_reasons", "xid_events", "processes")
    }

    assert len(DeviceState(kind="cuda", **values).to_json(compact=True)) < 4096  # type: ignore[arg-type]


def test_what_another_version_adds_is_passed_over() -> None:
    assert DeviceState.from_dict({"kind": "cuda", "warp_factor": 9, "power_w": 5}) == DeviceState(
        kind="cuda", power_w=5
    )


@pytest.mark.parametrize("found", [{}, {"kind": None}, {"kind": 3}])
def test_a_state_of_no_kind_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kind must be the type of the device"):
        DeviceState.from_dict(found)


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0, ()),
        (1, ("gpu_idle",)),
        (0x8C, ("sw_power_cap", "hw_slowdown", "hw_power_brake_slowdown")),
        (0x800, ("bit_0x800",)),
    ],
)
def test_reasons_of_the_clock_have_names(bits: int, names: tuple[str, ...]) -> None:
    assert clock_event_reasons(bits) == names


def test_every_field_says_what_it_is_where_it_is_read_and_when_it_is_not_known() -> None:
    for each in fields(DeviceState):
        assert all(each.metadata[key] for key in ("what", "source", "absent")), each.name
    assert len(field_table().splitlines()) == 2 + len(fields(DeviceState))


def test_states_can_be_hashed_and_compared() -> None:
    one = DeviceState(kind="cuda", power_w=5, unknown={"name": "not supported"})

    assert hash(one) == hash(DeviceState(kind="cuda", power_w=5))
    assert one != DeviceState(kind="cuda", power_w=5)
    assert one.is_mig is False
    assert DeviceState(kind="cuda", mig_gpu_instance=0).is_mig is True


def test_the_page_on_telemetry_has_the_table_of_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()

    assert f"## Fields\n\n{field_table()}\n" in page
