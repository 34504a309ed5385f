"""Who deals out a stream, whose length nobody knows: every replica reads all batches and runs those that are its own.

The works name batches, numbered from 0; where their samples stand is known once they are read.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import Mode, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.reading import Reading
from lightning_hybrid.runtime.sharedqueue import Alarm, SharedQueue
from lightning_hybrid.runtime.work import Work

_MOST_AHEAD = 4
"""Most batches that are claimed before the loop asks for them."""
_PERIODS_TO_END = 5
"""Publishing periods that a replica which reads on behind another one's end has to find its own."""
_PERIODS_TO_SPEAK = 2
"""Publishing periods in which replicas that ended at different places learn that of each other."""


def needs_ghost(work: Work, num_batches: int, replica: int) -> bool:
    """Whether a work behind the end of the stream is a ghost step, because its round holds batches of others."""
    assert work.cell is not None
    return work.mode != "queue" and work.cell - replica < num_batches


class _StreamDealer:
    """What both modes share: all replicas must find the same end, and none leaves before the last has found it."""

    def __init__(
        self,
        board: Board,
        queue: SharedQueue,
        reading: Reading,
        config: HybridConfig,
        clock: Callable[[], float],
    ) -> None:
        self._board, self._queue, self._reading, self._config = board, queue, reading, config
        self._clock, self._me, self._world = clock, board.view.me, board.view.world
        self._finishing = False
        self._surprise: tuple[bool, float] | None = None
        board.describe = self._describe
        board.errand = self._errand

    def begin(self, work: Work) -> bool:
        """Always: nobody else runs a batch that was claimed."""
        return True

    def done(self, work: Work) -> None:
        """Nothing to note."""

    def finish(self) -> None:
        """Waits until every replica has read the stream to the same end, so that none holds a wrong result.

        Raises:
            PlanError: replicas have read different numbers of batches.
        """
        self._finishing = True
        self._board.exchange_soon()
        with self._board.changed:
            self._board.wait(self._is_over, "the other replicas to finish")

    def _is_over(self) -> bool:
        peers = self._board.view.published
        ended = len(peers) == self._world and all(peer.stream_end is not None for peer in peers.values())
        return self._agrees() and ended

    def _agrees(self) -> bool:
        """Whether all that have found an end found it where this replica did, or may still find it.

        A replica that ends at once takes its word along, and where it serves the store all others' words. So a
        difference is an error only when the others had the time to see it too, or this one the time to find its end.
        """
        mine = self._reading
        ends = {
            replica: peer.stream_end
            for replica, peer in list(self._board.view.published.items())
            if replica != self._me and peer.stream_end is not None
        }
        other = next((replica for replica, end in ends.items() if not mine.may_end_at(end)), None)
        if other is None:
            return True
        if self._has_waited_long():
            more = "" if mine.has_ended else " or more"
            raise PlanError(
                f"ranks disagree about the stream: replica {self._me} read {mine.num_batches}{more} batches,"
                f" replica {other} read {ends[other]}; with iterable='claim' every rank must read the same stream in"
                " the same order, so shuffle it with the same seed and do not shard it"
            )
        return False

    def _has_waited_long(self) -> bool:
        now, ended = self._clock(), self._reading.has_ended
        if self._surprise is None or self._surprise[0] != ended:
            self._surprise = ended, now
        periods = _PERIODS_TO_SPEAK if ended else _PERIODS_TO_END
        return now - self._surprise[1] > periods * self._config.publish_period_s

    # --- on the background thread -------------------------------------------------------------------------------

    def _describe(self, record: ReplicaRecord) -> Published:
        reading = self._reading
        end = reading.num_batches if reading.has_ended else None
        return Published(record=record, reserved=reading.num_batches, recut=self._board.recut, stream_end=end)

    def _errand(self) -> float:
        try:
            self._agrees()
        except PlanError as error:  # the loop's thread may be inside a collective that the others never issue
            self._queue.raise_alarm(Alarm.of_failure(self._me, error))
            raise
        if not self._finishing:
            return self._restock()
        self._board.look()
        return self._config.endgame_poll_s

    def _restock(self) -> float:
        return math.inf


class StreamQueue(_StreamDealer):
    """Queue mode: a replica claims the next batch shortly before its loop asks for one.

    As nobody knows where the stream ends, what is claimed early is what a slow replica still has to do when all
    others are done. So the next batch is claimed ``config.stream_ahead_s`` before the loop will ask for it, by the
    pace of its last batches; of quick ones a few are claimed at once.

    Args:
        board: What the replicas know of each other; not started yet, or without a dealer.
        queue: The epoch's keys on the store.
        reading: How far this replica has read.
        config: Periods and deadlines.
        first_batch: The batches before it are dealt out otherwise.
        released: Whether it is sure that steps issue no collectives.
        clock: Monotonic seconds.
    """

    mode: Mode = "queue"

    def __init__(
        self,
        board: Board,
        queue: SharedQueue,
        reading: Reading,
        config: HybridConfig,
        *,
        first_batch: int,
        released: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_batch, self._released = first_batch, released
        self._claimed: deque[int] = deque()
        self._gaps_s: deque[float] = deque(maxlen=config.speed_window_steps)
        self._taken_s: float | None = None
        self._is_starving = False
        super().__init__(board, queue, reading, config, clock)

    def take(self, *, may_wait: bool) -> Work | None:
        """The next batch that this replica runs, if the stream is that long.

        A claim depends on no other replica, so it is waited for in any case.
        """
        asked_s = self._clock()
        with self._board.changed:
            if self._taken_s is not None:
                self._gaps_s.append(asked_s - self._taken_s)
            self._await_claim()
            batch = self._claimed.popleft()
            self._taken_s = self._clock()
            if self._wants_more():
                self._board.wake()  # now it can tell when
        return Work(batch, batch + 1, batch, mode="queue")

    def _is_over(self) -> bool:
        # an alarm must reach this replica before its next collective, but others may already be inside one
        return super()._is_over() and (not self._released() or self._board.view.all_finished())

    def _await_claim(self) -> None:
        self._board.check()
        if self._claimed:
            return
        self._is_starving = True
        self._board.wake()
        try:
            self._board.wait(lambda: bool(self._claimed), "a claim of the next batch")
        finally:
            self._is_starving = False

    @property
    def _most_ahead(self) -> int:
        """How many batches may be claimed that the loop has not asked for."""
        step_s = self._board.view.record.step_s
        if step_s is None or len(self._gaps_s) < self._config.speed_window_steps:
            return 1  # nobody can take back what is claimed
        slowest_s = max(step_s, *self._gaps_s)
        return min(_MOST_AHEAD, max(1, math.floor(self._config.stream_ahead_s / max(slowest_s, 1e-6))))

    def _wants_more(self) -> bool:
        return 2 * len(self._claimed) < self._most_ahead

    # --- on the background thread -------------------------------------------------------------------------------

    def _restock(self) -> float:
        with self._board.changed:
            due_s, size = self._due_s(), self._most_ahead
        if due_s > 0:
            return due_s
        stop = self._first_batch + self._queue.store.add("stream", size)
        with self._board.changed:
            self._claimed.extend(range(stop - size, stop))
            self._board.changed.notify_all()
        return math.inf

    def _due_s(self) -> float:
        """In how many seconds to claim."""
        if self._is_starving and not self._claimed:
            return 0.0
        if not self._gaps_s or not self._wants_more():
            return math.inf
        assert self._taken_s is not None
        asks_s = self._taken_s + (1 + len(self._claimed)) * median(self._gaps_s)
        return asks_s - self._config.stream_ahead_s - self._clock()


class StreamRounds(_StreamDealer):
    """Lockstep mode: the batches are dealt out in rotation.

    Args:
        board: What the replicas know of each other; not started yet, or without a dealer.
        queue: The epoch's keys on the store.
        reading: How far this replica has read.
        config: Periods and deadlines.
        first_batch: The rounds begin here.
        clock: Monotonic seconds.
    """

    mode: Mode = "lockstep"

    def __init__(
        self,
        board: Board,
        queue: SharedQueue,
        reading: Reading,
        config: HybridConfig,
        *,
        first_batch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._next = first_batch + board.view.me
        super().__init__(board, queue, reading, config, clock)

    def take(self, *, may_wait: bool) -> Work | None:
        """This replica's batch of the next round, if the stream is that long."""
        self._board.check()
        batch = self._next
        self._next += self._world
        return Work(batch, batch + 1, batch, mode="lockstep")
