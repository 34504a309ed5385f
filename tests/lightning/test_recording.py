"""A run of the Trainer is recorded, and can be run again in virtual time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid import HybridBalanceCallback, HybridConfig, Recording, replay
from tests.lightning.scenes import Echo, Logs, balance_of, ids, trainer
from tests.ranks import run_ranks


def spans(recording: Recording) -> list[tuple[int, int]]:
    return [(step.start, step.stop) for step in recording.steps]


def _predict(rank: int, directory: str) -> Any:
    a_trainer = trainer(2, HybridBalanceCallback(policy="load_balanced", cost=[float(1 + i % 3) for i in range(22)]))
    a_trainer.predict(Echo(), ids(22))
    recording = balance_of(a_trainer).recording
    assert recording is not None
    recording.save(Path(directory) / f"{rank}.jsonl")
    return spans(recording), {step.replica for step in recording.steps}, recording.makespan_s


def test_the_recording_holds_each_position_once_on_every_rank_and_can_be_run_again(tmp_path: Path) -> None:
    for found, replicas, makespan_s in run_ranks(_predict, 2, str(tmp_path)):
        assert list(itertools.chain(*(range(*span) for span in found))) == list(range(22))
        assert replicas == {0, 1}
        assert makespan_s > 0
    first, second = (Recording.load(tmp_path / f"{rank}.jsonl") for rank in range(2))
    assert first.to_lines() == second.to_lines()
    assert (first.stage, first.mode, first.policy, first.costs_given) == ("predict", "queue", "load_balanced", True)
    assert sum(step.cost or 0.0 for step in first.steps) == sum(1 + i % 3 for i in range(22))
    for policy in (None, "hybrid", "auto"):
        result = replay(first, policy=policy)
        assert result.exactly_once
        assert result.recorded_s == first.makespan_s
        assert result.config.policy == (policy or "load_balanced")


def _bounded(rank: int) -> Any:
    callback = HybridBalanceCallback(config=HybridConfig(recorded_steps=3))
    trainer(2, callback).predict(Echo(), ids(40))
    recording = callback.recording
    assert recording is not None
    return [step.replica for step in recording.steps], recording.steps_left_out


def test_of_a_long_run_the_newest_steps_are_recorded() -> None:
    for replicas, left_out in run_ranks(_bounded, 2):
        assert 1 <= len(replicas) <= 6
        assert len(replicas) + left_out == 20


def _off(rank: int) -> Any:
    callback = HybridBalanceCallback(config=HybridConfig(recorded_steps=0))
    trainer(2, callback).predict(Echo(), ids(12))
    return callback.recording.steps if callback.recording else None


def test_nothing_is_recorded_where_no_step_is_kept() -> None:
    assert run_ranks(_off, 2) == [(), ()]


def _stages(rank: int) -> Any:
    callback = HybridBalanceCallback()
    a_trainer = trainer(2, callback)
    before = callback.recording
    a_trainer.validate(Logs(), [ids(8), ids(12)], verbose=False)
    return (
        before,
        [(r.stage, r.loader_idx, spans(r)[-1][1]) for r in callback.recordings],
        callback.recording.loader_idx,
    )


def test_each_loader_of_a_run_is_recorded() -> None:
    for before, found, last in run_ranks(_stages, 2):
        assert before is None
        assert found == [("validate", 0, 8), ("validate", 1, 12)]
        assert last == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_single_device_shares_nothing_and_records_nothing(workers: int) -> None:
    callback = HybridBalanceCallback()
    trainer(1, callback).predict(Echo(), ids(6, num_workers=workers))
    assert callback.recording is None


def _lockstep(rank: int) -> Any:
    callback = HybridBalanceCallback(mode="lockstep")
    trainer(2, callback).predict(Echo(), ids(21))
    recording = callback.recording
    assert recording is not None
    result = replay(recording)
    return recording.mode, list(itertools.chain(*(range(*span) for span in spans(recording)))), result.format()


def test_a_run_in_lockstep_can_be_run_again_as_a_queue() -> None:
    for mode, positions, report in run_ranks(_lockstep, 2):
        assert mode == "lockstep"
        assert positions == list(range(21))
        assert "in lockstep mode; here it is a queue" in report
