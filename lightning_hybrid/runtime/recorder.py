"""What one replica measures about itself in an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from lightning_hybrid.core.cost import SpeedModel
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.runtime.timing import StepTimer
from lightning_hybrid.runtime.work import Work


class StepRecorder:
    """Adds up a replica's steps and times, and estimates its speed.

    Args:
        replica: Who this is.
        timer: Times the steps.
        window_steps: Steps that the speed is estimated from.
        blocked_s: Tells how long the loop's thread has been blocked by other replicas so far; that is no overhead.
    """

    def __init__(
        self, replica: int, timer: StepTimer, window_steps: int, blocked_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.timer = timer
        self.steps = self._samples = 0
        self._replica, self.blocked_s = replica, blocked_s
        self._speed = SpeedModel(window_steps)
        self._start_s: float | None = None
        self._busy_s = self._wait_s = self._overhead_s = 0.0
        self._final: ReplicaRecord | None = None
        self.own_time = _OwnTime(self)
        """Counts what happens inside ``with own_time`` as overhead, without the waiting for others."""

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
            if work.ghost:
                continue
            self._speed.observe(work.size, seconds, first_of_shape=first_of_shape)
            self.steps += 1
            self._samples += work.size
            self._busy_s += seconds
            yield work

    def record(self, *, cells_stolen: int = 0, finished: bool = False) -> ReplicaRecord:
        """All of it as of now, from any thread; the wall clock stops with the first record that is ``finished``."""
        if self._final is not None:
            return self._final
        record = ReplicaRecord(
            replica=self._replica,
            samples=self._samples,
            cells=self.steps,
            steps=self.steps,
            busy_s=self._busy_s,
            wait_s=self._wait_s,
            wall_s=0.0 if self._start_s is None else time.perf_counter() - self._start_s,
            overhead_s=self._overhead_s,
            speed_per_s=self._speed.speed_per_s,
            step_s=self._speed.step_s,
            cells_stolen=cells_stolen,
            finished=finished,
        )
        if finished:
            self._final = record
        return record


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
