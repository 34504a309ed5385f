"""Drivers that fail, hang, vanish or are forked."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid.core.device_state import DeviceState
from tests.probes import scenes
from tests.probes.nvml_library import calls, gpu, uuid, write

Play = Callable[..., Any]
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, UNKNOWN = 3, 4, 6, 999

FAILING = {
    "nvmlDeviceGetUtilizationRates": ["utilization_frac", "memory_utilization_frac"],
    "nvmlDeviceGetTemperatureThreshold": ["temperature_slowdown_celsius"],
    "nvmlDeviceGetPowerUsage": ["power_w"],
    "nvmlDeviceGetTotalEnergyConsumption": ["energy_j"],
    "nvmlDeviceGetPciInfo_v3": ["pci_bus_id"],
    "nvmlDeviceGetPerformanceState": ["performance_state"],
    "nvmlDeviceGetRemappedRows": [
        "remapped_rows_corrected",
        "remapped_rows_uncorrected",
        "remapping_failed",
        "remapping_pending",
    ],
    "nvmlDeviceGetNvLinkState": ["num_nvlinks", "num_nvlinks_active"],
    "nvmlDeviceRegisterEvents": ["xid_events"],
    "nvmlSystemGetDriverVersion": ["driver_version"],
}


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN])
def test_a_query_that_fails_leaves_only_its_fields_unknown(play: Play, script: Path, code: int) -> None:
    errors = {f"error__{function}": code for function in FAILING}
    write(script, gpu(0), gpu(1), **errors)

    state = DeviceState.from_dict(play(scenes.read, [0], 3)[0])

    gpm = {"sm_active_frac", "tensor_active_frac", "dram_active_frac"}
    assert set(state.unknown) - gpm == {name for names in FAILING.values() for name in names}
    assert all(getattr(state, name) is None for name in state.unknown)
    assert state.active is True
    asked = Counter(function for _, function, _ in calls(script.with_suffix(".calls")))
    times = 3 if code == UNKNOWN else 1
    assert {function: asked[function] for function in FAILING} == dict.fromkeys(FAILING, times)
    assert asked["nvmlInitWithFlags"] == 1


def test_an_error_that_passes_is_forgotten(play: Play, script: Path) -> None:
    write(script, gpu(0), gpu(1))

    states = play(scenes.read_and_change, [{"error__nvmlDeviceGetPowerUsage": UNKNOWN}, {}])

    assert [state.get("power_w") for state in states] == [250.0, None, 250.0]
    assert states[1]["unknown"]["power_w"] == "NVML failed without saying why"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (9, "the NVIDIA driver is not loaded"),
        (12, "NVML's library is not installed"),
        (18, "driver and NVML library are of different versions"),
        (999, "NVML failed without saying why"),
    ],
)
def test_nvml_that_cannot_start_is_said_once(play: Play, script: Path, code: int, reason: str) -> None:
    write(script, gpu(0), gpu(1), error__nvmlInitWithFlags=code)

    said, state = play(scenes.warn, 3)

    assert said == [f"the state of NVIDIA GPUs is not known here: {reason}"]
    assert state["unknown"]["power_w"] == reason
    assert "active" not in state
    assert len(calls(script.with_suffix(".calls"))) == 1


@pytest.mark.parametrize("setting", ["GPU-0000000", "GPU-ffffffff", "MIG-ffffffff", "7", "nonsense"])
def test_a_device_that_cannot_be_told_is_said_once_per_device(play: Play, script: Path, setting: str) -> None:
    write(script, gpu(0), gpu(1))

    said, state = play(scenes.warn, 9, environment={"CUDA_VISIBLE_DEVICES": setting})

    assert [text.partition(": ")[0] for text in said] == ["the state of a GPU is not known here"] * 2
    assert all(f"CUDA_VISIBLE_DEVICES={setting!r}" in text for text in said)
    assert "memory_total_bytes" not in state
    assert state["unknown"]["memory_total_bytes"].startswith("cuda:0 is no GPU that NVML shows")


def test_no_library_at_all(play: Play, script: Path, tmp_path: Path) -> None:
    said, state = play(scenes.warn, 2, library=tmp_path / "nothing" / "libnvidia-ml.so.1")

    if "unknown" not in state:
        pytest.skip("this machine has an NVIDIA driver of its own")
    assert said == ["the state of NVIDIA GPUs is not known here: NVML's library is not installed"]
    assert "power_w" not in state


def test_no_binding_at_all(play: Play, script: Path) -> None:
    state = play(scenes.no_binding)

    assert state["unknown"]["power_w"].startswith("nvidia-ml-py cannot be imported")


@pytest.mark.parametrize(
    ("binding", "reason"),
    [
        ("", "the module pynvml that is installed here is not nvidia-ml-py"),
        (
            "class NVMLError(Exception): pass\ndef nvmlInit(): raise OSError('no such device')",
            "OSError: no such device",
        ),
        ("class NVMLError(Exception): pass\ndef nvmlInit(): raise NVMLError", "NVML failed without saying why"),
        ("raise ImportError('half installed')", "nvidia-ml-py cannot be imported: half installed"),
    ],
)
def test_another_binding_of_that_name(play: Play, script: Path, tmp_path: Path, binding: str, reason: str) -> None:
    (tmp_path / "pynvml.py").write_text(binding)

    said, state = play(scenes.warn, 2, environment={"PYTHONPATH": str(tmp_path)})

    assert len(said) == 1
    assert said[0].endswith(reason)
    assert state["unknown"]["power_w"].endswith(reason)


def test_a_lost_gpu_says_so_once_and_the_other_goes_on(play: Play, script: Path) -> None:
    write(script, gpu(0), gpu(1))

    found = play(scenes.lose_and_find)

    lost, other = found["during"]
    assert found["before"][0]["active"] is True
    assert (lost["active"], lost["error"]) == (False, "the GPU is lost: it fell off the bus")
    assert (lost["uuid"], lost["name"]) == (uuid(0), "NVIDIA A100-SXM4-80GB")
    assert lost["unknown"]["power_w"] == "the GPU is lost: it fell off the bus"
    assert lost["xid_events"] == [79]
    assert "memory_used_bytes" not in lost
    assert (other["active"], other["power_w"]) == (True, 250.0)
    assert found["said"] == ["a GPU can no longer be read: the GPU is lost: it fell off the bus"]


def test_a_gpu_that_comes_back_is_read_again_but_its_energy_is_not_known(play: Play, script: Path) -> None:
    write(script, gpu(0), gpu(1))

    back, other = play(scenes.lose_and_find)["after"]

    assert (back["active"], back["power_w"]) == (True, 250.0)
    assert "error" not in back
    assert back["unknown"]["energy_j"] == "the device was lost since the first reading"
    assert other["energy_j"] == 0.0


def test_somebody_elses_shutdown_is_made_up_for(play: Play, script: Path) -> None:
    write(script, gpu(0))

    assert play(scenes.shut_down_by_another) == [250.0, 250.0, 250.0]
    asked = Counter(function for _, function, _ in calls(script.with_suffix(".calls")))
    assert asked["nvmlInitWithFlags"] == 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_start_nvml_themselves(play: Play, script: Path, method: str) -> None:
    write(script, gpu(0), gpu(1))

    assert play(scenes.in_children, method) == [uuid(0), uuid(0), uuid(1), uuid(0)]
    asked = Counter(function for _, function, _ in calls(script.with_suffix(".calls")))
    assert asked["nvmlInitWithFlags"] == 3


def test_a_child_forked_beside_a_sampler_starts_it_again(play: Play, script: Path) -> None:
    write(script, gpu(0))

    assert play(scenes.fork_while_sampling) == ["not read yet", uuid(0), uuid(0)]


def test_a_query_that_hangs_blocks_nobody_who_reads_the_snapshot(play: Play, script: Path) -> None:
    write(script, gpu(0), gpu(1))

    found = play(scenes.hang, 10)

    state = found["state"]
    assert state["error"] == "the driver does not answer"
    assert "active" not in state
    assert "power_w" not in state
    assert state["uuid"] == uuid(0)
    assert found["read_s"] < 0.5
    assert found["stop_s"] < 1.0


def test_a_query_that_hung_is_read_again_once_it_answers(play: Play, script: Path) -> None:
    write(script, gpu(0), gpu(1))

    assert play(scenes.hang_and_recover) == ["the driver does not answer", None, True]


def test_no_call_comes_from_the_thread_that_steps(play: Play, script: Path) -> None:
    write(script, gpu(0))

    stepping, readings = play(scenes.steps, 2000)

    noted = calls(script.with_suffix(".calls"))
    assert readings >= 5
    assert len(noted) > 5 * 20
    assert {thread for thread, _, _ in noted} != {stepping}
    assert stepping not in {thread for thread, _, _ in noted}
    assert os.getpid() not in {thread for thread, _, _ in noted}


def test_a_container_that_sees_one_of_eight(play: Play, script: Path) -> None:
    denied = {f"{n}.error.nvmlDeviceGetHandleByIndex_v2": NO_PERMISSION for n in range(8) if n != 5}
    write(script, *(gpu(n) for n in range(8)), denied)

    seen, beyond = play(scenes.cuda, [0, 1])

    assert (seen["uuid"], seen["nvml_index"]) == (uuid(5), 5)
    assert "uuid" not in beyond
    assert beyond["unknown"]["uuid"] == "cuda:1 is no GPU that NVML shows: there are 1 GPUs"


def test_a_lost_gpu_does_not_shift_the_numbers_of_the_others(play: Play, script: Path) -> None:
    gpus = [gpu(n) for n in range(3)]
    write(script, *gpus)

    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    before, after, late = play(scenes.cuda_after_a_change, gpus, 0, environment=order)

    assert (before, after) == (uuid(1), uuid(1))
    assert late["uuid"] == uuid(1)
