"""Joins the stages: capture, deal, run, measure, publish. Knows no framework.

An `Engine` lives as long as one run of a trainer; an `EpochRun` as long as one pass over one loader. The one loop that
closes here is `EpochRun._learn`: measured step times feed the speed model, and so the next shares.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import SpeedModel, load_score, prior_speeds
from lightning_hybrid.core.errors import CollectiveInQueueMode
from lightning_hybrid.core.plan import Grid, Plan, PlannedCell
from lightning_hybrid.core.state import BalanceSnapshot, Mode, ReplicaRecord
from lightning_hybrid.probes.base import DeviceProbe
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.claimer import QueueDealer
from lightning_hybrid.runtime.lockstep import LockstepDealer, ghost_work
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.store import InProcessStore, Store
from lightning_hybrid.runtime.timing import CollectiveClock, StepTimer, collective_count
from lightning_hybrid.runtime.work import Dealer, Exhausted, StaticDealer, Work

Stage = Literal["predict", "validate", "test"]


@dataclass(frozen=True, kw_only=True)
class EpochSpec:
    """What one pass over one loader is.

    ``prime_calls`` is how many batches the loader asks for before it gives out the first (0 without workers).
    ``max_size`` is the most samples of a re-cut step, ``None`` where batches must not be cut anew. ``probe_rounds`` is
    how many steps every replica takes before it is decided whether the user's step issues collectives.
    """

    stage: Stage
    loader_idx: int
    epoch: int
    grid: Grid
    prime_calls: int = 0
    max_size: int | None = None
    probe_rounds: int = 1


class Engine:
    """What a replica keeps for the length of a run.

    Args:
        config: All settings.
        replica: Who this is.
        num_replicas: How many replicas share the work.
        store: Opens a client of the store that they coordinate through, below a prefix.
        probe: Reads the device.
        new_timer: Makes the timer that fits the device.
        mode: ``config.mode`` with what the strategy demands taken into account.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        replica: int,
        num_replicas: int,
        store: Callable[[str], Store],
        probe: DeviceProbe,
        new_timer: Callable[[], StepTimer],
        mode: Literal["auto", "queue", "lockstep"],
    ) -> None:
        self.config, self.replica, self.num_replicas = config, replica, num_replicas
        self.probe, self.new_timer, self.collectives = probe, new_timer, CollectiveClock()
        self._store = store
        self._mode: Literal["auto", "queue", "lockstep"] = mode
        self._decided: dict[Stage, Mode] = {}
        self._passes = Counter[tuple[Stage, int]]()
        self.current: EpochRun | None = None
        """The epoch whose batch the loop runs now."""
        self.epochs: list[EpochRun] = []
        """The epochs of the present run or validation, one per loader."""

    def open_store(self, stage: Stage, loader_idx: int) -> tuple[Store, int]:
        """The store of the next pass over a loader, empty, and the number of that pass in this run."""
        self._passes[stage, loader_idx] += 1
        number = self._passes[stage, loader_idx]
        return self._store(f"{stage}/{loader_idx}/{number}/0"), number

    def balanced(self, spec: EpochSpec, store: Store) -> EpochRun:
        """An epoch whose work the replicas share by speed."""
        return self._opened(EpochRun(self, spec, store, self._decided.get(spec.stage, self._mode)))

    def static(self, spec: EpochSpec, works: list[Work]) -> EpochRun:
        """An epoch in which this replica runs exactly ``works``."""
        return self._opened(EpochRun(self, spec, InProcessStore(), "static", works))

    def decide(self, stage: Stage, mode: Mode) -> None:
        """Fixes the mode of all later epochs of ``stage`` in this run."""
        self._decided[stage] = mode

    def close(self) -> None:
        """Ends all background threads and takes every patch back; safe to call twice."""
        self.collectives.remove()
        for epoch in self.epochs:
            epoch.close()
        self.current = None

    def _opened(self, epoch: EpochRun) -> EpochRun:
        for other in self.epochs:
            other.finish()
        if any(other.spec.loader_idx >= epoch.spec.loader_idx for other in self.epochs):
            self.epochs = []
        self.epochs.append(epoch)
        epoch.open()
        return epoch


class EpochRun:
    """One pass over one loader on this replica: gives works, runs steps, measures them."""

    def __init__(
        self,
        engine: Engine,
        spec: EpochSpec,
        store: Store,
        mode: Mode | Literal["auto"],
        works: list[Work] | None = None,
    ) -> None:
        self.spec = spec
        self.done: list[Work] = []
        """Works that were begun, in the order of the steps; ghosts are left out."""
        self.records: list[ReplicaRecord] | None = None
        """All replicas' final records, once they were exchanged."""
        self.plan: Plan | None = None
        """Who ran what, once it was exchanged."""
        self._engine, self._config = engine, engine.config
        self._timer = engine.new_timer()
        self._speed = SpeedModel(self._config.speed_window_steps)
        self._record = ReplicaRecord(replica=engine.replica)
        self._mode: Mode | Literal["auto"] = mode
        self._work: Work | None = None
        self._steps_seen = 0
        self._collectives_at_start: int | None = None
        self._start_s: float | None = None
        self._overhead_s = self._wait_s = 0.0
        self._closed = False
        self._first_works = iter(self._probe_works() if works is None else [])
        self._dealer: Dealer | None = None if works is None else StaticDealer(works)
        world = engine.num_replicas if works is None else 1
        first_cell = min(spec.probe_rounds * world, spec.grid.num_cells)
        replica = engine.replica if works is None else 0
        self._queue = SharedQueue(store, replica, world, first_cell, spec.grid.num_cells)
        self._board = Board(
            self._queue, replica, self._config, read_device=engine.probe.read, watch=self._late_collective
        )
        if mode in ("auto", "lockstep"):
            engine.collectives.install()

    # --- works --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts the background thread."""
        if self._dealer is None and (self._mode != "auto" or self.spec.prime_calls):
            self._dealer = self._new_dealer("queue" if self._mode == "auto" else self._mode)
        self._board.start()

    def take(self, *, may_wait: bool) -> Work | None:
        """The next work to load, ``None`` when there is none right now and ``may_wait`` is false."""
        with self._own_time():
            for work in self._first_works:
                return work
            if self.spec.grid.num_samples == 0:
                raise Exhausted
            if self._dealer is None:
                self._dealer = self._new_dealer(self._settled_mode())
            return self._dealer.take(may_wait=may_wait)

    def begin(self, work: Work) -> bool:
        """Whether a loaded work may be run; it becomes the current one."""
        with self._own_time():
            if work.mode != "static" and not self._may_begin(work):
                return False
            self._engine.current = self
            self._work = work
            if self._start_s is None:
                self._start_s = time.perf_counter()
            if not work.ghost:
                self.done.append(work)
            return True

    def note_wait(self, seconds: float) -> None:
        """The loop waited this long for a batch."""
        if self._start_s is not None:
            self._wait_s += seconds

    def finish(self) -> None:
        """Ends the epoch on this replica: no step runs here any more."""
        if self._closed:
            return
        self._engine.current = None
        self._learn(drain=True)
        self._record = replace(self._live_record(), finished=True)
        self._board.record = self._record
        if self._dealer is None and self.spec.grid.num_samples:
            self._dealer = self._new_dealer(self.mode)
        if self._dealer is not None:
            self._dealer.finish()
        self.close()

    def close(self) -> None:
        """Ends the background thread; safe to call twice and after an error."""
        self._closed = True
        self._board.close()

    # --- steps --------------------------------------------------------------------------------------------------

    def run_step(self, step: Callable[[], Any], may_recut: Callable[[EpochRun, Any, int], bool]) -> Any:
        """Runs the user's step on the current work and measures it.

        Args:
            step: Runs it and returns its output.
            may_recut: Tells from the epoch, the output and the batch size whether batches may be cut anew; asked once.

        Raises:
            CollectiveInQueueMode: the step issued a collective after the first steps in queue mode.
        """
        work = self._work
        assert work is not None, "a step runs outside of the loader's batches"
        before = self._collectives_at_start = collective_count()
        waited_s = self._engine.collectives.waited_s
        self._timer.start()
        try:
            output = step()
        except Exception as error:
            if self._mode == "queue" and collective_count() != before:
                raise CollectiveInQueueMode(self._complaint(work)) from error
            raise
        self._collectives_at_start = None
        self._timer.stop(work, self._engine.collectives.waited_s - waited_s)
        with self._own_time():
            self._after_step(work, output, collective_count() != before, may_recut)
        return output

    def add_overhead(self, seconds: float) -> None:
        """Counts time that this package spent on the loop's thread elsewhere."""
        self._overhead_s += seconds

    def _after_step(
        self, work: Work, output: Any, moved: bool, may_recut: Callable[[EpochRun, Any, int], bool]
    ) -> None:
        self._steps_seen += 1
        if self._mode == "auto" and self._steps_seen == self.spec.probe_rounds:
            self._settle("lockstep" if moved else "queue")
        if moved and self._mode == "queue" and self._steps_seen >= self.spec.probe_rounds:
            self._queue.raise_alarm(self._complaint(work))
            self._board.check()
        if self._board.recut is None and self._mode == "lockstep" and not work.ghost:
            self._board.recut = may_recut(self, output, work.size)
        self._learn()

    @contextmanager
    def _own_time(self) -> Iterator[None]:
        """Counts what happens inside as this package's own time, without the waiting for others."""
        start_s, waited_s = time.perf_counter(), self._board.waited_s
        try:
            yield
        finally:
            self._overhead_s += time.perf_counter() - start_s - (self._board.waited_s - waited_s)

    def _learn(self, *, drain: bool = False) -> None:
        """Feeds the times of finished steps to the speed model, and so to the next shares: the loop closes here."""
        for work, seconds, first_of_shape in self._timer.finished(drain=drain):
            if work.ghost:
                continue
            self._speed.observe(work.size, seconds, first_of_shape=first_of_shape)
            record = self._record
            self._record = replace(
                record,
                samples=record.samples + work.size,
                cells=record.cells + 1,
                steps=record.steps + 1,
                busy_s=record.busy_s + seconds,
            )
            self._board.record = self._live_record()
            if self._record.steps == 1:
                self._board.exchange_soon()
            if self._dealer is not None and self._dealer.mode == work.mode:
                self._dealer.done(work)

    # --- what is known ------------------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """How the work is dealt out."""
        return "queue" if self._mode == "auto" else self._mode

    @property
    def steps_run(self) -> int:
        """Steps that this replica has run, ghosts left out."""
        return self._record.steps

    def batches_done(self) -> int:
        """Batches of the grid that all replicas together have finished, as far as is known here."""
        grid = self.spec.grid
        with self._board.changed:
            others = sum(p.record.samples for p in self._board.peers if p and p.record.replica != self._record.replica)
        samples = min(grid.num_samples, self._record.samples + others)
        return round(grid.num_cells * samples / grid.num_samples) if grid.num_samples else 0

    @property
    def is_balanced(self) -> bool:
        """Whether the replicas share this epoch's work."""
        return self._mode != "static"

    def snapshot(self) -> BalanceSnapshot:
        """The newest records of all replicas: the final ones once they were exchanged."""
        mine = self._live_record()
        records = self.records
        if records is None:
            with self._board.changed:
                peers = [peer.record for peer in self._board.peers if peer is not None]
            records = [record for record in peers if record.replica != mine.replica]
            device = next((peer.device for peer in peers if peer.replica == mine.replica), None)
            records = sorted([*records, replace(mine, device=device)], key=lambda record: record.replica)
        return BalanceSnapshot(
            stage=self.spec.stage,
            mode=self.mode,
            loader_idx=self.spec.loader_idx,
            epoch=self.spec.epoch,
            samples_total=self.spec.grid.num_samples,
            replicas=tuple(records),
        )

    def final_record(self) -> ReplicaRecord:
        """This replica's record, with its device."""
        return next(r for r in self.snapshot().replicas if r.replica == self._record.replica)

    def conclude(self, records: list[ReplicaRecord], works: list[list[tuple[int, int]]]) -> None:
        """Takes in every replica's final record and works, so that all hold the same plan and statistics."""
        self.records = records
        cells = [
            PlannedCell(record.replica, start, stop)
            for record, spans in zip(records, works, strict=True)
            for start, stop in spans
        ]
        self.plan = Plan(tuple(sorted(cells, key=lambda cell: (cell.start, cell.replica))))

    def _live_record(self) -> ReplicaRecord:
        if self._record.finished:
            return self._record
        wall_s = 0.0 if self._start_s is None else time.perf_counter() - self._start_s
        record = self._record
        return replace(
            record,
            wall_s=wall_s,
            wait_s=self._wait_s,
            overhead_s=self._overhead_s,
            speed_per_s=self._speed.speed_per_s,
            step_s=self._speed.step_s,
            cells_stolen=self._dealer.cells_stolen if isinstance(self._dealer, QueueDealer) else 0,
        )

    # --- modes --------------------------------------------------------------------------------------------------

    def _probe_works(self) -> list[Work]:
        """The first steps, the same number on every replica: own cells, or ghosts where there are too few."""
        grid, world = self.spec.grid, self._engine.num_replicas
        if grid.num_samples == 0:
            return []
        cells = [k * world + self._engine.replica for k in range(self.spec.probe_rounds)]
        return [Work(*grid.span(c), c) if c < grid.num_cells else ghost_work(grid, "static") for c in cells]

    def _settled_mode(self) -> Mode:
        assert self._mode != "auto", "the loader asked for more before its first steps had run"
        return self._mode

    def _settle(self, mode: Literal["queue", "lockstep"]) -> None:
        """Ends ``auto``: collectives in the user's step demand lockstep."""
        self._mode = mode
        self._engine.decide(self.spec.stage, mode)
        if mode == "queue":
            self._engine.collectives.remove()
        if self._dealer is not None and self._dealer.mode != mode:
            self._board.errand = None
            self._dealer = self._new_dealer(mode)
        with self._board.changed:
            self._board.wake()

    def _may_begin(self, work: Work) -> bool:
        dealer = self._dealer
        assert dealer is not None
        # batches that were loaded ahead for the queue are void once the first steps showed that lockstep is needed
        return dealer.mode == work.mode and dealer.begin(work)

    def _new_dealer(self, mode: Mode) -> Dealer:
        engine = self._engine
        prior = self._prior()
        if mode == "lockstep":
            return LockstepDealer(
                self._board,
                self._queue,
                self.spec.grid,
                self._config,
                replica=engine.replica,
                num_replicas=engine.num_replicas,
                first_cell=self._queue.first_cell,
                max_size=self.spec.max_size,
                prior=prior,
            )
        return QueueDealer(
            self._board,
            self._queue,
            self.spec.grid,
            self._config,
            replica=engine.replica,
            prior=prior,
            prefetch=self.spec.prime_calls > 0,
            released=lambda: self._mode != "auto",
        )

    def _prior(self) -> list[float]:
        """Relative speeds before any measurement, from the devices' load."""
        weights = self._config.memory_weight, self._config.compute_weight, self._config.network_weight
        scores: list[float | None] = [None] * self._engine.num_replicas
        for peer in self._board.peers:
            if peer is not None and peer.record.device is not None:
                device = peer.record.device
                scores[peer.record.replica] = load_score(
                    memory_frac=device.memory_frac,
                    compute_frac=device.utilization_frac,
                    network_frac=None,
                    weights=weights,
                )
        return prior_speeds(scores)

    def _late_collective(self) -> str | None:
        """For the background thread: why the run must end, when the running step hangs in a collective."""
        work, before = self._work, self._collectives_at_start
        if before is None or work is None or self._steps_seen < self.spec.probe_rounds:
            return None
        if self._mode == "queue" and collective_count() != before:
            return self._complaint(work)
        return None

    def _complaint(self, work: Work) -> str:
        return (
            f"replica {self._engine.replica} issued a collective in the {self.spec.stage} step of samples"
            f" {work.start} to {work.stop - 1} of the loader, but in queue mode replicas take different numbers of"
            ' steps; use HybridBalanceCallback(mode="lockstep")'
        )
