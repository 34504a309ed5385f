"""Which cells are run as one step."""

from __future__ import annotations

import numpy as np

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.size_search import SizeSearch
from lightning_hybrid.runtime.sizing import StepSizer
from lightning_hybrid.runtime.spec import EpochSpec, SizeRange
from lightning_hybrid.runtime.work import StaticDealer, Work


class Fits:
    """At most so many elements; samples where these are not known."""

    def __init__(self, most: int) -> None:
        self.most = most

    def fitting(self, samples: int, elements: int | None) -> int:
        size = samples if elements is None else elements
        return samples if size <= self.most else max(1, samples * self.most // size)


def _spec(num_samples: int, costs: list[float] | None = None) -> EpochSpec:
    grid = Grid.sequential(num_samples, 2)
    known = None if costs is None else Costs(compute=np.asarray(costs, dtype=float))
    return EpochSpec(stage="test", loader_idx=0, epoch=1, grid=grid, costs=known, auto=SizeRange(2, 8, 16))


def _sizer(spec: EpochSpec, most: int = 1000) -> StepSizer:
    assert spec.auto is not None
    return StepSizer(spec, SizeSearch(*spec.auto), Fits(most), spec.auto.most)


def test_as_many_samples_as_are_searched_for() -> None:
    sizer = _sizer(_spec(32))

    assert sizer.has_room(0, 8)
    assert not sizer.has_room(0, 10)


def test_heavy_samples_count_for_more() -> None:
    sizer = _sizer(_spec(16, [8, 8, 1, 1, 1, 1, 2, 2]))  # 24 for 16 samples; a step of 8 costs 12

    assert not sizer.has_room(0, 4)
    assert sizer.has_room(4, 16)


def test_what_does_not_fit_into_memory_is_no_step() -> None:
    assert not _sizer(_spec(32), most=6).has_room(0, 8)


def test_elements_of_the_newest_batch_tell_those_of_the_next() -> None:
    sizer = _sizer(_spec(32), most=60)
    sizer.observe(Work(0, 2), 0.1, elements=40)

    assert sizer.has_room(2, 4)
    assert not sizer.has_room(2, 6)


def test_the_search_keeps_to_what_fits() -> None:
    spec = _spec(4000)
    sizer = _sizer(spec, most=11)
    for number in range(200):
        size = round(sizer.step_cost)
        sizer.observe(Work(number, number + size), 1.0 + 0.001 * size, None)

    assert sizer.step_cost <= 11


def test_a_fixed_list_of_works_is_joined_where_they_follow_each_other() -> None:
    spec = _spec(12)
    works = [Work(*spec.grid.span(cell), cell) for cell in (0, 1, 2, 4, 5)]
    dealer = StaticDealer(works, _sizer(spec))
    taken = [dealer.take(may_wait=True) for _ in range(2)]

    assert [(work.start, work.stop, list(work.cells)) for work in taken if work is not None] == [
        (0, 6, [0, 1, 2]),
        (8, 12, [4, 5]),
    ]


def test_cells_of_a_work_come_in_the_order_in_which_they_were_handed_out() -> None:
    assert list(Work(0, 6, 2, last_cell=0).cells) == [2, 1, 0]
    assert list(Work(0, 6, 0, last_cell=2).cells) == [0, 1, 2]
    assert list(Work(0, 2, 0).cells) == [0]
    assert list(Work(0, 2).cells) == []
