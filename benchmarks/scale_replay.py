"""Real runs of the Trainer on emulated devices, run again in virtual time."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import build_cases
from benchmarks.devices import SpeedCurve
from benchmarks.emulation import CostedRows, EmulatedDevice, loader
from benchmarks.trainers import quiet_trainer
from lightning_hybrid import HybridBalanceCallback, replay
from tests.ranks import run_ranks

_CASES = ("slow_rank", "midrun", "heavy_tail")


def _recorded(rank: int, curves: tuple[SpeedCurve, ...], workload: Any, dataset: CostedRows) -> Any:
    callback = HybridBalanceCallback()
    trainer = quiet_trainer(callback, devices=len(curves), strategy="ddp")
    trainer.predict(EmulatedDevice(curves[rank]), loader(dataset, workload, 0))
    return callback.recording if rank == 0 else None


def replay_errors(repeats: int) -> list[float]:
    """Simulated over measured makespan, less 1, of each case and repetition."""
    cases = build_cases(steps=60, seed=0, repeats=1, short_repeats=1)
    errors = []
    for name in _CASES:
        case = cases[name]
        dataset = CostedRows(case.workload)
        for _ in range(repeats):
            recording = run_ranks(_recorded, len(case.curves), case.curves, case.workload, dataset, deadline_s=120)[0]
            result = replay(recording)
            assert result.recorded_s is not None
            errors.append(result.makespan_s / result.recorded_s - 1.0)
    return errors
