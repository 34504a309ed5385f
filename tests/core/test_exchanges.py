from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.exchanges import (
    LIMITS,
    Depth,
    Pilot,
    Round,
    partner_of,
    plan_exchanges,
    ring,
    tournament,
)

FAST = Pilot(all_reduce_s=2e-4, connect_s=1e-4, small_s=1e-4, large_s=1.5e-4)
DEPTHS = st.sampled_from(["quick", "full"])
SECONDS = st.floats(0, 100)
PILOTS = st.builds(Pilot, all_reduce_s=SECONDS, connect_s=SECONDS, small_s=SECONDS, large_s=SECONDS, spent_s=SECONDS)


def pairs_of(rounds: tuple[Round, ...]) -> list[tuple[int, int]]:
    return [pair for each in rounds for pair in each]


@given(st.integers(2, 40))
def test_in_a_tournament_every_pair_meets_once_and_nobody_twice_in_a_round(num_ranks: int) -> None:
    rounds = tuple(tournament(num_ranks))

    assert sorted(pairs_of(rounds)) == [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    assert len(rounds) == num_ranks - 1 + num_ranks % 2
    for each in rounds:
        assert max(Counter(rank for pair in each for rank in pair).values()) == 1


@given(st.integers(3, 40))
def test_in_a_ring_every_rank_has_two_neighbours(num_ranks: int) -> None:
    rounds = tuple(ring(num_ranks))

    assert sorted(pairs_of(rounds)) == sorted({tuple(sorted((r, (r + 1) % num_ranks))) for r in range(num_ranks)})
    assert len(rounds) == 2 + num_ranks % 2
    for each in rounds:
        assert max(Counter(rank for pair in each for rank in pair).values()) == 1


def test_two_ranks_have_one_pair() -> None:
    assert list(ring(2)) == list(tournament(2)) == [((0, 1),)]


@pytest.mark.parametrize(("rank", "partner"), [(0, 3), (3, 0), (1, None)])
def test_a_rank_finds_its_partner_or_sits_out(rank: int, partner: int | None) -> None:
    assert partner_of(rank, ((0, 3), (2, 4))) == partner


def test_quick_on_four_ranks_runs_a_ring_at_once_and_pair_by_pair() -> None:
    plan = plan_exchanges("quick", 4, FAST)

    assert plan.rounds == (((0, 1), (2, 3)), ((1, 2), (0, 3)))
    assert plan.alone == ((0, 1), (2, 3), (1, 2), (0, 3))
    assert plan.repeats == 3
    assert plan.message_bytes == 2**20
    assert plan.num_exchanges == 8 * 7
    assert plan.num_all_reduces == 6 + 1 + 6


def test_full_on_four_ranks_runs_all_pairs_at_once_and_pair_by_pair() -> None:
    plan = plan_exchanges("full", 4, FAST)

    assert plan.rounds == tuple(tournament(4))
    assert sorted(plan.alone) == sorted(pairs_of(plan.rounds))
    assert plan.message_bytes == 2**24


def test_pairs_that_have_a_round_for_themselves_are_not_run_a_second_time() -> None:
    assert plan_exchanges("full", 2, FAST).alone == plan_exchanges("full", 3, FAST).alone == ()


def test_a_slow_network_gets_small_messages_and_few_of_them() -> None:
    plan = plan_exchanges("quick", 4, Pilot(all_reduce_s=0.1, connect_s=0.1, small_s=0.1, large_s=5.0))

    assert (len(plan.rounds), plan.alone, plan.repeats, plan.message_bytes) == (1, (), 1, 2**12)


def test_a_pair_alone_outlives_the_repeats() -> None:
    plan = plan_exchanges("quick", 4, Pilot(all_reduce_s=2e-3, connect_s=4e-3, small_s=4e-3, large_s=5e-3))

    assert (len(plan.rounds), len(plan.alone), plan.repeats) == (2, 1, 2)


def test_a_pilot_that_took_long_leaves_less_time() -> None:
    assert plan_exchanges("quick", 4, replace(FAST, spent_s=0.17)).message_bytes == 2**18
    assert plan_exchanges("quick", 4, replace(FAST, spent_s=9.0)).num_exchanges == 6


def test_costly_connections_leave_the_one_round_that_the_pilot_has_connected() -> None:
    assert len(plan_exchanges("full", 8, replace(FAST, connect_s=0.9)).rounds) == 1


def test_very_many_ranks_exchange_no_more_than_the_bounds_allow() -> None:
    for num_ranks in (64, 1000, 5000):
        for depth, limits in LIMITS.items():
            plan = plan_exchanges(depth, num_ranks, FAST)
            assert 1 <= len(pairs_of(plan.rounds)) <= limits.most_pairs
            assert len(plan.alone) <= limits.most_alone


@given(depth=DEPTHS, num_ranks=st.integers(2, 32), pilot=PILOTS)
def test_what_is_planned_fits_into_its_part_of_the_budget_unless_it_is_the_least(
    depth: Depth, num_ranks: int, pilot: Pilot
) -> None:
    plan, limits = plan_exchanges(depth, num_ranks, pilot), LIMITS[depth]
    is_least = (len(plan.rounds), plan.alone, plan.repeats, plan.message_bytes) == (1, (), 1, 2**12)

    assert is_least or plan.predict_s(pilot) <= (limits.budget_s - pilot.spent_s) / 2
    assert 2**12 <= plan.message_bytes <= limits.most_bytes
    assert 1 <= plan.repeats <= limits.most_repeats
    assert set(plan.alone) <= set(pairs_of(plan.rounds)) or len(plan.rounds) == 1
    assert plan == plan_exchanges(depth, num_ranks, pilot)


def test_one_rank_has_nobody_to_exchange_with() -> None:
    with pytest.raises(ConfigError, match="num_ranks must be at least 2, got 1"):
        plan_exchanges("quick", 1, FAST)
