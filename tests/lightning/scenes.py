"""Small datasets, modules and Trainers that the cases are told with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_hybrid import HybridBalanceCallback


class Ids(Dataset[float]):
    """Sample i is ``float(i)``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> float:
        return float(i)


class Stream(IterableDataset[float]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[float]:
        return iter(map(float, range(self.n)))


class Echo(pl.LightningModule):
    """Predicts its batch."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch


class Logs(pl.LightningModule):
    """Logs every kind of value in validate and test, and keeps what a user would keep himself."""

    def __init__(self, sync_dist: bool = True) -> None:
        super().__init__()
        self.sync_dist = sync_dist
        self.mean, self.count = torchmetrics.MeanMetric(), torchmetrics.SumMetric()
        self.all = torchmetrics.CatMetric()
        self.seen: list[float] = []
        self.hooks: list[float] = []

    def _step(self, batch: torch.Tensor) -> None:
        batch = batch.float()
        self.seen += batch.tolist()
        self.mean.update(batch)
        self.count.update(torch.ones_like(batch))
        self.all.update(batch)
        self.log("metric", self.mean)
        self.log("count", self.count)
        self.log("mean", batch.mean(), sync_dist=self.sync_dist)
        for name in ("sum", "max", "min"):
            self.log(name, getattr(batch, name)(), reduce_fx=name, sync_dist=self.sync_dist)
        self.log("by_two", batch.mean(), batch_size=2, sync_dist=self.sync_dist)

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._step(batch)

    def test_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._step(batch)

    def on_validation_batch_end(self, outputs: Any, batch: torch.Tensor, *_: Any) -> None:
        self.hooks += batch.tolist()
        self.log("hook", batch.float().sum(), reduce_fx="sum", on_step=False, on_epoch=True)


def ids(n: int, batch_size: int = 2, **kwargs: Any) -> DataLoader[float]:
    return DataLoader(Ids(n), batch_size=batch_size, **kwargs)


def trainer(world: int = 2, *callbacks: Any, package: Any = pl, **kwargs: Any) -> Any:
    """A CPU Trainer without side effects; with a `HybridBalanceCallback` where none is given."""
    if not any(isinstance(callback, HybridBalanceCallback) for callback in callbacks):
        callbacks = (HybridBalanceCallback(), *callbacks)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "strategy": "ddp" if world > 1 else "auto",
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
    }
    return package.Trainer(**(defaults | kwargs))


def flat(batches: Sequence[torch.Tensor]) -> list[float]:
    return torch.cat(list(batches)).tolist() if batches else []


def balance_of(a_trainer: Any) -> HybridBalanceCallback:
    return next(c for c in a_trainer.callbacks if isinstance(c, HybridBalanceCallback))


@contextmanager
def messages() -> Iterator[list[str]]:
    """What the package says through its loggers inside."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_hybrid")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
