from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.workqueue import (
    MAX_CELLS,
    TAIL_UNIT,
    CellQueue,
    RangeKey,
    Span,
    declines,
    head_claim,
    remaining,
    tail_claim,
    taken,
)
from tests.core.claimants import DictKeys

CLAIMS = st.lists(st.tuples(st.sampled_from(["head", "tail"]), st.integers(1, 12)), max_size=40)
EIGHTHS = st.integers(1, 800).map(lambda eighths: eighths / 8)
"""Seconds whose sums have no rounding errors."""
MOVES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["claim head", "claim tail", "reserve", "steal"]),
        st.integers(1, 7),
        st.integers(0, 99),
    ),
    max_size=60,
)


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


class Replicas:
    """Several replicas' ranges of one queue, and which positions each has reserved."""

    def __init__(self, world: int, size: int) -> None:
        self.keys = DictKeys()
        self.queues = [CellQueue(self.keys, replica, size) for replica in range(world)]
        self.ranges: list[list[RangeKey]] = [[] for _ in self.queues]
        self.reserved: list[list[int]] = [[] for _ in self.queues]

    def claim(self, me: int, size: int, *, from_tail: bool = False) -> bool:
        won = self.queues[me].claim(size, from_tail=from_tail)
        if won is None:
            return False
        assert 1 <= won.size <= size
        self.ranges[me].append(won)
        return True

    def reserve(self, me: int, size: int, pick: int) -> bool:
        if not self.ranges[me]:
            return False
        owned = self.ranges[me][pick % len(self.ranges[me])]
        won = self.queues[me].reserve(owned, size)
        self.reserved[me] += range(*won)
        assert 0 <= won.size <= size
        return won.size > 0

    def steal(self, me: int, size: int, pick: int) -> bool:
        loot = [item for owner, ranges in enumerate(self.ranges) if owner != me for item in ranges]
        if not loot:
            return False
        victim = loot[pick % len(loot)]
        won = self.queues[me].steal(victim, size)
        if won is None:
            return False
        assert victim.start <= won.start < won.start + won.size <= victim.start + victim.size
        self.ranges[me].append(won)
        return True

    def finish(self) -> None:
        """Every replica claims and reserves until nothing is left."""
        for me in range(len(self.queues)):
            while self.claim(me, 3):
                pass
        for me, ranges in enumerate(self.ranges):
            for pick in range(len(ranges)):
                while self.reserve(me, 4, pick):
                    pass


def queues(world: int, size: int) -> list[CellQueue]:
    keys = DictKeys()
    return [CellQueue(keys, replica, size) for replica in range(world)]


def leaves_step_by_step(me: int, cells_left: int, steps_s: Sequence[float], busy_s: Sequence[float]) -> bool:
    """Gives out one cell after the other, each to the replica that ends it first, until ``me`` gets one."""
    ends_s = [busy + step for busy, step in zip(busy_s, steps_s, strict=True)]
    ends_s[me] = steps_s[me]
    for _ in range(cells_left):
        first = min(range(len(ends_s)), key=lambda i: (ends_s[i], i != me))
        if first == me:
            return False
        ends_s[first] += steps_s[first]
    return cells_left > 0


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


# --- the queue ------------------------------------------------------------------------------------------------------


def test_two_replicas_claim_behind_each_other() -> None:
    first, second = queues(2, 8)

    assert first.claim(3) == RangeKey("range/0/0.0", 0, 3)
    assert second.claim(3) == RangeKey("range/1/0.0", 3, 3)
    assert first.claim(3) == RangeKey("range/0/0.1", 6, 2)
    assert second.claim(3) is None
    assert (first.unclaimed, second.unclaimed) == (0, 0)


def test_who_claims_from_the_tail_meets_who_claims_from_the_head() -> None:
    first, second = queues(2, 8)

    assert second.claim(3, from_tail=True) == RangeKey("range/1/0.0", 5, 3)
    assert first.claim(4) == RangeKey("range/0/0.0", 0, 4)
    assert first.free == (4, 5)
    assert second.free == (0, 5)
    assert second.claim(3, from_tail=True) == RangeKey("range/1/0.1", 4, 1)
    assert first.claim(1) is None


def test_a_look_shows_what_the_others_have_claimed() -> None:
    first, second = queues(2, 10)
    first.look()
    assert first.free == (0, 10)
    second.claim(3)
    second.claim(2, from_tail=True)
    assert first.unclaimed == 10

    first.look()

    assert first.free == (3, 8)
    assert first.unclaimed == 5


@pytest.mark.parametrize("from_tail", [False, True])
def test_a_replica_that_saw_the_end_asks_no_more(from_tail: bool) -> None:
    keys = DictKeys()
    queue = CellQueue(keys, 0, 2)
    queue.claim(5, from_tail=from_tail)
    for _ in range(3):
        assert queue.claim(5, from_tail=not from_tail) is None

    assert keys.asked == [("add", "queue/0")]


def test_every_move_is_one_request() -> None:
    keys = DictKeys()
    owner, thief = (CellQueue(keys, replica, 10) for replica in range(2))
    mine = owner.claim(6)
    assert mine is not None
    owner.reserve(mine, 2)
    thief.steal(mine, 1)
    thief.unreserved([mine, mine])
    thief.look()
    thief.seal()

    assert [what for what, _ in keys.asked] == ["add", "add", "add", "get_many", "get_many", "add"]


def test_an_owner_gets_the_head_of_a_range_and_a_thief_its_tail() -> None:
    owner, thief = queues(2, 10)
    mine = owner.claim(10)
    assert mine is not None

    assert owner.reserve(mine, 3) == (0, 3)
    assert thief.steal(mine, 4) == RangeKey("range/1/0.0", 6, 4)
    assert owner.unreserved([mine]) == [Span(3, 6)]
    assert owner.reserve(mine, 5) == (3, 6)
    assert owner.reserve(mine, 5).size == 0
    assert thief.steal(mine, 1) is None
    assert [span.size for span in owner.unreserved([mine])] == [0]


def test_what_was_stolen_can_be_stolen_on() -> None:
    first, second, third = queues(3, 8)
    claimed = first.claim(8)
    assert claimed is not None
    loot = second.steal(claimed, 6)
    assert loot == RangeKey("range/1/0.0", 2, 6)

    assert third.steal(loot, 2) == RangeKey("range/2/0.0", 6, 2)
    assert second.reserve(loot, 9) == (2, 6)
    assert first.reserve(claimed, 9) == (0, 2)


def test_nobody_has_taken_anything_of_a_new_range() -> None:
    owner, other = queues(2, 10)
    ranges = [owner.claim(4), owner.claim(3)]

    assert other.unreserved(item for item in ranges if item) == [Span(0, 4), Span(4, 7)]
    assert other.unreserved([]) == []


@pytest.mark.parametrize(
    ("num_from_head", "num_from_tail", "left"),
    [(0, 0, (0, 10)), (3, 0, (3, 7)), (0, 3, (0, 7)), (4, 4, (4, 2)), (10, 0, None), (7, 6, None)],
)
def test_who_seals_takes_all_that_is_left(num_from_head: int, num_from_tail: int, left: tuple[int, int] | None) -> None:
    claiming, sealing = queues(2, 10)
    if num_from_head:
        claiming.claim(num_from_head)
    if num_from_tail:
        claiming.claim(num_from_tail, from_tail=True)
    sealed = sealing.seal()

    assert (None if sealed is None else (sealed.start, sealed.size)) == left
    assert claiming.claim(1) is None
    assert claiming.claim(1, from_tail=True) is None
    assert sealing.seal() is None


def test_versions_have_queues_and_ranges_of_their_own() -> None:
    keys = DictKeys()
    old, new = CellQueue(keys, 0, 10, 0), CellQueue(keys, 0, 6, 3)
    claimed = old.claim(4)
    assert claimed == RangeKey("range/0/0.0", 0, 4, 0)

    assert new.claim(4) == RangeKey("range/0/3.0", 0, 4, 3)
    assert old.claim(4) == RangeKey("range/0/0.1", 4, 4, 0)
    # loot stays what it was, in a range that has a name of its own
    assert new.steal(claimed, 1) == RangeKey("range/0/3.1", 3, 1, 0)


def test_an_empty_queue_gives_nothing() -> None:
    (queue,) = queues(1, 0)

    assert (queue.size, queue.unclaimed) == (0, 0)
    assert queue.claim(1) is None
    assert queue.seal() is None


def test_more_cells_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=f"size must be at most {MAX_CELLS}, got {MAX_CELLS + 1}"):
        queues(1, MAX_CELLS + 1)


@given(st.integers(0, 40), MOVES)
@settings(deadline=None, max_examples=150)
def test_interleaved_claims_reservations_and_thefts_give_every_cell_once(
    size: int, moves: list[tuple[int, str, int, int]]
) -> None:
    replicas = Replicas(4, size)
    for me, move, amount, pick in moves:
        if move == "reserve":
            replicas.reserve(me, amount, pick)
        elif move == "steal":
            replicas.steal(me, amount, pick)
        else:
            replicas.claim(me, amount, from_tail=move == "claim tail")
    so_far = [cell for cells in replicas.reserved for cell in cells]
    assert len(so_far) == len(set(so_far))

    replicas.finish()

    assert sorted(cell for cells in replicas.reserved for cell in cells) == list(range(size))


@given(st.integers(0, 40), MOVES, st.integers(0, 60))
@settings(deadline=None, max_examples=150)
def test_what_a_seal_takes_amid_other_moves_is_taken_by_nobody_else(
    size: int, moves: list[tuple[int, str, int, int]], seal_at: int
) -> None:
    replicas = Replicas(4, size)
    sealer = CellQueue(replicas.keys, 4, size)
    sealed: list[int] = []
    for turn, (me, move, amount, pick) in enumerate([*moves, (0, "reserve", 1, 0)]):
        if turn == min(seal_at, len(moves)):
            ranges = [item for owned in replicas.ranges for item in owned]
            parts = [sealer.seal(), *(sealer.steal(item, item.size) for item in ranges)]
            sealed = [at for part in parts if part for at in range(part.start, part.start + part.size)]
        if move == "reserve":
            replicas.reserve(me, amount, pick)
        elif move == "steal":
            replicas.steal(me, amount, pick)
        else:
            replicas.claim(me, amount, from_tail=move == "claim tail")
    replicas.finish()

    assert sorted([*sealed, *(cell for cells in replicas.reserved for cell in cells)]) == list(range(size))


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


@pytest.mark.parametrize("cells_left", [1, 5, 10**9])
def test_cells_are_left_to_a_replica_that_needs_no_time_at_all(cells_left: int) -> None:
    assert declines(1, cells_left, [0.0, 3.0], [0.5, 0.0])
    assert not declines(1, cells_left, [0.0, 3.0], [3.0, 0.0])


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS | st.just(0.0) | st.just(math.inf)), min_size=1, max_size=6), st.data())
@settings(deadline=None, max_examples=300)
def test_the_closed_form_gives_out_cells_one_by_one(replicas: list[tuple[float, float]], data: st.DataObject) -> None:
    me, cells_left = data.draw(st.integers(0, len(replicas) - 1)), data.draw(st.integers(0, 40))
    steps_s, busy_s = [step for step, _ in replicas], [busy for _, busy in replicas]

    assert declines(me, cells_left, steps_s, busy_s) == leaves_step_by_step(me, cells_left, steps_s, busy_s)


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS), min_size=1, max_size=6), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_the_earliest_completion_never_declines(
    replicas: list[tuple[float, float]], cells_left: int, data: st.DataObject
) -> None:
    me = data.draw(st.integers(0, len(replicas) - 1))
    steps_s, busy_s = [step for step, _ in replicas], [busy for _, busy in replicas]
    others_s = [step + busy for r, (step, busy) in enumerate(replicas) if r != me]

    if steps_s[me] <= min(others_s, default=math.inf):
        assert not declines(me, cells_left, steps_s, busy_s)


@given(st.lists(EIGHTHS, min_size=1, max_size=6), st.integers(1, 20))
@settings(deadline=None)
def test_of_replicas_that_are_all_free_one_takes_the_cell(steps_s: list[float], cells_left: int) -> None:
    assert not all(declines(me, cells_left, steps_s, [0.0] * len(steps_s)) for me in range(len(steps_s)))


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS), min_size=2, max_size=6), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_who_declines_would_have_ended_behind_all_the_others(
    replicas: list[tuple[float, float]], cells_left: int, data: st.DataObject
) -> None:
    me = data.draw(st.integers(0, len(replicas) - 1))
    steps_s, busy_s = [step for step, _ in replicas], [busy for _, busy in replicas]
    others = [replica for r, replica in enumerate(replicas) if r != me]
    without_me_s = last_end_s(cells_left, [step for step, _ in others], [busy for _, busy in others])

    assert declines(me, cells_left, steps_s, busy_s) == (without_me_s < steps_s[me])


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS), min_size=2, max_size=6), st.integers(1, 20), st.data())
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
