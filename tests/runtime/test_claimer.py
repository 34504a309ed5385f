from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.errors import CollectiveInQueueMode, CoordinationTimeout
from lightning_hybrid.runtime.sharedqueue import Alarm
from lightning_hybrid.runtime.store import InProcessStore
from lightning_hybrid.runtime.work import Exhausted, Work
from tests.runtime.replicas import QUICK, Gate, Replica, all_ran, run_in_threads, step_of

pytestmark = pytest.mark.timeout(60)

WITHOUT_WORKERS, WITH_WORKERS = 0, 4
BOTH = pytest.mark.parametrize("prefetch", [WITHOUT_WORKERS, WITH_WORKERS], ids=["no workers", "workers"])


@contextmanager
def started(*replicas: Replica) -> Iterator[None]:
    """The replicas' background threads, without their loops."""
    with ExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.board.close)
            replica.board.start()
        yield


def eventually(ready: Callable[[], bool], replica: Replica, deadline_s: float = 20.0) -> None:
    """Waits for something that the background thread of ``replica`` brings about."""
    ends_s = time.monotonic() + deadline_s
    with replica.board.changed:
        while not ready():
            assert time.monotonic() < ends_s, "it did not happen"
            replica.board.changed.wait(timeout=0.01)


def is_waiting(replica: Replica) -> Callable[[], bool]:
    """Whether the replica's loop has come to wait for work that it may not have now."""
    errand, pauses_s = replica.board.errand, set[float]()
    assert errand is not None

    def watched() -> float:
        pause_s = errand()
        pauses_s.add(pause_s)
        return pause_s

    replica.board.errand = watched
    return lambda: any(0 < pause_s <= QUICK.publish_period_s for pause_s in pauses_s)


# --- exactly once ---------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("num_cells", [0, 1, 2, 3, 5, 60])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_equal_replicas_run_every_cell_once(world: int, num_cells: int, prefetch: int) -> None:
    replicas = run_in_threads([step_of(0.0005)] * world, num_cells, prefetch=prefetch)

    assert all_ran(replicas) == list(range(num_cells))


@BOTH
def test_unequal_replicas_run_every_cell_once_and_the_slow_one_fewer(prefetch: int) -> None:
    steps = [step_of(0.004), step_of(0.004), step_of(0.004), step_of(0.020)]
    replicas = run_in_threads(steps, 96, prefetch=prefetch)

    assert all_ran(replicas) == list(range(96))
    shares = [len(replica.ran) for replica in replicas]
    assert shares[3] < min(shares[:3])
    assert shares[3] < 96 // 4


@BOTH
def test_cells_before_the_queue_are_not_dealt_out(prefetch: int) -> None:
    assert all_ran(run_in_threads([step_of(0)] * 2, 10, prefetch=prefetch, first_cell=4)) == [4, 5, 6, 7, 8, 9]


@BOTH
def test_a_replica_that_slows_down_and_recovers_costs_no_cell(prefetch: int) -> None:
    slow = threading.Event()

    def changing(work: Work) -> None:
        time.sleep(0.010 if slow.is_set() else 0.001)

    def steady(work: Work) -> None:
        if work.start == 30:
            slow.set()
        if work.start == 60:
            slow.clear()
        time.sleep(0.001)

    assert all_ran(run_in_threads([steady, changing], 90, prefetch=prefetch)) == list(range(90))


@given(
    steps_ms=st.lists(st.sampled_from([0.0, 0.2, 0.5, 2.0]), min_size=1, max_size=4),
    num_cells=st.integers(0, 40),
    prefetch=st.sampled_from([0, 1, 2, 4, 6]),
    claim_frac=st.sampled_from([0.1, 0.5, 1.0]),
    reserve_frac=st.sampled_from([0.0, 0.25, 1.0]),
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_every_cell_is_run_once_whatever_the_speeds_and_settings(
    steps_ms: list[float], num_cells: int, prefetch: int, claim_frac: float, reserve_frac: float
) -> None:
    config = QUICK.but(claim_frac=claim_frac, reserve_frac=reserve_frac)
    steps = [step_of(step_ms / 1000) for step_ms in steps_ms]

    assert all_ran(run_in_threads(steps, num_cells, config=config, prefetch=prefetch)) == list(range(num_cells))


@BOTH
def test_a_lease_that_nobody_misses_changes_nothing(prefetch: int) -> None:
    steps = [step_of(0.001), step_of(0.004)]
    config = QUICK.but(lease_s=10, claim_deadline_s=3)
    replicas = run_in_threads(steps, 60, config=config, prefetch=prefetch)

    assert all_ran(replicas) == list(range(60))


# --- stealing -------------------------------------------------------------------------------------------------------


@BOTH
def test_what_a_standing_replica_has_not_reserved_is_stolen_by_the_others(prefetch: int) -> None:
    store, gate = InProcessStore(), Gate()
    stuck, busy = (Replica(store, me, 2, 40, prefetch=prefetch) for me in range(2))

    def last_but_held(_work: Work) -> None:
        time.sleep(0.0005)
        # the standing one holds what it runs and what it had reserved before its speed was known
        if len(busy.ran) + 1 >= 40 - 2:
            gate.open()

    with ThreadPoolExecutor(2) as pool:
        stuck_ran = pool.submit(stuck.run, gate)
        gate.await_arrival()
        busy_ran = pool.submit(busy.run, last_but_held)
        assert busy_ran.result(timeout=30) is not None
        assert stuck_ran.result(timeout=30) is not None

    assert all_ran([stuck, busy]) == list(range(40))
    assert len(busy.ran) >= 38
    assert busy.dealer.cells_stolen > 0
    assert stuck.dealer.cells_stolen == 0


@BOTH
def test_three_replicas_empty_the_range_of_a_standing_one(prefetch: int) -> None:
    store, gate = InProcessStore(), Gate()
    stuck, *others = (Replica(store, me, 4, 80, prefetch=prefetch) for me in range(4))
    lock = threading.Lock()
    count = [0]

    def counting(_work: Work) -> None:
        with lock:
            count[0] += 1
            if count[0] >= 80 - 2:
                gate.open()

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(stuck.run, gate)]
        gate.await_arrival()
        futures += [pool.submit(other.run, counting) for other in others]
        for future in futures:
            future.result(timeout=30)

    assert all_ran([stuck, *others]) == list(range(80))
    assert len(stuck.ran) <= 2


def test_a_cell_that_was_stolen_while_it_was_loaded_is_not_run() -> None:
    store = InProcessStore()
    loading, thief = Replica(store, 0, 2, 12, prefetch=6), Replica(store, 1, 2, 12)
    with started(loading):
        works = [loading.dealer.take(may_wait=False) for _ in range(3)]
        assert [work and work.cell for work in works] == [0, 1, 2]
        # the thief takes all but the head that the owner has reserved
        with started(thief):
            stolen = []
            while len(stolen) < 11:
                work = thief.dealer.take(may_wait=True)
                assert work is not None
                assert thief.dealer.begin(work)
                thief.dealer.done(work)
                stolen.append(work.cell)
        begun = [work is not None and loading.dealer.begin(work) for work in works]

    assert sorted(stolen) == list(range(1, 12))
    assert begun == [True, False, False]


# --- several cells in one step ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("world", [1, 3])
def test_several_cells_are_run_as_one_step_and_each_once(world: int, prefetch: int) -> None:
    replicas = run_in_threads([step_of(0.002)] * world, 90, prefetch=prefetch, most=4)

    assert all_ran(replicas) == list(range(90))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps_ms=st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=1, max_size=4),
    num_cells=st.integers(0, 70),
    prefetch=st.sampled_from([0, 1, 4]),
    most=st.integers(2, 9),
)
def test_every_cell_is_run_once_whatever_the_size_of_steps(
    steps_ms: list[float], num_cells: int, prefetch: int, most: int
) -> None:
    replicas = run_in_threads([step_of(ms / 1000) for ms in steps_ms], num_cells, prefetch=prefetch, most=most)

    assert all_ran(replicas) == list(range(num_cells))


def test_what_is_left_of_a_step_of_which_a_part_was_stolen_is_loaded_again() -> None:
    store = InProcessStore()
    loading, thief = Replica(store, 0, 2, 12, prefetch=6, most=3), Replica(store, 1, 2, 12)
    with started(loading):
        works = [loading.dealer.take(may_wait=False) for _ in range(2)]
        assert [work and list(work.cells) for work in works] == [[0, 1, 2], [3, 4, 5]]
        stolen = []
        with started(thief):
            while 2 not in stolen:  # the owner has reserved the head of its range alone
                work = thief.dealer.take(may_wait=True)
                assert work is not None
                assert thief.dealer.begin(work)
                thief.dealer.done(work)
                stolen.append(work.cell)
            begun = [work is not None and loading.dealer.begin(work) for work in works]
            kept = [cell for cell in range(6) if cell not in stolen]
            again = [loading.dealer.take(may_wait=False) for _ in kept]

    assert begun == [False, False]
    # the thief may hold more than its loop has asked for so far, but never what the owner has reserved
    given = sorted(cell for work in again if work is not None for cell in work.cells)
    assert given
    assert set(given) <= set(kept)


# --- the end --------------------------------------------------------------------------------------------------------


def test_the_slow_replica_leaves_the_last_cell_to_the_fast_one() -> None:
    store = InProcessStore()
    slow, fast = Replica(store, 0, 2, 1, step_s=10.0), Replica(store, 1, 2, 1, step_s=0.05)
    slow_waits = is_waiting(slow)
    with started(fast), started(slow), ThreadPoolExecutor(1) as pool:
        eventually(lambda: len(slow.board.view.published) == 2, slow)
        waiting = pool.submit(slow.dealer.take, may_wait=True)
        eventually(slow_waits, slow)
        work = fast.dealer.take(may_wait=True)

        assert work == Work(0, 1, 0, mode="queue")
        assert fast.dealer.begin(work)
        with pytest.raises(Exhausted):
            waiting.result(timeout=20)


def test_the_slow_replica_takes_the_last_cell_after_all_when_the_fast_one_does_not_come() -> None:
    store = InProcessStore()
    slow, fast = Replica(store, 0, 2, 1, step_s=0.3), Replica(store, 1, 2, 1, step_s=0.05)
    with started(slow, fast):
        eventually(lambda: len(slow.board.view.published) == 2, slow)

        assert slow.dealer.take(may_wait=True) == Work(0, 1, 0, mode="queue")


def test_one_that_must_not_wait_is_told_that_there_is_nothing_now() -> None:
    store = InProcessStore()
    owner, other = Replica(store, 0, 2, 8, prefetch=2, step_s=0.01), Replica(store, 1, 2, 8, prefetch=2, step_s=9.0)
    with started(owner):
        taken = [owner.dealer.take(may_wait=False) for _ in range(8)]
        assert all(taken)
        eventually(lambda: owner.dealer.claimant.queue.unclaimed == 0, owner)
        with started(other):
            # the owner would end its cells long before the other has done one of them
            assert other.dealer.take(may_wait=False) is None


def test_there_is_no_end_while_another_replica_still_runs() -> None:
    gate = Gate()
    store = InProcessStore()
    slow, fast = (Replica(store, me, 2, 6) for me in range(2))
    with ThreadPoolExecutor(2) as pool:
        slow_ran = pool.submit(slow.run, gate)
        gate.await_arrival()
        fast_ran = pool.submit(fast.run, step_of(0))
        eventually(lambda: len(fast.ran) >= 4, fast)
        assert not fast_ran.done()
        gate.open()
        slow_ran.result(timeout=20)
        fast_ran.result(timeout=20)

    assert all_ran([slow, fast]) == list(range(6))


# --- before the mode is known ---------------------------------------------------------------------------------------


def test_before_the_release_cells_are_loaded_but_not_begun() -> None:
    released = threading.Event()
    replica = Replica(InProcessStore(), 0, 1, 6, prefetch=3, released=released.is_set)
    waits = is_waiting(replica)
    with started(replica), ThreadPoolExecutor(1) as pool:
        works = [replica.dealer.take(may_wait=False) for _ in range(3)]
        assert [work and work.cell for work in works] == [0, 1, 2]
        assert works[0] is not None
        begun = pool.submit(replica.dealer.begin, works[0])
        eventually(waits, replica)
        assert not begun.done()
        released.set()
        with replica.board.changed:
            replica.board.wake()
        assert begun.result(timeout=20)


# --- what ends a run ------------------------------------------------------------------------------------------------


@BOTH
def test_an_alarm_of_another_replica_ends_the_wait_for_work(prefetch: int) -> None:
    store = InProcessStore()
    holder, waiting = Replica(store, 0, 2, 1, prefetch=prefetch), Replica(store, 1, 2, 1, prefetch=prefetch)
    with started(holder):
        assert holder.dealer.take(may_wait=True) is not None
        with started(waiting), ThreadPoolExecutor(1) as pool:
            ended = pool.submit(waiting.dealer.finish)
            eventually(lambda: waiting.board.view.looks > 0, waiting)
            holder.queue.raise_alarm(Alarm("replica 0 issued a collective", is_collective=True))
            with pytest.raises(CollectiveInQueueMode, match="replica 0 issued a collective"):
                ended.result(timeout=20)


def test_a_wait_for_a_replica_that_died_ends_at_the_deadline() -> None:
    store = InProcessStore()
    config = QUICK.but(claim_deadline_s=0.4)
    died, alive = (Replica(store, me, 2, 4, config=config) for me in range(2))
    with started(died):
        assert died.dealer.take(may_wait=True) is not None

    with pytest.raises(CoordinationTimeout, match="claim_deadline_s"):
        alive.run(step_of(0))


class LostStore(InProcessStore):
    """A store that stops to answer after some requests."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self._requests = requests

    def add(self, key: str, amount: int) -> int:
        self._requests -= 1
        if self._requests < 0:
            raise CoordinationTimeout("the store is gone")
        return super().add(key, amount)


@BOTH
@pytest.mark.parametrize("requests", [0, 1, 2, 5])
def test_a_store_that_is_lost_ends_the_run(requests: int, prefetch: int) -> None:
    replica = Replica(LostStore(requests), 0, 1, 100, prefetch=prefetch)

    with pytest.raises(CoordinationTimeout, match="the store is gone"):
        replica.run(step_of(0))
