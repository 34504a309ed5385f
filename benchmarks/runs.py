"""One run of a Trainer on freshly forked ranks, measured and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.devices import SpeedCurve, Workload, equal_share_s, ideal_s
from benchmarks.emulation import CostedRows, EmulatedDevice, loader, replay
from benchmarks.trainers import quiet_trainer
from tests.ranks import run_ranks

Mode = Literal["queue", "lockstep", "auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What to run: the devices, the work, and who deals it out (``mode=None`` is the stock Trainer)."""

    curves: tuple[SpeedCurve, ...]
    workload: Workload
    num_workers: int = 0
    mode: Mode | None = None
    repetition: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GridCheck:
    """Whether a balanced run gave what one device gives for the same grid.

    ``partition``: the plan's cells cover every sample once. ``exactly_once``: the ranks ran as many samples as the plan
    gives them, no more. ``same_bits``: the gathered results equal the replay, on every rank. ``recut``: the cells are
    not the loader's batches. ``loader_batches``: `predict` returned one tensor per batch of the loader, of its size.
    ``other_grid_differs``: a replay of another grid gives other bits, so the check can fail.
    """

    partition: bool
    exactly_once: bool
    same_bits: bool
    recut: bool
    loader_batches: bool
    other_grid_differs: bool

    @property
    def passed(self) -> bool:
        """True when nothing is wrong with the results."""
        return self.partition and self.exactly_once and self.same_bits


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """One run as measured. ``loop_s`` is from the first rank's first step to the last rank's last."""

    loop_s: float
    ideal_s: float
    samples: tuple[int, ...]
    steps: tuple[int, ...]
    ends_s: tuple[float, ...]
    """End of each rank's last step, from the start of the loop."""
    overhead_us_per_step: float | None = None
    check: GridCheck | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankReport:
    origin_s: float
    first_step_s: float | None
    last_step_s: float | None
    steps: int
    samples: int
    cells: tuple[tuple[int, int, int], ...] = ()
    overheads: tuple[tuple[float, int], ...] = ()
    batch_sizes: tuple[int, ...] = ()
    digest: str = ""
    outputs: NDArray[np.float32] | None = None


def measure(spec: RunSpec) -> RunResult:
    """Runs ``spec`` on fresh ranks.

    Raises:
        RankFailed: a rank raised, died, or the run took far longer than dealing out equal shares.
    """
    dataset = CostedRows(spec.workload)
    costs = spec.workload.batch_costs()
    deadline_s = 60.0 + 3.0 * equal_share_s(spec.curves, costs)
    reports: list[_RankReport] = run_ranks(_rank, len(spec.curves), spec, dataset, deadline_s=deadline_s)
    first_s = min(report.first_step_s for report in reports if report.first_step_s is not None)
    ends_s = [report.last_step_s - first_s for report in reports if report.last_step_s is not None]
    overheads = [seconds / steps * 1e6 for seconds, steps in reports[0].overheads if steps]
    return RunResult(
        loop_s=max(ends_s),
        ideal_s=ideal_s(spec.curves, costs, start_s=first_s - reports[0].origin_s),
        samples=tuple(report.samples for report in reports),
        steps=tuple(report.steps for report in reports),
        ends_s=tuple(ends_s),
        overhead_us_per_step=max(overheads, default=None),
        check=None if spec.mode is None else _check(spec, dataset, reports),
    )


def _rank(rank: int, spec: RunSpec, dataset: CostedRows) -> _RankReport:
    model = EmulatedDevice(spec.curves[rank])
    callback = None if spec.mode is None else _balance_callback(spec.mode)
    callbacks = [] if callback is None else [callback]
    trainer = quiet_trainer(*callbacks, devices=len(spec.curves), strategy="ddp")
    predictions: Any = trainer.predict(model, loader(dataset, spec.workload, spec.num_workers))
    report = _RankReport(
        origin_s=model.origin_s,
        first_step_s=model.first_step_s,
        last_step_s=model.last_step_s,
        steps=model.num_steps,
        samples=model.num_samples,
    )
    if callback is None:
        return report
    outputs = np.ascontiguousarray(torch.cat(predictions).numpy())
    return replace(
        report,
        cells=tuple((int(replica), int(start), int(stop)) for replica, start, stop in callback.plan.cells),
        overheads=tuple((record.overhead_s, record.steps) for record in callback.statistics.replicas),
        batch_sizes=tuple(len(batch) for batch in predictions),
        digest=hashlib.sha256(outputs.tobytes()).hexdigest(),
        outputs=outputs if rank == 0 else None,
    )


def _balance_callback(mode: Mode) -> Any:
    # here, not at the top: the stock half of a benchmark runs without the package
    from lightning_hybrid import HybridBalanceCallback

    return HybridBalanceCallback(mode=mode)


def _check(spec: RunSpec, dataset: CostedRows, reports: Sequence[_RankReport]) -> GridCheck:
    planned = reports[0].cells
    grid = [(start, stop) for _, start, stop in planned]
    batches = spec.workload.batches()
    partition = is_partition(grid, spec.workload.num_samples)
    dealt = [sum(stop - start for owner, start, stop in planned if owner == rank) for rank in range(len(reports))]
    outputs = reports[0].outputs
    assert outputs is not None
    expected = replay(dataset, grid) if partition else None
    other = [(at, at + 1) for at in range(spec.workload.num_samples)] if grid == batches else batches
    return GridCheck(
        partition=partition and all(report.cells == planned for report in reports),
        exactly_once=dealt == [report.samples for report in reports],
        same_bits=expected is not None
        and outputs.shape == expected.shape
        and outputs.tobytes() == expected.tobytes()
        and len({report.digest for report in reports}) == 1,
        recut=grid != batches,
        loader_batches=all(list(report.batch_sizes) == [stop - start for start, stop in batches] for report in reports),
        other_grid_differs=expected is not None and expected.tobytes() != replay(dataset, other).tobytes(),
    )


def is_partition(grid: Sequence[tuple[int, int]], num_samples: int) -> bool:
    """Whether the cells, in order, cover ``0 .. num_samples`` without gap or overlap.

    >>> is_partition([(0, 4), (4, 6)], 6), is_partition([(0, 4), (3, 6)], 6), is_partition([(0, 4)], 6)
    (True, False, False)
    """
    edges = [0, *(stop for _, stop in grid)]
    starts = [*(start for start, _ in grid), num_samples]
    return edges == starts and all(start < stop for start, stop in grid)
