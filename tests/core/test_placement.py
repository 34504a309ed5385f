from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core import placement
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.proposals import ReplicaView


def costs(compute: list[float], memory: list[float] | None = None, io: list[float] | None = None) -> Costs:
    return Costs(
        compute=np.array(compute, dtype=np.float64),
        memory=None if memory is None else np.array(memory, dtype=np.float64),
        io=None if io is None else np.array(io, dtype=np.float64),
    )


def bounded(*bounds: float | None) -> list[ReplicaView]:
    return [ReplicaView(replica=r, speed_per_s=1.0, memory_bound=bound) for r, bound in enumerate(bounds)]


def test_sums_that_differ_by_rounding_are_level() -> None:
    assert len(set(placement.level(np.array([0.1 + 0.2, 0.3, 0.1 * 3])).tolist())) == 1
    assert placement.level(np.array([1.0, 1.001])).tolist()[0] < placement.level(np.array([1.0, 1.001])).tolist()[1]


def test_costs_of_zero_are_level() -> None:
    assert placement.level(np.zeros(3)).tolist() == [0, 0, 0]
    assert placement.level(np.zeros(0)).tolist() == []


@given(st.lists(st.integers(-(2**62), 2**62) | st.integers(-3, 3), max_size=40))
def test_ascending_is_the_stable_order_of_any_numbers(values: list[int]) -> None:
    levels = np.array(values, dtype=np.int64)

    assert placement.ascending(levels).tolist() == np.argsort(levels, kind="stable").tolist()


@pytest.mark.parametrize(
    ("cells", "are_alike"),
    [
        (costs([]), True),
        (costs([3]), True),
        (costs([2, 2, 2]), True),
        (costs([2, 2, 1]), True),
        (costs([2, 2, 3]), False),
        (costs([2, 1, 2]), False),
        (costs([2, 2], [1, 1]), True),
        (costs([2, 2, 2], [1, 3, 1]), False),
        (costs([2, 2, 1], None, [1, 1, 0]), True),
        (costs([0.1 + 0.2, 0.3, 0.3]), True),
    ],
)
def test_cells_are_alike_where_only_the_last_costs_less(cells: Costs, are_alike: bool) -> None:
    assert placement.all_alike(cells) is are_alike


def test_a_cell_is_of_the_kind_that_it_has_most_of() -> None:
    by_memory, by_io = placement.kinds(costs([2, 1, 1, 0], [1, 2, 1, 0], [1, 1, 2, 0]), 1.25)

    assert by_memory.tolist() == [False, True, False, False]
    assert by_io.tolist() == [False, False, True, False]


def test_memory_in_proportion_to_compute_makes_nothing_memory_heavy() -> None:
    by_memory, by_io = placement.kinds(costs([1, 7, 3], [10, 70, 30]), 1.0 + 1e-9)

    assert not by_memory.any()
    assert not by_io.any()


def test_a_replica_keeps_its_bound_where_there_is_something_to_compare() -> None:
    assert placement.memory_bounds(costs([1, 1], [3, 5]), bounded(4.0, None, 9.0)) == [4.0, None, 9.0]
    assert placement.memory_bounds(costs([1, 1]), bounded(4.0, None)) == [None, None]


def test_what_fits_nowhere_is_left_to_the_replicas_with_the_largest_bound() -> None:
    assert placement.memory_bounds(costs([1, 1], [3, 10]), bounded(4.0, 9.0, 9.0)) == [4.0, None, None]


def test_a_replica_without_a_bound_takes_what_fits_nowhere_else() -> None:
    assert placement.memory_bounds(costs([1, 1], [3, 10]), bounded(4.0, None)) == [4.0, None]


def test_misfits_are_counted_by_replica() -> None:
    cells = costs([1, 1, 1, 1], [2, 4, 5, 10])
    counted = placement.num_misfits(cells, bounded(4.0, 9.0, None))

    assert counted is not None
    assert counted.tolist() == [0, 0, 1, 2]
    assert placement.num_misfits(cells, bounded(None, None)) is None
    assert placement.num_misfits(costs([1]), bounded(1.0)) is None


def test_replicas_are_too_small_for_what_a_larger_one_can_run() -> None:
    cells = costs([1, 1], [2, 10])

    assert placement.too_small(cells, bounded(4.0, 12.0, None, 10.0)) == [True, False, False, False]
    assert placement.too_small(cells, bounded(4.0, 9.0)) == [True, False]
    assert placement.too_small(cells, bounded(4.0, 4.0)) == [False, False]
    assert placement.too_small(costs([1]), bounded(0.5, 2.0)) == [False, False]
    assert placement.too_small(cells, []) == []


@pytest.mark.parametrize(
    ("speeds", "at_least_frac", "flags"),
    [
        ([1, 1, 1], 0.0, [False, False, False]),
        ([1.0, 1.05], 0.0, [False, False]),
        ([4, 1, 4], 0.0, [False, True, False]),
        ([8, 1, 1], 0.0, [False, True, True]),
        ([1, 1, 1, 1], 0.1, [False, False, False, True]),
        ([1, 1, 1, 1], 0.5, [False, False, True, True]),
        ([1, 1], 1.0, [False, True]),
        ([2], 0.5, [False]),
        ([], 0.5, []),
        ([0, 0], 0.5, [False, False]),
    ],
)
def test_the_slow_ones_are_enough_and_never_all(speeds: list[float], at_least_frac: float, flags: list[bool]) -> None:
    assert placement.slower(speeds, at_least_frac, 0.1) == flags


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.floats(0, 1))
def test_no_slow_replica_is_faster_than_another_one(speeds: list[float], at_least_frac: float) -> None:
    flags = placement.slower(speeds, at_least_frac, 0.1)
    slow = [speed for speed, flag in zip(speeds, flags, strict=True) if flag]
    fast = [speed for speed, flag in zip(speeds, flags, strict=True) if not flag]

    assert fast
    assert max(slow, default=0.0) <= min(fast)


def test_both_ends_are_heavy_and_the_lightest_cells_are_between_them() -> None:
    cells = costs([8, 7, 6, 5, 4, 3, 2, 1])
    order = placement.meet(np.arange(8), cells, 0.4, 0.1)

    assert order.tolist() == [0, 1, 2, 6, 7, 5, 4, 3]


def test_nothing_moves_where_nobody_takes_from_the_tail() -> None:
    assert placement.meet(np.arange(4), costs([4, 3, 2, 1]), 0.0, 0.05).tolist() == [0, 1, 2, 3]
    assert placement.meet(np.arange(0), costs([]), 0.5, 0.05).tolist() == []


@given(st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.0, 5.0]), min_size=1, max_size=60), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_cells_that_cost_the_same_keep_their_order_wherever_the_ends_meet(
    compute: list[float], tail_frac: float, middle_frac: float
) -> None:
    cells = costs(compute)
    heavy_first = np.argsort(-cells.compute, kind="stable")
    order = placement.meet(heavy_first, cells, tail_frac, middle_frac)

    assert sorted(order.tolist()) == list(range(len(compute)))
    for cost in set(compute):
        same = [cell for cell in order.tolist() if compute[cell] == cost]
        assert same == sorted(same)


def test_the_first_cells_stay_first() -> None:
    views = [ReplicaView(replica=0, speed_per_s=1.0), ReplicaView(replica=1, speed_per_s=1.0)]
    order = placement.meet_behind(2, np.array([7, 6, 0, 1, 2, 3, 4, 5]), costs([8] * 8), views, [False, True], 0.0)

    assert order[:2].tolist() == [7, 6]
    assert sorted(order.tolist()) == list(range(8))


@pytest.mark.parametrize(
    ("order", "evenly", "mixed"),
    [
        ([0, 1, 2, 3], [4], [0, 1, 4, 2, 3]),
        ([0, 1, 2, 3], [4, 5], [0, 4, 1, 2, 5, 3]),
        ([0], [1, 2, 3], [1, 0, 2, 3]),
        ([], [1, 0], [1, 0]),
        ([1, 0], [], [1, 0]),
        ([], [], []),
    ],
)
def test_cells_are_spread_at_even_distances(order: list[int], evenly: list[int], mixed: list[int]) -> None:
    spread = placement.spread(np.array(order, dtype=np.int64), np.array(evenly, dtype=np.int64))

    assert spread.tolist() == mixed


@given(st.integers(0, 50), st.integers(1, 50))
def test_spread_cells_are_equally_far_apart(num_others: int, num_evenly: int) -> None:
    order = np.arange(num_others)
    mixed = placement.spread(order, np.arange(num_others, num_others + num_evenly)).tolist()
    places = [place for place, cell in enumerate(mixed) if cell >= num_others]
    steps = [later - earlier for earlier, later in itertools.pairwise(places)]

    assert sorted(mixed) == list(range(num_others + num_evenly))
    assert max(steps, default=0) - min(steps, default=0) <= 1
