"""``on_error="skip"``: samples that cannot be run are left out, told, and everything else is as it would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hybrid import HybridBalanceCallback
from lightning_hybrid.core.errors import TooManyErrors
from tests.lightning.scenes import Echo, Ids, Logs, ids, trainer
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


class Picky(Echo):
    """Its step raises for batches that hold one of the bad samples."""

    def __init__(self, bad: set[float]) -> None:
        super().__init__()
        self._bad = bad
        self._sizes: list[int] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self._sizes.append(len(batch))
        for value in batch.tolist():
            if value in self._bad:
                raise ValueError(f"cannot read {value:.0f}")
        return batch


def test_the_step_is_bisected_to_the_sample_that_raises() -> None:
    model, callback = Picky({5, 19}), HybridBalanceCallback(on_error="skip")
    out = trainer(1, callback).predict(model, ids(32, 16))

    assert out[0].tolist() == [i for i in range(16) if i != 5]
    assert out[1].tolist() == [i for i in range(16, 32) if i != 19]
    assert [(f.index, f.where, f.error, f.replica) for f in callback.failures] == [
        (5, "step", "ValueError: cannot read 5", 0),
        (19, "step", "ValueError: cannot read 19", 0),
    ]
    assert [None if row is None else float(row) for row in callback.rows()] == [
        None if i in (5, 19) else float(i) for i in range(32)
    ]
    assert len(model._sizes) <= 2 * (1 + 2 * 4)


def test_a_batch_of_bad_samples_alone_has_no_output() -> None:
    callback = HybridBalanceCallback(on_error="skip")
    out = trainer(1, callback).predict(Picky({4, 5, 6, 7}), ids(12, 4))

    assert [None if batch is None else batch.tolist() for batch in out] == [[0, 1, 2, 3], None, [8, 9, 10, 11]]


def test_ranks_hold_the_same_results_and_failures() -> None:
    bad = {3.0, 10.0, 11.0, 29.0}

    def rank(_: int) -> Any:
        callback = HybridBalanceCallback(on_error="skip")
        out = trainer(2, callback).predict(Picky(bad), ids(32, 4))
        rows = [None if row is None else float(row) for row in callback.rows()]
        return [batch.tolist() for batch in out], rows, sorted(f.index for f in callback.failures)

    good = [float(i) for i in range(32) if i not in bad]
    for out, rows, failed in run_ranks(rank, 2, deadline_s=30):
        assert [value for batch in out for value in batch] == good
        assert rows == [None if i in bad else float(i) for i in range(32)]
        assert failed == sorted(bad)


def test_more_failures_than_allowed_end_the_run_with_a_summary() -> None:
    callback = HybridBalanceCallback(on_error="skip", max_errors=2)
    with pytest.raises(TooManyErrors, match=r"3 samples could not be run, max_errors=2; here: sample 1 of loader 0"):
        trainer(1, callback).predict(Picky({1, 5, 9, 13}), ids(16, 4))


def test_a_step_that_always_raises_is_a_fault_of_the_program() -> None:
    with pytest.raises(TooManyErrors, match="none of the first 16 samples could be run"):
        trainer(1, HybridBalanceCallback(on_error="skip")).predict(Picky(set(map(float, range(64)))), ids(64, 8))


class PickyLogs(Logs):
    def __init__(self, bad: set[float], **settings: Any) -> None:
        super().__init__(**settings)
        self._bad = bad

    def _step(self, batch: torch.Tensor) -> None:
        super()._step(batch)
        if self._bad & set(batch.tolist()):
            raise ValueError("bad")


def test_metrics_are_those_of_the_good_samples() -> None:
    bad = {2.0, 9.0, 10.0}
    found = trainer(1, HybridBalanceCallback(on_error="skip")).test(PickyLogs(bad), ids(16, 4), verbose=False)[0]
    good = [float(i) for i in range(16) if i not in bad]

    assert found["count"] == len(good)
    assert found["metric"] == pytest.approx(sum(good) / len(good))
    assert found["sum"] == sum(good)
    assert found["max"], found["min"] == (15.0, 0.0)


# --- loading ---------------------------------------------------------------------------------------------------------


class Corrupt(Ids):
    """Some samples cannot be read, and some not be put into a batch."""

    def __init__(self, n: int, unreadable: set[int] = frozenset(), odd: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__(n)
        self.unreadable, self.odd = unreadable, odd

    def __getitem__(self, i: int) -> Any:
        if i in self.unreadable:
            raise OSError(f"file {i} is truncated")
        return [float(i)] * 2 if i in self.odd else float(i)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_samples_that_cannot_be_loaded_are_left_out(num_workers: int, num_ranks: int) -> None:
    def rank(_: int) -> Any:
        data = Corrupt(24, unreadable={1, 7, 8, 9, 10, 11}, odd={17})
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=num_workers)
        callback, seen = HybridBalanceCallback(on_error="skip"), Echo()
        out = trainer(num_ranks, callback).predict(seen, loader)
        rows = [None if row is None else float(row) for row in callback.rows()]
        failed = sorted((f.index, f.where) for f in callback.failures)
        return [None if batch is None else batch.tolist() for batch in out], rows, failed

    bad = {1, 7, 8, 9, 10, 11, 17}
    for out, rows, failed in run_ranks(rank, num_ranks, deadline_s=40):
        # a batch of which nothing is left was no step; where the whole is put together it has an entry all the same
        assert [batch for batch in out if batch is not None] == [
            [i for i in range(start, start + 4) if i not in bad] for start in range(0, 24, 4) if start != 8
        ]
        assert rows == [None if i in bad else float(i) for i in range(24)]
        assert failed == [(i, "collate" if i == 17 else "dataset") for i in sorted(bad)]
