from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.probes import values
from lightning_hybrid.probes.values import Energy, Rate, Unknown


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        (values.frac, 55, 0.55),
        (values.frac, 101, None),
        (values.frac, float("nan"), None),
        (values.watts, 250_000, 250.0),
        (values.watts, 0xFFFFFFFF, None),
        (values.mhz, 0xFFFFFFFF, None),
        (values.celsius, -5, -5),
        (values.celsius, 0xFFFFFFFF, None),
        (values.num_bytes, 4_294_967_295 * 2**20, None),
        (values.num_bytes, 80 * 2**30, 80 * 2**30),
        (values.num_bytes, -1, None),
        (values.count, 0xFFFFFFFFFFFFFFFF, None),
        (values.count, 0, 0),
    ],
)
def test_only_what_can_be_is_a_value(read: Any, value: float, expected: float | None) -> None:
    found = read(value)

    assert isinstance(found, Unknown) if expected is None else found == expected


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2), st.integers(1, 10**15))
def test_a_rate_is_never_negative_and_never_above_its_bound(counters: list[int], most: int) -> None:
    rate = Rate(most)
    found = [rate.update(counter, float(second)) for second, counter in enumerate(counters)]

    assert isinstance(found[0], Unknown)
    assert all(isinstance(each, Unknown) or 0 <= each <= most for each in found)


def test_a_rate_covers_no_gap_of_which_nothing_is_known() -> None:
    rate = Rate(1e12)
    rate.update(100, 0.0)
    rate.update(Unknown("not supported"), 1.0)

    assert isinstance(rate.update(300, 2.0), Unknown)
    assert rate.update(400, 4.0) == 50.0


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_energy_only_grows(counters: list[int]) -> None:
    energy = Energy()
    found = [energy.update(counter, float(second)) for second, counter in enumerate(counters)]
    known = [each for each in found if not isinstance(each, Unknown)]

    assert known == sorted(known)
    assert all(each <= 20_000.0 * (second + 1) * 2 for second, each in enumerate(known))
