from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.probes.base import FakeProbe
from lightning_hybrid.probes.host import HostProbe
from lightning_hybrid.probes.torch_device import Readings, TorchDeviceProbe, probe_for

HOST = DeviceState(kind="cpu", host_cpu_frac=0.5, host_memory_used_bytes=70, process_memory_bytes=7, timestamp_s=12.5)
CUDA_1 = torch.device("cuda", 1)


def probe_of(module: Any, device: torch.device = CUDA_1, readings: Readings | None = None) -> TorchDeviceProbe:
    return TorchDeviceProbe(
        device, module=module, host=FakeProbe([HOST]), readings=Readings() if readings is None else readings
    )


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
        name="NVIDIA L40S #1",
        memory_used_bytes=50,
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

    assert state == DeviceState(
        kind="cuda", host_cpu_frac=0.5, host_memory_used_bytes=70, process_memory_bytes=7, timestamp_s=12.5
    )


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
    mps = SimpleNamespace(current_allocated_memory=lambda: 20, driver_allocated_memory=lambda: 25)

    state = probe_of(mps, torch.device("mps")).read()

    assert (state.kind, state.memory_allocated_bytes, state.memory_used_bytes) == ("mps", 20, None)


def test_xpu_has_no_utilization() -> None:
    xpu = cuda()
    del xpu.utilization

    state = probe_of(xpu, torch.device("xpu", 0)).read()

    assert (state.kind, state.memory_used_bytes, state.utilization_frac) == ("xpu", 50, None)


def test_a_kind_that_torch_has_no_module_for_leaves_the_host(caplog: pytest.LogCaptureFixture) -> None:
    state = probe_of(None, torch.device("meta")).read()

    assert (state.kind, state.host_cpu_frac, state.memory_used_bytes) == ("meta", 0.5, None)
    assert caplog.records == []


def test_a_cpu_is_its_host() -> None:
    probe = probe_for(torch.device("cpu"))

    assert isinstance(probe, HostProbe)
    assert probe.read().kind == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_device_that_is_not_here_leaves_the_host(caplog: pytest.LogCaptureFixture) -> None:
    state = probe_for(torch.device("cuda", 0)).read()

    assert (state.kind, state.memory_used_bytes, state.name) == ("cuda", None, None)
    assert state.host_memory_total_bytes is not None
    assert caplog.records == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_cuda_device() -> None:
    kept = torch.zeros(2**20, device="cuda")

    state = probe_for(kept.device).read()

    assert state.name
    assert state.memory_allocated_bytes is not None
    assert state.memory_used_bytes is not None
    assert state.memory_total_bytes is not None
    assert 4 * 2**20 <= state.memory_allocated_bytes <= state.memory_used_bytes <= state.memory_total_bytes
