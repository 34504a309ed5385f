"""What one replica measures about itself in an epoch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from lightning_hybrid.core.learned import CostParameters
from lightning_hybrid.core.recording import KeptSteps, RecordedStep
from lightning_hybrid.core.speed import SpeedModel
from lightning_hybrid.core.state import ReplicaRecord, StepShape
from lightning_hybrid.runtime.timing import StepTimer
from lightning_hybrid.runtime.work import Work

CostOf = Callable[[Work], float | None]
"""Tells what a work costs, ``None`` where that is not known."""


class StepRecorder:
    """Adds up a replica's steps and times, and estimates its speed.

    A step costs what ``cost_of`` tells, else what the newest adopted parameters make of its size, else its samples.

    Args:
        replica: Who this is.
        timer: Times the steps.
        window_steps: Steps that the speed is at least estimated from.
        blocked_s: Tells how long the loop's thread has been blocked by other replicas so far; that is no overhead.
        cost_of: Tells the costs that the user gave; ``None`` where there are none.
        usual_cost: Cost of a usual step where the user gave costs, the same on every replica.
        recorded_steps: How many of the newest steps are kept one by one.
    """

    NEWEST_STEPS = 8
    """Steps that a record carries, where costs are learnt."""

    def __init__(
        self,
        replica: int,
        timer: StepTimer,
        window_steps: int,
        blocked_s: Callable[[], float] = lambda: 0.0,
        *,
        cost_of: CostOf | None = None,
        usual_cost: float | None = None,
        recorded_steps: int = 0,
    ) -> None:
        self.timer = timer
        self.steps = 0
        self._replica, self.blocked_s = replica, blocked_s
        self._tally = _Tally(window_steps, cost_of, usual_cost)
        self._elements: deque[int | None] = deque()  # of the steps whose time is not known yet
        self._log = _StepLog(recorded_steps)
        self._start_s: float | None = None
        self._busy_s = self._wait_s = self._overhead_s = self._collective_s = 0.0
        self._final: ReplicaRecord | None = None
        self.observer: Callable[[Work, float, int | None], None] | None = None
        """Told of every step that has finished: its work, its seconds, and how many elements its batch had."""
        self.own_time = _OwnTime(self)
        """Counts what happens inside ``with own_time`` as overhead, without the waiting for others."""

    def start(self) -> None:
        """Called right before each step: starts the timer."""
        self._log.start(max(0.0, self.blocked_s() - self.timer.blocked_s))
        self.timer.start()

    def stop(self, work: Work, waited_s: float, *, elements: int | None = None) -> None:
        """Called right after each step: stops the timer, and keeps how many elements the batch had."""
        self.timer.stop(work, waited_s)
        self._collective_s += 0.0 if work.ghost else waited_s
        self._elements.append(elements)
        self._log.stop(waited_s)

    def adopt(self, parameters: CostParameters) -> None:
        """Counts in learnt costs from now on, the steps so far too; nothing where the user gave costs.

        On the loop's thread only.
        """
        self._tally.adopt(parameters)

    def begin(self) -> None:
        """Starts the wall clock, the first time."""
        if self._start_s is None:
            self._start_s = time.perf_counter()

    def note_wait(self, seconds: float) -> None:
        """The loop waited this long for a batch; what it waits before the first one does not count."""
        if self._start_s is not None:
            self._wait_s += seconds

    def add_overhead(self, seconds: float) -> None:
        """This package used the loop's thread this long."""
        self._overhead_s += seconds

    def collect(self, *, drain: bool = False) -> Iterator[Work]:
        """Takes in the steps whose time has become known, and yields their works."""
        for work, seconds, first_of_shape in self.timer.finished(drain=drain):
            elements = self._elements.popleft() if self._elements else None
            self._log.finish(work, seconds, elements)
            if work.ghost:
                continue
            self.steps += 1
            self._busy_s += seconds
            self._tally.add(work, StepShape(self.steps, work.size, elements, seconds), first_of_shape=first_of_shape)
            if self.observer is not None:
                self.observer(work, seconds, elements)
            yield work

    def kept(self) -> KeptSteps:
        """The newest steps one by one, all that have finished."""
        return self._log.kept(self._replica, self._tally.known_cost)

    def record(
        self,
        *,
        cells_stolen: int = 0,
        times_collectives: bool = False,
        finished: bool = False,
    ) -> ReplicaRecord:
        """All of it as of now, from any thread; the wall clock stops with the first record that is ``finished``.

        With ``times_collectives`` all steps so far were told how long they waited in collectives.
        """
        if self._final is not None:
            return self._final
        tally, busy_s = self._tally, self._busy_s
        estimate = tally.speed.estimate()
        record = ReplicaRecord(
            replica=self._replica,
            samples=tally.samples,
            cost=tally.cost,
            steps=self.steps,
            busy_s=busy_s,
            wait_s=self._wait_s,
            collective_s=self._collective_s if times_collectives and self.timer.is_synchronous else None,
            wall_s=0.0 if self._start_s is None else time.perf_counter() - self._start_s,
            overhead_s=self._overhead_s,
            speed_per_s=tally.pace.speed_per_s,
            step_s=tally.pace.step_s if estimate is None else estimate.step_s,  # the costs so far may be zero
            cost_speed_per_s=None if estimate is None else estimate.speed_per_s,
            cost_speed_error_frac=None if estimate is None else estimate.error_frac,
            mean_cost_speed_per_s=None
            if estimate is None
            else estimate.mean_speed_per_s(tally.cost, tally.steps, busy_s),
            cost_version=tally.cost_version,
            newest_steps=tally.newest,
            cells_stolen=cells_stolen,
            finished=finished,
        )
        if finished:
            self._final = record
        return record


class _Tally:
    """Samples and costs of the finished steps, and the speeds by both.

    Args:
        window_steps: Steps that a speed is at least estimated from.
        cost_of: Tells the costs that the user gave.
        usual_cost: Cost of a usual step where the user gave costs.
    """

    def __init__(self, window_steps: int, cost_of: CostOf | None, usual_cost: float | None) -> None:
        self.samples = self.steps = self.cost_version = 0
        self.cost = 0.0
        self.newest: tuple[StepShape, ...] = ()  # replaced as a whole: another thread may be reading it
        self.pace = SpeedModel(window_steps)
        """In samples per second."""
        self.speed = self.pace if cost_of is None else SpeedModel(window_steps, usual_cost)
        """In cost units per second."""
        self._window_steps, self._cost_of = window_steps, cost_of
        self._parameters: CostParameters | None = None
        self._kept: deque[tuple[StepShape, bool]] = deque(maxlen=SpeedModel.HISTORY_STEPS)
        self._elements = self._samples_of_elements = 0

    def add(self, work: Work, step: StepShape, *, first_of_shape: bool) -> None:
        """Takes in one step."""
        cost = self._cost(work, step)
        self.steps += 1
        self.samples += step.samples
        self.cost += cost
        self.pace.observe(step.samples, step.seconds, first_of_shape=first_of_shape)
        if self.speed is not self.pace:
            self.speed.observe(cost, step.seconds, first_of_shape=first_of_shape)
        if self._cost_of is None:
            self._keep(step, first_of_shape=first_of_shape)

    def adopt(self, parameters: CostParameters) -> None:
        """Counts in other units, all steps so far too."""
        if self._cost_of is not None:
            return
        speed = SpeedModel(self._window_steps, parameters.samples_per_step)
        for step, first_of_shape in self._kept:
            speed.observe(parameters.cost(step.samples, step.elements), step.seconds, first_of_shape=first_of_shape)
        cost = parameters.cost(self._samples_of_elements, self._elements, steps=self.steps)
        cost += parameters.cost(self.samples - self._samples_of_elements, steps=0)
        self._parameters, self.cost_version, self.cost, self.speed = parameters, parameters.version, cost, speed

    def known_cost(self, work: Work, elements: int | None) -> float | None:
        """What a work cost, by the user or by what was learnt; ``None`` where neither tells."""
        if self._cost_of is not None:
            return self._cost_of(work)
        return None if self._parameters is None else self._parameters.cost(work.size, elements)

    def _cost(self, work: Work, step: StepShape) -> float:
        if self._parameters is not None:
            return self._parameters.cost(step.samples, step.elements)
        cost = step.samples if self._cost_of is None else self._cost_of(work)
        if cost is None:  # as the mean of the others
            cost = step.samples * (self.cost / self.samples if self.cost else 1.0)
        return cost

    def _keep(self, step: StepShape, *, first_of_shape: bool) -> None:
        self._kept.append((step, first_of_shape))
        if step.elements is None:
            return
        self._elements += step.elements
        self._samples_of_elements += step.samples
        if not first_of_shape:
            self.newest = (*self.newest[1 - StepRecorder.NEWEST_STEPS :], step)


class _StepLog:
    """Keeps the newest steps one by one.

    Args:
        num_steps: How many.
    """

    def __init__(self, num_steps: int) -> None:
        self._begun: deque[tuple[float, float]] = deque()  # steps whose time is not known yet
        self._steps: deque[tuple[Work, float, float, float, int | None]] = deque(maxlen=num_steps)
        self._num_finished = 0
        self._unix_s = time.time() - time.perf_counter()
        self._now = (0.0, 0.0)
        self._waits_s = 0.0

    def start(self, waits_s: float) -> None:
        """A step begins; ``waits_s`` is how long the loop's thread has waited for others so far."""
        self._now = time.perf_counter(), waits_s - self._waits_s
        self._waits_s = waits_s

    def stop(self, waited_s: float) -> None:
        """The step ends, in which it waited for others that long."""
        self._begun.append(self._now)
        self._waits_s -= waited_s

    def finish(self, work: Work, seconds: float, elements: int | None) -> None:
        """The time of the oldest step that has not been told is known."""
        if not self._begun:
            return
        start_s, waited_s = self._begun.popleft()
        if not work.ghost:
            self._num_finished += 1
            self._steps.append((work, start_s, seconds, waited_s, elements))

    def kept(self, replica: int, cost_of: Callable[[Work, int | None], float | None]) -> KeptSteps:
        """The steps with their costs, on the clock of the day, and how many older ones there were."""
        steps = [
            RecordedStep(
                replica, work.start, work.stop, self._unix_s + start_s, seconds, waited_s, cost_of(work, elements)
            )
            for work, start_s, seconds, waited_s, elements in self._steps
        ]
        return steps, self._num_finished - len(steps)


class _OwnTime:
    """A context that is entered several times per step, so it is made once; not to be nested."""

    __slots__ = ("_blocked_s", "_recorder", "_start_s")

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._start_s = self._blocked_s = 0.0

    def __enter__(self) -> None:
        self._start_s, self._blocked_s = time.perf_counter(), self._recorder.blocked_s()

    def __exit__(self, *_: object) -> None:
        blocked_s = self._recorder.blocked_s() - self._blocked_s
        self._recorder.add_overhead(time.perf_counter() - self._start_s - blocked_s)
