from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.proposals import NoMemoryBounds, Proposal, ReplicaView, bounded, validate


class FixedBounds:
    def __init__(self, *bounds: float | None) -> None:
        self._bounds = bounds

    def bound(self, replica: int) -> float | None:
        return self._bounds[replica]


def proposed(order: Any, *, num_replicas: int = 1, **changed: Any) -> Proposal:
    given: dict[str, Any] = {
        "order": np.array(order, dtype=np.int64) if isinstance(order, list) else order,
        "ends": ("head",) * num_replicas,
        "max_claim_costs": (None,) * num_replicas,
        "memory_bounds": (None,) * num_replicas,
    }
    return Proposal(**(given | changed))


def refused(proposal: Any, num_cells: int, num_replicas: int = 1, names: list[int] | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        validate(proposal, Costs.equal(num_cells), num_replicas, policy="mine", cell_names=names)
    return str(caught.value)


def test_bounds_are_put_into_the_views() -> None:
    views = [ReplicaView(replica=r, speed_per_s=1.0) for r in range(3)]

    assert [view.memory_bound for view in bounded(views, FixedBounds(4.0, None, 0.5))] == [4.0, None, 0.5]


def test_without_a_memory_model_no_bound_is_known() -> None:
    view = ReplicaView(replica=0, speed_per_s=1.0, memory_bound=3.0)

    assert bounded([view], NoMemoryBounds())[0].memory_bound is None


@given(st.permutations(range(20)), st.integers(0, 3))
def test_every_permutation_is_right(order: list[int], num_replicas: int) -> None:
    validate(proposed(order, num_replicas=num_replicas), Costs.equal(20), num_replicas, policy="mine")


def test_no_cells_need_no_order() -> None:
    validate(proposed([]), Costs.equal(0), 1, policy="mine")


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.int64])
def test_any_whole_numbers_will_do(dtype: Any) -> None:
    validate(proposed(np.array([2, 0, 1], dtype=dtype)), Costs.equal(3), 1, policy="mine")


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ([0, 1, 3], "left out: 2"),
        ([0, 1, 1, 3], "left out: 2; repeated: 1"),
        ([0, 1, 2, 3, 0], "repeated: 0"),
        ([0, 1, 2, 4], "left out: 3; not there: 4"),
        ([-1, 1, 2, 3], "left out: 0; not there: -1"),
        ([0, 1, 2, 3, 9], "not there: 9"),
        ([], "left out: 0, 1, 2, 3"),
    ],
)
def test_what_is_wrong_is_named(order: list[int], fault: str) -> None:
    assert refused(proposed(order), 4) == f"policy 'mine' must order each of the 4 cells once: {fault}"


def test_cells_are_called_by_their_names() -> None:
    assert refused(proposed([0, 2, 2]), 3, names=[70, 71, 72]).endswith("left out: 71; repeated: 72")


def test_of_many_cells_the_first_are_named() -> None:
    assert refused(proposed([]), 12).endswith("left out: 0, 1, 2, 3, 4 and 7 more")


@given(st.lists(st.integers(-2, 12), max_size=14))
def test_nothing_but_a_permutation_passes(order: list[int]) -> None:
    if sorted(order) == list(range(10)):
        validate(proposed(order), Costs.equal(10), 1, policy="mine")
    else:
        assert "'mine' must order each of the 10 cells once" in refused(proposed(order), 10)


@pytest.mark.parametrize(
    ("order", "what"),
    [
        ((0, 1), "tuple"),
        (np.array([0.0, 1.0]), "float64 array of shape (2,)"),
        (np.array([[0, 1]]), "int64 array of shape (1, 2)"),
    ],
)
def test_what_is_no_order_is_refused(order: Any, what: str) -> None:
    assert refused(proposed(order), 2) == f"policy 'mine': order must be a flat array of whole numbers, got {what}"


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"ends": ()}, "ends must have one entry per replica, 1, got 0"),
        ({"max_claim_costs": (None, None)}, "max_claim_costs must have one entry per replica, 1, got 2"),
        ({"memory_bounds": ()}, "memory_bounds must have one entry per replica, 1, got 0"),
        ({"ends": ("middle",)}, "ends[0] must be 'head' or 'tail', got 'middle'"),
        ({"max_claim_costs": (float("nan"),)}, "max_claim_costs[0] must be None or at least 0, got nan"),
        ({"memory_bounds": (-1.0,)}, "memory_bounds[0] must be None or at least 0, got -1.0"),
        ({"memory_bounds": ("4 GB",)}, "memory_bounds[0] must be None or at least 0, got '4 GB'"),
    ],
)
def test_what_is_no_entry_is_refused(changed: dict[str, Any], fault: str) -> None:
    message = refused(proposed([0, 1], **changed), 2)

    assert message.startswith("policy 'mine'")
    assert message.endswith(fault)


def test_what_is_no_proposal_is_refused() -> None:
    assert refused([0, 1], 2) == "policy 'mine' must return a Proposal, got list"
