from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.runtime import recorder as recorder_module
from lightning_hybrid.runtime.recorder import StepRecorder
from lightning_hybrid.runtime.timing import Timed
from lightning_hybrid.runtime.work import Work

BATCH, TAIL = Work(0, 10, 0), Work(10, 14, 1)
GHOST = Work(0, 10, 0, ghost=True)


class ScriptedTimer:
    """Tells the times that the test puts into it; the last ``held`` only at a drain."""

    def __init__(self, *timed: Timed, held: int = 0) -> None:
        self.timed, self.held = deque(timed), held

    def start(self) -> None:
        raise AssertionError("the recorder does not run steps")

    def stop(self, work: Work, waited_s: float) -> None:
        raise AssertionError("the recorder does not run steps")

    def finished(self, *, drain: bool = False) -> Iterator[Timed]:
        while len(self.timed) > (0 if drain else self.held):
            yield self.timed.popleft()


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the recorder, set by the test."""
    now = [100.0]
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: now[0])
    return now


def test_a_new_recorder_knows_nothing() -> None:
    recorder = StepRecorder(3, ScriptedTimer(), 5)

    assert recorder.record() == ReplicaRecord(replica=3)
    assert recorder.steps == 0


def test_steps_add_up_and_ghosts_do_not_count() -> None:
    timer = ScriptedTimer((BATCH, 2.0, True), (GHOST, 9.0, False), (BATCH, 1.0, False), (TAIL, 0.5, True))
    recorder = StepRecorder(0, timer, 5)

    assert list(recorder.collect()) == [BATCH, BATCH, TAIL]
    record = recorder.record()
    assert (record.samples, record.cells, record.steps, record.busy_s) == (24, 3, 3, 3.5)
    assert (record.speed_per_s, record.step_s) == (10.0, 1.0)


def test_what_the_timer_does_not_know_yet_comes_with_the_drain() -> None:
    timer = ScriptedTimer((BATCH, 1.0, False), (BATCH, 1.0, False), (TAIL, 0.5, False), held=2)
    recorder = StepRecorder(0, timer, 5)

    assert list(recorder.collect()) == [BATCH]
    assert list(recorder.collect(drain=True)) == [BATCH, TAIL]
    assert recorder.steps == 3


def test_the_record_is_up_to_date_while_it_is_collected() -> None:
    recorder = StepRecorder(0, ScriptedTimer((BATCH, 1.0, False), (TAIL, 1.0, False)), 5)

    assert [recorder.record().samples for _ in recorder.collect()] == [10, 14]


def test_the_wall_clock_starts_with_the_first_step_and_stops_at_the_end(now_s: list[float]) -> None:
    recorder = StepRecorder(0, ScriptedTimer(), 5)
    now_s[0] = 103.0
    assert recorder.record().wall_s == 0.0
    recorder.begin()
    now_s[0] = 107.0
    recorder.begin()
    assert recorder.record().wall_s == 4.0
    last = recorder.record(finished=True, cells_stolen=2)
    now_s[0] = 200.0

    assert (last.wall_s, last.cells_stolen, last.finished) == (4.0, 2, True)
    assert recorder.record() == last
    assert recorder.record(cells_stolen=7) == last


def test_a_wait_before_the_first_step_does_not_count() -> None:
    recorder = StepRecorder(0, ScriptedTimer(), 5)
    recorder.note_wait(50.0)
    recorder.begin()
    recorder.note_wait(0.5)
    recorder.note_wait(0.25)

    assert recorder.record().wait_s == 0.75


def test_own_time_is_overhead_without_the_time_that_others_blocked(now_s: list[float]) -> None:
    blocked_s = [7.0]
    recorder = StepRecorder(0, ScriptedTimer(), 5, lambda: blocked_s[0])
    with recorder.own_time:
        now_s[0] += 3.0
        blocked_s[0] += 2.0
    recorder.add_overhead(0.5)

    assert recorder.record().overhead_s == 1.5


def test_own_time_counts_when_it_ends_with_an_error(now_s: list[float]) -> None:
    recorder = StepRecorder(0, ScriptedTimer(), 5)

    def fail() -> None:
        now_s[0] += 2.0
        raise KeyError("gone")

    with pytest.raises(KeyError), recorder.own_time:
        fail()
    assert recorder.record().overhead_s == 2.0
