"""Trainers whose ranks read scripted GPUs, and what they logged."""

from __future__ import annotations

import csv
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_hybrid import DeviceStateMonitor
from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.probes.base import with_values
from lightning_hybrid.probes.nvml_device import NvmlReader
from lightning_hybrid.probes.nvml_gpus import gpus
from lightning_hybrid.probes.values import Unknown
from lightning_hybrid.probes.visible import Seen

DEADLINE_S = 20.0
STAGES = ("fit", "validate", "test", "predict")


class Scripted:
    """Reads the GPU of this rank's number from the scripted NVML."""

    def __init__(self, library: Path) -> None:
        self.library = library

    def __call__(self, _: torch.device) -> Scripted:
        ctypes.CDLL(str(self.library))  # before nvidia-ml-py asks for a library of that name
        place = int(os.environ.get("LOCAL_RANK", "0"))

        def find(nvml: Any) -> Any:
            listed = gpus(nvml)
            return listed if isinstance(listed, Unknown) else Seen(listed[place])

        self.reader = NvmlReader(find)
        return self

    def read(self) -> DeviceState:
        return with_values(DeviceState(kind="cuda", timestamp_s=time.time()), self.reader.read())

    def close(self) -> None:
        self.reader.close()


class Counting:
    """A device that says how often it was read."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self, _: torch.device) -> Counting:
        return self

    def read(self) -> DeviceState:
        self.readings += 1
        return DeviceState(kind="cuda", active=True, power_w=float(self.readings), timestamp_s=float(self.readings))


def _nothing(module: Any, batch_idx: int) -> None:
    pass


class Model(pl.LightningModule):
    """Runs in every stage; in each step it calls ``during``."""

    def __init__(self, during: Callable[[Any, int], None] = _nothing) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.during = during

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.during(self, batch_idx)
        return self.layer(batch.float().unsqueeze(1)).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.during(self, batch_idx)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.during(self, batch_idx)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.during(self, batch_idx)
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def monitored(world: int, monitor: DeviceStateMonitor | None, *callbacks: Any, package: Any = pl, **kwargs: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "strategy": "ddp" if world > 1 else "auto",
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "callbacks": [each for each in (monitor, *callbacks) if each is not None],
    }
    return package.Trainer(**(defaults | kwargs))


def run(trainer: Any, stage: str, *arguments: Any) -> None:
    quiet = {"verbose": False} if stage in ("validate", "test") else {}
    getattr(trainer, stage)(*arguments, **quiet)


def wait_until(ready: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not ready():
        assert time.monotonic() < until_s, "it did not happen"
        pause.wait(0.002)


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_hybrid")]


def csv_logger(path: Path) -> CSVLogger:
    return CSVLogger(path, name="csv", version="run")


def tensorboard(path: Path) -> TensorBoardLogger:
    return TensorBoardLogger(path, name="tensorboard", version="run")


def csv_columns(path: Path) -> dict[str, list[tuple[int, float]]]:
    """For each key its steps and values."""
    file = path / "csv" / "run" / "metrics.csv"
    columns: dict[str, list[tuple[int, float]]] = {}
    for row in csv.DictReader(file.read_text().splitlines()) if file.exists() else ():
        for key, value in row.items():
            if key != "step" and value:
                columns.setdefault(key, []).append((int(row["step"]), float(value)))
    return columns


def tensorboard_columns(path: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def steps_of(columns: dict[str, list[tuple[int, float]]], key: str) -> list[int]:
    return [step for step, _ in columns[key]]
