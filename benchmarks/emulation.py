"""The model and the data of the balance benchmarks: real arithmetic, emulated time.

A step multiplies for real, so that a batch cut at another place can give other bits, and then waits until its
emulated device would be done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.devices import SpeedCurve, Workload

WIDTH = 384


class CostedRows(Dataset[tuple[Tensor, float]]):
    """Rows of random numbers, each with the cost of its sample."""

    def __init__(self, workload: Workload) -> None:
        drawn = np.random.default_rng(workload.seed + 1).standard_normal((workload.num_samples, WIDTH))
        self.rows = torch.from_numpy(drawn.astype(np.float32))
        self.costs = workload.sample_costs().tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return self.rows[index], self.costs[index]


class Multiply(torch.nn.Module):
    """A linear layer, and a head of one output beside it.

    The square layer alone gives the same bits for most batch sizes on most CPUs; the head is computed by another
    kernel, whose order of summation depends on the number of rows. Without it a wrong grid could pass unseen.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.square = torch.nn.Linear(WIDTH, WIDTH)
            self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """``(batch, WIDTH)`` to ``(batch, WIDTH + 1)``."""
        return torch.cat((self.square(rows), self.head(rows)), dim=1)


class EmulatedDevice(pl.LightningModule):
    """A model whose step takes as long as it would on a device with the speed of ``curve``.

    Records when its own steps began and ended, by the monotonic clock, which is the same for all processes of a host.
    """

    def __init__(self, curve: SpeedCurve) -> None:
        super().__init__()
        self.multiply = Multiply()
        self.curve = curve
        self.origin_s = 0.0
        self.first_step_s: float | None = None
        self.last_step_s: float | None = None
        self.num_steps = 0
        self.num_samples = 0

    def on_predict_start(self) -> None:
        """Agrees with the other ranks on the time from which speeds count."""
        self.trainer.strategy.barrier()
        self.origin_s = self.trainer.strategy.broadcast(time.monotonic())

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """One step: multiply, then wait for what is left of its time."""
        start_s = time.monotonic()
        if self.first_step_s is None:
            self.first_step_s = start_s
        rows, costs = batch
        outputs: Tensor = self.multiply(rows)
        end_s = self.origin_s + self.curve.finish_s(start_s - self.origin_s, float(costs.sum()))
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self.num_steps += 1
        self.num_samples += len(rows)
        self.last_step_s = time.monotonic()
        return outputs


def loader(dataset: CostedRows, workload: Workload, num_workers: int) -> DataLoader[tuple[Tensor, float]]:
    """The loader that every run uses, stock and balanced."""
    return DataLoader(dataset, batch_size=workload.batch_size, num_workers=num_workers)


def replay(dataset: CostedRows, cells: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    """What one device computes for the ``(start, stop)`` cells, one after the other and without waiting."""
    multiply = Multiply().eval()
    with torch.inference_mode():
        # clone: a batch that a loader collates starts at an address of its own
        outputs = [multiply(dataset.rows[start:stop].clone()) for start, stop in cells]
    return np.asarray(torch.cat(outputs).numpy())
