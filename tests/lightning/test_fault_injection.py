"""A thousand failures at random, of memory and of samples: every good sample counts once, and metrics are right."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid import HybridBalanceCallback
from tests.lightning.scenes import Echo, Ids, Logs, trainer
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

NUM_SAMPLES, BATCH_SIZE = 4000, 8
SEED = 7


def _bad_samples(seed: int) -> frozenset[float]:
    rng = random.Random(seed)
    return frozenset(float(i) for i in range(NUM_SAMPLES) if rng.random() < 0.12)


class Faults:
    """Raises at random: out of memory for more than one sample, and always for a bad sample; counts both."""

    def __init__(self, seed: int) -> None:
        self._rng, self.bad = random.Random(seed), _bad_samples(SEED)
        self.num_failed = 0

    def strike(self, batch: torch.Tensor) -> None:
        if len(batch) > 1 and self._rng.random() < 0.02:
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.bad & set(batch.tolist()):
            self.num_failed += 1
            raise ValueError("a bad sample")


class FaultyLogs(Logs):
    def _step(self, batch: torch.Tensor) -> None:
        if not hasattr(self, "_faults"):
            self._faults = Faults(self.global_rank)
        if self._faults._rng.random() < 0.5:
            self._faults.strike(batch)
            super()._step(batch)
        else:
            super()._step(batch)
            self._faults.strike(batch)


class FaultyEcho(Echo):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if not hasattr(self, "_faults"):
            self._faults = Faults(self.global_rank)
        self._faults.strike(batch)
        return batch * 2


class Unreadable(Ids):
    """A few more samples cannot be read."""

    def __getitem__(self, i: int) -> float:
        if i % 97 == 0:
            raise OSError(f"sample {i} is truncated")
        return super().__getitem__(i)


def _good() -> list[float]:
    bad = _bad_samples(SEED)
    return [float(i) for i in range(NUM_SAMPLES) if i not in bad and i % 97]


def test_metrics_are_those_of_the_good_samples() -> None:
    def rank(_: int) -> Any:
        model, callback = FaultyLogs(), HybridBalanceCallback(on_error="skip")
        loader = DataLoader(Unreadable(NUM_SAMPLES), BATCH_SIZE)
        found = trainer(2, callback).validate(model, loader, verbose=False)[0]
        return found, sorted(failure.index for failure in callback.failures), model._faults.num_failed, model.seen

    (found, failed, num_first, seen_first), (second, failed_second, num_second, seen_second) = run_ranks(
        rank, 2, deadline_s=100
    )
    good = _good()
    print(f"seed {SEED}: {num_first + num_second} failed attempts")
    assert num_first + num_second >= 1000
    assert sorted(seen_first + seen_second) == good
    assert failed == failed_second == sorted(set(range(NUM_SAMPLES)) - set(map(int, good)))
    assert found == second
    assert found["count"] == len(good)
    assert found["metric"] == pytest.approx(sum(good) / len(good), rel=1e-5)
    assert found["sum"] == pytest.approx(sum(good), rel=1e-5)
    assert (found["min"], found["max"]) == (good[0], good[-1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_are_those_of_the_good_samples(num_workers: int) -> None:
    def rank(_: int) -> Any:
        model, callback = FaultyEcho(), HybridBalanceCallback(on_error="skip")
        loader = DataLoader(Unreadable(NUM_SAMPLES), BATCH_SIZE, num_workers=num_workers)
        out = trainer(2, callback).predict(model, loader)
        rows = [None if row is None else float(row) for row in callback.rows()]
        return [value for batch in out if batch is not None for value in batch.tolist()], rows

    good = _good()
    kept = set(good)
    for values, rows in run_ranks(rank, 2, deadline_s=100):
        assert values == [2 * value for value in good]
        assert rows == [2.0 * i if i in kept else None for i in range(NUM_SAMPLES)]
