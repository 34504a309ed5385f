"""Reads an accelerator through what torch knows of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.probes.base import DeviceProbe
from lightning_hybrid.probes.host import HostProbe

_log = logging.getLogger(__name__)


class Readings:
    """Asks for one reading at a time. One that raised is not asked for again, and its reason is logged once."""

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def ask(self, name: str, read: Callable[[], Any]) -> Any | None:
        """What ``read`` returns, or ``None`` where it raises now or did before."""
        if name in self._refused:
            return None
        try:
            return read()
        except Exception as err:
            # Drivers, NVML and torch raise classes of their own (ImportError, AssertionError, NVMLError, ...).
            self._refused.add(name)
            _log.warning("%s is not known here: %s: %s", name, type(err).__name__, err)
            return None


_OF_THIS_PROCESS = Readings()


class TorchDeviceProbe:
    """Reads memory, utilization and name of one device from torch, and the host that it sits in.

    The probe never starts the device's runtime: before the process itself has used the device, only the host is known.

    Args:
        device: The device, of any kind but ``cpu``.
        module: The torch module of its kind, such as `torch.cuda`.
        host: Reads the rest.
        readings: Remembers which readings cannot be had; by default once for the process.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        module: Any,
        host: DeviceProbe | None = None,
        readings: Readings | None = None,
    ) -> None:
        self._device = device
        self._module = module
        self._host = HostProbe() if host is None else host
        self._readings = _OF_THIS_PROCESS if readings is None else readings

    def read(self) -> DeviceState:
        """The state now."""
        state = replace(self._host.read(), kind=self._device.type)
        if self._ask("is_initialized") is False:
            return state
        if self._device.type == "mps":
            return replace(state, memory_allocated_bytes=self._ask("current_allocated_memory"))
        free_and_total = self._ask("mem_get_info", self._device)
        percent = self._ask("utilization", self._device)
        return replace(
            state,
            name=self._ask("get_device_name", self._device),
            memory_used_bytes=None if free_and_total is None else free_and_total[1] - free_and_total[0],
            memory_total_bytes=None if free_and_total is None else free_and_total[1],
            memory_allocated_bytes=self._ask("memory_allocated", self._device),
            utilization_frac=None if percent is None else percent / 100,
        )

    def _ask(self, function: str, *args: object) -> Any | None:
        read = getattr(self._module, function, None)
        if read is None:
            return None
        return self._readings.ask(f"torch.{self._device.type}.{function}", lambda: read(*args))


def probe_for(device: torch.device) -> DeviceProbe:
    """The probe that reads the most of ``device`` that torch and psutil know."""
    if device.type == "cpu":
        return HostProbe()
    return TorchDeviceProbe(device, module=getattr(torch, device.type, None))
