from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.policies import Proposal, ReplicaView, policy_named, policy_names
from lightning_hybrid.core.versions import QueueVersion, is_heavy_first, opening_cells, opening_version
from lightning_hybrid.core.workqueue import RangeKey, Span
from tests.core.claimants import costs_of, spans_of, version_of

SMALL_COSTS = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=20)


def views(*speeds: float, bounds: Sequence[float | None] | None = None) -> list[ReplicaView]:
    bounds = bounds or [None] * len(speeds)
    return [ReplicaView(replica=r, speed_per_s=speed, memory_bound=bounds[r]) for r, speed in enumerate(speeds)]


def in_order(compute: Sequence[float], memory: Sequence[float] | None = None, world: int = 2) -> QueueVersion:
    return version_of(range(len(compute)), costs_of(compute, memory), world)


# --- what a policy proposes -----------------------------------------------------------------------------------------


def test_a_version_holds_the_cells_in_the_order_of_the_policy_with_their_costs() -> None:
    cells = np.array([4, 7, 8, 9])
    version = QueueVersion.proposed(
        3, policy_named("load_balanced"), cells, costs_of([1, 5, 3, 5], [8, 6, 4, 2]), views(1.0, 2.0)
    )

    assert (version.number, version.policy, len(version)) == (3, "load_balanced", 4)
    assert version.cells.tolist() == [7, 9, 8, 4]
    assert version.costs.compute.tolist() == [5, 5, 3, 1]
    assert version.costs.memory is not None
    assert version.costs.memory.tolist() == [6, 2, 4, 8]
    assert (version.ends, version.max_claim_costs) == (("head", "head"), (None, None))


def test_a_cell_above_all_bounds_is_left_to_who_has_the_largest() -> None:
    costs = costs_of([1, 1, 1], [9, 5, 1])
    for bounds, kept in [((6.0, 4.0), (None, 4.0)), ((4.0, 4.0), (None, None)), ((9.0, 4.0), (9.0, 4.0))]:
        version = QueueVersion.proposed(1, Bounded(), np.arange(3), costs, views(1.0, 1.0, bounds=bounds))
        assert version.memory_bounds == kept
        assert all(version.fits_each(position).any() for position in range(3))


class Bounded:
    """A policy of a user that keeps to the bounds as they are."""

    name = "bounded"

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        return Proposal(
            order=np.arange(len(cells)),
            ends=("head",) * len(replicas),
            max_claim_costs=(None,) * len(replicas),
            memory_bounds=tuple(view.memory_bound for view in replicas),
        )


class Fixed:
    """Proposes what it is given."""

    name = "fixed"

    def __init__(self, order: Sequence[int], limit: float | None = None) -> None:
        self._order, self._limit = order, limit

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        return Proposal(
            order=np.array(self._order),
            ends=("tail",) * len(replicas),
            max_claim_costs=(self._limit,) * len(replicas),
            memory_bounds=(self._limit,) * len(replicas),
        )


@pytest.mark.parametrize(
    ("order", "fault"), [([0, 2], "left out: 7"), ([0, 1, 2, 1], "repeated: 7"), ([0, 1, 3, 2], "not there: 3")]
)
def test_a_policy_that_loses_or_repeats_cells_is_refused_by_the_cells_of_the_grid(order: list[int], fault: str) -> None:
    with pytest.raises(PlanError, match=f"policy 'fixed' must order each of the 3 cells once: {fault}"):
        QueueVersion.proposed(1, Fixed(order), np.array([4, 7, 9]), Costs.equal(3), views(1.0))


@pytest.mark.parametrize("limit", [np.int64(3), np.float32(3), 3, True])
def test_limits_of_any_kind_of_number_can_be_told(limit: float) -> None:
    version = QueueVersion.proposed(1, Fixed([1, 0], limit), np.arange(2), Costs.equal(2), views(1.0))

    assert QueueVersion.from_bytes(version.to_bytes(), Costs.equal(2)).max_claim_costs == (float(limit),)


# --- the first version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "heavy_first"), [([], True), ([2], True), ([3, 3, 1], True), ([3, 1, 2], False), ([1, 2], False)]
)
def test_cells_are_heavy_first_when_none_is_heavier_than_the_one_before(
    compute: list[float], heavy_first: bool
) -> None:
    assert is_heavy_first(costs_of(compute)) is heavy_first


@pytest.mark.parametrize(
    ("num_cells", "num_first", "heavy_first", "cells"),
    [(10, 4, False, (0, 4)), (10, 4, True, (6, 10)), (3, 4, False, (0, 3)), (3, 4, True, (0, 3)), (0, 4, True, (0, 0))],
)
def test_an_epoch_opens_with_the_lightest_cells_where_it_is_known_which(
    num_cells: int, num_first: int, heavy_first: bool, cells: tuple[int, int]
) -> None:
    assert opening_cells(num_cells, num_first, heavy_first=heavy_first) == cells


@given(st.integers(0, 20), st.integers(0, 9), st.booleans(), st.booleans())
@settings(deadline=None)
def test_the_first_version_holds_every_cell_that_is_not_dealt_out_otherwise(
    num_cells: int, num_first: int, heavy_first: bool, costs_known: bool
) -> None:
    costs = costs_of([float(cell % 3) for cell in range(num_cells)])
    dealt = opening_cells(num_cells, num_first, heavy_first=heavy_first)
    version = opening_version(policy_named("hybrid"), costs, dealt, 2, costs_known=costs_known)

    assert sorted([*version.cells.tolist(), *range(*dealt)]) == list(range(num_cells))
    assert (version.number, version.policy, version.shares) == (0, "hybrid", None)
    if not costs_known:
        assert version.cells.tolist() == sorted(version.cells.tolist())


# --- sharing out ----------------------------------------------------------------------------------------------------


def test_cells_go_to_who_ends_them_first_and_keep_their_order() -> None:
    # replica 0 is twice as fast and free at once, replica 1 in one second
    version = in_order([8, 4, 4, 2]).shared_out(views(2.0, 1.0), [0.0, 1.0])

    assert version.shares == spans_of((0, 3), (3, 4))
    assert version.cells.tolist() == [0, 2, 3, 1]
    assert version.costs.compute.tolist() == [8, 4, 2, 4]
    assert [version.cost(0, stop) for stop in range(5)] == [0, 8, 12, 14, 18]
    assert version.num_to_claim == 0
    assert version.share_key(0) == RangeKey("range/0/0.share", 0, 3, 0)
    assert version.share_key(1) == RangeKey("range/1/0.share", 3, 1, 0)


def test_a_cell_goes_where_it_fits() -> None:
    version = replace(in_order([4, 4, 4, 4], [9, 9, 1, 1]), memory_bounds=(9.0, 2.0))
    shared = version.shared_out(views(1.0, 1.0), [0.0, 0.0])

    assert shared.shares == spans_of((0, 2), (2, 4))
    assert shared.cells.tolist() == [0, 1, 2, 3]


def test_without_shares_everything_is_to_be_claimed() -> None:
    version = in_order([1, 1, 1])

    assert version.num_to_claim == 3
    assert version.share_key(0) is None


def test_who_gets_nothing_has_no_range() -> None:
    version = in_order([5]).shared_out(views(1.0, 100.0), [0.0, 0.0])

    assert version.share_key(0) is None
    assert version.share_key(1) == RangeKey("range/1/0.share", 0, 1, 0)


@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 10), st.none() | st.floats(0, 9)), min_size=1, max_size=5),
    st.sampled_from(policy_names()[:4]),
    st.data(),
)
@settings(deadline=None)
def test_every_cell_is_in_one_share(
    num: int, replicas: list[tuple[float, float, float | None]], policy: str, data: st.DataObject
) -> None:
    cells = np.array(data.draw(st.permutations(range(10, 10 + num))), dtype=np.int64)
    numbers = st.lists(st.floats(0, 9), min_size=num, max_size=num)
    costs = costs_of(data.draw(numbers), data.draw(st.none() | numbers))
    speeds, free_s, bounds = zip(*replicas, strict=True)
    version = QueueVersion.proposed(1, policy_named(policy), cells, costs, views(*speeds, bounds=bounds))
    shared = version.shared_out(views(*speeds), free_s)

    assert sorted(shared.cells.tolist()) == sorted(version.cells.tolist()) == sorted(cells.tolist())
    assert shared.shares is not None
    edges = [0, *(share.stop for share in shared.shares)]
    assert [share.start for share in shared.shares] == edges[:-1]
    assert (len(shared.shares), edges[-1]) == (len(replicas), num)
    cost_of = dict(zip(cells.tolist(), costs.compute.tolist(), strict=True))
    assert shared.costs.compute.tolist() == [cost_of[cell] for cell in shared.cells.tolist()]
    # within a share the policy's order is kept
    place = {cell: at for at, cell in enumerate(version.cells.tolist())}
    for share in shared.shares:
        places = [place[cell] for cell in shared.cells[share.start : share.stop].tolist()]
        assert places == sorted(places)


# --- sums and limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "uniform"),
    [
        ([], True),
        ([3], True),
        ([3, 3, 3], True),
        ([3, 3, 1], True),
        ([3, 3, 3.5], False),
        ([1, 3, 3], False),
        ([3, 3, 0], True),
        ([3, 3], True),
        ([3, 1], False),
        ([3, 1, 1], False),
        ([0, 0], True),
    ],
)
def test_cells_are_alike_when_all_but_a_smaller_last_one_cost_the_same(compute: list[float], uniform: bool) -> None:
    assert in_order(compute).is_uniform is uniform


def test_cells_are_told_apart_by_compute_or_memory() -> None:
    assert in_order([3, 3, 1]).is_alike
    assert not in_order([3, 1, 3]).is_alike
    assert not in_order([3, 3, 3], [1, 1, 2]).is_alike


def test_costs_of_positions_are_differences_of_sums() -> None:
    version = in_order([1, 2, 4, 8])

    assert [version.cost(0, 4), version.cost(1, 3), version.cost(2, 2)] == [15, 6, 0]
    assert version.mean_cost == 3.75
    assert in_order([]).mean_cost == 1.0


@pytest.mark.parametrize(
    ("start", "stop", "cost", "from_head", "from_tail"),
    [
        (0, 4, 2.9, 1, 0),
        (0, 4, 3, 2, 0),
        (0, 4, 7, 3, 0),
        (0, 4, 8, 3, 1),
        (0, 4, 15, 4, 4),
        (0, 4, math.inf, 4, 4),
        (0, 4, -1, 0, 0),
        (1, 3, 4, 1, 1),
        (1, 3, 99, 2, 2),
        (2, 2, 99, 0, 0),
    ],
)
def test_as_many_positions_as_their_costs_allow(
    start: int, stop: int, cost: float, from_head: int, from_tail: int
) -> None:
    version = in_order([1, 2, 4, 8])

    assert version.num_within(start, stop, cost) == from_head
    assert version.num_within(start, stop, cost, from_tail=True) == from_tail


@given(SMALL_COSTS, st.integers(-5, 120), st.booleans(), st.data())
@settings(deadline=None, max_examples=300)
def test_num_within_is_what_counting_gives(
    compute: list[float], cost: float, from_tail: bool, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(compute)))
    stop = data.draw(st.integers(start, len(compute)))
    part = compute[start:stop][::-1] if from_tail else compute[start:stop]
    counted = max((num for num in range(len(part) + 1) if sum(part[:num]) <= cost), default=0)

    assert in_order(compute).num_within(start, stop, cost, from_tail=from_tail) == counted


def test_rounding_of_sums_costs_no_cell() -> None:
    version = in_order([0.1] * 30)

    assert [version.num_within(start, start + 10, 0.3) for start in range(20)] == [3] * 20
    assert [version.num_within(stop - 10, stop, 0.3, from_tail=True) for stop in range(10, 31)] == [3] * 21


@given(SMALL_COSTS, st.none() | st.integers(0, 9).map(float), st.booleans(), st.data())
@settings(deadline=None, max_examples=300)
def test_num_fitting_is_what_counting_gives(
    memory: list[float], bound: float | None, from_tail: bool, data: st.DataObject
) -> None:
    version = replace(in_order([1.0] * len(memory), memory), memory_bounds=(None, bound))
    start = data.draw(st.integers(0, len(memory)))
    stop = data.draw(st.integers(start, len(memory)))
    positions = range(start, stop)[::-1] if from_tail else range(start, stop)
    counted = 0
    for position in positions:
        if not version.fits(1, position):
            break
        counted += 1

    assert version.num_fitting(1, start, stop, from_tail=from_tail) == counted
    assert version.num_fitting(0, start, stop, from_tail=from_tail) == stop - start
    for position in positions:
        assert version.fits(1, position) == (bound is None or memory[position] <= bound)
        assert version.fits_each(position).tolist() == [True, version.fits(1, position)]


def test_without_memory_costs_everything_fits() -> None:
    version = replace(in_order([5, 5]), memory_bounds=(0.0, 0.0))

    assert version.fits(0, 1)
    assert version.fits_each(0).tolist() == [True, True]
    assert version.num_fitting(1, 0, 2) == 2


# --- bytes ----------------------------------------------------------------------------------------------------------


@given(
    st.permutations(range(12)).flatmap(lambda cells: st.integers(0, 12).map(lambda num: cells[:num])),
    st.integers(0, 99),
    st.text(),
    st.lists(
        st.tuples(st.sampled_from(["head", "tail"]), st.none() | st.floats(0, 1e300), st.none() | st.floats(0)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None)
def test_a_version_comes_back_from_its_bytes(
    cells: list[int],
    number: int,
    policy: str,
    replicas: list[tuple[str, float | None, float | None]],
    is_shared: bool,
    is_dealt: bool,
) -> None:
    costs = costs_of(list(range(12)), [2.0 * cell for cell in range(12)])
    ends, limits, bounds = zip(*replicas, strict=True)
    version = version_of(
        cells,
        costs,
        len(replicas),
        number=number,
        policy=policy,
        ends=ends,
        max_claim_costs=limits,
        memory_bounds=bounds,
        is_dealt=is_dealt,
        shares=tuple(Span(0, len(cells)) for _ in replicas) if is_shared else None,
    )
    again = QueueVersion.from_bytes(version.to_bytes(), costs)

    assert again.cells.tolist() == cells
    assert again.cells.dtype == np.int64
    assert again.costs.compute.tolist() == [float(cell) for cell in cells]
    assert again.costs.memory is not None
    assert again.costs.memory.tolist() == [2.0 * cell for cell in cells]
    assert (again.number, again.policy, again.ends) == (number, policy, ends)
    assert (again.max_claim_costs, again.memory_bounds) == (limits, bounds)
    assert (again.shares, again.is_dealt) == (version.shares, is_dealt)
    assert again.digest == version.digest


def changed_body(version: QueueVersion) -> bytes:
    head = version.to_bytes().split(b"\n", 2)[:2]
    return b"\n".join([*head, zlib.compress(version.cells[::-1].astype("<i8").tobytes())])


def changed_head(version: QueueVersion) -> bytes:
    return version.to_bytes().replace(b'"head"', b'"tail"')


def changed_digest(version: QueueVersion) -> bytes:
    return b"0123456789abcdef" + version.to_bytes()[16:]


@pytest.mark.parametrize("changed", [changed_body, changed_head, changed_digest])
def test_bytes_that_do_not_hold_what_their_hash_says_are_refused(
    changed: Callable[[QueueVersion], bytes],
) -> None:
    version = version_of([2, 0, 1], Costs.equal(3), 2, number=5)

    with pytest.raises(PlanError, match=r"version 5 of the plan has hash [0-9a-f]{16}, its writer says [0-9a-f]{16}"):
        QueueVersion.from_bytes(changed(version), Costs.equal(3))


@pytest.mark.parametrize(
    "change",
    [
        {"number": 6},
        {"policy": "hybrid"},
        {"cells": np.array([0, 2, 1])},
        {"ends": ("head", "tail")},
        {"max_claim_costs": (None, 1.0)},
        {"memory_bounds": (None, 1.0)},
        {"shares": spans_of((0, 1), (1, 3))},
        {"is_dealt": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_versions_that_differ_have_different_digests(change: dict[str, Any]) -> None:
    version = version_of([2, 0, 1], Costs.equal(3), 2, number=5)

    assert version_of([2, 0, 1], Costs.equal(3), 2, number=5).digest == version.digest
    assert replace(version, **change).digest != version.digest


def test_a_large_version_is_told_in_few_bytes() -> None:
    version = version_of(range(100_000), Costs.equal(100_000), 2)

    assert len(version.to_bytes()) < 300_000
