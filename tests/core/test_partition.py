from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.partition import apportion, distribute_workload, last_round_sizes, round_sizes

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda weights: sum(weights) > 1e-6)
SPEEDS = st.lists(st.floats(0.01, 1000), min_size=1, max_size=9)


def round_s(sizes: list[int], speeds: list[float]) -> float:
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


# --- apportion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (10, [1, 1], [5, 5]),
        (10, [3, 3, 3, 1], [3, 3, 3, 1]),
        (7, [1, 1], [4, 3]),
        (8, [1, 1, 1], [3, 3, 2]),
        (10, [6, 2, 2.5], [6, 2, 2]),
        (1, [1, 2, 3], [0, 0, 1]),
        (0, [1, 2], [0, 0]),
        (5, [0, 1], [0, 5]),
        (5, [2.5], [5]),
        (100, [1, 0.001], [100, 0]),
    ],
)
def test_shares_follow_the_weights(total: int, weights: list[float], shares: list[int]) -> None:
    assert apportion(total, weights) == shares


@pytest.mark.parametrize(
    "weights", [[], [0, 0], [1, -1], [-1], [1, float("nan")], [float("inf"), 1], [1, -float("inf")]]
)
def test_weights_that_give_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="finite, not negative and not all zero"):
        apportion(5, weights)


@given(st.integers(0, 10**6), WEIGHTS)
@settings(deadline=None)
def test_shares_add_up_and_are_never_negative(total: int, weights: list[float]) -> None:
    shares = apportion(total, weights)

    assert len(shares) == len(weights)
    assert sum(shares) == total
    assert min(shares) >= 0


@pytest.mark.parametrize("weights", [[1.7e308, 1.7e308], [5e-324], [5e-324, 5e-324], [1e-310, 2e-310], [1e308, 1e-308]])
def test_shares_add_up_at_the_ends_of_the_number_range(weights: list[float]) -> None:
    shares = apportion(6, weights)

    assert sum(shares) == 6
    assert min(shares) >= 0


@given(st.integers(0, 10**6), WEIGHTS)
@settings(deadline=None)
def test_a_share_is_its_quota_rounded_down_or_up(total: int, weights: list[float]) -> None:
    for share, weight in zip(apportion(total, weights), weights, strict=True):
        quota = total * (weight / sum(weights))
        assert math.floor(quota - 1e-6) <= share <= math.ceil(quota + 1e-6)


@given(st.integers(0, 1000), WEIGHTS)
@settings(deadline=None)
def test_the_greater_weight_never_has_the_smaller_share(total: int, weights: list[float]) -> None:
    pairs = sorted(zip(weights, apportion(total, weights), strict=True))

    for (weight, share), (greater, its_share) in itertools.pairwise(pairs):
        same = greater - weight <= 1e-12 * greater
        assert share <= its_share + same


@given(st.integers(0, 1000), st.integers(1, 9), st.floats(0.01, 100))
@settings(deadline=None)
def test_equal_weights_differ_by_at_most_one_and_ties_go_to_the_first(total: int, world: int, weight: float) -> None:
    shares = apportion(total, [weight] * world)

    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


# --- distribute_workload ----------------------------------------------------------------------------------------------

SPEEDS_OR_STANDSTILL = st.lists(
    st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 1.0, 3.0]), min_size=1, max_size=9
).filter(any)


@given(st.integers(0, 10**30), SPEEDS_OR_STANDSTILL)
@settings(deadline=None)
def test_a_workload_adds_up_however_large_it_is(total: int, speeds: list[float]) -> None:
    shares = distribute_workload(total, speeds)

    assert sum(shares) == total
    assert min(shares) >= 0
    assert all(share == 0 for share, speed in zip(shares, speeds, strict=True) if speed == 0)


@given(st.integers(0, 10**20), SPEEDS_OR_STANDSTILL)
@settings(deadline=None)
def test_a_faster_replica_never_gets_less_than_a_slower_one(total: int, speeds: list[float]) -> None:
    pairs = sorted(zip(speeds, distribute_workload(total, speeds), strict=True))

    for (slower, less), (faster, more) in itertools.combinations(pairs, 2):
        assert slower == faster or less <= more


@given(st.integers(0, 10**9), SPEEDS_OR_STANDSTILL, st.integers(0, 8), st.floats(0, 1e6))
@settings(deadline=None)
def test_a_replica_that_becomes_faster_never_gets_less(
    total: int, speeds: list[float], which: int, more: float
) -> None:
    replica = which % len(speeds)
    faster = [speed + more if r == replica else speed for r, speed in enumerate(speeds)]

    assert distribute_workload(total, faster)[replica] >= distribute_workload(total, speeds)[replica]


@pytest.mark.parametrize(
    ("total", "speeds", "message"),
    [
        (-1, [1.0], "total must be a whole number of at least 0, got -1"),
        (2.0, [1.0], "total must be a whole number, got 2.0"),
        (True, [1.0], "total must be a whole number of at least 0, got True"),
        (None, [1.0], "total must be a whole number, got None"),
        (3, [], "speeds must hold at least one that is positive, got []"),
        (3, [0.0, 0.0], "speeds must hold at least one that is positive, got [0.0, 0.0]"),
        (3, [1.0, -2.0], "speeds[1] must be finite and at least 0, got -2.0"),
        (3, [float("nan")], "speeds[0] must be finite and at least 0, got nan"),
        (3, [1.0, float("inf")], "speeds[1] must be finite and at least 0, got inf"),
    ],
)
def test_a_workload_that_cannot_be_distributed_is_refused(total: int, speeds: list[float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        distribute_workload(total, speeds)
    assert str(caught.value) == message


# --- round_sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "max_size", "sizes"),
    [
        ([1, 1, 1, 1 / 3], 16, [16, 16, 16, 5]),
        ([1, 1, 1, 1], 16, [16, 16, 16, 16]),
        ([1], 16, [16]),
        ([1, 0.5], 8, [8, 4]),
        ([1, 0.5], 7, [6, 3]),
        ([1, 1, 1, 1 / 3], 1, [1, 1, 1, 1]),
        ([1, 0.001], 16, [16, 1]),
        ([1, 1 / 3], 3, [3, 1]),
        ([200, 200, 200, 66.66], 64, [64, 64, 64, 21]),  # [3, 3, 3, 1] would be 0.15 % faster but for the overhead
    ],
)
def test_a_round_gives_each_replica_what_it_can_do_in_the_same_time(
    speeds: list[float], max_size: int, sizes: list[int]
) -> None:
    assert round_sizes(speeds, max_size) == sizes


@given(SPEEDS, st.integers(1, 64))
@settings(deadline=None)
def test_every_replica_takes_part_in_a_round_and_none_gets_more_than_fits(speeds: list[float], max_size: int) -> None:
    sizes = round_sizes(speeds, max_size)

    assert len(sizes) == len(speeds)
    assert min(sizes) >= 1
    assert max(sizes) <= max_size


@given(SPEEDS, st.integers(1, 64))
@settings(deadline=None)
def test_a_round_is_never_slower_than_equal_batches(speeds: list[float], max_size: int) -> None:
    sizes = round_sizes(speeds, max_size)
    equal = [max_size] * len(speeds)

    assert sum(sizes) / round_s(sizes, speeds) >= sum(equal) / round_s(equal, speeds) * (1 - 1e-9)


@given(SPEEDS, st.integers(1, 64))
@settings(deadline=None)
def test_the_faster_replica_never_gets_the_smaller_part_of_a_round(speeds: list[float], max_size: int) -> None:
    sizes = [size for _, size in sorted(zip(speeds, round_sizes(speeds, max_size), strict=True))]

    assert sizes == sorted(sizes)


@given(SPEEDS, st.integers(1, 64), st.floats(0.001, 1000))
@settings(deadline=None)
def test_only_the_proportions_of_speeds_matter(speeds: list[float], max_size: int, unit: float) -> None:
    sizes = round_sizes(speeds, max_size)
    scaled = [speed * unit for speed in speeds]

    # another unit may decide a tie otherwise, never for the worse
    other = round_sizes(scaled, max_size)
    assert sum(other) / round_s(other, speeds) == pytest.approx(sum(sizes) / round_s(sizes, speeds))


@given(st.integers(1, 9), st.floats(0.01, 1000), st.integers(1, 64))
@settings(deadline=None)
def test_equal_replicas_get_full_batches(world: int, speed: float, max_size: int) -> None:
    assert round_sizes([speed] * world, max_size) == [max_size] * world


# --- last_round_sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remaining", "speeds", "full", "sizes"),
    [
        (49, [1, 1, 1, 1 / 3], [15, 15, 15, 5], [15, 15, 15, 4]),
        (4, [1, 1, 1, 1 / 3], [15, 15, 15, 5], [1, 1, 1, 1]),
        (3, [1, 1, 1, 1], [16, 16, 16, 16], [1, 1, 1, 0]),
        (1, [1, 1, 1, 1], [16, 16, 16, 16], [1, 0, 0, 0]),
        (0, [1, 1], [16, 16], [0, 0]),
        (7, [1, 1], [4, 4], [4, 3]),
        (8, [3, 1], [4, 4], [4, 4]),
        # the second has no memory for more, however fast it is
        (9, [1, 1], [10, 3], [6, 3]),
        (9, [1, 5], [10, 3], [6, 3]),
    ],
)
def test_a_last_round_uses_up_what_is_left(
    remaining: int, speeds: list[float], full: list[int], sizes: list[int]
) -> None:
    assert last_round_sizes(remaining, speeds, full) == sizes


@given(SPEEDS, st.integers(1, 64), st.data())
@settings(deadline=None)
def test_a_last_round_leaves_nothing_and_fits(speeds: list[float], max_size: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.none() | st.integers(1, 64), min_size=len(speeds), max_size=len(speeds)))
    full = round_sizes(speeds, max_size, caps)
    remaining = data.draw(st.integers(0, sum(full)))
    sizes = last_round_sizes(remaining, speeds, full)

    assert sum(sizes) == remaining
    assert min(sizes) >= (1 if remaining >= len(speeds) else 0)
    assert all(size <= most for size, most in zip(sizes, full, strict=True))


@given(SPEEDS, st.integers(1, 64))
@settings(deadline=None)
def test_a_round_is_never_smaller_than_a_full_batch(speeds: list[float], max_size: int) -> None:
    assert sum(round_sizes(speeds, max_size)) >= max_size


@pytest.mark.parametrize(("speeds", "max_size"), [((1, 0.33), 5), ((1, 0.22), 8), ((1, 0.12), 16)])
def test_two_unequal_replicas_need_no_more_rounds_than_batches(speeds: tuple[float, float], max_size: int) -> None:
    assert sum(round_sizes(speeds, max_size)) >= max_size
