from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.plan import Arrangement, Grid, Plan, PlannedCell, arrange, first_positions

BATCHES = st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), max_size=8)
CELLS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5)), max_size=10)


def plan_of(*cells: tuple[int, int, int]) -> Plan:
    return Plan(tuple(PlannedCell(*cell) for cell in cells))


def batches_of(grid: Grid) -> list[list[Any]]:
    return [grid.indices(*grid.span(cell)) for cell in range(grid.num_cells)]


# --- Grid -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "drop_last", "batches"),
    [
        (7, 3, False, [[0, 1, 2], [3, 4, 5], [6]]),
        (7, 3, True, [[0, 1, 2], [3, 4, 5]]),
        (6, 3, False, [[0, 1, 2], [3, 4, 5]]),
        (6, 3, True, [[0, 1, 2], [3, 4, 5]]),
        (2, 3, False, [[0, 1]]),
        (2, 3, True, []),
        (0, 3, False, []),
        (1, 1, False, [[0]]),
    ],
)
def test_a_sequential_grid_cuts_as_the_loader_does(
    num_samples: int, batch_size: int, drop_last: bool, batches: list[list[int]]
) -> None:
    grid = Grid.sequential(num_samples, batch_size, drop_last=drop_last)

    assert batches_of(grid) == batches
    assert grid.num_cells == len(batches)
    assert grid.num_samples == sum(map(len, batches))


def test_a_sequential_grid_of_a_billion_samples_keeps_no_list() -> None:
    grid = Grid.sequential(10**9, 10**6)

    assert grid.order == range(10**9)
    assert grid.span(999) == (999_000_000, 1_000_000_000)


def test_plain_indices_are_kept_as_an_array_and_given_as_plain_integers() -> None:
    grid = Grid.from_batches([[5, 3], [9]])

    assert isinstance(grid.order, np.ndarray)
    assert grid.order.dtype == np.int64
    assert all(type(index) is int for index in grid.indices(0, 3))
    assert batches_of(grid) == [[5, 3], [9]]


@pytest.mark.parametrize(
    "batches",
    [
        [["a", "b"], ["c"]],
        [[("a", 1), ("b", 2)], [("c", 3)]],
        [[np.int64(4), np.int64(2)], [np.int64(1)]],
        [[True, False], [True]],
        [[0, None], [2.5]],
        [[[1, 2], [3]], [[4, 5, 6]]],
        [[2**63, 1], [2**70]],
    ],
)
def test_indices_that_are_not_plain_integers_stay_what_they_are(batches: list[list[Any]]) -> None:
    grid = Grid.from_batches(batches)

    assert batches_of(grid) == batches
    assert [type(index) for index in grid.indices(0, 3)] == [type(i) for batch in batches for i in batch]


def test_a_grid_is_made_from_a_generator_of_batches() -> None:
    assert batches_of(Grid.from_batches(iter([(1, 2), (3,)]))) == [[1, 2], [3]]


def test_no_batches_make_an_empty_grid() -> None:
    grid = Grid.from_batches([])

    assert (grid.num_cells, grid.num_samples) == (0, 0)


def test_a_sample_that_the_sampler_yields_twice_counts_twice() -> None:
    grid = Grid.from_batches([[3, 3], [3]])

    assert grid.num_samples == 3
    assert batches_of(grid) == [[3, 3], [3]]


def test_indices_may_cross_the_edges_of_cells() -> None:
    grid = Grid.from_batches([[5, 3], [9], [1, 0]])

    assert grid.indices(1, 4) == [3, 9, 1]
    assert grid.indices(2, 2) == []


@pytest.mark.parametrize("grid", [Grid.sequential(7, 3), Grid.from_batches([[0, 1, 2], [3, 4, 5], [6]])])
@pytest.mark.parametrize(
    ("num_cells", "batches"),
    [(0, []), (1, [[0, 1, 2]]), (2, [[0, 1, 2], [3, 4, 5]]), (3, [[0, 1, 2], [3, 4, 5], [6]])],
)
def test_the_head_of_a_grid_keeps_whole_cells(grid: Grid, num_cells: int, batches: list[list[int]]) -> None:
    assert batches_of(grid.head(num_cells)) == batches


def test_a_head_longer_than_the_grid_is_the_grid() -> None:
    grid = Grid.sequential(7, 3)

    assert grid.head(3) is grid
    assert grid.head(4) is grid


def test_a_head_of_keyed_samples_keeps_their_keys() -> None:
    assert batches_of(Grid.from_batches([["a"], ["b", "c"]]).head(1)) == [["a"]]


@given(BATCHES)
@settings(deadline=None)
def test_a_grid_gives_back_the_batches_that_it_was_made_from(batches: list[list[int]]) -> None:
    grid = Grid.from_batches(batches)

    assert batches_of(grid) == batches
    assert grid.num_samples == sum(map(len, batches))


@given(BATCHES, BATCHES)
@settings(deadline=None)
def test_digests_are_equal_exactly_where_grids_are(one: list[list[int]], other: list[list[int]]) -> None:
    same = Grid.from_batches(one).digest == Grid.from_batches(other).digest

    assert same == (one == other)
    assert Grid.from_batches(one).digest == Grid.from_batches([list(batch) for batch in one]).digest


@given(st.integers(0, 40), st.integers(1, 9))
@settings(deadline=None)
def test_a_digest_does_not_depend_on_how_the_order_is_stored(num_samples: int, batch_size: int) -> None:
    grid = Grid.sequential(num_samples, batch_size)

    assert grid.digest == Grid.from_batches(batches_of(grid)).digest


def test_a_digest_tells_cuts_order_and_keys_apart() -> None:
    grids = [
        Grid.from_batches([[0, 1], [2]]),
        Grid.from_batches([[0], [1, 2]]),
        Grid.from_batches([[0, 2], [1]]),
        Grid.from_batches([["a", "b"], ["c"]]),
        Grid.from_batches([["a", "c"], ["b"]]),
        Grid.sequential(3, 3),
    ]

    assert len({grid.digest for grid in grids}) == 6
    assert all(re.fullmatch("[0-9a-f]{16}", grid.digest) for grid in grids)


# --- Arrangement ----------------------------------------------------------------------------------------------------


def test_heavy_samples_come_first_and_equal_ones_in_loader_order() -> None:
    grid, arrangement = arrange(Grid.sequential(5, 2), 2, costs=np.array([1.0, 3.0, 1.0, 9.0, 3.0]))

    assert batches_of(grid) == [[3, 1], [4, 0], [2]]
    assert arrangement.slots is not None
    assert arrangement.slots.tolist() == [3, 1, 4, 0, 2]
    assert arrangement.slots_at(1, 3).tolist() == [1, 4]
    assert batches_of(arrangement.batches) == [[0, 1], [2, 3], [4]]


def test_indices_follow_the_sampler() -> None:
    grid, _ = arrange(Grid.from_batches([[8, 2], [8]]), 2, costs=np.array([1.0, 2.0, 3.0]))
    named, _ = arrange(Grid.from_batches([["a", "b"], ["c"]]), 2, costs=np.array([1.0, 2.0, 3.0]))

    assert batches_of(grid) == [[8, 2], [8]]
    assert batches_of(named) == [["c", "b"], ["a"]]


def test_repeated_samples_share_a_slot() -> None:
    grid, arrangement = arrange(Grid.sequential(6, 2), 2, firsts=np.array([0, 1, 0, 3, 1, 1]))

    assert batches_of(grid) == [[0, 1], [3]]
    assert arrangement.slots is not None
    assert arrangement.slots.tolist() == [0, 1, 0, 2, 1, 1]


def test_repeated_samples_are_left_out_before_the_others_are_ordered() -> None:
    grid, arrangement = arrange(
        Grid.sequential(4, 2), 2, firsts=np.array([0, 0, 2, 3]), costs=np.array([1.0, 5.0, 2.0])
    )

    assert batches_of(grid) == [[2, 3], [0]]
    assert arrangement.slots is not None
    assert arrangement.slots.tolist() == [2, 2, 0, 1]


@pytest.mark.parametrize("costs", [None, np.ones(5), np.array([5.0, 4.0, 3.0, 3.0, 1.0])])
def test_batches_that_are_in_order_already_stay_themselves(costs: Any) -> None:
    batches = Grid.sequential(5, 2)
    grid, arrangement = arrange(batches, 2, costs=costs)

    assert grid is batches
    assert arrangement.slots is None
    assert arrangement.slots_at(2, 4).tolist() == [2, 3]


def test_arrangements_of_the_same_batches_differ_by_hash() -> None:
    batches = Grid.sequential(3, 2)
    arrangements = [
        arrange(batches, 2, costs=np.array(c))[1] for c in ([1.0, 2, 3], [3.0, 2, 1], [1.0, 3, 2], [1, 2, 3])
    ]

    assert len({arrangement.digest for arrangement in arrangements}) == 3
    assert arrangements[0].digest == arrangements[3].digest
    assert arrangements[1].digest == Arrangement(batches=batches).digest


def test_the_first_position_of_each_key() -> None:
    assert first_positions(["b", "a", "b", (1,), "a", (1,)]).tolist() == [0, 1, 0, 3, 1, 3]
    assert first_positions([]).tolist() == []


@given(st.data())
@settings(max_examples=100)
def test_every_sample_is_run_once_heavy_first_and_found_again(data: st.DataObject) -> None:
    num, batch_size = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 6))
    firsts = first_positions(data.draw(st.lists(st.integers(0, 12), min_size=num, max_size=num)))
    kept = sorted(set(firsts.tolist()))
    costs = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(kept), max_size=len(kept))), dtype=float)
    grid, arrangement = arrange(Grid.sequential(num, batch_size), batch_size, firsts=firsts, costs=costs)

    run = grid.indices(0, grid.num_samples)
    assert sorted(run) == kept
    assert all(len(cell) == batch_size for cell in batches_of(grid)[:-1])
    by_index = dict(zip(kept, costs.tolist(), strict=True))
    assert [(-by_index[index], index) for index in run] == sorted((-by_index[index], index) for index in run)
    assert [run[slot] for slot in arrangement.slots_at(0, num).tolist()] == firsts.tolist()


# --- Plan -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "num_samples"),
    [([(0, 0, 4), (1, 4, 5), (0, 5, 8)], 8), ([(3, 0, 1)], 1), ([], 0), ([(0, 0, 2), (1, 2, 2)], 2)],
)
def test_a_plan_that_holds_every_position_once_is_valid(cells: list[tuple[int, int, int]], num_samples: int) -> None:
    plan_of(*cells).validate(num_samples)


@pytest.mark.parametrize(
    ("cells", "num_samples", "message"),
    [
        ([(0, 0, 4), (1, 5, 8)], 8, "nobody ran position 4"),
        ([(0, 1, 4)], 4, "nobody ran position 0"),
        ([(0, 0, 4), (1, 3, 8)], 8, "two cells hold position 3"),
        ([(0, 0, 4), (1, 0, 4)], 4, "two cells hold position 0"),
        ([(0, 0, 4)], 8, "ends at position 4, the loader has 8"),
        ([(0, 0, 9)], 8, "ends at position 9, the loader has 8"),
        ([], 1, "ends at position 0, the loader has 1"),
    ],
)
def test_a_plan_that_misses_or_repeats_a_position_names_the_first(
    cells: list[tuple[int, int, int]], num_samples: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(*cells).validate(num_samples)


def test_a_cell_that_ends_before_it_starts_hides_no_repeated_position() -> None:
    with pytest.raises(PlanError):
        plan_of((0, 0, 4), (1, 4, 2), (0, 2, 4)).validate(4)


def test_a_plan_is_printed_as_a_line_per_cell() -> None:
    assert plan_of((0, 0, 4), (1, 4, 5)).format() == "0 0 4\n1 4 5"
    assert plan_of().format() == ""


@given(CELLS)
@settings(deadline=None)
def test_a_plan_comes_back_from_its_text(sizes: list[tuple[int, int]]) -> None:
    cells, at = [], 0
    for replica, size in sizes:
        cells.append((replica, at, at + size))
        at += size
    plan = plan_of(*cells)

    assert Plan.parse(plan.format()) == plan
    plan.validate(at)


@given(CELLS, st.data())
@settings(deadline=None)
def test_a_plan_with_a_cell_too_few_or_twice_is_never_valid(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    cells, at = [], 0
    for replica, size in [*sizes, (0, 1)]:
        cells.append((replica, at, at + size))
        at += size
    which = data.draw(st.integers(0, len(cells) - 1))
    twice = data.draw(st.booleans())
    broken = [*cells[:which], *([cells[which]] * 2 if twice else []), *cells[which + 1 :]]

    with pytest.raises(PlanError):
        plan_of(*broken).validate(at)


@pytest.mark.parametrize(
    ("text", "number", "line"),
    [
        ("0 0", 1, "0 0"),
        ("0 0 4 5", 1, "0 0 4 5"),
        ("0 0 4\n1 four 5", 2, "1 four 5"),
        ("0 0 4\n\n1 4 5", 2, ""),
        ("0 0 4.0", 1, "0 0 4.0"),
        ("replica start stop", 1, "replica start stop"),
    ],
)
def test_text_that_is_no_plan_is_refused_with_its_line(text: str, number: int, line: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"line {number} must hold three integers, got {line!r}")):
        Plan.parse(text)
