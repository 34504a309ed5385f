"""The command that shows a machine, on scripted GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.probes.nvml_library import ROOT, gpu, slice_of, uuid, write


def probed(script: Path, library: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "NVML_"))}
    return subprocess.run(
        [sys.executable, "-m", "lightning_hybrid", "probe", *options],
        cwd=ROOT,
        env=inherited | {"LD_LIBRARY_PATH": str(library.parent), "NVML_SCRIPT": str(script)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_machine_of_two_gpus_one_of_them_in_slices(nvml: Path, script: Path) -> None:
    write(script, gpu(0, error__nvmlDeviceGetPowerUsage=4), gpu(1, mig=1), slice_of(1, 0), slice_of(1, 1))

    done = probed(script, nvml, CUDA_VISIBLE_DEVICES=f"{uuid(0)},GPU-00000001")

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("host: ")
    assert lines[2].split()[:2] == ["device", "model"]
    assert lines[3].startswith("cuda:0  NVIDIA A100-SXM4-80GB")
    assert lines[4].startswith("cuda:1  NVIDIA A100-SXM4-80GB MIG 1g.10gb  2.0 of 10.0 GiB")
    assert lines[5].startswith("GPU 1   NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    assert "  cuda:0: power_w: not permitted to this user" in lines


def test_json_has_rates_and_reasons(nvml: Path, script: Path) -> None:
    write(script, gpu(0))

    found = json.loads(probed(script, nvml, "--json").stdout)

    (device,) = found["devices"]
    assert found["missing"] is None
    assert (device["index"], device["nvlink_tx_bytes_per_s"], device["energy_j"]) == (0, 0.0, 0.0)
    assert "host_cpu_frac" in found["host"]
    assert device["unknown"]["sm_active_frac"] == "this GPU has no performance monitoring (GPM)"


def test_watching_shows_what_changes_until_it_is_interrupted(nvml: Path, script: Path) -> None:
    write(script, gpu(0, power=100_000))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "NVML_"))}
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_hybrid", "probe", "--json", "--watch", "0.05"],
        cwd=ROOT,
        env=inherited | {"LD_LIBRARY_PATH": str(nvml.parent), "NVML_SCRIPT": str(script)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in the background has its children ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as watching:
        guard = threading.Timer(60, watching.kill)
        guard.start()
        assert watching.stdout is not None
        assert watching.stderr is not None
        first = json.loads(watching.stdout.readline())
        write(script, gpu(0, power=200_000))
        later = next(line for line in watching.stdout if '"power_w":200.0' in line)
        watching.send_signal(2)
        watching.stdout.read()
        code, said = watching.wait(), watching.stderr.read()
        guard.cancel()

    assert first["devices"][0]["power_w"] == 100.0
    assert json.loads(later)["devices"][0]["uuid"] == uuid(0)
    assert (code, said) == (0, "")


def test_a_driver_that_hangs_ends_in_an_answer(nvml: Path, script: Path) -> None:
    write(script, gpu(0), hang__nvmlDeviceGetCount_v2=30)
    code = (
        "from lightning_hybrid.probes.machine import Machine;"
        " machine = Machine(period_s=0.05, deadline_s=0.2); machine.start(); machine.wait(2, 10);"
        " print(machine.missing, machine.read()[1], machine.read()[0].active); machine.stop()"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": str(nvml.parent), "NVML_SCRIPT": str(script)},
        capture_output=True,
        text=True,
        timeout=25,
        check=True,
    )

    assert done.stdout == "NVML does not answer () True\n"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_period_that_makes_no_sense_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_hybrid.cli import main

    assert main(["probe", f"--watch={seconds}"]) == 2
    assert "--watch must be a positive number of seconds, got" in capsys.readouterr().err
