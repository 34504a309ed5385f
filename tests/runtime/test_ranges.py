from __future__ import annotations

import pytest

from lightning_hybrid.core.workqueue import Span
from lightning_hybrid.runtime.ranges import OwnRanges
from lightning_hybrid.runtime.sharedqueue import RangeKey

FIRST, SECOND = RangeKey("range/0/0", 4, 3), RangeKey("range/0/1", 20, 2)


def ranges_of(*keys: RangeKey, prefetch: bool = False) -> OwnRanges:
    ranges = OwnRanges(prefetch=prefetch)
    for key in keys:
        ranges.add(key)
    return ranges


def test_without_ranges_there_is_nothing() -> None:
    ranges = ranges_of()

    assert ranges.next_to_hand() is None
    assert ranges.next_to_reserve() is None
    assert (ranges.open(), ranges.spans()) == ([], [])
    assert (ranges.num_reserved, ranges.num_unhanded, ranges.num_unbegun) == (0, 0, 0)


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


def test_a_handed_cell_is_found_in_the_range_that_it_came_from() -> None:
    ranges = ranges_of(FIRST, SECOND, prefetch=True)
    first = ranges.next_to_hand()
    assert first is not None
    first.handed = 7
    second = ranges.next_to_hand()
    assert second is not None
    second.handed = 21

    assert ranges.holder_of(4) is first
    assert ranges.holder_of(6) is first
    assert ranges.holder_of(20) is second


def test_a_cell_that_came_back_by_theft_is_begun_in_its_first_range_first() -> None:
    # cells 5 and 6 were stolen while they were loaded, and cell 6 was stolen back
    ranges = ranges_of(FIRST, RangeKey("range/0/1", 6, 1), prefetch=True)
    first = ranges.next_to_hand()
    assert first is not None
    first.handed, first.begun, first.stop = 7, 5, 5
    again = ranges.next_to_hand()
    assert again is not None
    again.handed = 7

    assert ranges.holder_of(6) is first
    first.begun = 7
    assert ranges.holder_of(6) is again


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
