from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lightning_hybrid.core.learned import CostLearner, CostParameters
from lightning_hybrid.core.recommend import Recommendation, straggler
from lightning_hybrid.core.state import BalanceSnapshot, ReplicaRecord, StepShape
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
        self.blocked_s, self.is_synchronous = 0.0, True

    def start(self) -> None:
        """The time of the step is in the script."""

    def stop(self, work: Work, waited_s: float) -> None:
        """The time of the step is in the script."""

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

    assert recorder.record() == ReplicaRecord(replica=3, cost=0.0)
    assert recorder.steps == 0


def test_steps_add_up_and_ghosts_do_not_count() -> None:
    timer = ScriptedTimer((BATCH, 2.0, True), (GHOST, 9.0, False), (BATCH, 1.0, False), (TAIL, 0.5, True))
    recorder = StepRecorder(0, timer, 5)

    assert list(recorder.collect()) == [BATCH, BATCH, TAIL]
    record = recorder.record()
    assert (record.samples, record.cost, record.steps, record.busy_s) == (24, 24, 3, 3.5)
    assert (record.speed_per_s, record.step_s) == (10.0, 1.0)
    assert (record.cost_speed_per_s, record.cost_version, record.newest_steps) == (10.0, 0, ())
    assert record.mean_cost_speed_per_s == pytest.approx(24 / 3.5)


@pytest.mark.parametrize(("is_synchronous", "collective_s"), [(True, 0.5), (False, None)])
def test_time_in_collectives_is_told_where_the_host_sees_it(is_synchronous: bool, collective_s: float | None) -> None:
    timer = ScriptedTimer((BATCH, 1.0, False), (GHOST, 1.0, False), (TAIL, 1.0, False))
    timer.is_synchronous = is_synchronous
    recorder = StepRecorder(0, timer, 5)
    for work, waited_s in ((BATCH, 0.25), (GHOST, 4.0), (TAIL, 0.25)):
        recorder.start()
        recorder.stop(work, waited_s)

    assert list(recorder.collect()) == [BATCH, TAIL]
    assert recorder.record().collective_s is None
    assert recorder.record(times_collectives=True).collective_s == collective_s


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


# --- costs ----------------------------------------------------------------------------------------------------------


def recorder_of(*timed: Timed, elements: Sequence[int | None] = (), **options: Any) -> StepRecorder:
    """A recorder that has collected these steps, whose batches had these elements."""
    recorder = StepRecorder(0, ScriptedTimer(*timed), 5, **options)
    for (work, _, _), num in zip(timed, elements, strict=False):
        recorder.stop(work, 0.0, elements=num)
    list(recorder.collect())
    return recorder


def test_known_costs_count_instead_of_samples() -> None:
    steps = [(Work(0, 10, 0), 4.0, False), (Work(10, 20, 1), 1.0, False), (Work(20, 30, 2), 2.0, False)]
    costs = {0: 400.0, 1: 100.0, 2: 200.0}
    record = recorder_of(*steps, cost_of=lambda work: costs[work.cell]).record()

    assert (record.samples, record.cost) == (30, 700.0)
    assert record.cost_speed_per_s == pytest.approx(100.0)
    assert record.mean_cost_speed_per_s == pytest.approx(100.0)
    assert record.speed_per_s == 5.0
    assert record.step_s == pytest.approx(2.0)


def test_two_replicas_with_light_and_heavy_works_are_equally_fast() -> None:
    def speed(*costs: float) -> tuple[float, float]:
        steps = [(Work(10 * k, 10 * k + 10, k), 0.5 + cost / 4, False) for k, cost in enumerate(costs)]
        record = recorder_of(*steps, cost_of=lambda work: costs[work.cell or 0], usual_cost=8.0).record()
        assert record.cost_speed_per_s is not None
        assert record.mean_cost_speed_per_s is not None
        return record.cost_speed_per_s, record.mean_cost_speed_per_s

    assert speed(*[1, 3, 2, 4] * 4) == pytest.approx(speed(*[20, 60, 40, 30] * 4), rel=1e-6)


def test_a_work_of_unknown_cost_counts_as_the_mean_of_the_others() -> None:
    steps = [(BATCH, 1.0, False), (TAIL, 0.4, False)]
    record = recorder_of(*steps, cost_of=lambda work: 50.0 if work.cell == 0 else None).record()

    assert record.cost == 50.0 + 4 * 5.0
    assert record.cost_speed_per_s == pytest.approx(50.0)


def test_works_that_are_all_of_unknown_cost_count_by_their_samples() -> None:
    record = recorder_of((BATCH, 1.0, False), (TAIL, 0.4, False), cost_of=lambda _: None).record()

    assert record.cost == 14.0
    assert record.cost_speed_per_s == pytest.approx(10.0)


def test_works_that_cost_nothing_still_take_time() -> None:
    record = recorder_of((BATCH, 1.0, False), cost_of=lambda _: 0.0).record()

    assert (record.cost, record.cost_speed_per_s, record.step_s) == (0.0, None, 1.0)


LEARNT = CostParameters(version=2, per_step=1.0, per_element=0.01, samples_per_step=10.0, elements_per_sample=90.0)


def test_the_newest_steps_are_told_where_costs_can_be_learnt() -> None:
    steps = [(Work(10 * k, 10 * k + 10, k), 1.0 + k, k == 0) for k in range(12)]
    newest = recorder_of(*steps, elements=[100 * k for k in range(12)]).record().newest_steps

    assert newest == tuple(StepShape(k + 1, 10, 100 * k, 1.0 + k) for k in range(4, 12))


def test_first_steps_of_their_shape_and_ghosts_teach_nothing() -> None:
    steps = [(BATCH, 9.0, True), (GHOST, 1.0, False), (BATCH, 2.0, False)]
    newest = recorder_of(*steps, elements=[7, 8, 9]).record().newest_steps

    assert newest == (StepShape(2, 10, 9, 2.0),)


def test_nothing_is_taught_where_costs_are_known_or_batches_have_no_tensors() -> None:
    steps = [(BATCH, 1.0, False)] * 3

    assert recorder_of(*steps, elements=[7, 8, 9], cost_of=lambda _: 1.0).record().newest_steps == ()
    assert recorder_of(*steps, elements=[None] * 3).record().newest_steps == ()


def test_adopted_costs_hold_for_the_steps_so_far_and_those_to_come() -> None:
    early = [(BATCH, 2.0, True), (BATCH, 1.0, False), (BATCH, 2.0, False)]
    timer = ScriptedTimer(*early, (BATCH, 1.5, False))
    timer.held = 1
    recorder = StepRecorder(0, timer, 5)
    for elements in (1900, 900, 1900, 1400):
        recorder.stop(BATCH, 0.0, elements=elements)
    list(recorder.collect())
    before = recorder.record()
    recorder.adopt(LEARNT)
    after = recorder.record()
    list(recorder.collect(drain=True))
    end = recorder.record()

    assert (before.cost, before.cost_version) == (30.0, 0)
    assert (after.cost, after.cost_version) == (20.0 + 10.0 + 20.0, 2)
    assert after.cost_speed_per_s == pytest.approx(10.0)
    assert (end.cost, end.samples) == (65.0, 40)
    assert end.cost_speed_per_s == pytest.approx(10.0)
    assert end.mean_cost_speed_per_s == pytest.approx(10.0)
    assert end.speed_per_s == pytest.approx(10 / 1.5)


def test_a_rank_with_longer_samples_is_no_straggler_once_costs_are_learnt() -> None:
    draws, learner, recorders = random.Random(0), CostLearner(2), []
    for replica, mean_len in enumerate((50, 150)):
        elements = [int(10 * mean_len * draws.uniform(0.5, 1.5)) for _ in range(40)]
        timed = [(BATCH, (200 + num) / 1000 * draws.uniform(0.97, 1.03), False) for num in elements]
        timer = ScriptedTimer(*timed)
        recorder = StepRecorder(replica, timer, 5)
        recorders.append(recorder)
        for num in elements:
            recorder.stop(BATCH, 0.0, elements=num)
        for _ in recorder.collect():
            learner.observe(recorder.record())

    def found() -> Recommendation | None:
        records = tuple(recorder.record() for recorder in recorders)
        run: dict[str, Any] = {"stage": "predict", "mode": "queue", "loader_idx": 0, "epoch": 0, "samples_total": 800}
        return straggler(BalanceSnapshot(replicas=records, **run))

    before = found()
    parameters = learner.propose()
    assert before is not None
    assert parameters is not None
    for recorder in recorders:
        recorder.adopt(parameters)

    first, second = (recorder.record().cost_speed_per_s for recorder in recorders)
    assert found() is None
    assert first == pytest.approx(second, rel=0.05)


def test_adopted_costs_count_batches_of_unknown_size_as_mean_ones() -> None:
    recorder = recorder_of((BATCH, 1.0, False), (BATCH, 1.0, False), elements=[900, None])
    recorder.adopt(LEARNT)

    assert recorder.record().cost == pytest.approx(20.0)


def test_known_costs_are_not_given_up_for_learnt_ones() -> None:
    recorder = recorder_of((BATCH, 1.0, False), elements=[900], cost_of=lambda _: 7.0)
    recorder.adopt(LEARNT)

    assert (recorder.record().cost, recorder.record().cost_version) == (7.0, 0)


# --- steps one by one -----------------------------------------------------------------------------------------------


class RunningTimer(ScriptedTimer):
    """A scripted timer of steps that are run, too; waits that it caused itself are in ``blocked_s``."""

    blocked_s = 0.0

    def start(self) -> None:
        """The time of the step is in the script."""


def _run(recorder: StepRecorder, now_s: list[float], work: Work, at_s: float, **stop: Any) -> None:
    now_s[0] = at_s
    recorder.start()
    recorder.stop(work, **({"waited_s": 0.0} | stop))


def test_steps_are_kept_one_by_one_on_the_clock_of_the_day(now_s: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module.time, "time", lambda: 5100.0)
    timer = RunningTimer((BATCH, 2.0, True), (GHOST, 9.0, False), (TAIL, 0.5, True))
    recorder = StepRecorder(7, timer, 5, recorded_steps=10)
    _run(recorder, now_s, BATCH, 101.0)
    _run(recorder, now_s, GHOST, 103.0)
    _run(recorder, now_s, TAIL, 112.0)

    assert list(recorder.collect()) == [BATCH, TAIL]
    assert recorder.kept() == ([(7, 0, 10, 5101.0, 2.0, 0.0, None), (7, 10, 14, 5112.0, 0.5, 0.0, None)], 0)


def test_kept_steps_tell_how_long_others_were_waited_for(now_s: list[float]) -> None:
    timer = RunningTimer((BATCH, 2.0, True), (BATCH, 2.0, False), (BATCH, 2.0, False))
    blocked = [0.0]
    recorder = StepRecorder(0, timer, 5, lambda: blocked[0], recorded_steps=10)
    _run(recorder, now_s, BATCH, 101.0, waited_s=0.25)
    blocked[0] = 1.5
    _run(recorder, now_s, BATCH, 105.0)
    blocked[0], timer.blocked_s = 2.5, 0.75  # of what was waited since, most was for the own device
    _run(recorder, now_s, BATCH, 108.0)
    list(recorder.collect())

    assert [step.waited_s for step in recorder.kept()[0]] == [0.0, 1.75, 0.25]


def test_only_the_newest_steps_are_kept(now_s: list[float]) -> None:
    works = [Work(n, n + 1, n) for n in range(5)]
    recorder = StepRecorder(0, RunningTimer(*((work, 1.0, False) for work in works)), 5, recorded_steps=2)
    for work in works:
        _run(recorder, now_s, work, 100.0 + work.start)
    list(recorder.collect())

    steps, left_out = recorder.kept()
    assert [step.start for step in steps] == [3, 4]
    assert left_out == 3


def test_kept_steps_cost_what_the_user_said(now_s: list[float]) -> None:
    recorder = StepRecorder(0, RunningTimer((BATCH, 1.0, False)), 5, cost_of=lambda work: 42.0, recorded_steps=2)
    _run(recorder, now_s, BATCH, 101.0)
    list(recorder.collect())

    assert [step.cost for step in recorder.kept()[0]] == [42.0]


def test_kept_steps_cost_what_was_learnt_in_the_end(now_s: list[float]) -> None:
    recorder = StepRecorder(0, RunningTimer((BATCH, 1.0, False), (TAIL, 1.0, False)), 5, recorded_steps=2)
    _run(recorder, now_s, BATCH, 101.0, elements=100)
    _run(recorder, now_s, TAIL, 102.0, elements=20)
    list(recorder.collect())
    recorder.adopt(LEARNT)

    assert [step.cost for step in recorder.kept()[0]] == pytest.approx([2.0, 1.2])
