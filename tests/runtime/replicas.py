"""Replicas that share the work of one epoch: threads of this process or forked processes, with a loop like a loader's.

A step is a wait of some milliseconds in place of the device's work; every wait for another replica has a deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.speed import SpeedModel
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.claimer import QueueDealer
from lightning_hybrid.runtime.loader import WorkFeed, WorkIterator
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.store import InProcessStore, Store
from lightning_hybrid.runtime.work import Work

QUICK = HybridConfig(publish_period_s=0.02, endgame_poll_s=0.002, claim_deadline_s=20)
Step = Callable[[Work], None]


class LoaderStandIn:
    """Asks for works as a `DataLoader` does: with workers some ahead, and one more while it gives out a batch."""

    def __init__(self, feed: WorkFeed, prime_calls: int) -> None:
        self._feed, self._workers = feed, prime_calls > 0
        self._loaded: deque[Work] = deque()
        for _ in range(prime_calls):
            self._ask()

    def __iter__(self) -> Iterator[Work]:
        return self

    def __next__(self) -> Work:
        if not self._workers:
            return self._feed.next_work()
        if not self._loaded:
            raise StopIteration
        work = self._loaded.popleft()
        self._ask()
        return work

    def _ask(self) -> None:
        try:
            self._loaded.append(self._feed.next_work())
        except StopIteration:
            return


class AtMost:
    """Lets so many cells be run as one step."""

    def __init__(self, most: int) -> None:
        self.step_cost = float(most)

    def has_room(self, start: int, stop: int) -> bool:
        return stop - start <= self.step_cost


class Replica:
    """One replica of an epoch whose grid has one sample per cell.

    Args:
        store: Shared by the replicas.
        me: Which replica this is.
        world: How many there are.
        num_cells: Cells of the grid.
        config: Periods and deadlines.
        prefetch: Batches that the loader loads ahead of the first; 0 without workers.
        step_s: Speed that this replica is known to have before its first step.
        first_cell: Where the queue begins.
        costs: Of all cells; equal where they are left out.
        released: Whether cells may be reserved yet.
        most: Cells that the loop runs as one step at most.
    """

    def __init__(
        self,
        store: Store,
        me: int,
        world: int,
        num_cells: int,
        *,
        config: HybridConfig = QUICK,
        prefetch: int = 0,
        step_s: float | None = None,
        first_cell: int = 0,
        costs: Costs | None = None,
        released: Callable[[], bool] = lambda: True,
        most: int = 1,
    ) -> None:
        self.me, self.prefetch = me, prefetch
        self.queue = SharedQueue(store, me, world)
        self.board = Board(self.queue, me, world, config)
        speed = None if step_s is None else 1 / step_s
        self.board.view.record = ReplicaRecord(replica=me, step_s=step_s, speed_per_s=speed)
        costs = Costs.equal(num_cells) if costs is None else costs
        self._costs = costs.compute
        self.dealer = QueueDealer(
            self.board,
            self.queue,
            Grid.sequential(num_cells, 1),
            version_of(range(min(first_cell, num_cells), num_cells), costs, world),
            costs,
            config,
            prefetch=prefetch > 0,
            released=released,
            sizer=None if most == 1 else AtMost(most),
        )
        self.ran: list[int] = []
        """Cells that were run, in order."""
        self._speed = SpeedModel(5)

    def run(self, step: Step) -> list[int]:
        """Runs cells until there are none; returns them."""
        self.board.start()
        try:
            feed = WorkFeed(self, self.prefetch)
            for work in WorkIterator(lambda: LoaderStandIn(feed, self.prefetch), feed, self, self._no_ghosts):
                start_s = time.perf_counter()
                step(work)
                self._learn(work, time.perf_counter() - start_s)
                self.ran.extend(range(work.start, work.stop))
                self.dealer.done(work)
        finally:
            self.board.close()
        return self.ran

    def take(self, *, may_wait: bool) -> Work | None:
        return self.dealer.take(may_wait=may_wait)

    def begin(self, work: Work) -> bool:
        return self.dealer.begin(work)

    def unpack(self, work: Work, loaded: Any) -> Any:
        return loaded

    def note_wait(self, seconds: float) -> None:
        assert seconds >= 0

    def finish(self) -> None:
        self.board.view.record = replace(self.board.view.record, finished=True)
        self.dealer.finish()

    def _learn(self, work: Work, seconds: float) -> None:
        cost = float(self._costs[work.start : work.stop].sum())
        self._speed.observe(cost, seconds)
        record = self.board.view.record
        self.board.view.record = replace(
            record,
            steps=record.steps + 1,
            samples=record.samples + work.size,
            cost=(record.cost or 0.0) + cost,
            step_s=self._speed.step_s,
            speed_per_s=self._speed.speed_per_s,
        )
        if record.steps == 0:
            self.board.exchange_soon()

    @staticmethod
    def _no_ghosts(_batch: object) -> None:
        raise AssertionError("a queue deals out no ghosts")


def version_of(cells: Sequence[int], costs: Costs, world: int) -> QueueVersion:
    """A first plan version: the cells in this order, everybody from the head, without limits."""
    order, nothing = np.asarray(cells, dtype=np.int64), (None,) * world
    return QueueVersion(
        number=0,
        policy="load_balanced",
        cells=order,
        costs=costs.take(order),
        ends=("head",) * world,
        max_claim_costs=nothing,
        memory_bounds=nothing,
    )


def step_of(seconds: float) -> Step:
    """A step that lasts ``seconds``."""
    return lambda _work: time.sleep(seconds)


def run_in_threads(
    steps: Sequence[Step],
    num_cells: int,
    *,
    config: HybridConfig = QUICK,
    prefetch: int = 0,
    first_cell: int = 0,
    deadline_s: float = 40.0,
    most: int = 1,
) -> list[Replica]:
    """The replicas, one per step, after they ran all cells together."""
    store = InProcessStore()
    replicas = [
        Replica(store, me, len(steps), num_cells, config=config, prefetch=prefetch, first_cell=first_cell, most=most)
        for me in range(len(steps))
    ]
    pool = ThreadPoolExecutor(len(steps))
    futures = [pool.submit(replica.run, step) for replica, step in zip(replicas, steps, strict=True)]
    pool.shutdown(wait=False)
    for future in futures:
        future.result(timeout=deadline_s)
    return replicas


def all_ran(replicas: Sequence[Replica]) -> list[int]:
    """All cells that the replicas ran, sorted."""
    return sorted(cell for replica in replicas for cell in replica.ran)


class Gate:
    """Holds a step until a test opens it, with a deadline."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, _work: object = None) -> None:
        self._reached.set()
        assert self._opened.wait(timeout=30), "nobody opened the gate"

    def open(self) -> None:
        """Lets the step go on."""
        self._opened.set()

    def await_arrival(self) -> None:
        """Returns when a step has come to the gate."""
        assert self._reached.wait(timeout=30), "nobody came to the gate"
