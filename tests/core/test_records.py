"""What a record refuses, and that nothing is lost in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.records import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner(Record):
    ranks: tuple[int, ...]
    speed_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer(Record):
    count: int | None = None
    is_on: bool | None = None
    mode: Literal["a", "b"] | None = None
    names: Mapping[str, float] = field(default_factory=dict, hash=False)
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    devices: tuple[DeviceState, ...] = ()


FULL = Outer(
    count=2**60,
    is_on=False,
    mode="b",
    names={"x": 0.1, "": 0.0},
    inner=Inner(ranks=()),
    inners=(Inner(ranks=(0, 1), speed_per_s=1 / 3), Inner(ranks=(2,))),
    devices=(DeviceState(kind="cuda", clock_event_reasons=("gpu_idle",), unknown={"power_w": "no"}),),
)


def test_a_record_comes_back_from_its_json() -> None:
    assert Outer.from_json(FULL.to_json()) == FULL
    assert Outer.from_json(FULL.to_json().encode()) == FULL
    assert Outer.from_json(Outer().to_json()) == Outer()


def test_only_what_is_known_is_written() -> None:
    assert Outer(count=0, is_on=False).to_json() == '{"count":0,"is_on":false}'
    assert Inner(ranks=()).to_json() == '{"ranks":[]}'


def test_lists_and_whole_numbers_become_what_the_types_say() -> None:
    made = Outer(names={"x": 3}, inners=[Inner(ranks=[1])])  # type: ignore[arg-type]

    assert made.inners == (Inner(ranks=(1,)),)
    assert isinstance(made.names["x"], float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": -1}, "count must be a whole number of at least 0, got -1"),
        ({"count": 1.5}, "count must be a whole number of at least 0, got 1.5"),
        ({"count": True}, "count must be a whole number"),
        ({"count": "7"}, "count must be a whole number of at least 0, got '7'"),
        ({"is_on": 1}, "is_on must be true or false, got 1"),
        ({"mode": "c"}, "mode must be one of 'a', 'b', got 'c'"),
        ({"names": {"x": float("nan")}}, r"names\.x must be finite and at least 0, got nan"),
        ({"names": {"x": float("inf")}}, r"names\.x must be finite"),
        ({"names": {1: 1.0}}, "names must be a mapping from text"),
        ({"names": [1.0]}, "names must be a mapping from text"),
        ({"inner": 5}, "inner must be a Inner, got 5"),
        ({"inners": 5}, "inners must be a sequence, got 5"),
        ({"inners": (None,)}, r"inners\[0\] must be a Inner, got None"),
        ({"devices": ("cuda",)}, r"devices\[0\] must be a DeviceState, got 'cuda'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Outer(**values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text must be JSON"),
        ('{"count":1', "text must be JSON, got '{\"count\":1'"),
        ("[]", r"Outer must be an object of fields, got \[\]"),
        ('{"count":-1}', "count must be a whole number of at least 0, got -1"),
        ('{"count":NaN}', "count must be a whole number"),
        ('{"inner":[]}', r"inner must be an object of fields, got \[\]"),
        ('{"inner":{}}', r"inner\.ranks must be there, got None"),
        ('{"inners":[{"ranks":[0]},{"ranks":[0,-2]}]}', r"inners\[1\]\.ranks\[1\] must be a whole number"),
        ('{"inners":{"ranks":[0]}}', "inners must be a sequence"),
        ('{"devices":[3]}', r"devices\[0\] must be an object of fields, got 3"),
        ('{"devices":[{}]}', r"devices\[0\]\.kind must be the type of the device, as text, got None"),
        ('{"names":{"x":null}}', r"names\.x must be finite and at least 0, got None"),
    ],
)
def test_json_that_does_not_fit_is_refused_by_the_whole_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Outer.from_json(text)


def test_what_another_version_adds_is_passed_over() -> None:
    assert Outer.from_json('{"count":1,"warp_factor":9,"inner":{"ranks":[],"more":{}}}') == Outer(
        count=1, inner=Inner(ranks=())
    )
