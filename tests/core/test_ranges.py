from __future__ import annotations

import pytest

from lightning_hybrid.core.ranges import OwnRanges, append_cell
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import RangeKey, Span
from tests.core.claimants import costs_of, version_of

FIRST, SECOND = RangeKey("range/0/0.0", 4, 3), RangeKey("range/0/0.1", 20, 2)


def ranges_of(*keys: RangeKey, prefetch: bool = False, version: QueueVersion | None = None) -> OwnRanges:
    ranges = OwnRanges(prefetch=prefetch)
    for key in keys:
        ranges.add(key, version)
    return ranges


def heavy_first() -> QueueVersion:
    """Eight cells, cell ``c`` costs ``c``."""
    return version_of([7, 6, 5, 4, 3, 2, 1, 0], costs_of([0, 1, 2, 3, 4, 5, 6, 7]), 1)


def test_without_ranges_there_is_nothing() -> None:
    ranges = ranges_of()

    assert ranges.next_to_hand() is None
    assert ranges.next_to_reserve() is None
    assert (ranges.open(), ranges.spans()) == ([], [])
    assert (ranges.num_reserved, ranges.num_unhanded, ranges.num_unbegun) == (0, 0, 0)
    assert (ranges.cost_reserved, ranges.cost_unbegun) == (0, 0)


def test_a_new_range_may_be_stolen_whole() -> None:
    ranges = ranges_of(FIRST, SECOND)

    assert [item.key for item in ranges.open()] == [FIRST, SECOND]
    assert ranges.spans() == [Span(4, 7), Span(20, 22)]
    assert (ranges.num_reserved, ranges.num_unhanded, ranges.num_unbegun) == (0, 5, 5)


def test_without_workers_only_reserved_cells_are_handed_out() -> None:
    ranges = ranges_of(FIRST)
    assert ranges.next_to_hand() is None
    item = ranges.next_to_reserve()
    assert item is not None
    item.reserved = 6

    assert ranges.next_to_hand() is item
    item.handed = item.begun = 6
    assert ranges.next_to_hand() is None
    assert ranges.num_reserved == 0


def test_with_workers_cells_are_handed_out_before_they_are_reserved() -> None:
    ranges = ranges_of(FIRST, SECOND, prefetch=True)
    first = ranges.next_to_hand()
    assert first is not None
    assert first.key == FIRST
    first.handed = 7

    second = ranges.next_to_hand()
    assert second is not None
    assert second.key == SECOND
    assert (ranges.num_unhanded, ranges.num_unbegun) == (2, 5)


def test_stolen_cells_are_not_held() -> None:
    ranges = ranges_of(FIRST)
    (item,) = ranges.open()
    item.reserved, item.stop = 5, 5

    assert ranges.open() == []
    assert ranges.spans() == [Span(4, 5)]
    assert ranges.num_unhanded == 1


def test_ranges_that_were_run_to_their_end_are_forgotten() -> None:
    ranges = ranges_of(FIRST, SECOND)
    (first, second) = ranges.open()
    first.reserved = first.handed = first.begun = 7

    assert ranges.next_to_reserve() is second
    assert ranges.spans() == [Span(20, 22)]


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_swept_cell_is_run_and_cannot_be_stolen(prefetch: bool) -> None:
    ranges = ranges_of(prefetch=prefetch)
    ranges.add_swept(9)

    assert ranges.open() == []
    assert ranges.spans() == [Span(9, 10)]
    item = ranges.next_to_hand()
    assert item is not None
    assert (item.key, item.handed, item.reserved) == (None, 9, 10)
    assert ranges.next_to_reserve() is None


# --- in a version of the queue --------------------------------------------------------------------------------------


def test_positions_are_cells_in_the_order_of_the_version() -> None:
    ranges = ranges_of(RangeKey("range/0/0.0", 1, 4), version=heavy_first())
    (item,) = ranges.open()

    assert [item.cell_at(position) for position in range(1, 5)] == [6, 5, 4, 3]
    assert ranges.spans() == [Span(6, 7), Span(5, 6), Span(4, 5), Span(3, 4)]


def test_costs_are_summed_over_what_is_held() -> None:
    ranges = ranges_of(RangeKey("range/0/0.0", 1, 4), RangeKey("range/0/0.1", 6, 2), version=heavy_first())
    first, second = ranges.open()
    assert (ranges.cost_reserved, ranges.cost_unbegun) == (0, 6 + 5 + 4 + 3 + 1)
    first.reserved, second.reserved = 3, 7
    assert (ranges.cost_reserved, ranges.cost_unbegun) == (6 + 5 + 1, 6 + 5 + 4 + 3 + 1)
    first.handed = first.begun = 2
    first.stop = 4

    assert (ranges.cost_reserved, ranges.cost_unbegun) == (5 + 1, 5 + 4 + 1)


def test_what_was_begun_beyond_the_reserved_because_it_was_stolen_costs_nothing() -> None:
    ranges = ranges_of(RangeKey("range/0/0.0", 1, 4), version=heavy_first(), prefetch=True)
    (item,) = ranges.open()
    item.handed, item.reserved, item.stop, item.begun = 4, 2, 2, 4

    assert (ranges.cost_reserved, ranges.cost_unbegun) == (0, 0)
    assert (ranges.num_reserved, ranges.num_unbegun, ranges.num_unhanded) == (0, 0, 0)


def test_a_range_may_be_put_before_the_others() -> None:
    ranges = ranges_of(FIRST)
    item = ranges.add(SECOND, first=True)
    item.reserved = 22

    assert [item.key for item in ranges.open()] == [FIRST]
    assert ranges.next_to_hand() is item
    assert ranges.spans() == [Span(20, 22), Span(4, 7)]


def test_a_swept_cell_has_its_own_number_and_no_known_cost() -> None:
    ranges = ranges_of(version=heavy_first())
    ranges.add_swept(3)
    item = ranges.next_to_hand()

    assert item is not None
    assert (item.cell_at(3), item.cost(3, 4)) == (3, 0)


def test_cells_in_a_row_make_one_span() -> None:
    spans: list[Span] = []
    for cell in (4, 5, 6, 9, 8, 9, 10):
        append_cell(spans, cell)

    assert spans == [(4, 7), (9, 10), (8, 11)]
