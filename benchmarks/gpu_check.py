"""What only a GPU can prove, in less than five minutes: readings, which GPU is which, timing, running out of memory.

The last line is one JSON object; on a machine without a GPU it has ``"gpu": null``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.trainers import quiet_trainer
from lightning_hybrid import HybridBalanceCallback
from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.hardware import peak_flops_per_s
from lightning_hybrid.probes.torch_device import probe_for
from lightning_hybrid.runtime.oom import is_out_of_memory
from lightning_hybrid.runtime.timing import EventTimer, timer_for
from lightning_hybrid.runtime.work import Work

IN_FLIGHT = 2
_STEPS = 30
_SIZE = 4096
_FEATURES, _TOO_MANY, _LIMIT_BYTES = 256, 16384, 2 * 2**30
"""A step of so many samples needs twice the memory that the process is let have."""
_PERIOD_S = 1.1
"""Time between two readings, which rates and shares of time need."""

Device = torch.device


def fields(device: Device) -> dict[str, Any]:
    """Every reading of the device under load, and the reason of each that there is none of."""
    probe = probe_for(device)
    probe.read()
    _busy(device, _PERIOD_S)
    began_s = time.thread_time()
    state = probe.read()
    return {
        "read_cpu_ms": 1e3 * (time.thread_time() - began_s),
        "state": state.to_dict() | {"unknown": None},
        "unknown": dict(state.unknown),
        "peak_bf16_flops_per_s": peak_flops_per_s(state.name, "bfloat16"),
        "memory_agrees": _memory_agrees(state, device),
    }


def mapping(device: Device) -> dict[str, Any]:
    """Whether ``cuda:0`` is the GPU that CUDA names, before and after CUDA has started, by several settings."""
    uuid = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    number = probe_for(device).read().nvml_index
    settings = {"uuid": uuid, "beginning of uuid": uuid[:12], "number": str(number), "none": ""}
    found = {name: _asked(value) for name, value in settings.items()}
    right = {"none": [None, None]}
    return {
        "mapping": found,
        "mapping_is_right": all(seen == right.get(name, [uuid, uuid]) for name, seen in found.items()),
    }


def timing(device: Device) -> dict[str, Any]:
    """Seconds of a step by CUDA events within the in-flight window, over seconds by waiting for each step."""
    step = _step(device)
    step()
    torch.cuda.synchronize(device)
    waited_s = []
    for _ in range(_STEPS):
        began_s = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        waited_s.append(time.perf_counter() - began_s)
    timer = timer_for(device, IN_FLIGHT)
    timed_s, ahead = [], []
    for number in range(_STEPS):
        timer.start()
        step()
        timer.stop(Work(number, number + 1), 0.0)
        timed_s += [seconds for _, seconds, _ in timer.finished()]
        ahead.append(number + 1 - len(timed_s))
    timed_s += [seconds for _, seconds, _ in timer.finished(drain=True)]
    assert isinstance(timer, EventTimer)
    return {
        "event_over_synchronised": median(timed_s) / median(waited_s),
        "step_ms": 1e3 * median(waited_s),
        "steps_in_flight": max(ahead),
        "steps_timed": len(timed_s),
        "blocked_frac": timer.blocked_s / sum(timed_s),
    }


def out_of_memory(device: Device) -> dict[str, Any]:
    """Whether a real lack of memory is known for one, and memory can be had again afterwards."""
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        torch.empty(2 * total, dtype=torch.uint8, device=device)
    except RuntimeError as err:
        found = {"out_of_memory_type": type(err).__name__, "out_of_memory_is_known": is_out_of_memory(err)}
    else:
        found = {"out_of_memory_type": None, "out_of_memory_is_known": None}
    return found | {"works_after_out_of_memory": bool(torch.ones(8, device=device).sum().item() == 8)}


class Wide(pl.LightningModule):
    """Needs 256 KiB for each sample of a step, and gives one number for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(_FEATURES, 65536)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The mean activation of every sample."""
        return self.layer(batch).mean(dim=1)


def recovery(device: Device) -> dict[str, Any]:
    """Whether `predict` survives a real lack of memory, with batches that need twice as much and with ``auto``."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(_LIMIT_BYTES / total, device)
    try:
        samples = torch.randn(4 * _TOO_MANY, _FEATURES)
        expected = predicted(device, samples, 1024)[0]
        found, failures = predicted(device, samples, _TOO_MANY)
        torch.cuda.reset_peak_memory_stats(device)
        sized, auto_failures = predicted(device, samples, 1024, micro_batch_size="auto", max_micro_batch_size=_TOO_MANY)
        peak_bytes = torch.cuda.max_memory_allocated(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return {
        "recovery_is_right": torch.allclose(found, expected, atol=1e-4) and torch.allclose(sized, expected, atol=1e-4),
        "recovery_failures": failures,
        "auto_failures": auto_failures,
        "auto_peak_over_limit": peak_bytes / _LIMIT_BYTES,
    }


def predicted(device: Device, samples: torch.Tensor, batch_size: int, **settings: Any) -> tuple[torch.Tensor, int]:
    """The predictions of `Wide` for ``samples``, and how often a step ran out of memory."""
    callback = HybridBalanceCallback(**settings)
    trainer = quiet_trainer(callback, accelerator="gpu" if device.type == "cuda" else device.type)
    outputs: Any = trainer.predict(Wide(), DataLoader(Rows(samples), batch_size))
    assert callback.statistics is not None
    return torch.cat(outputs), callback.statistics.replicas[0].memory_failures


class Rows(Dataset[torch.Tensor]):
    """The rows of a tensor."""

    def __init__(self, samples: torch.Tensor) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._samples[index]


CHECKS: tuple[Callable[[Device], dict[str, Any]], ...] = (fields, mapping, timing, out_of_memory, recovery)


def collect(device: Device) -> dict[str, Any]:
    """What every check found; one that raised has its error in place of its figures."""
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    failed = {}
    for check in CHECKS:
        try:
            found |= check(device)
        except Exception as err:  # what a check meets on real hardware is what it is for
            failed[check.__name__] = f"{type(err).__name__}: {err}"
    failed |= {name: "false" for name, value in found.items() if value is False}
    return found | {"failed": failed}


def uuids() -> list[str | None]:
    """UUID of ``cuda:0`` as this package finds it, before CUDA has started in this process and after."""
    probe = probe_for(torch.device("cuda", 0))
    before = probe.read().uuid
    if torch.cuda.is_available():
        torch.cuda.init()
    return [before, probe.read().uuid]


def _asked(visible: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", "import json; from benchmarks.gpu_check import uuids; print(json.dumps(uuids()))"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def _memory_agrees(state: DeviceState, device: Device) -> bool | None:
    """Whether NVML's memory in use is CUDA's, to 5 % of the total."""
    if state.memory_used_bytes is None or state.memory_total_bytes is None:
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = state.memory_driver_reserved_bytes or 0
    return abs(state.memory_used_bytes + reserved - (total - free)) < 0.05 * total


def _step(device: Device) -> Callable[[], object]:
    matrix = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16)

    def step() -> object:
        product = matrix
        for _ in range(20):
            product = torch.mm(product, matrix)
        return product

    return step


def _busy(device: Device, seconds: float) -> None:
    step, until_s = _step(device), time.monotonic() + seconds
    while time.monotonic() < until_s:
        step()
        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all checks; 1 if one of them raised."""
    argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__).parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false, so there is nothing to check here")
        print(json.dumps({"gpu": None}))
        return 0
    logging.getLogger("lightning_hybrid").setLevel(logging.ERROR)
    started_s = time.monotonic()
    found = collect(torch.device("cuda", 0))
    found["duration_s"] = round(time.monotonic() - started_s, 1)
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps(found, default=str))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
