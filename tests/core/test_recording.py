"""Recorded steps as text, and as a workload that takes as long as the run took."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import ConfigError, PlanError
from lightning_hybrid.core.recording import RecordedRun, RecordedStep, since_all_kept
from lightning_hybrid.core.simulate import Simulation
from lightning_hybrid.core.simulated import SimulatedRun, Workload
from lightning_hybrid.core.traces import SpeedTrace


def recorded(*steps: tuple[Any, ...], num_replicas: int = 2, **kwargs: Any) -> RecordedRun:
    values: dict[str, Any] = {"stage": "predict", "mode": "queue"}
    return RecordedRun(
        num_replicas=num_replicas, steps=tuple(RecordedStep(*step) for step in steps), **(values | kwargs)
    )


def of_simulation(run: SimulatedRun, *, knows_costs: bool = False) -> RecordedRun:
    """The recording that a real run of these steps would have left."""
    costs = run.workload.costs.compute
    steps = [
        (s.replica, s.cell, s.cell + 1, s.start_s, s.end_s - s.start_s, 0.0, costs[s.cell] if knows_costs else None)
        for s in run.steps
    ]
    return recorded(*steps, num_replicas=len(run.workload.traces), costs_given=knows_costs)


def again(recording: RecordedRun) -> SimulatedRun:
    return Simulation(recording.to_workload(), recording.config).run()


# --- what a recording is --------------------------------------------------------------------------------------------


def test_steps_stand_in_order_of_positions() -> None:
    recording = recorded((1, 4, 8, 0.5, 1.0), (0, 0, 4, 0.0, 2.0))
    assert [step.start for step in recording.steps] == [0, 4]
    assert recording.num_samples == 8


def test_makespan_is_from_the_first_begin_to_the_last_end() -> None:
    assert recorded((0, 0, 1, 10.0, 1.0), (1, 1, 2, 10.5, 3.0), (0, 2, 3, 11.0, 1.0)).makespan_s == 3.5
    assert recorded().makespan_s == 0.0


def test_a_step_that_the_host_asked_for_early_begins_when_the_device_is_free() -> None:
    assert recorded((0, 0, 1, 0.0, 2.0), (0, 1, 2, 0.1, 2.0), (0, 2, 3, 0.2, 2.0)).makespan_s == 6.0


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((2, 0, 4, 0.0, 1.0), r"out of range \(2 replicas\): \(2, 0, 4"),
        ((0, 4, 4, 0.0, 1.0), "out of range"),
        ((0, -1, 4, 0.0, 1.0), "out of range"),
        ((0, 0, 4, 0.0, -1.0), "out of range"),
        ((0, 0, 4, float("nan"), 1.0), "out of range"),
        ((0, 0, 4, 0.0, 1.0, 0.0, float("inf")), "out of range"),
        ((0, 7, 9, 0.0, 1.0), r"two recorded steps hold position 8: \(0, 7, 9, .* \(1, 8, 12"),
    ],
)
def test_steps_that_cannot_be_are_refused(step: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        recorded(step, (1, 8, 12, 0.0, 1.0))


# --- as text --------------------------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(1, 9),
            st.floats(0, 1e9),
            st.floats(0, 1e3),
            st.floats(0, 10),
            st.none() | st.floats(0, 1e6),
        ),
        max_size=20,
    ),
    st.booleans(),
)
def test_text_gives_the_same_recording(steps: list[tuple[Any, ...]], costs_given: bool) -> None:
    at, placed = 0, []
    for replica, size, *rest in steps:
        placed.append((replica, at, at + size, *rest))
        at += size
    config = HybridConfig(policy="load_balanced", lease_s=5.0)
    recording = recorded(*placed, num_replicas=4, costs_given=costs_given, steps_left_out=3, config=config)
    back = RecordedRun.from_lines(recording.to_lines())
    assert back.steps == recording.steps
    assert back.to_lines() == recording.to_lines()
    assert (back.policy, back.config, back.costs_given) == ("load_balanced", config, costs_given)


def test_text_is_one_object_and_one_list_per_step() -> None:
    lines = recorded((0, 0, 4, 0.0, 1.5), (1, 4, 8, 0.25, 2.0, 0.125, 7.0)).to_lines().splitlines()
    assert json.loads(lines[0]) == {
        "recording": 1,
        "stage": "predict",
        "mode": "queue",
        "num_replicas": 2,
        "loader_idx": 0,
        "steps_left_out": 0,
        "costs_given": False,
        "first_rounds": 1,
        "config": {},
    }
    assert lines[1:] == ["[0, 0, 4, 0.0, 1.5, 0.0, null]", "[1, 4, 8, 0.25, 2.0, 0.125, 7.0]"]


HEAD = '{"recording": 1, "stage": "predict", "mode": "queue", "num_replicas": 1}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 must be JSON, got ''"),
        ("[]", r"line 1 must hold a JSON object, got '\[\]'"),
        ('{"recording": 2}', "line 1 must begin a recording of format 1"),
        ('{"recording": 1, "stage": "predict"}', "line 1 does not hold the fields of a recording"),
        (HEAD.replace("}", ', "other": 1}'), "line 1 does not hold the fields of a recording"),
        (f"{HEAD}\nnonsense", "line 2 must be JSON, got 'nonsense'"),
        (f"{HEAD}\n{{}}", "line 2 must hold a JSON list"),
        (f"{HEAD}\n[0, 0, 4, 0.0, 1.0, 0.0]", "line 2 must hold a step"),
        (f'{HEAD}\n[0, 0, 4, "now", 1.0, 0.0, null]', "line 2 must hold a step"),
        (f"{HEAD}\n[0, 0, true, 0.0, 1.0, 0.0, null]", "line 2 must hold a step"),
    ],
)
def test_text_that_is_no_recording_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        RecordedRun.from_lines(text)


def test_settings_of_another_version_are_named() -> None:
    with pytest.raises(PlanError, match="warp_factor"):
        RecordedRun.from_lines(HEAD.replace("}", ', "config": {"warp_factor": 9}}'))
    with pytest.raises(ConfigError, match="claim_frac"):
        RecordedRun.from_lines(HEAD.replace("}", ', "config": {"claim_frac": 9}}'))


# --- which steps are left -------------------------------------------------------------------------------------------


def test_steps_begin_when_all_replicas_have_kept_them() -> None:
    first = [RecordedStep(0, n, n + 1, 100.0 + n, 1.0) for n in range(4)], 0
    second = [RecordedStep(1, n, n + 1, 96.5 + n, 1.0) for n in range(5, 8)], 2
    steps, left_out = since_all_kept([first, second])
    assert [(step.replica, step.start, step.start_s) for step in steps] == [
        (0, 2, 0.5),
        (0, 3, 1.5),
        (1, 5, 0.0),
        (1, 6, 1.0),
        (1, 7, 2.0),
    ]
    assert left_out == 4


def test_without_any_step_there_is_nothing() -> None:
    assert since_all_kept([([], 0), ([], 0)]) == ((), 0)


# --- as a workload --------------------------------------------------------------------------------------------------


def test_workload_has_the_cells_and_devices_of_the_run() -> None:
    steps = [(n % 2, 4 * n, 4 * n + 4, 2.0 * (n // 2), 1.0 + n % 2) for n in range(12)]
    workload = recorded(*steps).to_workload()
    assert workload.costs.compute == pytest.approx([4.0] * 12)
    assert [trace.speeds for trace in workload.traces] == [(4.0,), (2.0,)]
    assert not workload.costs_known


def test_costs_that_the_user_gave_are_known_again() -> None:
    steps = [(0, n, n + 1, float(n), 1.0, 0.0, 3.0) for n in range(3)]
    workload = recorded(*steps, num_replicas=1, costs_given=True).to_workload()
    assert workload.costs_known
    assert workload.costs.compute.tolist() == [3.0, 3.0, 3.0]
    assert workload.traces == (SpeedTrace.constant(3.0),)


def test_learnt_costs_count_but_are_not_known_beforehand() -> None:
    steps = [(0, n, n + 1, float(n), 1.0, 0.0, 3.0) for n in range(3)]
    workload = recorded(*steps, num_replicas=1).to_workload()
    assert not workload.costs_known
    assert workload.costs.compute.tolist() == [3.0, 3.0, 3.0]


def test_time_between_steps_counts_without_the_waits_for_others() -> None:
    workload = recorded(
        (0, 0, 1, 0.0, 1.0), (0, 1, 2, 1.2, 1.0), (0, 2, 3, 4.5, 1.0, 2.1), (1, 3, 4, 0.7, 1.0)
    ).to_workload()
    assert workload.overheads_s == pytest.approx((0.2, 0.0))
    assert workload.starts_s == pytest.approx((0.0, 0.7))


def test_a_replica_that_ran_nothing_is_like_the_others() -> None:
    workload = recorded((0, 0, 1, 0.0, 0.5), (1, 1, 2, 0.0, 0.5), num_replicas=3).to_workload()
    assert workload.traces[2] == SpeedTrace.constant(2.0)


def test_an_empty_recording_makes_no_workload() -> None:
    with pytest.raises(PlanError, match="holds no step"):
        recorded().to_workload()


# --- run again ------------------------------------------------------------------------------------------------------


def test_loader_and_hooks_lengthen_the_replayed_run_too() -> None:
    steps = [(n % 2, n, n + 1, 1.25 * (n // 2), 1.0) for n in range(20)]
    recording = recorded(*steps)
    assert recording.makespan_s == 12.25
    assert again(recording).makespan_s == pytest.approx(12.25, abs=0.02)


def test_a_replica_that_began_late_begins_late_again() -> None:
    steps = [(0, n, n + 1, float(n), 1.0) for n in range(6)] + [(1, n + 6, n + 7, 3.0 + n, 1.0) for n in range(3)]
    run = again(recorded(*steps))
    assert min(step.start_s for step in run.steps if step.replica == 1) == 3.0
    assert run.makespan_s == pytest.approx(6.0, abs=0.05)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    num_replicas=st.integers(2, 8),
    knows_costs=st.booleans(),
    overhead_s=st.sampled_from([0.0, 0.05]),
)
def test_a_run_takes_as_long_when_it_is_run_again(
    seed: int, num_replicas: int, knows_costs: bool, overhead_s: float
) -> None:
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(0.5, 2.0, num_replicas)
    drawn = Costs(
        compute=np.full(40 * num_replicas, 1.0) if not knows_costs else rng.lognormal(0, 0.7, 40 * num_replicas)
    )
    traces = [SpeedTrace.constant(speed) for speed in speeds]
    traces[0] = SpeedTrace.sudden(speeds[0], 10.0, speeds[0] / 2)
    workload = Workload(
        costs=drawn, traces=tuple(traces), costs_known=knows_costs, overheads_s=(overhead_s,) * num_replicas
    )
    run = Simulation(workload, HybridConfig()).run()
    recording = of_simulation(run, knows_costs=knows_costs)
    assert recording.makespan_s == pytest.approx(run.makespan_s)
    replayed = again(recording)
    assert replayed.exactly_once_violations == 0
    assert replayed.makespan_s == pytest.approx(run.makespan_s, rel=0.05)
