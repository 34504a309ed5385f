"""One emulated device as the worker of any peer: the step of `emulation.EmulatedDevice` without a Trainer.

Ray starts fresh interpreters, so nothing that is imported here takes seconds beyond torch itself. Workers meet in a
folder, because each peer starts them in its own way; the monotonic clock is the same for all processes of a host.
"""

from __future__ import annotations

import os
import pickle
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.devices import SpeedCurve

POLL_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """All that a worker has to know: it has the data at hand, and is sent nothing but the index of a batch.

    ``rows`` is ``(samples, width)``; ``weights`` holds weight and bias of layers whose outputs stand side by side.
    """

    folder: Path
    curves: tuple[SpeedCurve, ...]
    batches: tuple[tuple[int, int], ...]
    costs: tuple[float, ...]
    rows: NDArray[np.float32]
    weights: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]

    def save(self) -> None:
        """Writes the job into its folder."""
        (self.folder / "job.pickle").write_bytes(pickle.dumps(self))


def load_job(folder: Path) -> Job:
    """The job that was saved into ``folder``."""
    job = pickle.loads((folder / "job.pickle").read_bytes())
    assert isinstance(job, Job)
    return job


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One batch as a device ran it; times by the monotonic clock."""

    index: int
    device: int
    start_s: float
    end_s: float
    outputs: NDArray[np.float32]


class StartLine:
    """Hands out devices, holds workers back until all are there, and keeps the time from which speeds count."""

    def __init__(self, folder: Path, num_devices: int) -> None:
        self.folder = folder
        self.num_devices = num_devices

    def take_device(self) -> int:
        """A device that no other worker has.

        Raises:
            RuntimeError: all are taken.
        """
        for device in range(self.num_devices):
            with suppress(FileExistsError):
                (self.folder / f"device{device}").touch(exist_ok=False)
                return device
        raise RuntimeError(f"a worker too many: all {self.num_devices} devices are taken")

    def wait_for_all(self) -> None:
        """Returns when every device is taken."""
        while len(list(self.folder.glob("device*"))) < self.num_devices:
            time.sleep(POLL_S)

    def origin_s(self) -> float:
        """When this was first called by any worker, which is when the first step began."""
        mark, mine = self.folder / "origin", self.folder / f"origin.{os.getpid()}"
        if not mark.exists():
            mine.write_text(repr(time.monotonic()))
            with suppress(FileExistsError):
                os.link(mine, mark)
        return float(mark.read_text())


class PeerDevice:
    """Device number ``device`` of ``job``."""

    def __init__(self, job: Job, device: int) -> None:
        self.job = job
        self.device = device
        self.rows = torch.from_numpy(job.rows)
        self.layers = [(torch.from_numpy(weight), torch.from_numpy(bias)) for weight, bias in job.weights]
        self.line = StartLine(job.folder, len(job.curves))
        self.origin_s: float | None = None

    def step(self, index: int) -> Step:
        """Multiplies the batch, then waits for what is left of its time."""
        if self.origin_s is None:
            self.origin_s = self.line.origin_s()
        start_s = time.monotonic()
        outputs = self._multiply(*self.job.batches[index])
        curve = self.job.curves[self.device]
        end_s = self.origin_s + curve.finish_s(start_s - self.origin_s, self.job.costs[index])
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(left_s)
        return Step(index=index, device=self.device, start_s=start_s, end_s=time.monotonic(), outputs=outputs)

    def _multiply(self, start: int, stop: int) -> NDArray[np.float32]:
        # clone: a batch that a loader collates starts at an address of its own
        batch = self.rows[start:stop].clone()
        with torch.inference_mode():
            layers = [torch.nn.functional.linear(batch, weight, bias) for weight, bias in self.layers]
            return np.asarray(torch.cat(layers, dim=1).numpy())
