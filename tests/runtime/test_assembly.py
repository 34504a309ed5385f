from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.errors import PlanError, ResultsError
from lightning_hybrid.core.plan import Arrangement, Grid, arrange, first_positions
from lightning_hybrid.runtime.assembly import Outputs, assembled, into_batches, into_rows
from lightning_hybrid.runtime.results import Piece, join_rows
from tests.runtime.outputs import Scores, output_of, same

pytestmark = pytest.mark.timeout(60)


# --- batches --------------------------------------------------------------------------------------------------------


def test_pieces_in_any_order_become_the_users_batches() -> None:
    grid = Grid.sequential(7, 3)
    pieces = [Piece(6, 7, "c"), Piece(0, 3, "a"), Piece(3, 6, "b")]

    assert into_batches(grid, pieces) == (["a", "b", "c"], ())


def test_the_output_of_a_whole_batch_is_given_as_it_is() -> None:
    grid = Grid.sequential(6, 3)
    outputs = [object(), torch.tensor(0.5)]

    batches, _ = into_batches(grid, [Piece(3, 6, outputs[1]), Piece(0, 3, outputs[0])])
    assert batches[0] is outputs[0]
    assert batches[1] is outputs[1]


@pytest.mark.parametrize("nothing", [None, [None, None]])
def test_whole_batches_without_an_output_stay_without(nothing: Any) -> None:
    assert into_batches(Grid.sequential(4, 2), [Piece(0, 2, nothing), Piece(2, 4, nothing)]) == ([nothing] * 2, ())


def test_no_pieces_make_no_batches() -> None:
    assert into_batches(Grid.sequential(0, 3), []) == ([], ())


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 2), (3, 6)], "hold positions up to 2, the next piece begins at 3"),
        ([(0, 4), (3, 6)], "hold positions up to 4, the next piece begins at 3"),
        ([(0, 3), (0, 3), (3, 6)], "hold positions up to 3, the next piece begins at 0"),
        ([(0, 5)], "hold 5 of 6 positions"),
        ([], "hold 0 of 6 positions"),
    ],
)
def test_pieces_that_miss_or_repeat_a_position_are_refused(spans: list[tuple[int, int]], message: str) -> None:
    pieces = [Piece(start, stop, torch.arange(start, stop)) for start, stop in spans]

    with pytest.raises(PlanError, match=message):
        into_batches(Grid.sequential(6, 3), pieces)


@given(st.integers(1, 30), st.integers(1, 7), st.data())
@settings(deadline=None, max_examples=60)
def test_pieces_cut_anywhere_become_the_batches_of_one_device(
    num_samples: int, batch_size: int, data: st.DataObject
) -> None:
    grid = Grid.sequential(num_samples, batch_size)
    cuts = sorted({*data.draw(st.lists(st.integers(1, num_samples), max_size=10)), num_samples})
    pieces = [Piece(start, stop, output_of(start, stop)) for start, stop in zip([0, *cuts], cuts, strict=False)]
    batches, ragged = into_batches(grid, data.draw(st.permutations(pieces)))

    assert (len(batches), ragged) == (grid.num_cells, ())
    assert all(same(batch, output_of(*grid.span(cell))) for cell, batch in enumerate(batches))


def test_pieces_without_rows_are_not_cut() -> None:
    grid = Grid.sequential(4, 2)
    pieces = [Piece(0, 3, torch.ones(5)), Piece(3, 4, torch.ones(1))]

    with pytest.raises(ResultsError, match="batch_dependent=True"):
        into_batches(grid, pieces)


def test_rows_of_several_shapes_become_a_list_in_their_batch() -> None:
    pieces = [Piece(0, 1, torch.ones(1, 4)), Piece(1, 3, torch.ones(2, 2)), Piece(3, 4, torch.ones(1, 2))]
    batches, ragged = into_batches(Grid.sequential(4, 2), pieces)

    assert ragged == (0,)
    assert [row.shape for row in batches[0]] == [(4,), (2,)]
    assert batches[1].shape == (2, 2)


# --- arrangements ---------------------------------------------------------------------------------------------------


def run_of(num: int, batch_size: int, firsts: Any = None, costs: Any = None) -> tuple[Grid, Arrangement]:
    return arrange(
        Grid.sequential(num, batch_size),
        batch_size,
        firsts=None if firsts is None else np.array(firsts),
        costs=None if costs is None else np.array(costs, dtype=float),
    )


def cell_output(grid: Grid, cell: int) -> dict[str, Any]:
    """What one step over the cell returns, row by row the output of the dataset index."""
    return join_rows([output_of(index, index + 1) for index in grid.indices(*grid.span(cell))])  # type: ignore[no-any-return]


def entries_of(outputs: Outputs) -> list[Any]:
    return [piece.output for piece in outputs.pieces]


def pieces_of(grid: Grid) -> list[Piece]:
    return [Piece(*grid.span(cell), cell_output(grid, cell)) for cell in range(grid.num_cells)]


def test_ordered_cells_become_the_users_batches() -> None:
    grid, arrangement = run_of(5, 2, costs=[1, 3, 2, 9, 1])
    outputs = assembled(grid, arrangement, reversed(pieces_of(grid)))
    batches = entries_of(outputs)

    assert grid.indices(0, 5) == [3, 1, 2, 0, 4]
    assert all(same(batch, output_of(*span)) for batch, span in zip(batches, [(0, 2), (2, 4), (4, 5)], strict=True))
    assert (outputs.form, outputs.ragged) == ("batches", frozenset())
    assert outputs.indices() == [[0, 1], [2, 3], [4]]
    assert [row["names"] for row in outputs.rows("loader")] == [f"sample {i}" for i in range(5)]


def test_a_repeated_sample_has_a_row_of_its_own() -> None:
    grid, arrangement = run_of(4, 2, firsts=[0, 1, 0, 0])
    pieces = [Piece(0, 2, (torch.tensor([[5.0], [6.0]]), [{"x": torch.zeros(1)}, {"x": torch.ones(1)}]))]
    outputs = assembled(grid, arrangement, pieces)
    batches, rows = entries_of(outputs), outputs.rows("loader")

    assert [batch[0].tolist() for batch in batches] == [[[5.0], [6.0]], [[5.0], [5.0]]]
    assert [row[0].tolist() for row in rows] == [[5.0], [6.0], [5.0], [5.0]]
    batches[1][0][0] += 1
    batches[1][1][0]["x"] += 1
    assert [row[0].tolist() for row in rows] == [[5.0], [6.0], [6.0], [5.0]]
    assert [batch[1][0]["x"].tolist() for batch in batches] == [[0.0], [1.0]]
    assert batches[1][1][1]["x"].tolist() == [0.0]


def test_a_repeated_row_of_a_part_that_a_rank_holds_is_a_copy() -> None:
    grid, arrangement = run_of(3, 2, firsts=[0, 1, 0])
    rows = Outputs(grid=grid, arrangement=arrangement, pieces=[Piece(0, 2, torch.zeros(2, 1))]).rows("loader")
    rows[2] += 1

    assert [row.tolist() for row in rows] == [[0.0], [0.0], [1.0]]


def test_rows_by_dataset_index_follow_the_sampler() -> None:
    batches = Grid.from_batches([[7, 3], [5]])
    grid, arrangement = arrange(batches, 2, costs=np.array([1.0, 2.0, 3.0]))
    outputs = assembled(grid, arrangement, [Piece(0, 2, torch.tensor([5, 3])), Piece(2, 3, torch.tensor([7]))])

    assert [int(row) for row in outputs.rows("loader")] == [7, 3, 5]
    assert [int(row) for row in outputs.rows("dataset")] == [3, 5, 7]


def test_a_rank_that_holds_a_part_has_the_rows_of_that_part() -> None:
    grid, arrangement = run_of(6, 2, costs=[1, 2, 3, 4, 5, 6])
    held = Outputs(grid=grid, arrangement=arrangement, pieces=[Piece(4, 6, ["b", "a"]), Piece(0, 2, ["f", "e"])])

    assert held.rows("loader") == ["a", "b", "e", "f"]
    assert held.indices() == [[1, 0], [5, 4]]


def test_outputs_without_rows_stay_cells() -> None:
    grid, arrangement = run_of(3, 2, costs=[1, 2, 3])
    outputs = assembled(grid, arrangement, [Piece(2, 3, "light"), Piece(0, 2, "heavy")])

    assert entries_of(outputs) == ["heavy", "light"]
    assert (outputs.form, outputs.indices()) == ("cells", [[2, 1], [0]])
    with pytest.raises(ResultsError):
        outputs.rows("loader")


def test_a_batch_of_rows_that_differ_is_a_list_of_them() -> None:
    grid, arrangement = run_of(4, 2, costs=[1, 9, 1, 9])
    outputs = assembled(grid, arrangement, [Piece(0, 2, torch.ones(2, 5)), Piece(2, 4, None)])
    entries, rows = entries_of(outputs), outputs.rows("loader")

    assert outputs.ragged == {0, 1}
    assert [row is None for row in rows] == [True, False, True, False]
    assert [entries[0][0], entries[1][0]] == [None, None]
    assert [entries[0][1].shape, entries[1][1].shape] == [(5,), (5,)]


def test_ordered_pieces_that_miss_a_position_are_refused() -> None:
    grid, arrangement = run_of(3, 2, costs=[1, 2, 3])

    with pytest.raises(PlanError, match="hold 2 of 3 positions"):
        assembled(grid, arrangement, [Piece(0, 2, torch.ones(2))])


@given(st.data())
@settings(deadline=None, max_examples=80)
def test_whatever_is_ordered_left_out_and_cut_everything_comes_back(data: st.DataObject) -> None:
    num, batch_size = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 5))
    keys = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 9), min_size=num, max_size=num)))
    firsts = None if keys is None else first_positions(keys)
    num_run = num if firsts is None else len(set(firsts.tolist()))
    costs = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 4), min_size=num_run, max_size=num_run)))
    grid, arrangement = run_of(num, batch_size, firsts, costs)
    cuts = sorted({*data.draw(st.lists(st.integers(1, grid.num_samples), max_size=6)), grid.num_samples})
    cells = Grid(order=grid.order, offsets=np.array([0, *cuts]))
    outputs = assembled(grid, arrangement, data.draw(st.permutations(pieces_of(cells))))
    batches = entries_of(outputs)

    shown = range(num) if firsts is None else firsts.tolist()
    want = [output_of(i, i + 1) for i in shown]
    spans = [arrangement.batches.span(cell) for cell in range(arrangement.batches.num_cells)]
    assert all(same(batch, join_rows(want[a:b])) for batch, (a, b) in zip(batches, spans, strict=True))
    assert [row["names"] for row in outputs.rows("loader")] == [f"sample {i}" for i in shown]


# --- rows -----------------------------------------------------------------------------------------------------------


def test_one_result_per_sample_in_loader_order() -> None:
    rows = into_rows([Piece(0, 2, output_of(0, 2)), Piece(2, 3, output_of(2, 3))])

    assert [row["ids"].item() for row in rows] == [0, 1, 2]
    assert [row["names"] for row in rows] == ["sample 0", "sample 1", "sample 2"]
    assert rows[1]["features"].tolist() == [1.0, 1.0, 1.0]
    assert [type(row["pair"]) for row in rows] == [Scores] * 3
    assert rows[2]["pair"] == (torch.tensor(4), "2")


def test_a_list_of_names_gives_a_name_per_sample() -> None:
    assert into_rows([Piece(0, 2, ["a", "b"]), Piece(2, 3, ["c"])]) == ["a", "b", "c"]


def test_a_step_without_an_output_gives_none_for_each_sample() -> None:
    assert into_rows([Piece(0, 2, None), Piece(2, 3, None)]) == [None, None, None]
    assert into_rows([]) == []


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (torch.tensor(1.0), "Tensor"),
        (torch.ones(4), "Tensor"),
        ({"loss": torch.tensor(1.0)}, "dict"),
        (0.5, "float"),
        ("ab", "str"),
        ([torch.ones(2), torch.ones(2)], "list"),
    ],
)
def test_an_output_without_rows_is_refused_with_its_samples_and_type(output: Any, kind: str) -> None:
    with pytest.raises(ResultsError, match=rf"for samples 4 to 5 of the run is a {kind} without one row per sample"):
        into_rows([Piece(4, 6, output)])
