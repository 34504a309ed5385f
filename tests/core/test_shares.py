"""Shares by earliest completion: every cell has an owner, and no other would have completed it sooner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.shares import earliest_completion
from lightning_hybrid.core.traces import SpeedTrace, lower_bound_s
from tests.core.claimants import costs_of

QUARTERS = st.integers(0, 40).map(lambda quarters: quarters / 4)
"""Costs and times whose sums have no rounding errors, as long as speeds are powers of two."""
SPEEDS = st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0])
BOUNDS = st.none() | st.integers(1, 10).map(float)
MANY = 3 * 2048
"""So many cells that some are dealt out in bulk."""


def shares(
    compute: Sequence[float],
    speeds: Sequence[float],
    *,
    free_s: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    bounds: Sequence[float | None] | None = None,
) -> list[int]:
    """The owner of each cell, where all replicas are free and without bounds unless it is said."""
    nothing = [None] * len(speeds)
    return earliest_completion(
        costs_of(compute, memory), speeds, free_s or [0.0] * len(speeds), bounds or nothing
    ).tolist()


def ends_of(
    owners: Sequence[int], compute: Sequence[float], speeds: Sequence[float], free_s: Sequence[float] | None = None
) -> list[float]:
    """When each replica would be done."""
    ends_s = np.array(free_s or [0.0] * len(speeds))
    return (ends_s + np.bincount(owners, weights=compute, minlength=len(speeds)) / np.array(speeds)).tolist()


def fitting(memory: float | None, bounds: Sequence[float | None]) -> list[int]:
    """The replicas that a cell fits, or else those with the largest bound."""
    limits = [float("inf") if bound is None else bound for bound in bounds]
    least = min(0.0 if memory is None else memory, max(limits))
    return [r for r, limit in enumerate(limits) if limit >= least]


# --- few cells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "speeds", "owners"),
    [
        ([], [1, 1], []),
        ([3, 2, 1], [1], [0, 0, 0]),
        ([4, 3, 2, 1], [1, 1], [0, 1, 1, 0]),
        ([1, 1, 1], [1, 1], [0, 1, 0]),
        # on two of speed 1 and one of 4: 4 ends there at 1, 3 at 1.75, 2 at 2.25 elsewhere at 2
        ([4, 3, 2, 2], [1, 1, 4], [2, 2, 0, 1]),
        ([0, 0], [1, 2], [0, 0]),
    ],
)
def test_each_cell_goes_to_who_completes_it_first(compute: list[float], speeds: list[float], owners: list[int]) -> None:
    assert shares(compute, speeds) == owners


def test_it_is_the_completion_that_counts_and_not_who_is_free_first() -> None:
    # the slow one is free at once, but would take until 8
    assert shares([8], [1, 4], free_s=[0.0, 5.0]) == [1]
    assert shares([8], [1, 4], free_s=[0.0, 6.5]) == [0]


def test_who_is_busy_for_long_gets_nothing_until_the_others_are_as_far() -> None:
    owners = shares([1] * 6, [1, 1], free_s=[0.0, 4.0])

    assert owners == [0, 0, 0, 0, 0, 1]


@given(
    st.lists(QUARTERS, max_size=12),
    st.lists(st.tuples(SPEEDS, QUARTERS, BOUNDS), min_size=1, max_size=4),
    st.none() | st.lists(st.integers(0, 12).map(float), min_size=12, max_size=12),
)
def test_no_other_replica_that_a_cell_fits_would_have_completed_it_sooner(
    compute: list[float], replicas: list[tuple[float, float, float | None]], memory: list[float] | None
) -> None:
    speeds, free_s, bounds = (list(part) for part in zip(*replicas, strict=True))
    memory = None if memory is None else memory[: len(compute)]
    owners = shares(compute, speeds, free_s=free_s, memory=memory, bounds=bounds)

    assert len(owners) == len(compute)
    ends_s = list(free_s)
    for cell, owner in enumerate(owners):
        able = fitting(None if memory is None else memory[cell], bounds)
        completions = {r: ends_s[r] + compute[cell] / speeds[r] for r in able}
        assert owner == min(completions, key=lambda r: (completions[r], r))
        ends_s[owner] = completions[owner]


@given(st.lists(QUARTERS, min_size=1, max_size=6), st.lists(SPEEDS, min_size=1, max_size=3))
@settings(deadline=None)
def test_heavy_cells_first_come_as_close_to_the_best_as_the_theorem_says(
    compute: list[float], speeds: list[float]
) -> None:
    compute.sort(reverse=True)
    every_way = itertools.product(range(len(speeds)), repeat=len(compute))
    best_s = min(max(ends_of(owners, compute, speeds)) for owners in every_way)

    # longest processing time first on uniform machines: at most 2 m / (m + 1) times the best (Gonzalez et al., 1977)
    most_s = best_s * 2 * len(speeds) / (len(speeds) + 1)
    assert max(ends_of(shares(compute, speeds), compute, speeds)) <= most_s * (1 + 1e-9)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_cell_goes_only_where_it_fits() -> None:
    owners = shares([4, 4, 1, 1], [8, 1], memory=[5, 2, 9, 2], bounds=[4.0, None])

    assert owners == [1, 0, 1, 0]


def test_a_cell_that_is_just_as_large_as_the_bound_fits() -> None:
    assert shares([1, 1], [8, 1], memory=[4, 4.5], bounds=[4.0, 9.0]) == [0, 1]


@pytest.mark.parametrize(
    ("bounds", "owners"), [([3.0, 5.0, 4.0], {1}), ([5.0, 3.0, 5.0], {0, 2}), ([4.0, 4.0, 4.0], {0, 1, 2})]
)
def test_a_cell_above_all_bounds_goes_to_those_with_the_largest(bounds: list[float], owners: set[int]) -> None:
    assert set(shares([1] * 6, [1, 1, 1], memory=[9] * 6, bounds=bounds)) == owners


def test_bounds_without_memory_costs_and_memory_costs_without_bounds_change_nothing() -> None:
    compute, speeds = [5, 4, 3, 2, 1], [1, 2]
    without = shares(compute, speeds)

    assert shares(compute, speeds, bounds=[1.0, 1.0]) == without
    assert shares(compute, speeds, memory=[9, 9, 9, 9, 9]) == without
    assert shares(compute, speeds, memory=[9, 9, 9, 9, 9], bounds=[9.0, None]) == without


# --- fairness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cells", [12, 1200, MANY, 10 * MANY])
@pytest.mark.parametrize("world", [2, 3, 6])
def test_equal_replicas_get_equal_numbers_of_equal_cells(num_cells: int, world: int) -> None:
    counts = np.bincount(shares([1] * num_cells, [2] * world), minlength=world)

    assert counts.sum() == num_cells
    assert np.ptp(counts) <= 1


@pytest.mark.parametrize("num_cells", [1200, 10 * MANY])
def test_replicas_get_equal_cells_in_proportion_to_their_speeds(num_cells: int) -> None:
    counts = np.bincount(shares([1] * num_cells, [1, 2, 3]), minlength=3)

    assert np.abs(counts - num_cells * np.array([1, 2, 3]) / 6).max() <= 1


# --- many cells, in bulk --------------------------------------------------------------------------------------------


def drawn(kind: str, num_cells: int) -> np.ndarray:
    """Costs in descending order; their seed is 7."""
    random = np.random.default_rng(7)
    costs = random.lognormal(0.0, 1.0, num_cells) if kind == "lognormal" else random.uniform(0.5, 1.5, num_cells)
    return np.sort(costs)[::-1]


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
@pytest.mark.parametrize("speeds", [[1, 1], [1, 8], [1, 2, 3, 8, 0.5]])
def test_many_cells_end_within_a_hundredth_of_the_bound(kind: str, speeds: list[float]) -> None:
    compute = drawn(kind, 4 * MANY)
    owner = earliest_completion(Costs(compute=compute), speeds, [0.0] * len(speeds), [None] * len(speeds))

    assert owner.shape == compute.shape
    assert (owner.min(), owner.max()) == (0, len(speeds) - 1)
    bound_s = lower_bound_s(compute, [SpeedTrace.constant(speed) for speed in speeds])
    ends_s = ends_of(owner, compute, speeds)
    assert max(ends_s) <= 1.01 * bound_s
    assert min(ends_s) >= 0.99 * bound_s


def test_in_bulk_every_replica_gets_cells_from_everywhere() -> None:
    compute = drawn("lognormal", 4 * MANY)
    owner = earliest_completion(Costs(compute=compute), [1.0, 3.0], [0.0, 0.0], [None, None])
    parts = [part.mean() for part in np.array_split(owner, 20)]

    # by speed three of four, more where cells of like cost happen to fall so
    assert 0.6 < min(parts) <= max(parts) < 0.9


def test_in_bulk_who_is_free_later_gets_less() -> None:
    compute = drawn("uniform", 4 * MANY)
    total_s, later_s = float(compute.sum()), float(compute.sum()) / 4
    owner = earliest_completion(Costs(compute=compute), [1.0, 1.0], [0.0, later_s], [None, None])
    ends_s = ends_of(owner, compute, [1.0, 1.0], [0.0, later_s])

    assert ends_s == pytest.approx([(total_s + later_s) / 2] * 2, rel=0.01)


def test_in_bulk_who_is_free_after_all_is_done_gets_nothing() -> None:
    compute = drawn("uniform", 2 * MANY)
    owner = earliest_completion(Costs(compute=compute), [1.0, 8.0, 1.0], [0.0, 1e6, 0.0], [None, None, None])

    assert set(owner.tolist()) == {0, 2}


def test_in_bulk_memory_bounds_are_kept() -> None:
    compute = drawn("uniform", 2 * MANY)
    memory = np.random.default_rng(8).uniform(0.0, 10.0, len(compute))
    bounds = [None, 5.0, 8.0]
    owner = earliest_completion(Costs(compute=compute, memory=memory), [1.0, 1.0, 1.0], [0.0] * 3, bounds)

    for replica, bound in enumerate(bounds):
        assert bound is None or memory[owner == replica].max() <= bound
    # there is enough light work for all to end together
    assert ends_of(owner, compute, [1, 1, 1]) == pytest.approx([compute.sum() / 3] * 3, rel=0.01)


def test_in_bulk_cells_above_all_bounds_go_to_those_with_the_largest() -> None:
    compute = drawn("uniform", 2 * MANY)
    memory = np.full(len(compute), 9.0)
    owner = earliest_completion(Costs(compute=compute, memory=memory), [1.0, 1.0, 1.0], [0.0] * 3, [4.0, 2.0, 4.0])

    assert set(owner.tolist()) == {0, 2}
    assert abs(int((owner == 0).sum()) - len(compute) // 2) <= 0.01 * len(compute)


@given(
    st.integers(2 * 2048 - 2, 2 * 2048 + 40),
    st.lists(st.tuples(SPEEDS, QUARTERS, BOUNDS), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 999),
)
@settings(deadline=None, max_examples=15)
def test_around_the_first_bulk_every_cell_has_an_owner_that_it_fits(
    num_cells: int, replicas: list[tuple[float, float, float | None]], has_memory: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    speeds, free_s, bounds = (list(part) for part in zip(*replicas, strict=True))
    memory = random.uniform(0.0, 12.0, num_cells) if has_memory else None
    costs = Costs(compute=np.sort(random.uniform(0.1, 5.0, num_cells))[::-1], memory=memory)
    owner = earliest_completion(costs, speeds, free_s, bounds)

    assert owner.shape == (num_cells,)
    for cell in range(num_cells):
        assert owner[cell] in fitting(None if memory is None else float(memory[cell]), bounds)
