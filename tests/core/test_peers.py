from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.peers import Peers, speed_of
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import ReplicaRecord
from tests.core.claimants import ScriptedClock, said

MAYBE = st.none() | st.floats(0.1, 100)


def peers_of(world: int, *, me: int = 0, clock: ScriptedClock | None = None, **options: Any) -> Peers:
    return Peers(me, world, clock or ScriptedClock(), **({"overdue_s": 0.2} | options))


def at_speed(replica: int, speed: float | None, **work: Any) -> Published:
    return said(replica, {"steps": 1, "cost_speed_per_s": speed}, **work)


def knowing(*speeds: float | None, world: int | None = None, **options: Any) -> Peers:
    """What replica 0 knows; it is the first of the speeds."""
    peers = peers_of(world or len(speeds), **options)
    peers.record = ReplicaRecord(replica=0, cost_speed_per_s=speeds[0])
    peers.take_in({r: at_speed(r, speed) for r, speed in enumerate(speeds)})
    return peers


# --- what is known --------------------------------------------------------------------------------------------------


def test_before_the_first_look_nothing_is_known() -> None:
    peers = peers_of(3)

    assert (peers.published, peers.looks, peers.newest_version) == ({}, 0, 0)
    assert peers.my_speed_and_all() == (1.0, 3.0)
    assert not peers.knows_all_speeds()
    assert not peers.all_finished()
    assert (peers.reserved_by_others(), peers.unreserved_by_others()) == ((0, 0.0), (0, 0.0))
    assert peers.running_cost_of_others() == 0
    assert (peers.speed(1), peers.step_s(1), peers.busy_s(1)) == (0.0, math.inf, math.inf)


def test_a_replica_that_has_not_spoken_is_left_out() -> None:
    peers = peers_of(3)
    peers.take_in({0: None, 1: at_speed(1, 2.0), 2: None})
    peers.take_in({0: None, 1: None, 2: at_speed(2, 4.0)})

    assert sorted(peers.published) == [1, 2]
    assert peers.looks == 2


def test_the_newest_version_is_the_newest_that_was_ever_seen() -> None:
    peers = peers_of(2)
    for version in (0, 3, 2):
        peers.take_in({}, version)

    assert peers.newest_version == 3


def test_the_records_of_all_begin_with_the_newest_own_one() -> None:
    peers = knowing(1.0, 2.0, 3.0)
    peers.record = ReplicaRecord(replica=0, steps=9)

    assert [(record.replica, record.steps) for record in peers.records()] == [(0, 9), (1, 1), (2, 1)]


def test_the_speed_in_cost_units_goes_before_the_one_in_samples() -> None:
    assert speed_of(ReplicaRecord(replica=0, speed_per_s=2.0, cost_speed_per_s=30.0)) == 30.0
    assert speed_of(ReplicaRecord(replica=0, speed_per_s=2.0)) == 2.0
    assert speed_of(ReplicaRecord(replica=0)) is None


# --- speeds ---------------------------------------------------------------------------------------------------------


def test_speeds_of_all_add_up() -> None:
    peers = knowing(2.0, 3.0, 5.0)

    assert peers.my_speed_and_all() == (2.0, 10.0)
    assert [peers.speed(r) for r in range(3)] == [2.0, 3.0, 5.0]
    assert peers.speeds_of_others().tolist() == [3.0, 5.0]
    assert peers.knows_all_speeds()


def test_the_own_speed_is_the_newest_and_not_the_published_one() -> None:
    peers = knowing(2.0, 3.0)
    peers.record = ReplicaRecord(replica=0, cost_speed_per_s=7.0)

    assert peers.my_speed_and_all() == (7.0, 10.0)
    assert peers.speed(0) == 7.0


def test_a_replica_that_has_not_spoken_counts_as_fast_as_the_mean() -> None:
    assert knowing(2.0, 4.0, world=4).my_speed_and_all() == (2.0, 12.0)


def test_a_replica_that_was_not_measured_counts_as_the_median_of_the_others() -> None:
    assert knowing(2.0, 4.0, None).my_speed_and_all() == (2.0, 9.0)
    assert knowing(None, 4.0, 8.0).my_speed_and_all() == (6.0, 18.0)


def test_the_prior_stands_in_for_speeds_that_were_not_measured() -> None:
    peers = knowing(4.0, None, None)
    peers.newer_prior = lambda: [1.0, 0.5, 0.25]

    assert peers.my_speed_and_all() == (4.0, 4.0 + 2.0 + 1.0)


def test_the_prior_is_made_anew_with_every_look() -> None:
    peers, priors = knowing(4.0, None), iter([[1.0, 0.5], [1.0, 2.0]])
    peers.newer_prior = lambda: next(priors)

    assert [peers.my_speed_and_all() for _ in range(3)] == [(4.0, 6.0)] * 3
    peers.take_in({1: at_speed(1, None)})
    assert peers.my_speed_and_all() == (4.0, 12.0)


@pytest.mark.parametrize(
    ("speeds", "world", "known"),
    [
        ([1.0], 1, True),
        ([None], 1, False),
        ([1.0, 2.0], 2, True),
        ([None, 2.0], 2, False),
        ([1.0, None], 2, False),
        ([1.0, 2.0], 3, False),
    ],
)
def test_all_speeds_are_known_when_everybody_was_measured(speeds: list[float | None], world: int, known: bool) -> None:
    assert knowing(*speeds, world=world).knows_all_speeds() is known


# --- steps ----------------------------------------------------------------------------------------------------------


def in_step(step_s: float | None, clock: ScriptedClock, *, steps: int = 3) -> Published:
    return said(1, {"steps": steps, "step_s": step_s})


def test_a_replica_that_was_not_measured_counts_as_busy_for_ever() -> None:
    clock = ScriptedClock()
    peers = peers_of(2, clock=clock)
    peers.take_in({1: in_step(None, clock)})

    assert peers.busy_s(0) == math.inf
    assert peers.busy_s(1) == math.inf
    assert peers.busy_s_of_others().tolist() == [math.inf]
    assert peers.steps_s_of_others().tolist() == [math.inf]


def test_a_replica_is_expected_to_be_half_way_through_its_step() -> None:
    clock = ScriptedClock()
    peers = peers_of(2, clock=clock)
    peers.take_in({1: in_step(4.0, clock)})

    assert peers.busy_s(1) == 2.0
    clock.now_s += 4.0
    assert peers.busy_s(1) == 2.0


def test_an_overdue_step_is_expected_to_last_as_long_again() -> None:
    clock = ScriptedClock()
    peers = peers_of(2, clock=clock)
    peers.take_in({1: in_step(4.0, clock)})
    clock.now_s += 4.5
    peers.take_in({1: in_step(4.0, clock)})
    assert peers.busy_s(1) == 4.5
    clock.now_s += 30.0
    assert peers.busy_s(1) == 34.5

    peers.take_in({1: in_step(4.0, clock, steps=4)})
    assert peers.busy_s(1) == 2.0


def test_a_step_is_overdue_only_when_it_could_have_been_told() -> None:
    clock = ScriptedClock()
    peers = peers_of(2, clock=clock, overdue_s=1.0)
    peers.take_in({1: in_step(4.0, clock)})
    clock.now_s += 4.9

    assert peers.busy_s(1) == 2.0


@given(st.lists(st.tuples(MAYBE, MAYBE, st.floats(0, 9), st.floats(0, 50)), min_size=1, max_size=6), st.floats(0, 100))
@settings(deadline=None)
def test_the_others_together_are_each_of_them(
    others: list[tuple[float | None, float | None, float, float]], later_s: float
) -> None:
    clock = ScriptedClock()
    peers = peers_of(1 + len(others), clock=clock)
    for r, (speed, step_s, ahead_cost, seen_s) in enumerate(others, 1):
        clock.now_s += seen_s
        record = {"steps": 1, "cost_speed_per_s": speed, "step_s": step_s}
        peers.take_in({r: said(r, record, ahead_cost=ahead_cost)})
    clock.now_s += later_s

    assert peers.others == list(range(1, 1 + len(others)))
    assert peers.speeds_of_others().tolist() == [peers.speed(r) for r in peers.others]
    assert peers.steps_s_of_others().tolist() == [peers.step_s(r) for r in peers.others]
    assert peers.busy_s_of_others().tolist() == [peers.busy_s(r) for r in peers.others]
    busy = [(peers.speed(r), peers.busy_s(r)) for r in peers.others]
    running = sum(speed * busy_s for speed, busy_s in busy if math.isfinite(busy_s))
    assert peers.running_cost_of_others() == pytest.approx(running)


def test_what_is_reserved_beside_the_step_keeps_a_replica_busy_too() -> None:
    clock = ScriptedClock()
    peers = peers_of(3, clock=clock)
    peers.take_in(
        {
            1: said(1, {"step_s": 4.0, "cost_speed_per_s": 2.0}, ahead_cost=6.0),
            2: said(2, {"step_s": 4.0}, ahead_cost=6.0),  # nobody knows how long that takes
        }
    )
    assert [peers.busy_s(1), peers.busy_s(2)] == [2.0 + 3.0, 2.0]
    clock.now_s += 10.0

    assert [peers.busy_s(1), peers.busy_s(2)] == [10.0 + 3.0, 10.0]
    assert peers.busy_s_of_others().tolist() == [13.0, 10.0]


def test_the_own_step_is_the_newest() -> None:
    peers = peers_of(1)
    peers.take_in({0: said(0, {"step_s": 4.0})})
    peers.record = ReplicaRecord(replica=0, step_s=0.5)

    assert peers.step_s(0) == 0.5


# --- sums -----------------------------------------------------------------------------------------------------------


def test_sums_leave_out_the_own_word() -> None:
    peers = peers_of(3, me=1)
    for r in range(3):
        peers.take_in(
            {r: at_speed(r, 1.0, reserved=r + 1, reserved_cost=10.0 * r, unreserved=5, unreserved_cost=0.5 + r)}
        )

    assert peers.reserved_by_others() == (1 + 3, 20.0)
    assert peers.unreserved_by_others() == (10, 3.0)


def test_sums_follow_a_new_word_of_one_replica() -> None:
    peers = peers_of(3)
    peers.take_in({r: at_speed(r, 1.0, reserved=2) for r in range(3)})
    assert peers.reserved_by_others()[0] == 4

    peers.take_in({2: at_speed(2, 3.0, reserved=7)})

    assert peers.reserved_by_others()[0] == 2 + 7
    assert peers.speeds_of_others().tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("finished", "over"), [([], False), ([0], False), ([0, 1], False), ([0, 2], False), ([0, 1, 2], True)]
)
def test_all_have_finished_when_everybody_said_so(finished: list[int], over: bool) -> None:
    peers = peers_of(3)
    peers.take_in({r: said(r, {"finished": r in finished}) for r in (0, 2)})
    assert not peers.all_finished()
    peers.take_in({1: said(1, {"finished": 1 in finished})})

    assert peers.all_finished() is over


# --- very many ------------------------------------------------------------------------------------------------------


def test_few_replicas_are_all_looked_at() -> None:
    peers = peers_of(8, look_replicas=8)

    assert not peers.is_sampled
    assert peers.to_look_at() == list(range(8))


def test_of_many_each_look_reads_a_sample_of_others() -> None:
    peers = peers_of(100, me=7, look_replicas=10)
    looks = [peers.to_look_at() for _ in range(200)]

    assert peers.is_sampled
    assert all(0 < len(look) == len(set(look)) <= 10 for look in looks)
    assert {r for look in looks for r in look} == set(range(100)) - {7}


def test_finished_replicas_are_not_looked_at_again() -> None:
    peers = peers_of(100, look_replicas=10)
    peers.take_in({r: said(r, {"finished": True}) for r in range(1, 60)})

    looked_at = {r for _ in range(200) for r in peers.to_look_at()}
    assert looked_at == set(range(60, 100))


def test_the_last_one_that_runs_is_found_among_many() -> None:
    peers = peers_of(200, look_replicas=16)
    peers.take_in({r: said(r, {"finished": True}) for r in range(1, 199)})

    assert any(peers.to_look_at() == [199] for _ in range(20))


def test_sums_over_a_sample_are_scaled_to_all_that_run() -> None:
    peers = peers_of(101, look_replicas=10)
    peers.record = ReplicaRecord(replica=0, cost_speed_per_s=4.0)
    peers.take_in({r: at_speed(r, 2.0, unreserved=3, unreserved_cost=1.5) for r in range(1, 5)})
    assert peers.unreserved_by_others() == (300, 150.0)
    assert peers.my_speed_and_all() == (4.0, pytest.approx((4.0 + 4 * 2.0) * 101 / 5))

    # who has finished has nothing left, and is in no sum
    peers.take_in({r: said(r, {"finished": True, "cost_speed_per_s": 2.0}) for r in range(50, 60)})
    peers.take_in({r: at_speed(r, 2.0, unreserved=3, unreserved_cost=1.5) for r in range(1, 5)})
    assert peers.unreserved_by_others() == (270, 135.0)
    num = 4 + 0.75**2 * 4  # the sample before last still tells something of the mean speed
    assert peers.my_speed_and_all() == (4.0, pytest.approx((4.0 + num * 2.0) * 91 / (1 + num)))


def test_the_mean_speed_of_many_is_known_the_better_the_more_looks_there_were() -> None:
    peers = peers_of(1000, look_replicas=10)
    peers.record = ReplicaRecord(replica=0, cost_speed_per_s=1.0)
    assert peers.speed_error_frac == math.inf

    errors = []
    for start in (1, 11, 21, 31):
        peers.take_in({r: at_speed(r, 1.0 + r % 2) for r in range(start, start + 10)})
        errors.append(peers.speed_error_frac)
    assert errors[0] == pytest.approx(0.5 / 1.5 / math.sqrt(10))
    assert sorted(errors, reverse=True) == errors
    assert peers_of(10).speed_error_frac == 0.0


@pytest.mark.parametrize(("num_measured", "known"), [(2, False), (5, True), (9, True)])
def test_of_many_it_is_enough_to_know_half_a_look(num_measured: int, known: bool) -> None:
    peers = peers_of(100, look_replicas=10)
    peers.record = ReplicaRecord(replica=0, cost_speed_per_s=1.0)
    peers.take_in({r: at_speed(r, 1.0) for r in range(1, 1 + num_measured)})

    assert peers.knows_all_speeds() is known


def test_decisions_rest_on_the_newest_sample() -> None:
    peers = peers_of(100, look_replicas=10)
    peers.record = ReplicaRecord(replica=0, cost_speed_per_s=1.0)
    peers.take_in({1: at_speed(1, 5.0)})
    peers.take_in({2: at_speed(2, 7.0), 3: None})

    assert peers.others == [2]
    assert sorted(peers.newest()) == [2]
    assert sorted(peers.published) == [1, 2]


def test_who_need_not_sum_up_the_run_forgets_older_samples() -> None:
    peers = peers_of(100, look_replicas=10, keeps_all=False)
    peers.take_in({1: at_speed(1, 5.0)})
    peers.take_in({2: at_speed(2, 7.0)})

    assert sorted(peers.newest()) == [2]
    assert peers.published == {}
    assert peers.busy_s(1) == math.inf


def test_of_many_all_have_finished_when_each_was_seen_to() -> None:
    peers = peers_of(100, look_replicas=10)
    peers.record = ReplicaRecord(replica=0, finished=True)
    for start in range(0, 100, 20):
        assert not peers.all_finished()
        peers.take_in({r: said(r, {"finished": True}) for r in range(max(1, start), start + 20)})

    assert peers.all_finished()
