"""The Trainer's scheduler in virtual time, as users call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_hybrid import ConfigError, CostError, HybridConfig, SpeedTrace, replay, simulate
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.policies import policy_names
from lightning_hybrid.core.recording import RecordedRun, RecordedStep


def test_equal_cells_on_equal_devices_come_to_the_bound() -> None:
    result = simulate("4x1", num_cells=80)
    assert result.exactly_once
    assert result.bound_s == 20.0
    assert result.over_bound == pytest.approx(1.0, abs=0.02)
    assert result.idle_frac == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("costs", ["equal", "uniform:0.5:1.5", "lognormal:1"])
@pytest.mark.parametrize("costs_known", [True, False])
@pytest.mark.parametrize("speeds", ["3x1,0.25", "2x1,sudden:1:5:0.25", "2x1,drift:1:0.3:20", "1,periodic:1:0.4:4"])
def test_every_cell_is_run_once(speeds: str, costs: str, costs_known: bool) -> None:
    result = simulate(speeds, costs=costs, num_cells=120, costs_known=costs_known, seed=5)
    assert result.exactly_once
    assert result.over_bound is not None
    assert 0.999 < result.over_bound < 1.4
    assert result.run.claims > 0


@pytest.mark.parametrize("policy", ["auto", *policy_names()[:4]])
def test_every_policy_can_be_named(policy: str) -> None:
    result = simulate("3x1,0.5", costs="lognormal:1", policy=policy)
    assert result.config.policy == policy
    assert result.exactly_once
    assert result.statistics.schedules[0].policy == ("hybrid" if policy == "auto" else policy)


def test_fifty_cells_per_device_are_drawn_where_it_is_not_said() -> None:
    assert len(simulate("2x1,0.5").run.workload.costs) == 150


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (simulate("8x1..4", costs="lognormal:1", seed=7) for _ in range(2))
    assert first.figures() == second.figures()
    assert first.run.steps == second.run.steps
    assert first.figures() != simulate("8x1..4", costs="lognormal:1", seed=8).figures()


@pytest.mark.parametrize("costs", ["equal", "lognormal:1"])
@pytest.mark.parametrize("costs_known", [True, False])
@pytest.mark.parametrize("fails", ["failing:1:5", "failing:1:5.5", "failing:0.3:9", "drift:1:0:8"])
def test_what_a_failing_device_leaves_is_taken_over_after_the_lease(costs: str, costs_known: bool, fails: str) -> None:
    config = HybridConfig(lease_s=12.0)
    result = simulate(f"2x1,{fails}", costs=costs, costs_known=costs_known, num_cells=60, config=config)
    assert result.exactly_once
    assert {step.replica for step in result.run.steps if step.end_s > 9.0} <= {0, 1}


def test_a_failing_device_without_a_lease_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lease_s must be set where a device fails.*got None"):
        simulate("2x1,failing:1:5")


def test_a_slow_store_takes_time() -> None:
    quick, slow = (simulate("4x1", num_cells=400, store_latency_s=s).makespan_s for s in (0.0, 0.3))
    assert quick < slow


def test_devices_may_be_numbers_and_traces() -> None:
    result = simulate([1, SpeedTrace.sudden(1.0, 5.0, 0.5), "0.5"], num_cells=30)
    assert [trace.speeds for trace in result.run.workload.traces] == [(1.0,), (1.0, 0.5), (0.5,)]


# --- given costs ----------------------------------------------------------------------------------------------------


def test_known_costs_of_samples_make_cells_of_like_samples() -> None:
    result = simulate("2x1", costs=[1.0, 9.0, 2.0, 8.0, 3.0], batch_size=2)
    assert result.run.workload.costs.compute.tolist() == [17.0, 5.0, 1.0]


def test_unknown_costs_of_samples_make_cells_in_their_own_order() -> None:
    result = simulate("2x1", costs=np.array([1, 9, 2, 8, 3]), batch_size=2, costs_known=False)
    assert result.run.workload.costs.compute.tolist() == [10.0, 10.0, 3.0]


def test_memory_costs_are_kept() -> None:
    given = Costs(compute=np.array([1.0, 2.0]), memory=np.array([5.0, 3.0]))
    memory = simulate("2x1", costs=given).run.workload.costs.memory
    assert memory is not None
    assert memory.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("text", ["3 1 2", "3,1,2\n", "3\n1\n\n2\n"])
def test_lengths_are_read_from_a_text_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    assert simulate("2x1", costs=tmp_path / "lengths.txt").run.workload.costs.compute.tolist() == [3.0, 2.0, 1.0]


def test_lengths_are_read_from_an_array_file(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([3, 1, 2], dtype=np.int32))
    assert simulate("2x1", costs=tmp_path / "lengths.npy").run.workload.costs.compute.tolist() == [3.0, 2.0, 1.0]


def test_a_word_among_the_lengths_is_named(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("3\n1\nlength\n2")
    with pytest.raises(CostError, match=r"cost of sample 2 must be a number, got 'length' in .*lengths\.txt"):
        simulate("2x1", costs=tmp_path / "lengths.txt")


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1.0, -1.0], "cost of sample 1 must be at least 0 and finite, got -1.0"),
        ([1.0, float("nan")], "cost of sample 1 must be at least 0"),
        ([], "costs must have at least one entry, got none"),
    ],
)
def test_wrong_costs_are_named(costs: list[float], message: str) -> None:
    with pytest.raises(CostError, match=message):
        simulate("2x1", costs=costs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "best"}, "policy must be one of 'auto', 'load_balanced', .* got 'best'"),
        ({"config": HybridConfig(policy="best")}, "policy must be one of 'auto'"),
        ({"store_latency_s": -1.0}, "store_latency_s must be at least 0 and finite, got -1.0"),
        ({"num_cells": 0}, "num_cells must be at least 1, got 0"),
        ({"batch_size": 4}, "batch_size must be left out where the costs of cells are drawn, got 4"),
        ({"costs": [1.0], "batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"costs": [1.0], "num_cells": 4}, "num_cells must be left out where costs are given, got 4"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate("2x1", **arguments)


# --- replays --------------------------------------------------------------------------------------------------------


def recording(policy: str = "load_balanced") -> RecordedRun:
    steps = tuple(RecordedStep(n % 2, n, n + 1, 1.0 * (n // 2), 1.0) for n in range(40))
    return RecordedRun(stage="predict", mode="queue", num_replicas=2, steps=steps, config=HybridConfig(policy=policy))


def test_a_recorded_run_is_run_again_by_its_own_policy() -> None:
    result = replay(recording())
    assert result.config.policy == "load_balanced"
    assert result.recorded_s == 20.0
    assert result.makespan_s == pytest.approx(20.0, rel=0.05)
    assert result.exactly_once


def test_a_recorded_run_is_run_again_by_another_policy() -> None:
    assert replay(recording(), policy="memory_aware").statistics.schedules[0].policy == "memory_aware"


def test_a_policy_that_is_not_registered_here_is_named() -> None:
    with pytest.raises(ConfigError, match=r"policy must be one of 'auto', .* got 'of_the_user'"):
        replay(recording("of_the_user"))
