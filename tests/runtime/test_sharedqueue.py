from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.state import DeviceState, ReplicaRecord
from lightning_hybrid.core.workqueue import MAX_CELLS, Span
from lightning_hybrid.runtime.sharedqueue import Alarm, Published, RangeKey, SharedQueue
from lightning_hybrid.runtime.store import InProcessStore

pytestmark = pytest.mark.timeout(60)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SPANS = st.lists(st.builds(Span, st.integers(0, 99), st.integers(0, 99)), max_size=4).map(tuple)
RANGES = st.lists(st.builds(RangeKey, st.text(), st.integers(0, 99), st.integers(1, 99)), max_size=4).map(tuple)
PUBLISHED = st.builds(
    Published,
    record=st.builds(
        ReplicaRecord,
        replica=st.integers(0, 7),
        step_s=st.none() | FINITE,
        device=st.none() | st.builds(DeviceState, kind=st.just("cuda"), name=st.none() | st.text()),
    ),
    reserved=st.integers(0, 99),
    ranges=RANGES,
    done=SPANS,
    held=SPANS,
    recut=st.none() | st.booleans(),
)
MOVES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["claim", "reserve", "steal"]), st.integers(1, 7), st.integers(0, 99)),
    max_size=60,
)


def queues(world: int, num_cells: int, first_cell: int = 0) -> list[SharedQueue]:
    store = InProcessStore()
    return [SharedQueue(store, replica, world, first_cell, num_cells) for replica in range(world)]


class Replicas:
    """Several replicas' ranges of one queue, and which cells each has reserved."""

    def __init__(self, world: int, num_cells: int, first_cell: int) -> None:
        self.queues = queues(world, num_cells, first_cell)
        self.ranges: list[list[RangeKey]] = [[] for _ in self.queues]
        self.reserved: list[list[int]] = [[] for _ in self.queues]

    def claim(self, me: int, size: int) -> bool:
        won = self.queues[me].claim(size)
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


# --- cells ----------------------------------------------------------------------------------------------------------


def test_two_replicas_claim_behind_each_other() -> None:
    first, second = queues(2, 10, first_cell=2)

    assert first.claim(3) == RangeKey("range/0/0", 2, 3)
    assert second.claim(3) == RangeKey("range/1/0", 5, 3)
    assert first.claim(3) == RangeKey("range/0/1", 8, 2)
    assert second.claim(3) is None
    assert (first.unclaimed, second.unclaimed) == (0, 0)


def test_a_replica_that_saw_the_end_asks_the_store_no_more() -> None:
    store = InProcessStore()
    queue = SharedQueue(store, 0, 1, 0, 2)
    queue.claim(5)
    for _ in range(3):
        assert queue.claim(5) is None

    assert store.get_many(["queue"]) == [b"5"]


def test_an_owner_gets_the_head_of_a_range_and_a_thief_its_tail() -> None:
    owner, thief = queues(2, 10)
    mine = owner.claim(10)
    assert mine is not None

    assert owner.reserve(mine, 3) == (0, 3)
    assert thief.steal(mine, 4) == RangeKey("range/1/0", 6, 4)
    assert owner.unreserved([mine]) == [3]
    assert owner.reserve(mine, 5) == (3, 6)
    assert owner.reserve(mine, 5).size == 0
    assert thief.steal(mine, 1) is None


def test_what_was_stolen_can_be_stolen_on() -> None:
    first, second, third = queues(3, 8)
    claimed = first.claim(8)
    assert claimed is not None
    loot = second.steal(claimed, 6)
    assert loot == RangeKey("range/1/0", 2, 6)

    assert third.steal(loot, 2) == RangeKey("range/2/0", 6, 2)
    assert second.reserve(loot, 9) == (2, 6)
    assert first.reserve(claimed, 9) == (0, 2)


def test_nobody_has_taken_anything_of_a_new_range() -> None:
    owner, other = queues(2, 10)
    ranges = [owner.claim(4), owner.claim(3)]

    assert other.unreserved(item for item in ranges if item) == [4, 3]
    assert other.unreserved([]) == []


def test_a_queue_that_begins_behind_the_end_is_empty() -> None:
    (queue,) = queues(1, 4, first_cell=7)

    assert (queue.size, queue.unclaimed) == (0, 0)
    assert queue.claim(1) is None


def test_more_cells_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=f"num_cells must be at most {MAX_CELLS}, got {MAX_CELLS + 1}"):
        queues(1, MAX_CELLS + 1)


@given(st.integers(0, 40), st.integers(0, 5), MOVES)
@settings(deadline=None, max_examples=150)
def test_interleaved_claims_reservations_and_thefts_give_every_cell_once(
    num_cells: int, first_cell: int, moves: list[tuple[int, str, int, int]]
) -> None:
    replicas = Replicas(4, num_cells, first_cell)
    for me, move, size, pick in moves:
        if move == "claim":
            replicas.claim(me, size)
        elif move == "reserve":
            replicas.reserve(me, size, pick)
        else:
            replicas.steal(me, size, pick)
    so_far = [cell for cells in replicas.reserved for cell in cells]
    assert len(so_far) == len(set(so_far))

    replicas.finish()

    assert sorted(cell for cells in replicas.reserved for cell in cells) == list(range(first_cell, num_cells))


def test_threads_that_claim_reserve_and_steal_at_once_run_every_cell_once() -> None:
    replicas = Replicas(4, 400, 0)

    def main(me: int) -> None:
        for turn in range(60):
            replicas.claim(me, 5)
            replicas.steal(me, 2, turn * 7 + me)
            replicas.reserve(me, 3, turn)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(main, range(4), timeout=30))
    replicas.finish()

    assert sorted(cell for cells in replicas.reserved for cell in cells) == list(range(400))


# --- words ----------------------------------------------------------------------------------------------------------


@given(PUBLISHED)
@settings(deadline=None)
def test_what_a_replica_tells_comes_back_from_its_bytes(published: Published) -> None:
    assert Published.from_bytes(published.to_bytes()) == published


def test_replicas_read_what_each_said_last() -> None:
    first, second, third = queues(3, 10)
    silent = Published(record=ReplicaRecord(replica=2))
    first.publish(Published(record=ReplicaRecord(replica=0, steps=1)))
    first.publish(Published(record=ReplicaRecord(replica=0, steps=2), reserved=3))
    third.publish(silent)

    assert second.look() == [Published(record=ReplicaRecord(replica=0, steps=2), reserved=3), None, silent]
    assert second.alarm is None


def test_an_alarm_reaches_every_replica_and_the_first_reason_counts() -> None:
    first, second, third = queues(3, 10)
    fire = Alarm("replica 0 is on fire", is_collective=False)
    first.raise_alarm(fire)
    second.raise_alarm(Alarm("replica 1 issued a collective", is_collective=True))
    third.look()

    assert [queue.alarm for queue in (first, second, third)] == [fire] * 3


@given(st.text(), st.booleans())
@settings(deadline=None)
def test_an_alarm_comes_back_from_its_bytes(reason: str, is_collective: bool) -> None:
    alarm = Alarm(reason, is_collective)

    assert Alarm.from_bytes(alarm.to_bytes()) == alarm


def test_the_first_proposal_is_what_all_hold() -> None:
    first, second = queues(2, 10)

    assert second.agreed("block/0") is None
    assert first.agree("block/0", b"mine") == b"mine"
    assert second.agree("block/0", b"yours") == b"mine"
    assert second.agreed("block/0") == b"mine"


def test_a_lost_cell_is_adopted_by_one_replica() -> None:
    first, second = queues(2, 10)

    assert second.adopt_orphan(4)
    assert not first.adopt_orphan(4)
    assert second.adopt_orphan(4)
    assert first.adopt_orphan(5)
