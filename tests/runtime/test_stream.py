from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRuns
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import PeerFailed, PlanError
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import Mode, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.dealing import new_dealer, probe_works
from lightning_hybrid.runtime.reading import EndlessGrid, Reading
from lightning_hybrid.runtime.sharedqueue import Alarm, SharedQueue
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.store import InProcessStore
from lightning_hybrid.runtime.stream import StreamQueue, StreamRounds, needs_ghost
from lightning_hybrid.runtime.work import Work
from tests.runtime.replicas import QUICK, Gate

Step = Callable[[int], None]


def nothing(_batch: int) -> None:
    """A step that takes no time."""


class Reader:
    """A replica that reads a stream of ``num_batches`` batches, and the loop that runs its part."""

    def __init__(self, store: InProcessStore, me: int, world: int, num_batches: int, mode: Mode) -> None:
        self.me, self.num_batches = me, num_batches
        self.reading = Reading()
        self.queue = SharedQueue(store, me, world)
        self.board = Board(self.queue, me, world, QUICK)
        spec = EpochSpec(stage="test", loader_idx=0, epoch=1, grid=EndlessGrid.new(), stream=self.reading)
        self.first = probe_works(spec, me, world)
        policy: Any = None  # a stream is not ordered
        self.dealer = new_dealer(mode, spec, self.board, self.queue, QUICK, policy, released=lambda: True)
        self.ran: list[int] = []
        self.steps = 0

    def run(self, step: Step) -> list[int]:
        self.board.start()
        try:
            for work in self._works():
                self.steps += 1
                if not work.ghost:
                    assert work.cell is not None
                    step(work.cell)
                    self.ran.append(work.cell)
            self.board.view.record = replace(self.board.view.record, finished=True)
            self.dealer.finish()
        finally:
            self.board.close()
        return self.ran

    def _works(self) -> Iterator[Work]:
        first = iter(self.first)
        while True:
            work = next(first, None) or self.dealer.take(may_wait=True)
            assert work is not None
            assert work.cell is not None
            while self.reading.num_batches < min(self.num_batches, work.cell + 1):
                self.reading.add(1)
            if work.cell < self.num_batches:
                yield work
                continue
            self.reading.has_ended = True
            if not needs_ghost(work, self.num_batches, self.me):
                return
            yield replace(work, ghost=True)


def run_together(
    steps: Sequence[Step], lengths: Sequence[int], mode: Mode, store: InProcessStore | None = None
) -> list[Reader]:
    """The replicas after they have read streams of these lengths together."""
    store = store or InProcessStore()
    readers = [Reader(store, me, len(steps), n, mode) for me, n in enumerate(lengths)]
    with ThreadPoolExecutor(len(steps)) as pool:
        futures = [pool.submit(reader.run, step) for reader, step in zip(readers, steps, strict=True)]
        for future in futures:
            future.result(timeout=30)
    return readers


# --- who runs what ---------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 40), st.sampled_from(["queue", "lockstep"]))
def test_every_batch_is_run_once_and_every_replica_steps_alike(world: int, num_batches: int, mode: Mode) -> None:
    readers = run_together([nothing] * world, [num_batches] * world, mode)

    assert sorted(batch for reader in readers for batch in reader.ran) == list(range(num_batches))
    assert all(reader.ran == sorted(reader.ran) for reader in readers)
    assert all(reader.reading.num_batches == num_batches for reader in readers)
    if mode == "lockstep":
        assert {reader.steps for reader in readers} == {-(-num_batches // world)}
    elif num_batches:
        assert all(reader.steps for reader in readers)


def test_a_replica_that_is_held_up_has_at_most_one_batch_more() -> None:
    gate = Gate()

    def held(_: int) -> None:
        gate()

    store = InProcessStore()
    quick, slow = (Reader(store, me, 2, 200, "queue") for me in range(2))
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(slow.run, held)
        gate.await_arrival()
        early = pool.submit(quick.run, lambda batch: gate.open() if batch > 190 else None)
        early.result(timeout=30)
        late.result(timeout=30)

    assert len(quick.ran) > 180
    assert sorted(quick.ran + slow.ran) == list(range(200))


def test_claims_are_made_on_the_background_thread_alone() -> None:
    threads: set[str] = set()

    class Watched(InProcessStore):
        def add(self, key: str, amount: int) -> int:
            threads.add(threading.current_thread().name)
            return super().add(key, amount)

    run_together([nothing] * 2, [50, 50], "queue", Watched())

    assert threads == {"lightning_hybrid-board"}


@pytest.mark.parametrize(
    ("mode", "cell", "num_batches", "ghost"),
    [
        ("static", 1, 0, False),  # nobody has a batch
        ("static", 1, 1, True),
        ("lockstep", 7, 7, True),  # the round of batch 6, which replica 0 runs
        ("lockstep", 7, 6, False),
        ("queue", 7, 7, False),
    ],
)
def test_ghosts_fill_the_last_round(mode: Mode, cell: int, num_batches: int, ghost: bool) -> None:
    assert needs_ghost(Work(cell, cell + 1, cell, mode=mode), num_batches, replica=1) is ghost


def test_rounds_deal_out_in_turn_behind_the_first_steps() -> None:
    board = Board(SharedQueue(InProcessStore(), 1, 3), 1, 3, QUICK)
    dealer = StreamRounds(board, SharedQueue(InProcessStore(), 1, 3), Reading(), QUICK, first_batch=6)

    assert [dealer.take(may_wait=False) for _ in range(3)] == [Work(c, c + 1, c, mode="lockstep") for c in (7, 10, 13)]


# --- when it claims --------------------------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Claims:
    """The dealer of one replica, whose background thread and clock the test plays."""

    def __init__(self, **settings: Any) -> None:
        self.clock, self.store = Clock(), InProcessStore()
        config = HybridConfig(**settings)
        queue = SharedQueue(self.store, 0, 1)
        self.board = Board(queue, 0, 1, config, clock=self.clock)
        self.dealer = StreamQueue(self.board, queue, Reading(), config, first_batch=10, clock=self.clock)

    @property
    def claimed(self) -> int:
        return int(self.store.get_many(["stream"])[0] or b"0")

    def errand(self) -> float:
        assert self.board.errand is not None
        return self.board.errand()

    def take(self) -> int:
        """Takes a batch; the background thread claims one if the loop must wait."""
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self.dealer.take, may_wait=True)
            while not taken.done():
                self.errand()
            work = taken.result()
        assert work is not None
        assert work.cell is not None
        return work.cell

    def take_at_pace(self, pace_s: float, times: int) -> None:
        for _ in range(times):
            self.take()
            self.clock.now_s += pace_s


def test_first_claim_waits_for_the_loop_to_ask() -> None:
    claims = Claims()

    assert claims.errand() == float("inf")
    assert claims.claimed == 0
    assert claims.take() == 10
    assert claims.errand() == float("inf")  # the pace is not known
    assert claims.claimed == 1


def test_next_batch_is_claimed_shortly_before_the_loop_asks() -> None:
    claims = Claims(stream_ahead_s=0.02)
    claims.take_at_pace(1.0, 3)
    claims.take()
    claimed = claims.claimed

    assert claims.errand() == pytest.approx(0.98)
    claims.clock.now_s += 0.5
    assert claims.errand() == pytest.approx(0.48)
    assert claims.claimed == claimed
    claims.clock.now_s += 0.485
    claims.errand()
    assert claims.claimed == claimed + 1


def test_long_step_hoards_no_claims() -> None:
    claims = Claims()
    claims.take_at_pace(0.01, 8)
    claims.take()
    claimed = claims.claimed
    claims.clock.now_s += 60

    for _ in range(5):
        claims.errand()
    assert claims.claimed <= claimed + 1


def test_quick_batches_are_claimed_a_few_at_once() -> None:
    claims = Claims(stream_ahead_s=0.02)
    claims.board.view.record = ReplicaRecord(replica=0, step_s=0.001)
    claims.take_at_pace(0.001, 12)
    claimed = claims.claimed

    claims.take_at_pace(0.001, 8)
    assert 8 <= claims.claimed - claimed <= 8 + 4


def test_one_slow_batch_in_the_window_ends_claiming_several() -> None:
    claims = Claims(stream_ahead_s=0.02)
    claims.board.view.record = ReplicaRecord(replica=0, step_s=0.001)
    claims.take_at_pace(0.001, 12)
    claims.take_at_pace(1.0, 1)
    claims.take_at_pace(0.001, 4)
    claimed = claims.claimed

    claims.take()
    claims.errand()
    assert claims.claimed <= claimed + 2


# --- ends ------------------------------------------------------------------------------------------------------------


def peer(batches: int, *, ended: bool = True) -> Published:
    return Published(record=ReplicaRecord(replica=1), reserved=batches, stream_end=batches if ended else None)


def dealer_of(num_read: int, *, ended: bool) -> tuple[StreamRounds, Board, SharedQueue, Clock]:
    clock, queue, reading = Clock(), SharedQueue(InProcessStore(), 0, 2), Reading()
    for _ in range(num_read):
        reading.add(1)
    reading.has_ended = ended
    board = Board(queue, 0, 2, HybridConfig(publish_period_s=0.2), clock=clock)
    dealer = StreamRounds(board, queue, reading, HybridConfig(publish_period_s=0.2), first_batch=0, clock=clock)
    return dealer, board, queue, clock


def test_rank_that_reads_on_behind_anothers_end_has_a_second_to_find_its_own() -> None:
    _, board, queue, clock = dealer_of(4, ended=False)
    assert board.errand is not None
    board.view.take_in({1: peer(3)})

    board.errand()
    clock.now_s = 0.9
    board.errand()
    clock.now_s = 1.1
    with pytest.raises(PlanError, match="replica 0 read 4 or more batches, replica 1 read 3"):
        board.errand()
    assert queue.alarm is not None
    assert "PlanError: ranks disagree about the stream" in queue.alarm.reason


@pytest.mark.parametrize("other", [3, 5])
def test_different_ends_are_an_error_once_both_know(other: int) -> None:
    _, board, _, clock = dealer_of(4, ended=True)
    assert board.errand is not None
    board.view.take_in({1: peer(other)})

    board.errand()
    clock.now_s = 0.5
    with pytest.raises(PlanError, match=f"replica 0 read 4 batches, replica 1 read {other}"):
        board.errand()


@pytest.mark.parametrize(("other", "ended"), [(4, True), (9, True), (2, False)])
def test_replica_that_is_ahead_or_behind_is_no_error(other: int, ended: bool) -> None:
    _, board, queue, clock = dealer_of(4, ended=False)
    assert board.errand is not None
    board.view.take_in({1: peer(other, ended=ended)})

    for clock.now_s in (0.0, 5.0, 10.0):
        board.errand()
    assert queue.alarm is None


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
@pytest.mark.parametrize("lengths", [(6, 9), (9, 6), (0, 1)])
def test_replicas_that_read_different_lengths_all_end(lengths: tuple[int, int], mode: Mode) -> None:
    store = InProcessStore()
    readers = [Reader(store, me, 2, n, mode) for me, n in enumerate(lengths)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(reader.run, nothing) for reader in readers]
        errors = [future.exception(timeout=30) for future in futures]

    for error in errors:
        assert isinstance(error, PlanError | PeerFailed)
        assert f"replica 0 read {lengths[0]}" in str(error)
        assert f"replica 1 read {lengths[1]}" in str(error)


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_alarm_of_another_replica_ends_the_loop(mode: Mode) -> None:
    store = InProcessStore()
    reader = Reader(store, 0, 2, 10**6, mode)
    alarm = Alarm.of_failure(1, OSError("no such shard"))

    def raises_alarm(batch: int) -> None:
        if batch > 20:
            SharedQueue(store, 1, 2).raise_alarm(alarm)

    with pytest.raises(PeerFailed, match="replica 1 failed with OSError: no such shard"):
        reader.run(raises_alarm)


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_no_replica_leaves_before_the_last_has_ended(mode: Mode) -> None:
    store, gate = InProcessStore(), Gate()
    quick, slow = (Reader(store, me, 2, 2, mode) for me in range(2))
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(slow.run, lambda _: gate())
        gate.await_arrival()
        early = pool.submit(quick.run, nothing)
        with pytest.raises(StillRuns):
            early.result(timeout=0.3)
        gate.open()
        assert early.result(timeout=30) == [0]
        assert late.result(timeout=30) == [1]
