"""What the probes benchmark measures, each in a process whose NVML is scripted."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_hybrid import DeviceStateMonitor
from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.probes.base import DeviceProbe
from lightning_hybrid.probes.host import HostProbe
from lightning_hybrid.probes.sampler import Sampler
from lightning_hybrid.runtime.state_exchange import StateExchange
from lightning_hybrid.runtime.store import InProcessStore
from tests.lightning.devices import Model, Scripted, monitored
from tests.lightning.scenes import ids
from tests.probes.nvml_library import calls
from tests.probes.scenes import GpuProbe

HOST_S, DEVICE_S = 0.001, 0.004
"""A step of 5 ms: products on the host, as the launching of kernels, then the wait for an emulated device. Products
alone vary by several per cent from run to run on a shared host."""
_DEADLINE_S = 60.0


class _ThreadClock:
    """CPU time of the thread that calls it, from its first call to its last, and how often it did."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, *_: object) -> None:
        self.times_s.append(time.thread_time())

    @property
    def cpu_s_per_call(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


class _All:
    """Reads the host and all GPUs, one after the other."""

    def __init__(self, num_gpus: int) -> None:
        self._probes = [HostProbe(), *(GpuProbe(place) for place in range(num_gpus))]

    def read(self) -> DeviceState:
        states = [probe.read() for probe in self._probes]
        return states[0]


def monitoring(num_gpus: int, span_s: float) -> dict[str, Any]:
    """CPU time of what reads the host and all GPUs once a second, and how many readings came.

    By one thread; by a thread for each, all at the same time, as the probe command does it; and by a thread for each at
    a time of its own, as ranks do, where nothing of the one's is left in the caches for the next.
    """
    gpus = [GpuProbe(place) for place in range(num_gpus)]
    one, arrived_frac = _read_for([_All(num_gpus)], span_s, 0.0)
    together, _ = _read_for([HostProbe(), *gpus], span_s, 0.0)
    apart, _ = _read_for([HostProbe(), *gpus], span_s, 1 / (num_gpus + 1))
    return {
        "monitor_core_frac": one,
        "monitor_together_core_frac": together,
        "monitor_apart_core_frac": apart,
        "samples_arrived_frac": arrived_frac,
    }


def _read_for(probes: Sequence[DeviceProbe], span_s: float, pause_s: float) -> tuple[float, float]:
    """CPU time per second of a sampler for each probe, and the readings that came over those that were due."""
    samplers = [Sampler(probe, period_s=1.0) for probe in probes]
    clocks = [_ThreadClock() for _ in probes]
    pause = threading.Event()
    for sampler, clock in zip(samplers, clocks, strict=True):
        sampler.after.append(clock)
        sampler.start()
        pause.wait(pause_s)
    began = [len(clock.times_s) for clock in clocks]
    pause.wait(span_s)
    arrived = sum(len(clock.times_s) - before for clock, before in zip(clocks, began, strict=True))
    for sampler in samplers:
        sampler.stop()
    return sum(clock.cpu_s_per_call for clock in clocks), arrived / (len(clocks) * span_s)


def sharing(num_ranks: int, period_s: float, times: int) -> dict[str, Any]:
    """What a hook's read of all ranks' newest states costs, and what telling and learning them does at 1 Hz."""
    samplers = [Sampler(GpuProbe(rank), kind="cuda", period_s=period_s) for rank in range(num_ranks)]
    store = InProcessStore()
    exchanges = [
        StateExchange(store, rank, num_ranks, sampler.read, period_s=period_s) for rank, sampler in enumerate(samplers)
    ]
    clocks = [_ThreadClock() for _ in exchanges]
    for sampler, exchange, clock in zip(samplers, exchanges, clocks, strict=True):
        exchange.after.append(clock)
        sampler.start()
        exchange.start()
    _wait_until(lambda: len(exchanges[0].states()) == num_ranks)
    _wait_until(lambda: min(len(clock.times_s) for clock in clocks) > times)
    reads_us = [1e6 * _seconds(exchanges[0].states) for _ in range(2000)]
    for sampler, exchange in zip(samplers, exchanges, strict=True):
        exchange.stop()
        sampler.stop()
    return {
        "snapshot_read_us": median(reads_us),
        "tell_core_frac": median(clock.cpu_s_per_call for clock in clocks[1:]),
        "learn_core_frac": clocks[0].cpu_s_per_call,
    }


def stepping(library: Path, steps: int, pairs: int) -> dict[str, Any]:
    """Loop time with the monitor over loop time without, run in turns, for steps of 5 ms."""
    matrix = torch.randn(256, 256)
    work = _times_for(matrix)
    wall, cpu, fastest_s = [], [], {True: math.inf, False: math.inf}
    for pair in range(pairs):
        took = {
            is_monitored: _loop(library if is_monitored else None, matrix, work, steps)
            for is_monitored in ((True, False) if pair % 2 else (False, True))
        }
        wall.append(took[True][0] / took[False][0] - 1)
        cpu.append(took[True][1] / took[False][1] - 1)
        fastest_s = {arm: min(best_s, took[arm][0]) for arm, best_s in fastest_s.items()}
    return {
        "step_overhead_frac": median(wall),
        "step_fastest_overhead_frac": fastest_s[True] / fastest_s[False] - 1,
        "step_cpu_overhead_frac": median(cpu),
        "step_overheads_frac": wall,
    }


def calls_on_step_thread(library: Path, noted: Path, steps: int) -> dict[str, Any]:
    """How many questions to NVML came from the thread that steps, and how many there were."""
    matrix = torch.randn(256, 256)
    _loop(library, matrix, _times_for(matrix), steps)
    threads = [thread for thread, _, _ in calls(noted)]
    return {"nvml_calls_on_step_thread": threads.count(threading.get_native_id()), "nvml_calls": len(threads)}


def _loop(library: Path | None, matrix: torch.Tensor, times: int, steps: int) -> tuple[float, float]:
    """Seconds from the first step to the last, and the process's CPU time in them."""
    began_s: list[tuple[float, float]] = []

    def during(module: Any, batch_idx: int) -> None:
        began_s.append((time.perf_counter(), time.process_time()))
        _work(matrix, times)

    with tempfile.TemporaryDirectory() as directory:
        monitor = None if library is None else DeviceStateMonitor(probe=Scripted(library))
        trainer = monitored(1, monitor, logger=TensorBoardLogger(directory), log_every_n_steps=50)
        trainer.predict(Model(during), ids(steps, 1), return_predictions=False)
    (first_s, first_cpu_s), (last_s, last_cpu_s) = began_s[0], began_s[-1]
    return last_s - first_s, last_cpu_s - first_cpu_s


def _work(matrix: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)
    time.sleep(DEVICE_S)


def _times_for(matrix: torch.Tensor) -> int:
    """How many products take as long as the host's part of a step."""
    took_s = [_seconds(lambda: torch.mm(matrix, matrix)) for _ in range(400)]
    return max(1, round(HOST_S / median(took_s[100:])))


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _wait_until(ready: Callable[[], bool]) -> None:
    until_s, pause = time.monotonic() + _DEADLINE_S, threading.Event()
    while not ready():
        if time.monotonic() > until_s:
            raise TimeoutError("the states of all ranks did not arrive")
        pause.wait(0.01)
