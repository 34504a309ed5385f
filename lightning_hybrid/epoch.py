"""One pass over one loader on one replica. Knows no framework.

The one loop of the package closes here, in `EpochRun._learn`: measured step times feed the speed model, and so the next
shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning_hybrid.core.conductor import Conductor
from lightning_hybrid.core.config import ModeOption
from lightning_hybrid.core.errors import CollectiveInQueueMode, CoordinationTimeout, PeerFailed
from lightning_hybrid.core.failures import Where
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.recording import KeptSteps
from lightning_hybrid.core.state import BalanceSnapshot, Mode, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.claimer import QueueDealer
from lightning_hybrid.runtime.collectives import CollectiveCounter, CollectiveWatch
from lightning_hybrid.runtime.dealing import new_dealer, prior_from, probe_works
from lightning_hybrid.runtime.figures import EpochFigures
from lightning_hybrid.runtime.guarded import loaded_of
from lightning_hybrid.runtime.loader import NOTHING
from lightning_hybrid.runtime.losses import Losses
from lightning_hybrid.runtime.recorder import StepRecorder
from lightning_hybrid.runtime.recording import Recording, recording_of
from lightning_hybrid.runtime.sharedqueue import Alarm, SharedQueue
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.steering import LEADER, learnt_by_leader, parameters_of
from lightning_hybrid.runtime.step_facts import StepFacts
from lightning_hybrid.runtime.store import Store
from lightning_hybrid.runtime.work import Dealer, Exhausted, StaticDealer, Work

if TYPE_CHECKING:
    from lightning_hybrid.engine import Engine

MayRecut = Callable[["EpochRun", Any, int], bool]
"""Tells from the epoch, a step's output and its batch size whether batches may be cut anew."""


class EpochRun:
    """One pass over one loader on this replica: gives works, runs steps, measures them."""

    def __init__(
        self, engine: Engine, spec: EpochSpec, store: Store, mode: Mode | ModeOption, works: list[Work] | None = None
    ) -> None:
        self.spec = spec
        self.done: list[Work] = []
        """Works that were begun, in the order of the steps; ghosts are left out."""
        self.losses = Losses(engine.replica, spec.loader_idx, engine.config)
        """Samples that could not be run, and works of which none could be loaded."""
        self.steps_have_collectives = False
        """Whether a step of this epoch has issued one."""
        self._engine, self._mode = engine, mode
        self._handed: deque[Work] = deque()  # batches whose step has not run: one, or more where the loop reads ahead
        self._running: Work | None = None
        self._facts = StepFacts(spec, engine.sizes, self.losses)
        self._replica = engine.replica
        self._steps_begun = 0
        self._collectives = CollectiveWatch(engine.replica, spec.stage, CollectiveCounter())
        self._closed = False
        self._first_works = iter(probe_works(spec, engine.replica, engine.num_replicas) if works is None else [])
        self.sizer = engine.sizer_of(spec)
        """Decides how many cells are run as one step; ``None``: each alone."""
        self._dealer: Dealer | None = None if works is None else StaticDealer(works, self.sizer)
        replica, world = (engine.replica, engine.num_replicas) if works is None else (0, 1)
        self._queue = SharedQueue(store, replica, world)
        self._board = Board(
            self._queue, replica, world, engine.config, read_device=engine.read_device, watch=self._late_collective
        )
        timer = engine.new_timer()
        self.recorder = StepRecorder(
            engine.replica,
            timer,
            engine.config.speed_window_steps,
            lambda: self._board.waited_s + timer.blocked_s,
            cost_of=None if spec.costs is None else spec.cost_of,
            usual_cost=spec.usual_cost,
            recorded_steps=engine.config.recorded_steps,
        )
        if self.sizer is not None:
            self.recorder.observer = self.sizer.observe
        self._learnt: str | None = None
        self._conductor: Conductor | None = None
        self._board.source = self._record
        self.figures = EpochFigures(spec, engine.replica, self._board)

    # --- works --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts the background thread; every earlier epoch has ended."""
        if self._mode in ("auto", "lockstep"):
            self._engine.collectives.install()
        if self._dealer is None and self.spec.grid.num_samples:
            # in ``auto`` a queue until it is decided: cells are claimed during the first step, but none is reserved
            self._dealer = self._new_dealer(self.mode)
        self._board.start()

    def take(self, *, may_wait: bool) -> Work | None:
        """The next work to load, ``None`` when there is none right now and ``may_wait`` is false."""
        with self.recorder.own_time:
            for work in self._first_works:
                return work
            if self._dealer is None:
                raise Exhausted
            if self._mode == "auto" and self.spec.prime_calls == 0:
                # the loader reads further ahead than it said: to wait for the first step would be to wait for ever
                self._settle("queue")
            if self._mode == "lockstep" and self.recorder.steps == 0:
                self._learn(drain=True)  # the others wait for this replica's first speed
                may_wait = may_wait and not self._handed
            return self._dealer.take(may_wait=may_wait)

    def begin(self, work: Work) -> bool:
        """Whether a loaded work may be run; then its step is the next one that is due."""
        with self.recorder.own_time:
            if work.mode != "static" and not self._may_begin(work):
                return False
            if work.ghost:  # it is run at once
                self._handed.appendleft(work)
            else:
                self._handed.append(work)
                self.done.append(work)
            self.recorder.begin()
            return True

    def note_wait(self, seconds: float) -> None:
        """The loop waited this long for a batch."""
        self.recorder.note_wait(seconds)

    def unpack(self, work: Work, loaded: Any) -> Any:
        """The batch of a work that was begun, without the samples that could not be loaded; `NOTHING`: none could.

        Raises:
            TooManyErrors: see `leave_out`.
        """
        loaded = loaded_of(loaded)
        for failure in () if work.ghost else loaded.failures:
            self.leave_out(work.start + failure.place, failure.where, failure.error)
        if not loaded.is_empty:
            return loaded.batch
        self._give_up(work)
        return NOTHING

    def _give_up(self, work: Work) -> None:
        self._handed.remove(work)
        if not work.ghost:
            self.done.remove(work)
            self.losses.works.append(work)
        if self._dealer is not None:
            self._dealer.done(work)

    def note_sizes(self, sizes: Sequence[int], *, is_short: bool) -> None:
        """Notes how many samples the parts had in which the batch whose step ran was run; see `StepFacts.note`."""
        assert self._running is not None
        self._facts.note(self._running, sizes, is_short=is_short)

    def leave_out(self, position: int, where: Where, error: str) -> None:
        """Notes a sample that could not be run.

        Raises:
            TooManyErrors: there are more than ``max_errors``, or none could be run so far.
        """
        with self._board.changed:
            peers = self._board.view.published.items()
            elsewhere = sum(peer.record.failed_samples for replica, peer in peers if replica != self._replica)
        self.losses.add(position, self.spec.index_of(position), where, error, elsewhere=elsewhere)

    def finish(self) -> None:
        """Ends the epoch on this replica: no step runs here any more; waits until none runs elsewhere.

        Does nothing while the loop still holds batches that it has read ahead.
        """
        if self._closed or self._handed:
            return
        self._learn(drain=True)
        self._record(finished=True)
        if self._dealer is not None:
            self._dealer.finish()
        self.close()
        if self._conductor is not None:
            self._conductor.take_stock(self._board.view.records())
        self._engine.when_finished(self)

    def close(self) -> None:
        """Ends the background thread; safe to call twice and after an error."""
        self._closed = True
        self._engine.collectives.remove()
        self._board.close()

    def fail(self, error: BaseException) -> None:
        """Tells the other replicas, as far as they can still be reached, that this one cannot go on."""
        if self._closed or isinstance(error, PeerFailed | CoordinationTimeout | CollectiveInQueueMode):
            return
        with suppress(CoordinationTimeout):
            self._queue.raise_alarm(Alarm.of_failure(self._replica, error))
            if self._replica == LEADER:  # the store ends with this process, and the others would not learn why
                self._queue.await_seen(self._engine.config.alarm_grace_s)

    # --- steps --------------------------------------------------------------------------------------------------

    def run_step(self, step: Callable[[], Any], may_recut: MayRecut, elements: int | None = None) -> Any:
        """Runs the user's step on the current work and measures it.

        Args:
            step: Runs it and returns its output.
            may_recut: Whether batches may be cut anew; asked once.
            elements: How many elements the tensors of the batch have.

        Raises:
            CollectiveInQueueMode: the step issued a collective after the first steps in queue mode.
        """
        work = self._running = self._handed.popleft()
        self._engine.current = self
        with self.recorder.own_time:
            self._collectives.begin(work)
            waited_s = self._engine.collectives.waited_s
            self.recorder.start()
        try:
            output = step()
        except Exception as error:
            if self._mode == "queue" and self._collectives.has_moved():
                with suppress(CoordinationTimeout):  # the others may have ended already
                    self._queue.raise_alarm(Alarm(self._collectives.complaint(), is_collective=True))
                raise CollectiveInQueueMode(self._collectives.complaint()) from error
            raise
        finally:
            self._running = None
        moved = self._collectives.end()
        self.steps_have_collectives |= moved
        self.recorder.stop(work, self._engine.collectives.waited_s - waited_s, elements=elements)
        with self.recorder.own_time:
            self._steps_begun += 1
            self._look_for_collectives(moved=moved)
            if self._board.recut is None and self._mode == "lockstep" and not work.ghost:
                self._board.recut = may_recut(self, output, work.size)
            self._learn()
        return output

    def _learn(self, *, drain: bool = False) -> None:
        """Feeds the times of finished steps to the speed model, and so to the next shares: the loop closes here."""
        learnt = learnt_by_leader(self._board)
        if learnt is not None and learnt != self._learnt:
            self._learnt = learnt
            self.recorder.adopt(parameters_of(learnt))
        for work in self.recorder.collect(drain=drain):
            if self.recorder.steps == 1:
                self._board.exchange_soon()
            if self._dealer is not None:
                self._dealer.done(work)

    def measured(self, grid: Grid) -> None:
        """The stream of this epoch was read to its end, and ``grid`` is what it held."""
        self.spec = self.figures.spec = replace(self.spec, grid=grid)

    def take_stock(self) -> None:
        """Counts all replicas' samples for the policies, once their final records were exchanged."""
        if self._conductor is not None and self.figures.records is not None:
            self._conductor.take_stock(self.figures.records)

    # --- what is known ------------------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """How the work is dealt out; while that is not decided, as a queue."""
        return "queue" if self._mode == "auto" else self._mode

    @property
    def counts_elements(self) -> bool:
        """Whether the sizes of batches may teach what steps cost."""
        return (self.is_balanced and self.spec.costs is None) or self.sizer is not None

    @property
    def has_batch(self) -> bool:
        """Whether the loop holds a batch whose step has not run."""
        return bool(self._handed)

    @property
    def next_size(self) -> int:
        """Samples of the batch whose step is due."""
        return len(self.positions_due)

    @property
    def positions_due(self) -> Sequence[int]:
        """Positions in the grid of the samples of the batch whose step is due, or runs."""
        return self.losses.kept(self._handed[0] if self._running is None else self._running)

    def name_of(self, position: int) -> str:
        """What to call a sample in a message."""
        index = self.spec.index_of(position)
        which = "a sample" if index is None else f"sample {index!r}"
        return f"{which} of loader {self.spec.loader_idx} of {self.spec.stage}, on replica {self._replica}"

    def has_issued_collective(self) -> bool:
        """Whether the step that runs has issued a collective, so that no rank can run it again alone."""
        return self._engine.num_replicas > 1 and self._collectives.has_moved()

    @property
    def is_balanced(self) -> bool:
        """Whether the replicas share this epoch's work."""
        return self._mode != "static"

    def snapshot(self) -> BalanceSnapshot:
        """The newest records of all replicas: the final ones once they were exchanged."""
        return self.figures.snapshot(self.mode)

    def recording_of(self, kept: Mapping[int, KeptSteps]) -> Recording:
        """The recording of this pass, of the steps that every replica has kept."""
        return recording_of(self.spec, self.mode, self._engine.config, kept)

    def _record(self, *, finished: bool = False) -> ReplicaRecord:
        in_lockstep = self._mode == "lockstep"
        record = self.recorder.record(cells_stolen=self._cells_stolen, times_collectives=in_lockstep, finished=finished)
        return self._facts.told_in(record)

    @property
    def _cells_stolen(self) -> int:
        return self._dealer.cells_stolen if isinstance(self._dealer, QueueDealer) else 0

    # --- modes --------------------------------------------------------------------------------------------------

    def _look_for_collectives(self, *, moved: bool) -> None:
        """Ends ``auto`` after the first steps; later, a collective in queue mode ends the run."""
        if self._mode == "auto" and self._steps_begun == self.spec.probe_rounds:
            self._settle("lockstep" if moved else "queue")
        if moved and self._mode == "queue" and self._steps_begun >= self.spec.probe_rounds:
            self._queue.raise_alarm(Alarm(self._collectives.complaint(), is_collective=True))
            self._board.check()

    def _settle(self, mode: Literal["queue", "lockstep"]) -> None:
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
        engine, steering = self._engine, self._engine.steering
        dealer = new_dealer(
            mode,
            self.spec,
            self._board,
            self._queue,
            engine.config,
            steering,
            released=lambda: self._mode != "auto",
            sizer=self.sizer,
        )
        if engine.replica == LEADER and engine.num_replicas > 1:
            self._conductor = steering.attend(self._board, dealer, self.spec, self._conductor)
        if isinstance(dealer, QueueDealer):
            self._board.view.newer_prior = self._prior
            dealer.before_wait = lambda: self._learn(drain=True)  # what is done must be known before a wait for all
        return dealer

    def _prior(self) -> list[float]:
        with self._board.changed:
            records = [peer.record for peer in self._board.view.published.values()]
        return prior_from(records, self._engine.num_replicas, self._engine.config)

    def _late_collective(self) -> str | None:
        """For the background thread: why the run must end, when the running step hangs in a collective."""
        if self._mode != "queue" or self._steps_begun < self.spec.probe_rounds or not self._collectives.has_moved():
            return None
        return self._collectives.complaint()
