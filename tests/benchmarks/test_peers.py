from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.devices import Workload, constant
from benchmarks.emulation import CostedRows, replay
from benchmarks.peer_bench import Attempt, PeerBench
from benchmarks.peer_cases import peer_cases
from benchmarks.peer_device import PeerDevice, StartLine, Step, load_job
from benchmarks.peer_runs import PeerRun, job_of, measure, overlap
from benchmarks.peers import case_figures
from benchmarks.report import Target, missed

CASE = replace(
    peer_cases(steps=2, seed=0, repeats=1)["equal"][0],
    curves=(constant(1.0), constant(0.5)),
    workload=Workload(num_samples=48, sample_cost=0.02 / 16),
)


def step(device: int, start_s: float, end_s: float) -> Step:
    return Step(index=0, device=device, start_s=start_s, end_s=end_s, outputs=np.zeros(1, dtype=np.float32))


def run(loop_s: float) -> PeerRun:
    return PeerRun(ideal_s=1.0, loop_s=loop_s, steps_s=loop_s, steps=(1, 1), valid=True)


def test_target_at_least_a_number() -> None:
    target = Target(figure="ratio", at_least=0.98)
    assert (target.met_by(0.98), target.met_by(0.97), target.met_by(None)) == (True, False, None)
    assert str(target) == ">= 0.98"
    assert missed({"ratio": 0.9}, [target]) == ["ratio"]


def test_every_worker_gets_a_device_of_its_own(tmp_path: Path) -> None:
    line = StartLine(tmp_path, 2)
    assert [line.take_device(), line.take_device()] == [0, 1]
    line.wait_for_all()
    with pytest.raises(RuntimeError, match="all 2 devices are taken"):
        line.take_device()


def test_speeds_count_from_the_first_question(tmp_path: Path) -> None:
    before_s = time.monotonic()
    origins = [StartLine(tmp_path, 2).origin_s() for _ in range(2)]
    assert before_s <= origins[0] == origins[1] <= time.monotonic()


def test_step_has_the_bits_of_one_device_and_the_time_of_its_speed(tmp_path: Path) -> None:
    dataset = CostedRows(CASE.workload)
    job_of(CASE, dataset, tmp_path).save()
    done = PeerDevice(load_job(tmp_path), device=1).step(2)
    assert done.outputs.tobytes() == replay(dataset, [(32, 48)]).tobytes()
    assert done.end_s - done.start_s >= 0.04


@pytest.mark.parametrize(
    ("second", "expected"), [((0, 0.9, 2.0), True), ((0, 1.0, 2.0), False), ((1, 0.9, 2.0), False)]
)
def test_overlap_is_of_one_device(second: tuple[int, float, float], expected: bool) -> None:
    assert overlap([step(0, 0.0, 1.0), step(*second)]) is expected


@pytest.mark.parametrize("system", ["ours", "pool"])
def test_run_is_valid_and_ends_after_its_steps(system: str) -> None:
    measured = measure(system, CASE)
    assert measured.valid
    assert sum(measured.steps) == 3
    assert measured.loop_s >= measured.steps_s >= 0.04


def test_heavy_tailed_costs_are_drawn_anew_and_their_order_is_neutral() -> None:
    draws = peer_cases(steps=30, seed=0, repeats=2)["heavy_tail"]
    assert [draw.workload.seed for draw in draws] == [3, 15]  # in the order of seed 0 a queue is 1.7 % faster


def test_median_of_a_peer_over_the_median_of_ours() -> None:
    bench = PeerBench(("ours", "pool"))
    loops = {"ours": (2.0, 4.0, 3.0), "pool": (1.5, 9.0, 6.0)}
    bench.attempts = [
        Attempt(case="equal", system=system, repetition=repetition, run=run(loop_s))
        for system, loops_s in loops.items()
        for repetition, loop_s in enumerate(loops_s)
    ]
    figures = case_figures(bench, "equal")
    assert figures["equal_pool_over_ours"] == 2.0
    assert figures["equal_pool_over_ideal"] == 6.0
    assert figures["equal_ray_over_ours"] is None
