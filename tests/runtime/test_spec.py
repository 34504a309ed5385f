"""What a pass over a loader is, and what follows from it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.plan import Grid, arrange
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.work import Work
from tests.core.claimants import costs_of


def spec_of(grid: Grid, **more: Any) -> EpochSpec:
    return EpochSpec(stage="predict", loader_idx=0, epoch=1, grid=grid, **more)


def test_nothing_is_assumed_of_a_pass_but_one_round_of_first_steps() -> None:
    spec = spec_of(Grid.sequential(8, 4))

    assert (spec.prime_calls, spec.probe_rounds, spec.read_ahead, spec.first_rounds) == (0, 1, 0, 1)
    assert (spec.max_size, spec.arrangement, spec.costs, spec.stream) == (None, None, None, None)


def test_a_pass_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec_of(Grid.sequential(8, 4)).epoch = 2  # type: ignore[misc]  # that is the case


# --- costs ----------------------------------------------------------------------------------------------------------


def test_without_costs_a_cell_costs_its_samples_and_a_work_nothing_that_is_known() -> None:
    spec = spec_of(Grid.sequential(10, 4))

    assert spec.cell_costs.compute.tolist() == [4.0, 4.0, 2.0]
    assert (spec.cell_costs.memory, spec.cell_costs.io) == (None, None)
    assert spec.cost_of(Work(0, 4)) is None
    assert spec.usual_cost is None
    assert not spec.is_heavy_first


def test_given_costs_are_those_of_the_cells() -> None:
    costs = costs_of([3, 2, 4], [1, 1, 1])
    spec = spec_of(Grid.sequential(10, 4), costs=costs)

    assert spec.cell_costs is costs
    assert spec.usual_cost == 3.0


@pytest.mark.parametrize(
    ("start", "stop", "cost"),
    [
        (0, 4, 8.0),
        (4, 8, 4.0),
        (8, 10, 6.0),
        (0, 10, 18.0),
        (0, 1, 2.0),  # a quarter of the first cell
        (3, 5, 3.0),  # a quarter of each of two
        (9, 10, 3.0),
        (5, 5, 0.0),
    ],
)
def test_a_work_costs_its_part_of_the_cells_that_it_lies_in(start: int, stop: int, cost: float) -> None:
    spec = spec_of(Grid.sequential(10, 4), costs=costs_of([8, 4, 6]))

    assert spec.cost_of(Work(start, stop)) == pytest.approx(cost)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8), st.data())
def test_works_of_any_cut_cost_together_what_the_cells_do(cells: list[tuple[int, int]], data: st.DataObject) -> None:
    sizes, compute = zip(*cells, strict=True)
    num = sum(sizes)
    grid = Grid(order=range(num), offsets=np.cumsum([0, *sizes]))
    spec = spec_of(grid, costs=costs_of([float(cost) for cost in compute]))
    cuts = sorted(data.draw(st.sets(st.integers(1, num - 1), max_size=5))) if num > 1 else []
    edges = [0, *cuts, num]

    parts = [spec.cost_of(Work(start, stop)) or 0.0 for start, stop in itertools.pairwise(edges)]
    assert sum(parts) == pytest.approx(sum(compute))
    for cell in range(grid.num_cells):
        assert spec.cost_of(Work(*grid.span(cell))) == pytest.approx(compute[cell])


@pytest.mark.parametrize(("compute", "usual_cost"), [([2, 4, 6], 4.0), ([0, 0, 0], None), ([0, 0, 3], 1.0)])
def test_the_usual_cost_is_the_mean_where_that_tells_anything(compute: list[float], usual_cost: float | None) -> None:
    assert spec_of(Grid.sequential(9, 3), costs=costs_of(compute)).usual_cost == usual_cost


def test_a_pass_without_cells_has_no_usual_cost() -> None:
    spec = spec_of(Grid.sequential(0, 4), costs=Costs.equal(0))

    assert (spec.usual_cost, len(spec.cell_costs)) == (None, 0)


@pytest.mark.parametrize(("compute", "heavy_first"), [([3, 2, 2], True), ([2, 3, 1], False)])
def test_cells_are_heavy_first_where_their_costs_fall(compute: list[float], heavy_first: bool) -> None:
    assert spec_of(Grid.sequential(9, 3), costs=costs_of(compute)).is_heavy_first is heavy_first


# --- first steps and reuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("probe_rounds", "read_ahead", "rounds"), [(1, 0, 1), (2, 0, 2), (1, 1, 2), (3, 2, 5)])
def test_what_is_read_ahead_is_dealt_out_with_the_first_steps(probe_rounds: int, read_ahead: int, rounds: int) -> None:
    spec = spec_of(Grid.sequential(8, 4), probe_rounds=probe_rounds, read_ahead=read_ahead)

    assert spec.first_rounds == rounds


def test_samples_that_are_run_once_for_several_are_counted() -> None:
    batches = Grid.sequential(7, 3)
    grid, arrangement = arrange(batches, 3, firsts=np.array([0, 1, 0, 3, 1, 5, 0]))

    assert spec_of(grid, arrangement=arrangement).samples_reused == 3
    assert spec_of(batches).samples_reused == 0


def test_samples_that_are_only_put_into_another_order_are_all_run() -> None:
    grid, arrangement = arrange(Grid.sequential(7, 3), 3, costs=np.arange(7.0))

    assert spec_of(grid, arrangement=arrangement).samples_reused == 0
