"""What it costs to know the state of every device, on scripted GPUs.

README.md beside this file says what each figure means.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import probes_runs
from benchmarks.command import parse_parts, show
from benchmarks.report import Target
from lightning_hybrid.core.hardware import known_names
from tests.probes.nvml_library import compiled, gpu, write

NUM_GPUS = 8
TARGETS = (
    Target(figure="monitor_core_frac", at_most=0.005),
    Target(figure="snapshot_read_us", at_most=20),
    Target(figure="step_overhead_frac", at_most=0.01),
    Target(figure="nvml_calls_on_step_thread", at_most=0),
    Target(figure="samples_arrived_frac", at_least=0.9),
    Target(figure="known_device_names", at_least=40),
)
PARTS = ("monitoring", "sharing", "stepping", "calls")


class _Machine:
    """A machine whose NVML is a scripted library."""

    def __init__(self, directory: Path) -> None:
        self.library, self.script = compiled(directory), directory / "gpus.txt"
        self.noted = directory / "calls.txt"
        write(self.script, *(gpu(number) for number in range(NUM_GPUS)))

    def run(self, function: Callable[..., dict[str, Any]], *arguments: Any, notes: bool = False) -> dict[str, Any]:
        """What ``function`` returns in a forked process of this machine."""
        with multiprocessing.get_context("fork").Pool(1, self._enter, (notes,)) as pool:
            return pool.apply(function, arguments)

    def _enter(self, notes: bool) -> None:
        os.environ |= {"NVML_SCRIPT": str(self.script), "NVML_FIXED": "1"}
        if notes:  # to note every call costs as much as the call
            os.environ["NVML_CALLS"] = str(self.noted)
        ctypes.CDLL(str(self.library))  # before nvidia-ml-py asks for a library of that name


def collect(parts: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Runs the parts and names what they gave; a figure that was not measured is ``None``."""
    found: dict[str, Any] = {target.figure: None for target in TARGETS}
    found["known_device_names"] = len(set(known_names()))
    with tempfile.TemporaryDirectory() as directory:
        machine = _Machine(Path(directory))
        if "monitoring" in parts:
            found |= machine.run(probes_runs.monitoring, NUM_GPUS, 5.0 if quick else 20.0)
        if "sharing" in parts:
            found |= machine.run(probes_runs.sharing, NUM_GPUS, 0.2, 10 if quick else 100)
        if "stepping" in parts:
            found |= machine.run(probes_runs.stepping, machine.library, 100 if quick else 300, 3 if quick else 15)
        if "calls" in parts:
            found |= machine.run(probes_runs.calls_on_step_thread, machine.library, machine.noted, 400, notes=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a question to NVML came from the thread that steps."""
    options = parse_parts("probes", __doc__, PARTS, argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_hybrid"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.pop("LIGHTNING_HYBRID", None)
    started_s = time.monotonic()
    figures = collect(options.parts, quick=options.quick)
    show(figures, TARGETS, options, started_s)
    return 1 if figures["nvml_calls_on_step_thread"] else 0


if __name__ == "__main__":
    sys.exit(main())
