"""Recordings in files, and how one is put together from what the replicas have kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.recording import RecordedStep
from lightning_hybrid.runtime.recording import Recording, recording_of
from lightning_hybrid.runtime.spec import EpochSpec


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    steps = tuple(RecordedStep(n % 2, n, n + 1, 0.5 * n, 0.25) for n in range(6))
    recording = Recording(stage="test", mode="queue", num_replicas=2, steps=steps, loader_idx=1)
    recording.save(tmp_path / "run.jsonl")
    loaded = Recording.load(str(tmp_path / "run.jsonl"))
    assert isinstance(loaded, Recording)
    assert (loaded.steps, loaded.stage, loaded.loader_idx) == (steps, "test", 1)


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(PlanError, match=r"notes\.txt holds no recording: line 1 must be JSON, got 'hello'"):
        Recording.load(tmp_path / "notes.txt")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(PlanError, match=r"picture\.png holds no recording"):
        Recording.load(tmp_path / "picture.png")


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "none.jsonl")


def test_a_recording_is_put_together_from_what_all_replicas_kept() -> None:
    grid = Grid.sequential(8, 2)
    spec = EpochSpec(
        stage="predict", loader_idx=0, epoch=1, grid=grid, probe_rounds=2, costs=Costs(compute=np.array([4.0, 3, 2, 1]))
    )
    kept = {
        1: ([RecordedStep(1, 2, 4, 1000.5, 1.0, 0.0, 3.0), RecordedStep(1, 6, 8, 1002.0, 1.0, 0.0, 1.0)], 0),
        0: ([RecordedStep(0, 4, 6, 1001.0, 1.0, 0.0, 2.0)], 1),
    }
    recording = recording_of(spec, "queue", HybridConfig(policy="hybrid"), kept)
    assert [(step.replica, step.start, step.start_s) for step in recording.steps] == [(0, 4, 0.0), (1, 6, 1.0)]
    assert recording.steps_left_out == 2
    assert (recording.stage, recording.mode, recording.num_replicas) == ("predict", "queue", 2)
    assert (recording.costs_given, recording.first_rounds, recording.policy) == (True, 2, "hybrid")
