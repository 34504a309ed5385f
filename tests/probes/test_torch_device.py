from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.probes.base import FakeProbe
from lightning_hybrid.probes.host import HostProbe
from lightning_hybrid.probes.torch_device import Readings, TorchDeviceProbe, probe_for
from lightning_hybrid.probes.values import Unknown

HOST = DeviceState(kind="cpu", host_cpu_frac=0.5, host_memory_used_bytes=70, process_memory_bytes=7, timestamp_s=12.5)
CUDA_1 = torch.device("cuda", 1)


def probe_of(module: Any, device: torch.device = CUDA_1, readings: Readings | None = None) -> TorchDeviceProbe:
    return TorchDeviceProbe(
        device,
        module=module,
        host=FakeProbe([HOST]),
        readings=Readings() if readings is None else readings,
    )


class ScriptedNvml:
    """Stands where `NvmlReader` does: readings by turns."""

    def __init__(self, *readings: dict[str, Any]) -> None:
        self._readings = list(readings)
        self.forgotten = 0

    def read(self) -> dict[str, Any]:
        return dict(self._readings.pop(0))

    def forget(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        self._readings = []


def nvidia(module: Any, *readings: dict[str, Any]) -> tuple[TorchDeviceProbe, ScriptedNvml]:
    nvml: Any = ScriptedNvml(*readings)
    probe = TorchDeviceProbe(
        CUDA_1, module=module, is_nvidia=True, host=FakeProbe([HOST]), readings=Readings(), nvml=nvml
    )
    return probe, nvml


def cuda(**changes: Any) -> SimpleNamespace:
    functions: dict[str, Any] = {
        "is_initialized": lambda: True,
        "mem_get_info": lambda device: (30, 80),
        "memory_allocated": lambda device: 20,
        "utilization": lambda device: 75,
        "get_device_name": lambda device: f"NVIDIA L40S #{device.index}",
    }
    return SimpleNamespace(**(functions | changes))


def test_a_cuda_device_is_read_with_its_host() -> None:
    assert probe_of(cuda()).read() == DeviceState(
        kind="cuda",
        index=1,
        active=True,
        name="NVIDIA L40S #1",
        memory_used_bytes=50,
        memory_free_bytes=30,
        memory_total_bytes=80,
        memory_allocated_bytes=20,
        utilization_frac=0.75,
        host_cpu_frac=0.5,
        host_memory_used_bytes=70,
        process_memory_bytes=7,
        timestamp_s=12.5,
    )


def test_a_device_that_the_process_has_not_used_is_not_woken_up() -> None:
    def wake(device: torch.device) -> None:
        raise AssertionError("the probe made a context")

    sleeping = cuda(is_initialized=lambda: False, mem_get_info=wake, memory_allocated=wake, get_device_name=wake)

    state = probe_of(sleeping).read()

    assert replace(state, unknown={}) == DeviceState(
        kind="cuda", index=1, host_cpu_frac=0.5, host_memory_used_bytes=70, process_memory_bytes=7, timestamp_s=12.5
    )
    assert state.unknown["memory_allocated_bytes"] == "this process has not used the device"


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("no pynvml"), RuntimeError("driver"), AssertionError("no CUDA"), OSError("lib")]
)
def test_utilization_that_raises_is_unknown_warned_of_once_and_not_asked_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[torch.device] = []

    def utilization(device: torch.device) -> int:
        asked.append(device)
        raise error

    readings = Readings()
    with caplog.at_level(logging.WARNING):
        states = [
            probe_of(cuda(utilization=utilization), readings=readings).read(),
            probe_of(cuda(utilization=utilization), readings=readings).read(),
        ]

    assert [state.utilization_frac for state in states] == [None, None]
    assert [state.memory_used_bytes for state in states] == [50, 50]
    assert asked == [CUDA_1]
    assert [record.getMessage() for record in caplog.records] == [
        f"torch.cuda.utilization is not known here: {type(error).__name__}: {error}"
    ]


def test_mps_knows_what_this_process_allocated() -> None:
    mps = SimpleNamespace(
        current_allocated_memory=lambda: 20, driver_allocated_memory=lambda: 25, recommended_max_memory=lambda: 70
    )

    state = probe_of(mps, torch.device("mps")).read()

    assert (state.kind, state.memory_allocated_bytes, state.memory_used_bytes) == ("mps", 20, None)
    assert (state.memory_reserved_bytes, state.memory_total_bytes, state.active) == (25, 70, True)


def test_an_old_xpu_module_has_no_utilization() -> None:
    xpu = cuda()
    del xpu.utilization

    state = probe_of(xpu, torch.device("xpu", 0)).read()

    assert (state.kind, state.memory_used_bytes, state.utilization_frac) == ("xpu", 50, None)


def test_sensors_of_amd_and_intel_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    rocm = cuda(
        memory_usage=lambda device: 30,
        temperature=lambda device: 61.6,
        power_draw=lambda device: 350,
        clock_rate=lambda device: 1700,
        memory_reserved=lambda device: 25,
    )

    state = probe_of(rocm).read()

    assert (state.utilization_frac, state.memory_utilization_frac) == (0.75, 0.3)
    assert (state.temperature_celsius, state.power_w, state.sm_clock_mhz) == (62, 350, 1700)
    assert state.memory_reserved_bytes == 25


def test_zero_is_how_torch_says_that_power_and_clock_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")

    state = probe_of(cuda(power_draw=lambda device: 0, clock_rate=lambda device: 0)).read()

    assert (state.power_w, state.sm_clock_mhz) == (None, None)
    assert {"power_w", "sm_clock_mhz"} <= set(state.unknown)


def test_nvml_comes_first_and_torch_fills_what_it_does_not_know() -> None:
    read = {"name": "NVIDIA H200", "memory_used_bytes": 60, "memory_total_bytes": 90, "memory_free_bytes": 30}
    unsupported = dict.fromkeys(read, Unknown("not supported")) | {"power_w": Unknown("not permitted"), "active": True}
    asked: list[torch.device] = []

    def memory(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 30, 80

    known = read | {"utilization_frac": 0.5, "active": True}
    probe, _ = nvidia(cuda(mem_get_info=memory), known, unsupported)

    first = probe.read()
    assert asked == []
    second = probe.read()

    assert (first.name, first.memory_used_bytes, first.memory_total_bytes) == ("NVIDIA H200", 60, 90)
    assert (first.utilization_frac, first.memory_allocated_bytes) == (0.5, 20)
    assert (second.name, second.memory_used_bytes, second.memory_total_bytes) == ("NVIDIA L40S #1", 50, 80)
    assert second.unknown == {"power_w": "not permitted"}


def test_torch_is_not_asked_for_the_use_of_an_nvidia_gpu() -> None:
    def initialise(device: torch.device) -> int:
        raise AssertionError("torch would initialise NVML again")

    probe, _ = nvidia(cuda(utilization=initialise), {"utilization_frac": Unknown("not supported")})

    state = probe.read()

    assert state.unknown == {"utilization_frac": "not supported"}


def test_a_lost_gpu_stays_lost_whatever_torch_remembers() -> None:
    def hang(device: torch.device) -> None:
        raise AssertionError("a call to a lost GPU may hang")

    module = cuda(mem_get_info=hang, memory_allocated=hang, get_device_name=hang)
    probe, _ = nvidia(module, {"active": False, "error": "the GPU is lost", "power_w": Unknown("the GPU is lost")})

    state = probe.read()

    assert (state.active, state.error) == (False, "the GPU is lost")
    assert state.unknown["memory_allocated_bytes"] == "the GPU is lost"


def test_the_gpu_is_found_anew_once_cuda_has_started() -> None:
    started = iter([False, False, True, True])
    module = cuda(is_initialized=lambda: next(started))
    probe, nvml = nvidia(module, {}, {}, {}, {})

    forgotten = []
    for _ in range(4):
        probe.read()
        forgotten.append(nvml.forgotten)

    assert forgotten == [0, 0, 1, 1]


def test_a_kind_that_torch_has_no_module_for_leaves_the_host(caplog: pytest.LogCaptureFixture) -> None:
    state = probe_of(None, torch.device("meta")).read()

    assert (state.kind, state.host_cpu_frac, state.memory_used_bytes) == ("meta", 0.5, None)
    assert caplog.records == []


def test_a_cpu_is_its_host() -> None:
    probe = probe_for(torch.device("cpu"))

    assert isinstance(probe, HostProbe)
    assert probe.read().kind == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_device_that_is_not_here_leaves_the_host() -> None:
    state = probe_for(torch.device("cuda", 0)).read()

    assert (state.kind, state.memory_used_bytes, state.name) == ("cuda", None, None)
    assert state.host_memory_total_bytes is not None
    assert state.unknown["power_w"] == "NVML's library is not installed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_cuda_device() -> None:
    kept = torch.zeros(2**20, device="cuda")

    state = probe_for(kept.device).read()

    assert state.name
    assert state.memory_allocated_bytes is not None
    assert state.memory_used_bytes is not None
    assert state.memory_total_bytes is not None
    assert 4 * 2**20 <= state.memory_allocated_bytes <= state.memory_used_bytes <= state.memory_total_bytes
