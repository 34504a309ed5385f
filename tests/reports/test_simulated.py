"""Figures and report of a simulated run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.recording import RecordedRun, RecordedStep
from lightning_hybrid.core.simulated import SimulatedRun
from lightning_hybrid.core.statistics import History
from lightning_hybrid.core.traces import SpeedTrace
from lightning_hybrid.reports.simulated import SimulationResult
from tests import simulated
from tests.simulated import DEALT, HYBRID, run_of

RUN = run_of(
    (0, 0.0, 1.0, DEALT), (0, 1.0, 4.0, HYBRID), (1, 0.0, 1.0, DEALT), (1, 1.0, 3.0, simulated.STOLEN), num_replicas=2
)


def result_of(run: SimulatedRun, recording: RecordedRun | None = None) -> SimulationResult:
    history = History(HybridConfig())
    history.begin("simulate", "hybrid", start_s=0.0, reason="begin of the epoch")
    history.begin("simulate", "memory_aware", start_s=2.0, kind="switch", reason="memory pressure 0.90 is above 0.80")
    return SimulationResult(run=run, statistics=history.statistics, config=HybridConfig(), recording=recording)


def test_figures_are_those_of_the_run() -> None:
    figures = result_of(RUN).figures()
    schedules = figures.pop("schedules")
    assert figures == {
        "replicas": 2,
        "cells": 4,
        "costs_known": True,
        "policy": "auto",
        "makespan_s": 4.0,
        "recorded_s": None,
        "bound_s": 3.5,
        "over_bound": 4.0 / 3.5,
        "idle_frac": 0.125,
        "exactly_once_violations": 0,
        "claims": 4,
        "claims_per_s": 1.0,
        "store_requests": 24,
        "store_requests_per_claim": 6.0,
        "cells_stolen": 1,
        "policy_switches": 1,
    }
    assert [(item["start_s"], item["policy"], item["kind"]) for item in schedules] == [
        (0.0, "hybrid", "start"),
        (2.0, "memory_aware", "switch"),
    ]


def test_report_reads_in_plain_text() -> None:
    assert result_of(RUN).format().splitlines() == [
        "simulated: 4 cells on 2 replicas, policy auto, costs known",
        "  makespan                 4 s",
        "  bound                  3.5 s  no schedule is faster",
        "  makespan / bound       1.143",
        "  idle                  12.5 %  of the replicas' time",
        "  claims                     4  1 per second",
        "  store requests            24  6 per claim",
        "  stolen               1 cells  from what others had claimed",
        "  exactly once             yes",
        "",
        "policies",
        "         0 s  hybrid: begin of the epoch",
        "         2 s  memory_aware: memory pressure 0.90 is above 0.80",
        "",
        "replica  speed             cells  stolen  busy %",
        "      0  1                     2       0   100.0",
        "      1  1                     2       1    75.0",
    ]


def test_report_of_many_replicas_shows_a_sample() -> None:
    run = run_of(*((r, 0.0, 1.0, HYBRID) for r in range(1000)), num_replicas=1000)
    lines = result_of(run).format().splitlines()
    assert lines[-1] == "16 of 1,000 replicas"
    assert sum(line.strip()[0].isdigit() for line in lines[-17:-1]) == 16


def test_a_cell_that_was_not_run_once_is_told() -> None:
    lost = replace(RUN, steps=RUN.steps[:-1])
    assert not result_of(lost).exactly_once
    assert "NO: 1 cells were not" in result_of(lost).format()
    assert result_of(lost).figures()["exactly_once_violations"] == 1


def test_what_is_not_known_is_none_and_a_dash() -> None:
    workload = replace(RUN.workload, costs=Costs(compute=np.array([100.0])), traces=(SpeedTrace.failing(1.0, 1.0),) * 2)
    dead = replace(RUN, workload=workload, steps=[], makespan_s=0.0, claims=0)
    result = result_of(dead)
    assert (result.bound_s, result.over_bound, result.idle_frac, result.claims_per_s) == (None,) * 4
    assert json.loads(result.to_json())["bound_s"] is None
    assert "  makespan / bound           -" in result.format().splitlines()


@pytest.mark.parametrize(
    ("mode", "ending"), [("queue", "+25.0 %"), ("lockstep", "+25.0 %, in lockstep mode; here it is a queue")]
)
def test_a_replay_stands_beside_what_was_recorded(mode: str, ending: str) -> None:
    recording = RecordedRun(
        stage="predict",
        mode=mode,  # type: ignore[arg-type]  # one of those it may be
        num_replicas=1,
        steps=(RecordedStep(0, 0, 4, 0.0, 3.2),),
        config=HybridConfig(policy="load_balanced"),
    )
    result = result_of(RUN, recording)
    assert result.recorded_s == 3.2
    lines = result.format().splitlines()
    assert lines[0] == "replayed: 4 cells on 2 replicas, policy auto, costs known"
    assert lines[1] == f"  makespan                 4 s  recorded 3.2 s under load_balanced, {ending}"
