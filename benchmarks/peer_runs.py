"""One run of one system, ours or a peer, on the same emulated devices: measured alike, and checked.

For every system the loop begins with the first step anywhere, after all workers are ready, and ends when the results
are where the system brings them by default: on every rank (ours, Accelerate) or at the driver (pool, Ray).
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.devices import equal_share_s, ideal_s
from benchmarks.emulation import CostedRows, EmulatedDevice, Multiply, loader, replay
from benchmarks.peer_device import Job, PeerDevice, StartLine, Step
from benchmarks.peer_ray import BEST_SETTINGS, RayServer
from benchmarks.trainers import quiet_trainer
from tests.ranks import run_ranks

System = Literal["ours", "pool", "ray", "accelerate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRun:
    """One run as measured."""

    ideal_s: float
    """Below which no schedule can end the last step."""
    loop_s: float
    """From the first step's begin to the results being there."""
    steps_s: float
    """From the first step's begin to the last step's end."""
    steps: tuple[int, ...]
    """Of each device."""
    valid: bool
    """Every batch came back, once, with the bits that one device computes; no device ran two steps at a time."""


def measure(system: System, case: Case, ray: RayServer | None = None) -> PeerRun:
    """Runs ``system`` on a case, on fresh workers.

    Raises:
        RankFailed, RuntimeError: a worker failed, or the run took far longer than dealing out equal shares.
    """
    dataset = CostedRows(case.workload)
    deadline_s = 60.0 + 3.0 * equal_share_s(case.curves, case.workload.batch_costs())
    with tempfile.TemporaryDirectory(prefix="peers_") as folder:
        job = job_of(case, dataset, Path(folder))
        if system == "ours":
            return _ours(case, job, dataset, deadline_s)
        if system == "ray":
            if ray is None:
                raise RuntimeError("Ray did not start")
            job.save()
            steps, done_s = ray.run(job.folder, BEST_SETTINGS[case.name], deadline_s)
        elif system == "pool":
            [(steps, done_s)] = run_ranks(_pool, 1, job, deadline_s=deadline_s)
        else:
            ranks = run_ranks(_accelerate_rank, len(case.curves), job, deadline_s=deadline_s)
            steps, done_s = ranks[0][0], max(done_s for _, done_s in ranks)
    return _run_of(case, dataset, steps, done_s)


def job_of(case: Case, dataset: CostedRows, folder: Path) -> Job:
    multiply = Multiply()
    layers = (multiply.square, multiply.head)
    return Job(
        folder=folder,
        curves=case.curves,
        batches=tuple(case.workload.batches()),
        costs=tuple(case.workload.batch_costs()),
        rows=np.asarray(dataset.rows.numpy()),
        weights=tuple((layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in layers),
    )


def _run_of(case: Case, dataset: CostedRows, steps: Sequence[Step], done_s: float) -> PeerRun:
    ordered = sorted(steps, key=lambda step: step.index)
    first_s = min(step.start_s for step in steps)
    once = [step.index for step in ordered] == list(range(len(case.workload.batches())))
    return PeerRun(
        ideal_s=ideal_s(case.curves, case.workload.batch_costs()),
        loop_s=done_s - first_s,
        steps_s=max(step.end_s for step in steps) - first_s,
        steps=tuple(sum(step.device == device for step in steps) for device in range(len(case.curves))),
        valid=once and _same_bits(case, dataset, [step.outputs for step in ordered]) and not overlap(steps),
    )


def overlap(steps: Sequence[Step]) -> bool:
    """Whether a device began a step before the end of another: it would be faster than it is said to be."""
    ordered = sorted(steps, key=lambda step: (step.device, step.start_s))
    return any(a.device == b.device and b.start_s < a.end_s for a, b in pairwise(ordered))


def _same_bits(case: Case, dataset: CostedRows, outputs: Sequence[NDArray[np.float32]]) -> bool:
    return np.concatenate(outputs).tobytes() == replay(dataset, case.workload.batches()).tobytes()


# ----- ours ----------------------------------------------------------------------------------------------------------


class _LinedUpDevice(EmulatedDevice):
    """A device whose speeds count from the first step anywhere, as they do for the peers."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job.curves[rank])
        self.line = StartLine(job.folder, len(job.curves))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.first_step_s is None:
            self.origin_s = self.line.origin_s()
        return super().predict_step(batch, batch_idx)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankReport:
    first_step_s: float | None
    last_step_s: float | None
    done_s: float
    steps: int
    outputs: list[NDArray[np.float32]] | None


def _ours(case: Case, job: Job, dataset: CostedRows, deadline_s: float) -> PeerRun:
    reports: list[_RankReport] = run_ranks(_trainer_rank, len(case.curves), case, job, dataset, deadline_s=deadline_s)
    first_s = min(report.first_step_s for report in reports if report.first_step_s is not None)
    outputs = reports[0].outputs
    return PeerRun(
        ideal_s=ideal_s(case.curves, case.workload.batch_costs()),
        loop_s=max(report.done_s for report in reports) - first_s,
        steps_s=max(report.last_step_s for report in reports if report.last_step_s is not None) - first_s,
        steps=tuple(report.steps for report in reports),
        valid=outputs is not None and _same_bits(case, dataset, outputs),
    )


def _trainer_rank(rank: int, case: Case, job: Job, dataset: CostedRows) -> _RankReport:
    from lightning_hybrid import HybridBalanceCallback

    model = _LinedUpDevice(job, rank)
    trainer = quiet_trainer(HybridBalanceCallback(mode="queue"), devices=len(case.curves), strategy="ddp")
    predictions: Any = trainer.predict(model, loader(dataset, case.workload, case.num_workers))
    done_s = time.monotonic()
    return _RankReport(
        first_step_s=model.first_step_s,
        last_step_s=model.last_step_s,
        done_s=done_s,
        steps=model.num_steps,
        outputs=[batch.numpy() for batch in predictions] if rank == 0 else None,
    )


# ----- Accelerate ----------------------------------------------------------------------------------------------------


def _accelerate_rank(rank: int, job: Job) -> tuple[list[Step], float]:
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState(cpu=True)
    device = PeerDevice(job, rank)
    state.wait_for_everyone()
    with state.split_between_processes(list(range(len(job.batches)))) as indices:
        steps = [device.step(index) for index in indices]
    gathered: list[Step] = gather_object(steps)
    done_s = time.monotonic()
    return (gathered if rank == 0 else []), done_s


# ----- a pool of processes -------------------------------------------------------------------------------------------

_worker: PeerDevice
"""The device of this worker: a pool keeps what its initialiser makes in a global."""


def _pool(_: int, job: Job) -> tuple[list[Step], float]:
    fork = multiprocessing.get_context("fork")
    with fork.Pool(len(job.curves), initializer=_become_device, initargs=(job,)) as pool:
        StartLine(job.folder, len(job.curves)).wait_for_all()
        steps = list(pool.imap_unordered(_pool_step, range(len(job.batches)), chunksize=1))
        done_s = time.monotonic()
    return steps, done_s


def _become_device(job: Job) -> None:
    global _worker
    line = StartLine(job.folder, len(job.curves))
    _worker = PeerDevice(job, line.take_device())
    line.wait_for_all()


def _pool_step(index: int) -> Step:
    return _worker.step(index)
