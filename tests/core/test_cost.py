from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lightning_hybrid.core.cost import Costs, check_cost, check_costs
from lightning_hybrid.core.errors import CostError

COSTS = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(0, 1e6))


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def floats(*values: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


# --- Costs ----------------------------------------------------------------------------------------------------------


def test_equal_costs_are_one_each() -> None:
    costs = Costs.equal(3)

    assert len(costs) == 3
    assert costs.compute.tolist() == [1.0, 1.0, 1.0]
    assert costs.memory is None
    assert costs.io is None


def test_taking_costs_keeps_the_order_that_was_asked_for() -> None:
    taken = Costs(compute=floats(1, 2, 3), memory=floats(4, 5, 6)).take(ints(2, 0))

    assert taken.compute.tolist() == [3.0, 1.0]
    assert taken.memory is not None
    assert taken.memory.tolist() == [6.0, 4.0]
    assert taken.io is None


def test_costs_of_cells_are_sums_and_an_empty_cell_costs_nothing() -> None:
    cells = Costs(compute=floats(1, 2, 3, 4), io=floats(1, 0, 0, 1)).of_cells(ints(0, 2, 2, 3, 4))

    assert cells.compute.tolist() == [3.0, 0.0, 3.0, 4.0]
    assert cells.io is not None
    assert cells.io.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert cells.memory is None


def test_costs_of_no_cells_are_none() -> None:
    assert len(Costs.equal(0).of_cells(ints(0))) == 0


def test_costs_that_are_all_zero_count_as_equal_in_cells() -> None:
    assert Costs(compute=floats(0, 0, 0)).of_cells(ints(0, 2, 3)).compute.tolist() == [2.0, 1.0]


def test_equal_samples_make_exactly_equal_cells() -> None:
    cells = Costs(compute=np.full(3000, 0.1)).of_cells(np.arange(0, 3001, 10, dtype=np.int64))

    assert len(set(cells.compute.tolist())) == 1


@given(COSTS, st.data())
def test_cells_add_up_to_their_samples(values: np.ndarray[Any, np.dtype[np.float64]], data: st.DataObject) -> None:
    inner = data.draw(st.lists(st.integers(0, len(values)), max_size=10))
    cells = Costs(compute=values).of_cells(ints(0, *sorted(inner), len(values)))

    assert (cells.compute >= 0).all()
    total = values.sum() if values.any() else len(values)
    assert cells.compute.sum() == pytest.approx(total)


def test_a_digest_tells_costs_apart_and_their_kinds() -> None:
    costs = Costs(compute=floats(1, 2))

    assert costs.digest == Costs(compute=floats(1, 2)).digest
    assert len(costs.digest) == 16
    assert int(costs.digest, 16) >= 0
    others = [
        Costs(compute=floats(2, 1)),
        Costs(compute=floats(1, 2), memory=floats(1, 2)),
        Costs(compute=floats(1, 2), io=floats(1, 2)),
    ]
    assert len({costs.digest, *(other.digest for other in others)}) == 4


def test_kinds_of_unlike_lengths_are_refused() -> None:
    with pytest.raises(CostError, match=r"memory costs must be as many as compute costs, 2, got shape \(3,\)"):
        Costs(compute=floats(1, 2), memory=floats(1, 2, 3))


# --- check_costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [[1, 2.5, 0], (1, 2.5, 0), np.array([1, 2.5, 0], dtype=np.float32), [Decimal(1), np.float64(2.5), False]]
)
def test_good_costs_come_back_as_an_array(values: Any) -> None:
    costs = check_costs(values, 3)

    assert costs.dtype == np.float64
    assert costs.tolist() == [1.0, 2.5, 0.0]


def test_the_array_is_a_copy() -> None:
    values = floats(1, 2)
    check_costs(values, 2)[0] = 9.0

    assert values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("num", [0, 3])
def test_costs_that_are_all_zero_count_as_all_equal(num: int) -> None:
    assert check_costs([0.0] * num, num).tolist() == [1.0] * num


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, -2.0, -3.0], r"cost of sample 1 must be at least 0 and finite, got -2\.0"),
        ([1.0, 2.0, math.nan], "cost of sample 2 must be at least 0 and finite, got nan"),
        ([math.inf, 2.0, math.nan], "cost of sample 0 must be at least 0 and finite, got inf"),
        (np.array([1, -1, 1]), r"cost of sample 1 must be at least 0 and finite, got -1\.0"),
        ([1.0, None, -1.0], "cost of sample 1 must be a number, got None"),
        ([1.0, "2", 3.0], "cost of sample 1 must be a number, got '2'"),
        (["1", "2", "3"], "cost of sample 0 must be a number, got '1'"),
        ([1.0, 2.0, [3.0]], r"cost of sample 2 must be a number, got \[3\.0\]"),
        ([[1.0], [2.0], [3.0]], r"cost of sample 0 must be a number, got \[1\.0\]"),
        ([1.0, 2.0, 1j], "cost of sample 0 must be a number|cost of sample 2 must be a number, got 1j"),
        ([1.0, 2.0], "cost must have one entry per sample, 3, got 2"),
        ([1.0] * 4, "cost must have one entry per sample, 3, got 4"),
    ],
)
def test_bad_costs_are_named_by_their_index(values: Any, message: str) -> None:
    with pytest.raises(CostError, match=message):
        check_costs(values, 3)


def test_the_kind_of_cost_is_named() -> None:
    with pytest.raises(CostError, match="memory cost of sample 0"):
        check_costs([-1.0], 1, kind="memory cost")
    with pytest.raises(CostError, match="io of sample 'a'"):
        check_cost(math.nan, "a", kind="io")


@given(st.lists(st.floats(), min_size=1, max_size=20))
def test_what_is_accepted_is_what_a_cost_can_be(values: list[float]) -> None:
    try:
        costs = check_costs(values, len(values))
    except CostError:
        assert not all(0 <= value < math.inf for value in values)
    else:
        assert costs.tolist() == (values if any(values) else [1.0] * len(values))
