from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import RangeKey, Span
from tests.core.claimants import Epoch, costs_of, said, spans_of, version_of

CONFIG = HybridConfig(publish_period_s=0.01, claim_frac=0.5, reserve_frac=0.25, reserve_ahead_s=0.25)
BOTH = pytest.mark.parametrize("prefetch", [False, True], ids=["no workers", "workers"])


def epoch_of(
    compute: list[float],
    world: int = 2,
    *,
    memory: list[float] | None = None,
    config: HybridConfig = CONFIG,
    options: dict[str, Any] | None = None,
    **version: Any,
) -> Epoch:
    """An epoch of cells 0, 1, 2 ... in this order."""
    costs = costs_of(compute, memory)
    return Epoch(version_of(range(len(compute)), costs, world, **version), costs, config, **(options or {}))


def equal(num: int, world: int = 2, **options: Any) -> Epoch:
    """An epoch of equal cells."""
    return epoch_of([1.0] * num, world, **options)


def shared(epoch: Epoch, *shares: tuple[int, int], **version: Any) -> Epoch:
    """The epoch after its cells were given out: positions ``shares[r]`` to replica ``r``."""
    cells = range(len(epoch.costs))
    given = {"number": 1, "shares": spans_of(*shares)} | version
    epoch.adopt(version_of(cells, epoch.costs, len(shares), **given))
    return epoch


def held(epoch: Epoch, replica: int) -> list[tuple[int, int]]:
    """Positions of the open ranges of a replica that it has not reserved."""
    return [(item.reserved, item.stop) for item in epoch[replica].claimant.ranges.open()]


# --- how much is claimed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unclaimed", "speed", "all_speeds", "claim_frac", "size"),
    [
        (100, 1.0, 4.0, 0.5, 12),
        (100, 3.0, 4.0, 0.5, 37),
        (100, 1.0, 4.0, 1.0, 25),
        (7, 1.0, 4.0, 0.5, 1),
        (1, 1.0, 2.0, 1.0, 1),
        (100, 0.001, 4.0, 0.5, 1),
    ],
)
def test_a_claim_is_a_part_of_the_fair_share(
    unclaimed: int, speed: float, all_speeds: float, claim_frac: float, size: int
) -> None:
    epoch = equal(unclaimed, config=CONFIG.but(claim_frac=claim_frac)).measure(speed, all_speeds - speed)
    epoch[0].claimant.turn()

    assert epoch[0].claimant.queue.free == (size, unclaimed)
    assert held(epoch, 0) == [(0, size)]


@given(st.integers(1, 10**6), st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.floats(0.01, 1))
@settings(deadline=None, max_examples=50)
def test_all_replicas_together_claim_no_more_than_their_part(
    unclaimed: int, speeds: list[float], claim_frac: float
) -> None:
    epoch = equal(unclaimed, len(speeds), config=CONFIG.but(claim_frac=claim_frac)).measure(*speeds)
    sizes = []
    for replica in epoch.replicas:
        # each as if it were the first
        replica.claimant.queue.free = Span(0, unclaimed)
        sizes.append(replica.claimant._claim_size(replica.claimant.version, from_tail=False))

    assert min(sizes) >= 1
    assert sum(sizes) <= claim_frac * unclaimed + len(speeds)


def test_a_claim_goes_by_cost() -> None:
    # two equal replicas, half of the fair share of 40 is 10 cost units
    epoch = epoch_of([4, 4, 4, 4, 4, 4, 4, 4, 4, 1, 1, 1, 1]).measure(1.0, 1.0)
    epoch[0].claimant.turn()
    assert held(epoch, 0) == [(0, 2)]

    from_tail = epoch_of([4, 4, 4, 4, 4, 4, 4, 4, 4, 1, 1, 1, 1], ends=("tail", "head")).measure(1.0, 1.0)
    from_tail[0].claimant.turn()
    assert held(from_tail, 0) == [(8, 13)]


def test_a_claim_of_several_cells_costs_no_more_than_its_limit() -> None:
    for limit, size in [(None, 10), (5.0, 5), (1.5, 1), (0.2, 1)]:
        epoch = equal(40, max_claim_costs=(limit, None)).measure(1.0, 1.0)
        epoch[0].claimant.turn()
        assert held(epoch, 0) == [(0, size)]


def test_speeds_that_were_not_measured_count_as_the_mean() -> None:
    epoch = equal(100, 4)
    epoch[0].claimant.turn()

    assert held(epoch, 0) == [(0, 12)]


# --- from which end -------------------------------------------------------------------------------------------------


def test_who_is_to_take_from_the_tail_does_so_first() -> None:
    epoch = epoch_of([8, 6, 4, 3, 2, 2, 1, 1], ends=("head", "tail")).measure(2.0, 1.0)
    epoch[0].claimant.turn()
    epoch[1].claimant.turn()

    # half of their fair shares of 27 are 9 and 4.5 cost units
    assert (held(epoch, 0), held(epoch, 1)) == ([(0, 1)], [(5, 8)])
    assert (epoch[0].want(), epoch[1].want()) == (0, 5)


def test_who_is_to_take_from_the_tail_takes_from_the_head_what_is_left_there() -> None:
    # the tail does not fit into the memory of the second
    epoch = epoch_of([2, 2, 2, 3], memory=[1, 1, 1, 9], ends=("head", "tail"), memory_bounds=(None, 4.0)).measure(
        1.0, 1.0
    )

    assert epoch[1].want() == 0


def test_a_slow_replica_leaves_a_heavy_cell_to_a_fast_one_and_takes_from_the_tail() -> None:
    # alone it would need 40 s for the first, when all together are done within ten
    epoch = epoch_of([40, 1, 1, 1, 1, 1, 1, 1]).measure(4.0, 1.0)

    assert epoch[1].want() == 7
    assert epoch[0].want() == 0
    assert epoch[1].claimant.cells_stolen == 0


def test_a_heavy_cell_is_taken_from_the_head_by_who_ends_it_in_time() -> None:
    epoch = epoch_of([4, 1, 1, 1, 1, 1, 1, 1]).measure(4.0, 3.0)

    assert epoch[1].want() == 0


def test_a_slow_replica_runs_the_heavy_cell_after_all_when_the_fast_one_stands_still() -> None:
    epoch = epoch_of([40, 1]).measure(4.0, 1.0)
    assert epoch[1].want() == 1
    assert epoch[1].want() is None
    epoch.clock.now_s += 20.0
    assert epoch[1].want() is None
    epoch.clock.now_s += 20.0

    assert epoch[1].want() == 0


def test_the_slow_replica_leaves_the_last_of_equal_cells_to_the_fast_one() -> None:
    epoch = equal(1).measure(1 / 10, 1 / 0.05, step_s=0.05)
    epoch[0].measured(1 / 10, step_s=10.0)

    assert epoch[0].want() is None
    assert not epoch[0].is_exhausted()
    assert epoch[1].want() == 0
    assert epoch[0].want() is None
    assert epoch[0].is_exhausted()


def test_before_anybody_is_measured_cells_of_unknown_worth_are_taken_from_the_tail_one_by_one() -> None:
    epoch = epoch_of([9, 8, 7, 2, 1, 1])

    assert epoch[0].want() == 5
    assert epoch[0].claimant.queue.free == (0, 5)
    epoch[1].settle()
    assert held(epoch, 1) == [(4, 5), (3, 4)]  # two, so that the loader does not run out
    assert epoch[0].want() == 2


def test_who_is_measured_first_waits_with_heavy_cells_until_the_others_are_too() -> None:
    epoch = epoch_of([40, 30, 1, 1, 1, 1], 2)
    epoch[0].measured(1.0)
    assert epoch[0].want() == 5
    assert epoch[0].claimant.queue.free == (0, 5)
    epoch[0].settle()
    assert epoch[0].claimant.queue.free == (0, 5)  # nothing before its loop asks
    epoch[1].measured(1.0)
    epoch.exchange()

    assert epoch[0].want() == 0


def test_while_speeds_are_not_known_nobody_claims_what_does_not_fit() -> None:
    epoch = epoch_of([2, 3, 2, 1], memory=[1, 1, 1, 9], memory_bounds=(4.0, None))
    epoch[0].measured(1.0)

    assert epoch[0].want() is None
    assert epoch[0].claimant.queue.free == (0, 4)
    assert epoch[1].want() == 3


def test_what_nobody_could_end_in_time_is_claimed_at_once_by_the_fastest() -> None:
    epoch = epoch_of([30, 1, 1, 1, 1, 1, 1]).measure(1.0, 2.0)
    for replica in range(2):
        epoch[replica].settle()

    # all could be done in 12 s, the heaviest cell takes 30 or 15 s
    assert epoch[0].claimant.ranges.cost_unbegun < 30
    assert epoch[1].claimant.ranges.cost_unbegun >= 30


def test_nothing_heavy_is_claimed_behind_something_heavy_that_runs() -> None:
    epoch = epoch_of([10, 10, 10] + [1] * 24).measure(3.0, 2.0)
    assert epoch[0].want() == 0
    epoch[0].settle()

    # behind two of them a third would end after 10 s; all that is left could be done in 7 s
    assert epoch[0].claimant.queue.free.start == 2


# --- how much is kept from thieves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells_left", "speed", "all_cells_per_s", "reserve_frac", "ahead_s", "size"),
    [
        (1000, 10.0, 10.0, 0.25, 0.5, 5),
        (20, 10.0, 10.0, 0.25, 5.0, 5),
        (2, 10.0, 10.0, 0.25, 5.0, 1),
        (1, 10.0, 10.0, 0.25, 5.0, 0),
        (1000, 1.0, 10.0, 0.25, 0.5, 1),
        (1000, 10.0, 10.0, 0.0, 0.5, 0),
        (1000, 10.0, 10.0, 0.25, 0.0, 0),
    ],
)
def test_what_is_kept_from_thieves_is_bounded_by_time(
    cells_left: int, speed: float, all_cells_per_s: float, reserve_frac: float, ahead_s: float, size: int
) -> None:
    speeds = [speed] if speed == all_cells_per_s else [speed, all_cells_per_s - speed]
    config = CONFIG.but(reserve_frac=reserve_frac, reserve_ahead_s=ahead_s)
    epoch = equal(cells_left, len(speeds), config=config)
    shares = [(0, cells_left), (cells_left, cells_left)][: len(speeds)]
    shared(epoch, *shares).measure(*speeds, step_s=1 / speed)
    epoch[0].settle()

    assert epoch[0].claimant.ranges.num_reserved == size
    # once the loop asks there is always one
    assert epoch[0].want() == 0


def test_heavy_cells_are_kept_from_thieves_by_their_cost() -> None:
    epoch = shared(epoch_of([2, 2, 1] + [1] * 97, 1), (0, 100)).measure(10.0)
    epoch[0].settle()

    # a quarter of a second is worth 2.5 cost units
    assert epoch[0].claimant.ranges.num_reserved == 1


def test_no_cell_is_reserved_before_the_release() -> None:
    released = [False]
    epoch = shared(equal(40, 1, options={"released": lambda: released[0]}), (0, 40)).measure(10.0, step_s=0.1)
    epoch[0].starve().settle()
    assert epoch[0].claimant.ranges.num_reserved == 0
    assert epoch[0].take() is None
    released[0] = True

    assert epoch[0].want() == 0


def test_of_a_version_that_was_dealt_out_everything_is_reserved_at_once() -> None:
    epoch = shared(epoch_of([9, 1, 1, 1, 1, 1, 5, 1]), (0, 3), (3, 8), is_dealt=True).measure(1.0, 50.0)
    epoch[0].settle()

    assert epoch[0].claimant.ranges.num_reserved == 3
    assert [epoch[0].want() for _ in range(4)] == [0, 1, 2, None]
    assert epoch[0].claimant.reserved_cost == 11


def test_what_is_reserved_is_told_and_summed_up() -> None:
    epoch = epoch_of([3, 2, 2, 1]).measure(1.0, 1.0)
    assert epoch[0].want() == 0
    epoch.exchange()

    told = epoch.published[0]
    assert (told.reserved, told.reserved_cost) == (1, 3.0)
    assert (epoch[1].claimant.unreserved_anywhere(), epoch[1].claimant.unreserved_cost()) == (3, 5.0)
    assert epoch[1].claimant.time_left_s() == 2.5


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_claim_ends_before_the_first_cell_that_does_not_fit() -> None:
    epoch = equal(40, memory=[1.0] * 3 + [9.0] + [1.0] * 36, memory_bounds=(4.0, None)).measure(1.0, 1.0)
    epoch[0].claimant.turn()

    assert held(epoch, 0) == [(0, 3)]


def test_what_does_not_fit_is_left_to_who_it_fits() -> None:
    epoch = epoch_of([3, 2, 2, 1], memory=[9, 1, 1, 1], memory_bounds=(None, 4.0)).measure(1.0, 8.0)
    ran = [epoch[1].want() for _ in range(4)]

    assert ran == [3, 2, 1, None]
    assert not epoch[1].is_exhausted()
    assert epoch[1].claimant.has_nothing_to_claim()
    assert epoch[0].want() == 0
    assert epoch.run_out() == [0, 1, 2, 3]


def test_what_does_not_fit_between_others_is_reached_and_left() -> None:
    memory = [1.0, 9.0, 1.0, 9.0, 1.0]
    epoch = epoch_of([2, 3, 2, 3, 2.5], memory=memory, memory_bounds=(None, 4.0)).measure(1.0, 8.0)

    assert epoch[1].want() in (0, 4)
    assert epoch[1].want() in (0, 4)
    assert epoch[1].want() is None
    assert epoch.run_out() == [0, 1, 2, 3, 4]
    assert not {1, 3} & set(epoch[1].ran)


@BOTH
def test_what_does_not_fit_its_owner_is_stolen_by_who_it_fits(prefetch: bool) -> None:
    # the owner's memory has become less since the cells were given out
    memory = [1.0, 9.0, 1.0, 1.0, 1.0, 1.0]
    epoch = epoch_of([2, 3, 2, 2, 1.5, 1.5], memory=memory, options={"prefetch": prefetch})
    shared(epoch, (0, 6), (6, 6), memory_bounds=(4.0, None)).measure(1.0, 1.0)

    assert epoch.run_out() == [0, 1, 2, 3, 4, 5]
    assert 1 in epoch[1].ran


def test_a_thief_takes_no_more_than_fits() -> None:
    memory = [1.0] * 7 + [9.0] + [1.0] * 2
    epoch = equal(10, memory=memory)
    shared(epoch, (0, 10), (10, 10), memory_bounds=(None, 4.0)).measure(1.0, 9.0)
    epoch[1].starve().settle()

    assert epoch[1].claimant.ranges.spans() == [Span(8, 10)]


# --- stealing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backlog", "my_speed", "owner_speed", "size"),
    [(8, 1.0, 1.0, 2), (8, 3.0, 1.0, 3), (1, 1.0, 1.0, 1), (2, 0.5, 1.0, 1), (100, 1.0, None, 50)],
)
def test_a_thief_takes_half_of_what_it_would_do_of_the_backlog(
    backlog: int, my_speed: float, owner_speed: float | None, size: int
) -> None:
    epoch = shared(equal(backlog), (0, backlog), (backlog, backlog)).measure(owner_speed, my_speed)
    epoch[1].starve().claimant.turn()

    assert epoch[1].claimant.cells_stolen == size
    assert epoch[1].claimant.queue.unreserved([RangeKey("range/0/1.share", 0, backlog, 1)]) == [(0, backlog - size)]


@given(st.integers(1, 10**4), st.floats(0.01, 100), st.none() | st.floats(0.01, 100))
@settings(deadline=None, max_examples=50)
def test_a_thief_never_takes_more_than_half(backlog: int, my_speed: float, owner_speed: float | None) -> None:
    epoch = shared(equal(backlog), (0, backlog), (backlog, backlog)).measure(owner_speed, my_speed)
    epoch[1].starve().claimant.turn()

    assert epoch[1].claimant.cells_stolen <= max(1, backlog / 2)


def test_a_thief_goes_to_who_would_end_last() -> None:
    epoch = shared(equal(30, 3), (0, 20), (20, 30), (30, 30)).measure(10.0, 1.0, 10.0)
    epoch[2].starve().claimant.turn()

    assert epoch[2].claimant.cells_stolen > 0
    assert {20 <= item.key.start < 30 for item in epoch[2].claimant.ranges.open() if item.key} <= {True}
    assert epoch[2].claimant.queue.unreserved([RangeKey("range/0/1.share", 0, 20, 1)]) == [(0, 20)]


def test_of_several_ranges_the_one_with_the_heaviest_last_cell_is_stolen_from() -> None:
    epoch = epoch_of([1, 1, 1, 1, 7, 1, 1, 1, 1, 1], config=CONFIG.but(claim_frac=1.0)).measure(1.0, 1.0)
    claimant = epoch[0].claimant
    for size in (5, 5):
        claimant._own(claimant.queue.claim(size))
    epoch[1].starve().settle()

    assert epoch[1].claimant.ranges.num_reserved + epoch[1].claimant.ranges.num_unreserved > 0
    assert epoch[1].take() == 4


def test_a_loop_that_runs_steals_ahead_only_what_it_ends_behind_its_step_before_the_owner() -> None:
    epoch = shared(equal(4), (0, 4), (4, 4)).measure(1.0, 1.0)
    epoch[1].settle()
    assert epoch[1].claimant.cells_stolen == 1

    late = shared(equal(2), (0, 2), (2, 2)).measure(1.0, 0.2, step_s=1.0)
    late[1].measured(0.2, step_s=5.0)
    late[1].settle()
    assert late[1].claimant.cells_stolen == 0


def test_a_single_stolen_cell_is_reserved_at_once() -> None:
    epoch = shared(epoch_of([3, 2]), (0, 2), (2, 2)).measure(1.0, 1.0)
    epoch[1].starve().claimant.turn()

    # it is never told as one that can be stolen, so that two idle replicas do not steal it from each other for ever
    assert epoch.published[1].ranges == ()
    assert epoch.published[1].reserved == 1
    assert epoch[1].take() == 1


@pytest.mark.parametrize("first", [0, 1])
def test_two_idle_replicas_do_not_steal_from_each_other_for_ever(first: int) -> None:
    epoch = shared(epoch_of([3, 2, 2]), (0, 3), (3, 3)).measure(1.0, 1.0)
    for replica in (first, 1 - first) * 20:
        epoch[replica].starve().claimant.turn()

    assert epoch[0].claimant.cells_stolen + epoch[1].claimant.cells_stolen <= 2
    assert epoch.run_out() == [0, 1, 2]


def test_a_theft_is_noticed_by_its_owner() -> None:
    epoch = shared(equal(8), (0, 8), (8, 8)).measure(1.0, 1.0)
    epoch[1].starve().settle()
    stolen = epoch[1].claimant.cells_stolen
    assert stolen > 0
    assert held(epoch, 0) == [(0, 8)]
    epoch[0].starve().claimant._steal()

    assert held(epoch, 0) == [(0, 8 - stolen)]


def test_cells_of_a_replica_that_does_not_know_its_share_are_stolen_too() -> None:
    epoch = equal(8)
    version = version_of(range(8), epoch.costs, 2, number=1, shares=spans_of((0, 8), (8, 8)))
    epoch[0].claimant.queue.seal()
    epoch.measure(1.0, 1.0)
    epoch[1].claimant.adopt(version)
    epoch[1].starve().settle()
    assert epoch[1].claimant.cells_stolen > 0
    epoch[0].claimant.adopt(version)

    assert epoch.run_out() == list(range(8))


# --- what does not pay ----------------------------------------------------------------------------------------------


def test_an_own_range_whose_head_does_not_pay_is_set_apart() -> None:
    epoch = shared(epoch_of([40, 2, 1, 1]), (0, 4), (4, 4)).measure(1.0, 8.0)

    assert epoch[0].want() == 1
    # what is left of the others comes first, and the heavy one can be stolen alone
    assert held(epoch, 0) == [(2, 4), (0, 1)]
    assert epoch[1].want() == 0
    assert epoch.run_out() == [0, 1, 2, 3]


def test_a_head_that_does_not_pay_is_run_when_nobody_comes_for_it() -> None:
    epoch = shared(epoch_of([40, 2]), (0, 2), (2, 2)).measure(1.0, 8.0)
    assert epoch[0].want() == 1
    assert epoch[0].want() is None
    epoch.clock.now_s += 50.0

    assert epoch[0].want() == 0


# --- following ------------------------------------------------------------------------------------------------------


def publish_version(epoch: Epoch, version: QueueVersion) -> None:
    epoch.keys.put(f"version/{version.number}", version.to_bytes())
    while int(epoch.keys.values.get("version", 0)) < version.number:
        epoch.keys.add("version", 1)


def test_a_new_version_is_followed_at_the_next_look() -> None:
    epoch = epoch_of([1, 2, 3, 4, 5, 6]).measure(1.0, 1.0)
    assert epoch[1].want() == 0
    (sealed,) = epoch[0].claimant.seal([])
    assert sealed[0] == 0
    cells = list(range(sealed[1].start, sealed[1].stop))[::-1]
    publish_version(epoch, version_of(cells, epoch.costs, 2, number=1, ends=("head", "tail")))
    epoch[1].look()
    epoch[1].settle()

    claimant = epoch[1].claimant
    assert (claimant.version.number, claimant.version.ends) == (1, ("head", "tail"))
    assert claimant.version.cells.tolist() == cells
    assert claimant.version.costs.compute.tolist() == [cell + 1 for cell in cells]
    assert claimant.describe(epoch[1].view.record).version == 1
    assert epoch.run_out() == list(range(6))


def test_a_share_is_a_range_of_who_gets_it_and_older_ranges_are_run_first() -> None:
    epoch = equal(12).measure(1.0, 1.0)
    epoch[1].claimant.turn()
    assert held(epoch, 1) == [(0, 3)]
    epoch[0].claimant.seal([])
    publish_version(epoch, version_of(range(3, 12), epoch.costs, 2, number=1, shares=spans_of((0, 4), (4, 9))))
    epoch[1].look()
    epoch[1].claimant.turn()

    keys = [item.key for item in epoch[1].claimant.ranges.open()]
    assert keys == [RangeKey("range/1/0.0", 0, 3, 0), RangeKey("range/1/1.share", 4, 5, 1)]
    assert [epoch[1].want() for _ in range(4)] == [0, 1, 2, 7]
    assert epoch.run_out() == list(range(12))


def test_of_several_new_versions_the_newest_is_followed() -> None:
    epoch = equal(6).measure(1.0, 1.0)
    epoch[0].claimant.seal([])
    publish_version(epoch, version_of(range(6), epoch.costs, 2, number=1))
    publish_version(epoch, version_of([5, 4, 3, 2, 1, 0], epoch.costs, 2, number=2))
    epoch[1].look()
    epoch[1].claimant.turn()

    assert epoch[1].claimant.version.number == 2
    assert sorted(epoch[1].claimant.versions) == [0, 2]
    assert epoch[1].want() == 5


def test_there_is_no_end_while_cells_are_being_planned_anew() -> None:
    epoch = equal(2, world=12, config=CONFIG.but(look_replicas=4)).measure(*[1.0] * 12)
    planning, following = epoch.replicas[:2]
    planning.claimant.seal([])
    planning.claimant.is_planning = True
    for replica in (planning, following):
        replica.claimant._vain_looks = 99
        replica.claimant.queue.look()
    assert [planning.is_exhausted(), following.is_exhausted()] == [False, True]
    publish_version(epoch, version_of(range(2), epoch.costs, 12, number=1))
    following.look()
    assert not following.is_exhausted()
    planning.claimant.is_planning = False
    planning.look()

    assert epoch.run_out() == [0, 1]


def test_what_was_declined_of_an_older_version_is_forgotten() -> None:
    epoch = epoch_of([40, 1]).measure(4.0, 1.0)
    epoch[1].want()
    epoch[1].want()
    assert epoch[1].claimant.has_nothing_to_claim()
    epoch[1].claimant.adopt(version_of([0], epoch.costs, 2, number=1))

    assert not epoch[1].claimant.has_nothing_to_claim()


def test_ranges_of_a_version_that_was_skipped_are_left_alone() -> None:
    epoch = equal(8).measure(1.0, 1.0)
    # replica 0 has followed to version 1, of which replica 1 has never heard
    epoch[0].claimant.adopt(version_of(range(8), epoch.costs, 2, number=1, shares=spans_of((0, 8), (8, 8))))
    epoch[1].claimant.adopt(version_of([], epoch.costs, 2, number=2))
    epoch.exchange()
    epoch[1].starve().settle()

    assert epoch[1].claimant.cells_stolen == 0
    assert not epoch[1].is_exhausted()


@pytest.mark.parametrize("asks", ["open_anywhere", "seal"])
def test_who_seals_finds_every_part_that_nobody_has_reserved(asks: str) -> None:
    epoch = equal(20).measure(1.0, 1.0)
    epoch[0].settle()
    epoch[1].settle()
    assert epoch[1].want() == 5
    epoch.exchange()
    claimant = epoch[0].claimant
    open_parts = claimant.open_anywhere()
    if asks == "open_anywhere":
        claimant.queue.look()
        found = sorted(at for _, _, span in open_parts for at in range(*span))
        assert {owner for owner, _, _ in open_parts} == {0, 1}
        free = range(*claimant.queue.free)
    else:
        parts = claimant.seal([item for _, item, _ in open_parts])
        assert {number for number, _ in parts} == {0}
        found, free = sorted(at for _, span in parts for at in range(*span)), range(0)
        assert epoch[1].claimant.queue.claim(1) is None
        assert held(epoch, 0) == []
    reserved = epoch[0].claimant.reserved + epoch[1].claimant.reserved
    assert len({*found, *free}) == 20 - reserved
    assert not {*found, *free} & {5}


# --- loading ahead --------------------------------------------------------------------------------------------------


def loading(epoch: Epoch, replica: int = 0) -> list[int]:
    return [owned.cell_at(position) for owned, position in epoch[replica].claimant.loading]


def test_cells_are_loaded_before_they_are_reserved() -> None:
    epoch = shared(equal(12, options={"prefetch": True}), (0, 12), (12, 12)).measure(1.0, 1.0)
    assert [epoch[0].take() for _ in range(3)] == [0, 1, 2]
    assert loading(epoch) == [0, 1, 2]
    assert epoch[0].begin() is None
    epoch[0].settle()

    assert epoch[0].begin() is True
    assert epoch[0].ran == [0]


def test_a_cell_that_was_stolen_while_it_was_loaded_is_left() -> None:
    epoch = shared(equal(4, options={"prefetch": True}), (0, 4), (4, 4)).measure(1.0, 1.0)
    assert [epoch[0].take() for _ in range(4)] == [0, 1, 2, 3]
    thief = epoch[1].claimant
    thief._own(thief.queue.steal(RangeKey("range/0/1.share", 0, 4, 1), 3), is_stolen=True)
    epoch[0].settle().claimant._learn_thefts()

    assert [epoch[0].begin() for _ in range(4)] == [True, False, False, False]
    assert epoch[0].begin() is None
    assert epoch[0].ran == [0]
    assert epoch[0].claimant.ranges.spans() == []


def test_loaded_cells_are_begun_in_the_ranges_that_they_came_from() -> None:
    epoch = shared(equal(6, options={"prefetch": True}), (4, 6), (0, 4)).measure(1.0, 1.0)
    ranges = epoch[0].claimant.ranges
    ranges.add(RangeKey("range/0/1.9", 1, 1, 1), epoch[0].claimant.version)
    assert [epoch[0].take() for _ in range(4)] == [4, 5, 1, None]
    first, second = ranges.open()
    first.reserved, second.reserved = 6, 2

    assert [epoch[0].begin() for _ in range(3)] == [True, True, True]
    assert (first.begun, second.begun) == (6, 2)


def test_a_cell_that_came_back_by_theft_is_begun_in_its_first_range_first() -> None:
    # cells 1 and 2 were stolen while they were loaded, and cell 2 was stolen back
    epoch = shared(equal(3, options={"prefetch": True}), (0, 3), (3, 3)).measure(1.0, 1.0)
    assert [epoch[0].take() for _ in range(3)] == [0, 1, 2]
    ranges = epoch[0].claimant.ranges
    (first,) = ranges.open()
    first.reserved = first.stop = 1
    again = ranges.add(RangeKey("range/0/1.9", 2, 1, 1), epoch[0].claimant.version)
    assert epoch[0].take() == 2
    again.reserved = 3

    assert [epoch[0].begin() for _ in range(4)] == [True, False, False, True]
    assert epoch[0].ran == [0, 2]


def test_the_background_thread_is_asked_for_more_in_time() -> None:
    epoch = shared(equal(3, options={"prefetch": True}), (0, 3), (3, 3)).measure(1.0, 1.0)
    claimant = epoch[0].claimant

    assert [claimant.hand_out() for _ in range(4)] == [(0, False), (1, True), (2, True), None]


# --- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 1, 2, 5])
@BOTH
def test_there_is_an_end_when_every_cell_is_reserved(num: int, prefetch: bool) -> None:
    epoch = equal(num, options={"prefetch": prefetch}).measure(1.0, 1.0)

    assert epoch.run_out() == list(range(num))
    assert [replica.claimant.unreserved_anywhere() for replica in epoch.replicas] == [0, 0]


def test_an_idle_replica_looks_again_soon_and_a_busy_one_when_it_is_woken() -> None:
    epoch = equal(1).measure(1.0, 1.0)
    assert epoch[0].claimant.turn() == 0.0
    assert epoch[0].settle().claimant.turn() == math.inf
    assert epoch[0].want() == 0
    epoch[1].starve()
    assert 0 < epoch[1].claimant.turn() <= 0.01
    epoch[1].claimant.is_starving, epoch[1].claimant.is_finishing = False, True
    assert 0 < epoch[1].claimant.turn() <= 0.01


def test_it_is_over_when_everybody_has_said_so() -> None:
    epoch = equal(0).measure(1.0, 1.0)
    assert not epoch[0].claimant.is_over()
    for replica in epoch.replicas:
        replica.view.record = said(replica.me, {"finished": True}).record
        replica.publish()
    epoch[0].claimant.is_finishing = True
    epoch[0].claimant.turn()

    assert epoch[0].claimant.is_over()


# --- leases ---------------------------------------------------------------------------------------------------------

LEASED = CONFIG.but(lease_s=10.0)


def test_what_is_held_run_and_done_is_told_where_claims_can_expire() -> None:
    epoch = shared(equal(6, config=LEASED), (0, 6), (6, 6)).measure(1.0, 1.0)
    epoch[0].want()
    with epoch[0].changed:
        epoch[0].claimant._running.add(5)
        told = epoch[0].claimant.describe(epoch[0].view.record)

    assert told.done == ((0, 1),)
    assert {*told.held} == {Span(1, 6), Span(5, 6)}
    assert equal(6)[0].claimant.describe(epoch[0].view.record).held == ()


def test_cells_of_a_replica_that_stands_still_are_taken_over() -> None:
    epoch = equal(6, config=LEASED).measure(1.0, 1.0)
    dead, alive = epoch.replicas
    dead.starve().settle()
    alive.look()
    for _ in range(200):
        while alive.want() is not None:
            pass
        epoch.clock.now_s += 1.0
        alive.look()
        if alive.is_exhausted():
            break

    assert sorted(alive.ran) == list(range(6))
    assert alive.claimant.is_exhausted()


def test_first_steps_of_a_dead_replica_are_taken_over_too() -> None:
    # cells 0 to 3 are dealt out in turn, two to each of the replicas
    costs = costs_of([1.0] * 8)
    epoch = Epoch(version_of(range(4, 8), costs, 2), costs, LEASED, prefetch=False, dealt=range(4)).measure(1.0, 1.0)
    assert [{*epoch.published[r].held} for r in range(2)] == [{(0, 1), (2, 3)}, {(1, 2), (3, 4)}]
    alive = epoch[1]
    for cell in (1, 3):
        alive._run(cell)
    for _ in range(200):
        while alive.want() is not None:
            pass
        alive.publish()
        alive.look()
        epoch.clock.now_s += 1.0

    assert sorted(alive.ran) == list(range(8))
    assert alive.is_exhausted()


def test_with_a_lease_the_end_is_when_everything_is_done() -> None:
    epoch = equal(2, config=LEASED).measure(1.0, 1.0)
    assert epoch[0].want() == 0
    assert epoch[1].want() == 1
    assert not epoch[0].is_exhausted()
    epoch.exchange()

    assert epoch[0].is_exhausted()
    assert not epoch[0].claimant.is_over()
    epoch[0].view.record = said(0, {"finished": True}).record
    epoch.exchange()
    assert epoch[0].claimant.is_over()


# --- very many ------------------------------------------------------------------------------------------------------


def test_of_very_many_what_is_left_is_estimated_from_a_sample() -> None:
    epoch = equal(1000, 20, config=CONFIG.but(look_replicas=4)).measure(*[1.0] * 20)
    for replica in epoch.replicas:
        replica.claimant.turn()
    epoch.exchange()
    epoch[0].claimant.turn()

    # what was claimed is not reserved yet
    assert epoch[0].claimant.unreserved_anywhere() == pytest.approx(1000, rel=0.1)


def test_of_very_many_replicas_each_cell_is_run_once() -> None:
    epoch = equal(300, 12, config=CONFIG.but(look_replicas=3)).measure(*[1.0] * 11, 0.2)

    assert epoch.run_out() == list(range(300))


# --- every cell once ------------------------------------------------------------------------------------------------

MOVES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["turn", "take", "begin", "look", "wait"])), max_size=150)


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    num, world = draw(st.integers(0, 25)), draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 5).map(float), min_size=num, max_size=num)
    compute = draw(st.just([1.0] * num) | numbers)
    memory = draw(st.none() | numbers)
    bounds = draw(st.lists(st.none() | st.integers(0, 5).map(float), min_size=world, max_size=world))
    epoch = epoch_of(
        compute if any(compute) else [1.0] * num,
        world,
        memory=memory,
        config=CONFIG.but(
            claim_frac=draw(st.sampled_from([0.1, 0.5, 1.0])),
            reserve_frac=draw(st.sampled_from([0.0, 0.25, 1.0])),
            lease_s=draw(st.sampled_from([None, 1000.0])),
        ),
        options={"prefetch": draw(st.booleans())},
        ends=tuple(draw(st.lists(st.sampled_from(["head", "tail"]), min_size=world, max_size=world))),
        memory_bounds=(None, *bounds[1:]),
    )
    for replica in epoch.replicas:
        replica.speed = draw(st.sampled_from([0.1, 1.0, 3.0]))
        if draw(st.booleans()):
            replica.measured(replica.speed, step_s=draw(st.sampled_from([0.1, 1.0])))
    return epoch


@given(epochs(), MOVES)
@settings(deadline=None, max_examples=150)
def test_every_cell_is_run_once_by_one_that_it_fits(epoch: Epoch, moves: list[tuple[int, str]]) -> None:
    for which, move in moves:
        replica = epoch[which % len(epoch.replicas)]
        if move == "turn":
            replica.claimant.turn()
        elif move == "take":
            replica.starve()
            replica.take()
        elif move == "begin":
            replica.begin()
        elif move == "look":
            replica.publish()
            replica.look()
        else:
            epoch.clock.now_s += 0.3
    assert len(epoch.ran) == len(set(epoch.ran))

    assert epoch.run_out() == list(range(len(epoch.costs)))
    version = epoch[0].claimant.version
    for replica in epoch.replicas:
        assert all(version.fits(replica.me, cell) for cell in replica.ran)


def test_published_words_are_what_others_go_by() -> None:
    epoch = Epoch(version_of(range(4), Costs.equal(4), 2), Costs.equal(4), CONFIG)
    epoch[0].settle()
    word = epoch.published[0]

    assert isinstance(word, Published)
    assert word.unreserved == sum(item.size for item in word.ranges) > 0
    assert word.unreserved_cost == word.unreserved
