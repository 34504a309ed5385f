from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.workqueue import (
    MAX_CELLS,
    TAIL_UNIT,
    Span,
    claim_size,
    declines,
    head_claim,
    remaining,
    reserve_size,
    steal_size,
    tail_claim,
    taken,
)

CLAIMS = st.lists(st.tuples(st.sampled_from(["head", "tail"]), st.integers(1, 12)), max_size=40)
STEPS = st.floats(0.01, 100)


class Counter:
    """The shared counter of a queue, and who won which cells of it."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells, self.value = num_cells, 0
        self.won: list[int] = []

    def claim(self, end: str, size: int) -> Span:
        if end == "head":
            self.value += size
            span = head_claim(self.value, size, self.num_cells)
        else:
            self.value += size * TAIL_UNIT
            span = tail_claim(self.value, size, self.num_cells)
        self.won += range(*span)
        return span


def last_end_s(cells: int, steps_s: Sequence[float], busy_s: Sequence[float]) -> float:
    """When the last of ``cells`` ends, if each is given to the replica that ends it first."""
    ends_s = list(busy_s)
    for _ in range(cells):
        first = min(range(len(ends_s)), key=lambda r: ends_s[r] + steps_s[r])
        ends_s[first] += steps_s[first]
        last_s = ends_s[first]
    return last_s


# --- claims ---------------------------------------------------------------------------------------------------------


def test_heads_and_tails_meet_in_the_middle() -> None:
    counter = Counter(10)

    assert counter.claim("head", 4) == (0, 4)
    assert counter.claim("tail", 3) == (7, 10)
    assert counter.claim("head", 2) == (4, 6)
    assert remaining(counter.value, 10) == 1
    assert counter.claim("tail", 5) == (6, 7)
    assert remaining(counter.value, 10) == 0
    assert taken(counter.value) == (6, 8)


@pytest.mark.parametrize("end", ["head", "tail"])
def test_a_claim_behind_the_end_wins_nothing(end: str) -> None:
    counter = Counter(3)
    counter.claim("head", 2)
    counter.claim("tail", 2)

    assert sorted(counter.won) == [0, 1, 2]
    for _ in range(3):
        assert counter.claim(end, 5).size == 0
    assert remaining(counter.value, 3) == 0


@pytest.mark.parametrize("end", ["head", "tail"])
def test_a_queue_without_cells_gives_none(end: str) -> None:
    assert Counter(0).claim(end, 1) == (0, 0)


def test_the_largest_queue_has_room_for_claims_that_overshoot() -> None:
    counter = Counter(MAX_CELLS)
    for end, size in (("head", MAX_CELLS - 1), ("tail", MAX_CELLS - 1), ("head", 5), ("tail", 5)):
        value_before = counter.value
        counter.value += size if end == "head" else size * TAIL_UNIT
        assert value_before < counter.value < 2**63

    assert taken(counter.value) == (MAX_CELLS + 4, MAX_CELLS + 4)
    assert remaining(counter.value, MAX_CELLS) == 0
    assert tail_claim(counter.value, 5, MAX_CELLS).size == 0


def test_the_last_cell_of_the_largest_queue_is_won_once() -> None:
    value = MAX_CELLS - 1
    value += TAIL_UNIT

    assert tail_claim(value, 1, MAX_CELLS) == (MAX_CELLS - 1, MAX_CELLS)
    assert head_claim(value + 1, 1, MAX_CELLS).size == 0


@given(st.integers(0, 60), CLAIMS)
@settings(deadline=None, max_examples=200)
def test_interleaved_claims_at_both_ends_win_every_cell_once(num_cells: int, claims: list[tuple[str, int]]) -> None:
    counter = Counter(num_cells)
    for end, size in claims:
        left = remaining(counter.value, num_cells)
        span = counter.claim(end, size)
        assert span.size == min(size, left)
        assert 0 <= span.start <= span.stop <= num_cells
        assert remaining(counter.value, num_cells) == left - span.size

    assert len(counter.won) == len(set(counter.won))
    assert len(counter.won) == num_cells - remaining(counter.value, num_cells)


@given(st.integers(0, 60), CLAIMS, st.integers(1, 7))
@settings(deadline=None)
def test_no_cell_is_lost_when_the_queue_is_used_up(num_cells: int, claims: list[tuple[str, int]], size: int) -> None:
    counter = Counter(num_cells)
    for end, its_size in claims:
        counter.claim(end, its_size)
    while remaining(counter.value, num_cells):
        counter.claim("head", size)

    assert sorted(counter.won) == list(range(num_cells))


# --- how much to ask for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unclaimed", "speed", "all_speeds", "claim_frac", "size"),
    [
        (100, 1.0, 4.0, 0.5, 12),
        (100, 3.0, 4.0, 0.5, 37),
        (100, 1.0, 4.0, 1.0, 25),
        (7, 1.0, 4.0, 0.5, 1),
        (1, 1.0, 1.0, 1.0, 1),
        (100, 0.0, 4.0, 0.5, 1),
    ],
)
def test_a_claim_is_a_part_of_the_fair_share(
    unclaimed: int, speed: float, all_speeds: float, claim_frac: float, size: int
) -> None:
    assert claim_size(unclaimed, speed, all_speeds, claim_frac) == size


@given(st.integers(1, 10**6), st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.floats(0.01, 1))
@settings(deadline=None)
def test_all_replicas_together_claim_no_more_than_their_part(
    unclaimed: int, speeds: list[float], claim_frac: float
) -> None:
    sizes = [claim_size(unclaimed, speed, sum(speeds), claim_frac) for speed in speeds]

    assert min(sizes) >= 1
    assert sum(sizes) <= claim_frac * unclaimed + len(speeds)


@pytest.mark.parametrize(
    ("cells_left", "step_s", "all_cells_per_s", "reserve_frac", "ahead_s", "size"),
    [
        (1000, 0.1, 10.0, 0.25, 0.5, 5),
        (20, 0.1, 10.0, 0.25, 5.0, 5),
        (2, 0.1, 10.0, 0.25, 5.0, 1),
        (1.9, 0.1, 10.0, 0.25, 5.0, 0),
        (1000, 1.0, 10.0, 0.25, 0.5, 1),
        (0, 0.1, 10.0, 0.25, 0.5, 0),
        (1000, 0.1, 10.0, 0.0, 0.5, 0),
        (1000, 0.1, 10.0, 0.25, 0.0, 0),
    ],
)
def test_what_is_kept_from_thieves_is_bounded_by_time(
    cells_left: float, step_s: float, all_cells_per_s: float, reserve_frac: float, ahead_s: float, size: int
) -> None:
    reserved = reserve_size(
        cells_left=cells_left,
        step_s=step_s,
        all_cells_per_s=all_cells_per_s,
        reserve_frac=reserve_frac,
        ahead_s=ahead_s,
    )

    assert reserved == size


@pytest.mark.parametrize(
    ("backlog", "my_speed", "owner_speed", "size"),
    [(8, 1.0, 1.0, 2), (8, 3.0, 1.0, 3), (1, 1.0, 1.0, 1), (1, 0.1, 10.0, 1), (100, 1.0, 0.0, 50)],
)
def test_a_thief_takes_half_of_what_it_would_do_of_the_backlog(
    backlog: int, my_speed: float, owner_speed: float, size: int
) -> None:
    assert steal_size(backlog, my_speed, owner_speed) == size


@given(st.integers(1, 10**6), st.floats(0.01, 100), st.floats(0, 100))
@settings(deadline=None)
def test_a_thief_takes_something_and_never_more_than_half(backlog: int, my_speed: float, owner_speed: float) -> None:
    assert 1 <= steal_size(backlog, my_speed, owner_speed) <= max(1, backlog / 2)


# --- declining ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("me", "cells_left", "steps_s", "busy_s", "leaves"),
    [
        # one cell left: the fast one is busy for 0.5 s and then does it in 1 s, before the slow one's 3 s
        (1, 1, [1.0, 3.0], [0.5, 1.5], True),
        (1, 2, [1.0, 3.0], [0.5, 1.5], True),
        # the third would end at 3.5 s with the fast one
        (1, 3, [1.0, 3.0], [0.5, 1.5], False),
        # the fast one is stuck
        (1, 1, [1.0, 3.0], [9.0, 1.5], False),
        # ends at the same time: the one that is free takes it
        (1, 1, [1.0, 1.5], [0.5, 0.0], False),
        (0, 1, [1.0, 3.0], [0.5, 1.5], False),
        (1, 3, [1.0, 3.0, 1.0], [0.5, 1.5, 0.5], True),
        (0, 1, [5.0], [0.0], False),
        (0, 1, [5.0, math.inf], [0.0, math.inf], False),
        (1, 0, [1.0, 3.0], [0.5, 1.5], False),
    ],
)
def test_a_cell_that_others_end_sooner_is_left_to_them(
    me: int, cells_left: int, steps_s: list[float], busy_s: list[float], leaves: bool
) -> None:
    assert declines(me, cells_left, steps_s, busy_s) is leaves


@given(st.lists(st.tuples(STEPS, STEPS), min_size=1, max_size=6), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_the_earliest_completion_never_declines(
    replicas: list[tuple[float, float]], cells_left: int, data: st.DataObject
) -> None:
    me = data.draw(st.integers(0, len(replicas) - 1))
    steps_s, busy_s = [step for step, _ in replicas], [busy for _, busy in replicas]
    others_s = [step + busy for r, (step, busy) in enumerate(replicas) if r != me]

    if steps_s[me] <= min(others_s, default=math.inf):
        assert not declines(me, cells_left, steps_s, busy_s)


@given(st.lists(STEPS, min_size=1, max_size=6), st.integers(1, 20))
@settings(deadline=None)
def test_of_replicas_that_are_all_free_one_takes_the_cell(steps_s: list[float], cells_left: int) -> None:
    assert not all(declines(me, cells_left, steps_s, [0.0] * len(steps_s)) for me in range(len(steps_s)))


@given(st.lists(st.tuples(STEPS, STEPS), min_size=2, max_size=6), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_who_declines_would_have_ended_behind_all_the_others(
    replicas: list[tuple[float, float]], cells_left: int, data: st.DataObject
) -> None:
    me = data.draw(st.integers(0, len(replicas) - 1))
    steps_s, busy_s = [step for step, _ in replicas], [busy for _, busy in replicas]
    others = [replica for r, replica in enumerate(replicas) if r != me]
    without_me_s = last_end_s(cells_left, [step for step, _ in others], [busy for _, busy in others])

    assert declines(me, cells_left, steps_s, busy_s) == (without_me_s < steps_s[me])


@given(st.lists(st.tuples(STEPS, STEPS), min_size=2, max_size=6), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_more_cells_left_never_make_a_replica_decline(
    replicas: list[tuple[float, float]], cells_left: int, data: st.DataObject
) -> None:
    me = data.draw(st.integers(0, len(replicas) - 1))
    steps_s, busy_s = [step for step, _ in replicas], [busy for _, busy in replicas]

    if not declines(me, cells_left, steps_s, busy_s):
        assert not declines(me, cells_left + 1, steps_s, busy_s)


def test_thieves_who_overshoot_take_nothing_back_from_the_owner() -> None:
    six_reserved_and_seven_stolen_of_ten = 6 + 7 * TAIL_UNIT

    assert head_claim(six_reserved_and_seven_stolen_of_ten + 1, 1, 10) == Span(6, 6)
