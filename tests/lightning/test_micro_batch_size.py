"""Steps of another size than the loader's batches: results come back as the loader's batches all the same."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch.utils.data import DataLoader

from lightning_hybrid import HybridBalanceCallback
from tests.lightning.scenes import Echo, Ids, Logs, ids, trainer
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


class Sizes(Echo):
    def __init__(self) -> None:
        super().__init__()
        self._sizes: list[int] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self._sizes.append(len(batch))
        return batch


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("size", [1, 3, 5, 8, "auto"])
def test_results_are_the_loaders_batches(size: Any, num_ranks: int, num_workers: int) -> None:
    def rank(_: int) -> Any:
        model, callback = Sizes(), HybridBalanceCallback(micro_batch_size=size)
        out = trainer(num_ranks, callback).predict(model, ids(43, 5, num_workers=num_workers))
        return [batch.tolist() for batch in out], [float(row) for row in callback.rows()], model._sizes

    expected = [[float(i) for i in range(start, min(start + 5, 43))] for start in range(0, 43, 5)]
    for out, rows, sizes in run_ranks(rank, num_ranks, deadline_s=40):
        assert out == expected
        assert rows == list(map(float, range(43)))
        if size != "auto":
            assert max(sizes) <= size
            assert sizes.count(size) >= len(sizes) - 1


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("size", [3, "auto"])
def test_metrics_are_those_of_one_device(size: Any, num_ranks: int) -> None:
    def rank(_: int) -> Any:
        callback = HybridBalanceCallback(micro_batch_size=size)
        return trainer(num_ranks, callback).validate(Logs(), ids(23, 4), verbose=False)[0]

    for found in run_ranks(rank, num_ranks, deadline_s=40):
        assert found["metric"] == pytest.approx(11)
        assert found["count"] == 23
        assert found["mean"] == pytest.approx(11)
        assert found["sum"] == 253


def test_several_cells_are_run_as_one_step_where_the_size_is_found() -> None:
    model = Sizes()
    trainer(1, HybridBalanceCallback(micro_batch_size="auto", max_micro_batch_size=8)).predict(model, ids(64, 8))

    assert set(model._sizes) <= {2, 4, 6, 8}  # a quarter of a batch is the smallest
    assert model._sizes.count(8) >= 3  # it is what the search begins with


def test_batches_of_the_users_own_stay() -> None:
    model = Sizes()
    trainer(1, HybridBalanceCallback(micro_batch_size=3, batch_dependent=True)).predict(model, ids(8, 4))

    assert model._sizes == [4, 4]


def test_outputs_without_rows_are_given_step_by_step() -> None:
    class Scalar(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return torch.as_tensor(batch).sum()

    callback = HybridBalanceCallback(micro_batch_size=3)
    out = trainer(1, callback).predict(Scalar(), ids(8, 4))
    assert list(map(float, out)) == [3, 12, 13]
    assert callback.indices() == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_beside_lightnings_own_search_the_size_that_it_finds_is_the_size_that_fits() -> None:
    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self._modes: set[bool] = set()

        def val_dataloader(self) -> DataLoader[float]:
            return DataLoader(Ids(16), self.batch_size)

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self._modes.add(self.training)
            if len(batch) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.log("count", float(len(batch)), reduce_fx="sum")

    model = Model()
    finder = BatchSizeFinder(mode="power", steps_per_trial=2, init_val=2, max_trials=5)
    runner = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[HybridBalanceCallback(), finder],
    )
    found = runner.validate(model, verbose=False)

    assert model.batch_size == 4
    assert model._modes == {False}
    assert found == [{"count": 16.0}]
