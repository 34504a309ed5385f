from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import CollectiveInQueueMode, CoordinationTimeout, PeerFailed
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import DeviceState, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.sharedqueue import Alarm, SharedQueue
from lightning_hybrid.runtime.store import InProcessStore, Store

pytestmark = pytest.mark.timeout(60)

QUICK = HybridConfig(publish_period_s=0.01, claim_deadline_s=20)


class ScriptedClock:
    """Goes on by ``tick_s`` with every reading."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self._tick_s = 100.0, tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


def board_of(
    store: Store, replica: int = 0, *, config: HybridConfig = QUICK, clock: Callable[[], float] = time.monotonic
) -> Board:
    return Board(SharedQueue(store, replica, 2), replica, 2, config, clock=clock)


def until(board: Board, ready: Callable[[], bool]) -> None:
    with board.changed:
        board.wait(ready, "what the test waits for")


def tell(store: Store, replica: int, *, steps: int = 0, step_s: float | None = None, reserved: int = 0) -> None:
    record = ReplicaRecord(replica=replica, steps=steps, step_s=step_s)
    SharedQueue(store, replica, 2).publish(Published(record=record, reserved=reserved))


# --- exchange -------------------------------------------------------------------------------------------------------


def test_replicas_learn_of_each_other_without_their_loops() -> None:
    store = InProcessStore()
    first, second = board_of(store, 0), board_of(store, 1)
    second.view.record = ReplicaRecord(replica=1, steps=7, step_s=0.5)
    second.recut = True
    first.start()
    second.start()
    until(first, lambda: len(first.view.published) == 2)
    first.close()
    second.close()

    assert first.view.published[1] == Published(record=second.view.record, recut=True)


def test_a_new_record_is_published_at_once_when_asked() -> None:
    store = InProcessStore()
    board = board_of(store, config=QUICK.but(publish_period_s=15))
    board.start()
    until(board, lambda: bool(board.view.published))
    board.view.record = ReplicaRecord(replica=0, steps=1)
    begin_s = time.monotonic()
    board.exchange_soon()
    with board.changed:
        while board.view.published[0].record.steps != 1:
            assert board.changed.wait(timeout=10)
    board.close()

    assert time.monotonic() - begin_s < 10


def test_the_device_is_read_once_a_period_and_published_with_the_record() -> None:
    readings: list[int] = []

    def read() -> DeviceState:
        readings.append(threading.get_ident())
        return DeviceState(kind="cpu", utilization_frac=0.5)

    store = InProcessStore()
    config = QUICK.but(device_period_s=1000)
    board = Board(SharedQueue(store, 0, 1), 0, 1, config, read_device=read)
    turns = [0]

    def errand() -> float:
        turns[0] += 1
        return math.inf

    board.errand = errand
    board.start()
    until(board, lambda: turns[0] >= 4)
    board.close()

    assert len(readings) == 1
    assert readings[0] != threading.get_ident()
    assert board.view.published[0].record.device == DeviceState(kind="cpu", utilization_frac=0.5)


def test_an_errand_is_run_again_when_it_wants_and_when_it_is_woken() -> None:
    board = board_of(InProcessStore(), config=QUICK.but(publish_period_s=1000))
    pauses_s = iter([0.0, 0.001])
    turns = [0]

    def errand() -> float:
        turns[0] += 1
        with board.changed:
            board.changed.notify_all()
        return next(pauses_s, math.inf)

    board.errand = errand
    board.start()
    with board.changed:
        while turns[0] < 3:
            assert board.changed.wait(timeout=20)
        board.wake()
        while turns[0] < 4:
            assert board.changed.wait(timeout=20)
    board.close()

    assert turns[0] == 4


def test_the_newest_record_is_asked_for_before_it_is_told() -> None:
    store = InProcessStore()
    board = board_of(store)
    steps = iter(range(1, 10))
    board.source = lambda: ReplicaRecord(replica=0, steps=next(steps))
    board.publish()
    board.publish()
    board.look()

    assert board.view.record.steps == board.view.published[0].record.steps == 2


def test_what_is_told_is_what_the_dealer_makes_of_the_record_and_what_was_decided_here() -> None:
    board = board_of(InProcessStore())
    board.view.record = ReplicaRecord(replica=0, steps=5)
    board.describe = lambda record: Published(record=record, reserved=record.steps, version=2)
    board.policy, board.learnt = "memory_aware", "{}"
    board.publish()
    board.look()

    assert board.view.published[0] == Published(
        record=ReplicaRecord(replica=0, steps=5), reserved=5, version=2, policy="memory_aware", learnt="{}"
    )


def test_a_look_takes_in_the_newest_version_of_the_plan() -> None:
    store = InProcessStore()
    board = board_of(store)
    store.add("version", 3)
    board.look()

    assert board.view.newest_version == 3


def test_after_each_exchange_others_get_their_turn() -> None:
    board = board_of(InProcessStore())
    seen: list[int] = []
    board.after_exchange.append(lambda: seen.append(board.view.looks))
    board.start()
    until(board, lambda: len(seen) >= 3)
    board.close()

    assert seen[:3] == [1, 2, 3]


def test_of_many_replicas_a_look_reads_a_part_unless_the_dead_are_swept() -> None:
    queue = SharedQueue(InProcessStore(), 0, 50)
    sampling = Board(queue, 0, 50, QUICK.but(look_replicas=8))
    sweeping = Board(queue, 0, 50, QUICK.but(look_replicas=8, lease_s=10.0))

    assert (sampling.view.is_sampled, sweeping.view.is_sampled) == (True, False)
    assert sweeping.view.to_look_at() == list(range(50))


# --- waiting --------------------------------------------------------------------------------------------------------


def test_a_wait_without_any_progress_ends_at_the_deadline() -> None:
    board = board_of(InProcessStore(), config=QUICK.but(claim_deadline_s=50), clock=ScriptedClock(tick_s=5.0))

    with (
        board.changed,
        pytest.raises(CoordinationTimeout, match=r"waited 55 s \(claim_deadline_s\) for a miracle, and no replica"),
    ):
        board.wait(lambda: False, "a miracle")


@pytest.mark.parametrize("moves", ["steps", "reserved"])
def test_a_wait_goes_on_while_any_replica_makes_progress(moves: str) -> None:
    store, clock = InProcessStore(), ScriptedClock()
    board = board_of(store, config=QUICK.but(claim_deadline_s=50), clock=clock)
    turns = [0]

    def ready() -> bool:
        turns[0] += 1
        clock.now_s += 40
        if turns[0] <= 6:
            tell(store, 1, **{moves: turns[0]})
        board.look()
        return False

    with board.changed, pytest.raises(CoordinationTimeout):
        board.wait(ready, "a miracle")

    assert turns[0] == 8


def test_time_spent_waiting_adds_up() -> None:
    clock = ScriptedClock()
    board = board_of(InProcessStore(), clock=clock)
    answers = iter([False, True, True])

    def ready() -> bool:
        clock.now_s += 2.0
        return next(answers)

    with board.changed:
        board.wait(ready, "the first")
        assert board.waited_s == 4.0
        board.wait(ready, "the second")

    assert board.waited_s == 6.0


class BrokenStore(InProcessStore):
    def put(self, key: str, value: bytes) -> None:
        raise CoordinationTimeout("the store is gone")


def test_what_ended_the_background_thread_is_raised_in_the_loop() -> None:
    board = board_of(BrokenStore())
    board.start()

    with board.changed, pytest.raises(CoordinationTimeout, match="the store is gone"):
        board.wait(lambda: False, "what never comes")
    with pytest.raises(CoordinationTimeout, match="the store is gone"):
        board.check()


def test_what_the_watch_complains_of_ends_the_run_on_every_replica() -> None:
    store = InProcessStore()
    first = Board(SharedQueue(store, 0, 2), 0, 2, QUICK, watch=lambda: "replica 0 hangs")
    second = board_of(store, 1)
    first.start()
    second.start()
    for board in (first, second):
        with board.changed, pytest.raises(CollectiveInQueueMode, match="replica 0 hangs"):
            board.wait(lambda: False, "what never comes")
        board.close()


def test_the_failure_of_another_replica_is_told_as_such() -> None:
    store = InProcessStore()
    SharedQueue(store, 1, 2).raise_alarm(Alarm("replica 1 failed with KeyError: 'mask'", is_collective=False))
    board = board_of(store)
    board.start()

    with board.changed, pytest.raises(PeerFailed, match="replica 1 failed with KeyError: 'mask'"):
        board.wait(lambda: False, "what never comes")
    board.close()


def test_all_is_well_while_nothing_went_wrong() -> None:
    board = board_of(InProcessStore())
    board.check()
    board.start()
    until(board, lambda: bool(board.view.published))
    board.check()
    board.close()


# --- the end --------------------------------------------------------------------------------------------------------


def test_a_board_may_be_closed_before_its_start_and_twice() -> None:
    never_started, started = board_of(InProcessStore()), board_of(InProcessStore())
    never_started.close()
    started.start()
    started.close()
    started.close()


def test_after_the_close_nothing_is_published() -> None:
    store = InProcessStore()
    board = board_of(store)
    board.start()
    until(board, lambda: bool(board.view.published))
    board.close()
    board.view.record = ReplicaRecord(replica=0, steps=99)
    board.exchange_soon()

    (data,) = store.get_many(["replica/0"])
    assert data is not None
    assert Published.from_bytes(data).record.steps == 0


class SilentStore(InProcessStore):
    """A store whose answers do not come before the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = threading.Event(), threading.Event()

    def put(self, key: str, value: bytes) -> None:
        self.asked.set()
        assert self.answer.wait(timeout=30)
        super().put(key, value)


def test_a_close_does_not_wait_for_a_store_that_does_not_answer() -> None:
    store = SilentStore()
    board = board_of(store)
    board.start()
    assert store.asked.wait(timeout=20)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(board.close).result(timeout=10)
        store.answer.set()
