"""NVML without a GPU: a C library that answers from a text file, for the real nvidia-ml-py to load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("nvml.c")
NAME = "libnvidia-ml.so.1"

GIB = 2**30


def compiled(directory: Path, *, without: Sequence[str] = ()) -> Path:
    """The library in ``directory``, as that of a driver which lacks the functions ``without``."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: gcc or cc is needed to build the scripted NVML")
    directory.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{NAME}", str(SOURCE)]
    if without:
        hidden = directory / "hidden.map"
        hidden.write_text("{ local: " + " ".join(f"{name};" for name in without) + " };")
        command.append(f"-Wl,--version-script={hidden}")
    subprocess.run([*command, "-o", str(directory / NAME)], check=True, timeout=60)
    return directory / NAME


def gpu(number: int, **changes: Any) -> dict[str, Any]:
    """The lines of a busy A100; ``None`` takes one out. In names ``__`` stands for a dot."""
    lines: dict[str, Any] = {
        "name": "NVIDIA A100-SXM4-80GB",
        "uuid": uuid(number),
        "pci": f"00000000:{number + 1:02X}:00.0",
        "capability": "8.0",
        "memory.total": 80 * GIB,
        "memory.used": 20 * GIB,
        "memory.reserved": GIB // 2,
        "processes": f"self:{8 * GIB} 4242:{12 * GIB}",
        "utilization": 90,
        "memory_utilization": 40,
        "clock.sm": 1200 + number,
        "clock.sm_max": 1410,
        "clock.memory": 1593,
        "clock.memory_max": 1593,
        "reasons": "0x4",
        "pstate": 0,
        "temperature": 60 + number,
        "slowdown": 92,
        "power": 250_000,
        "power_limit": 400_000,
        "energy": 1_000_000,
        "pcie.generation": 4,
        "pcie.generation_max": 4,
        "pcie.width": 16,
        "pcie.width_max": 16,
        "pcie.tx": 1000,
        "pcie.rx": 2000,
        "pcie.replays": 0,
        "nvlinks": "1" * 12,
        "field.82": 70,
        "field.138": 1000,
        "field.139": 2000,
        "ecc.corrected": 3,
        "ecc.uncorrected": 0,
        "remapped": "1 0 0 0",
        "xid": "none",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return {f"{number}.{name}": value for name, value in lines.items() if value is not None}


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-d72c-4106-c12f-20bd9faed9f6"


def slice_of(number: int, place: int, **changes: Any) -> dict[str, Any]:
    """The lines of a MIG slice of a GPU, whose own lines need ``mig=1``."""
    lines: dict[str, Any] = {
        "name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "uuid": f"MIG-{number:04x}{place:04x}-e6c0-5b4e-9a63-7a7e5d5c1e6a",
        "gi": 7 + place,
        "ci": 0,
        "memory.total": 10 * GIB,
        "memory.used": 2 * GIB,
        "processes": f"self:{GIB}",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return {f"{number}.mig.{place}.{name}": value for name, value in lines.items() if value is not None}


def write(path: Path, *parts: Mapping[str, Any], **common: Any) -> None:
    """Replaces the script at once with the lines of ``parts``; the number of GPUs is counted."""
    lines: dict[str, Any] = {"driver": "570.86.15"}
    for part in parts:
        lines |= part
    lines["count"] = len({key.partition(".")[0] for key in lines if key[0].isdigit()})
    lines |= {name.replace("__", "."): value for name, value in common.items()}
    new = path.with_suffix(".new")
    new.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
    new.replace(path)


def calls(path: Path) -> list[tuple[int, str, int]]:
    """Thread, function and GPU of every call that was noted in a file, in order."""
    lines = (line.split() for line in path.read_text().splitlines())
    return [(int(thread), function, int(gpu)) for thread, function, gpu in lines]


def played(
    scene: Callable[..., Any],
    script: Path,
    *arguments: Any,
    library: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> Any:
    """What ``scene`` returns, through JSON, in a process of its own whose NVML is ``library``."""
    code = (
        f"import json, sys; from {scene.__module__} import {scene.__name__} as scene;"
        " print('\\n' + json.dumps(scene(*json.loads(sys.argv[1]))))"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "NVML_"))}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([str(script), *arguments])],
        cwd=ROOT,
        env=inherited
        | {"LD_LIBRARY_PATH": str(library.parent), "NVML_SCRIPT": str(script)}
        | {"NVML_CALLS": str(script.with_suffix(".calls"))}
        | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
