from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.runtime.reading import EndlessGrid, Reading, are_alike


def read(*sizes: int, mark: str | None = None, ended: bool = True) -> Reading:
    reading = Reading()
    for i, size in enumerate(sizes):
        reading.add(size, mark if i == 0 else None)
    reading.has_ended = ended
    return reading


def test_batches_stand_behind_each_other() -> None:
    reading = read(2, 3, 1)

    assert reading.num_batches == 3
    assert [reading.span(batch) for batch in range(3)] == [(0, 2), (2, 5), (5, 6)]


def test_grid_of_what_was_read() -> None:
    grid = read(2, 3, 1).grid()

    assert (grid.num_cells, grid.num_samples) == (3, 6)
    assert grid.indices(*grid.span(1)) == [2, 3, 4]


def test_grid_of_an_empty_stream() -> None:
    grid = read().grid()

    assert (grid.num_cells, grid.num_samples) == (0, 0)


@given(st.lists(st.integers(1, 100)))
def test_grid_holds_every_sample_once(sizes: list[int]) -> None:
    reading = read(*sizes)
    grid = reading.grid()

    assert [grid.span(cell) for cell in range(grid.num_cells)] == [reading.span(b) for b in range(len(sizes))]
    assert [i for b in range(len(sizes)) for i in grid.indices(*grid.span(b))] == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("num_read", "ended", "end", "may"),
    [
        (3, True, 3, True),
        (3, True, 4, False),
        (3, True, 2, False),
        (3, False, 3, True),
        (3, False, 9, True),
        (3, False, 2, False),
    ],
)
def test_where_a_stream_may_end(num_read: int, ended: bool, end: int, may: bool) -> None:
    assert read(*[1] * num_read, ended=ended).may_end_at(end) is may


def test_endless_grid_has_a_cell_for_every_batch() -> None:
    grid = EndlessGrid.new()

    assert grid.num_cells == grid.num_samples == 2**30
    assert grid.span(12345) == (12345, 12346)


def test_equal_streams_are_alike() -> None:
    assert are_alike([read(2, 2, 1, mark="a").summary()] * 3)
    assert are_alike([read(2, 2, 1, mark="a").summary(), read(2, 2, 1).summary()])
    assert are_alike([read().summary()] * 2)


def test_streams_that_begin_differently_are_not_alike() -> None:
    assert not are_alike([read(2, 1, mark="a").summary(), read(2, 1, mark="b").summary()])


@pytest.mark.parametrize(("sizes", "named"), [((2, 2), "another 4 in 2"), ((2, 1, 2), "another 5 in 3")])
def test_streams_of_other_sizes_are_an_error_that_names_both(sizes: tuple[int, ...], named: str) -> None:
    with pytest.raises(PlanError, match=f"one read 5 samples in 3 batches, {named}"):
        are_alike([read(2, 2, 1).summary(), read(*sizes).summary()])
