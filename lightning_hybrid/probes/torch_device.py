"""Reads an accelerator through NVML and what torch knows of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.probes.base import DeviceProbe, with_values
from lightning_hybrid.probes.host import HostProbe
from lightning_hybrid.probes.nvml import Nvml
from lightning_hybrid.probes.nvml_device import NvmlReader, Values
from lightning_hybrid.probes.nvml_gpus import cuda_device
from lightning_hybrid.probes.values import Unknown, celsius, frac, within

_log = logging.getLogger(__name__)

_UNUSED = Unknown("this process has not used the device")


class Readings:
    """Asks for one reading at a time. One that raised is not asked for again, and its reason is logged once."""

    def __init__(self) -> None:
        self._refused: dict[str, Unknown] = {}

    def ask(self, name: str, read: Callable[[], Any]) -> Any:
        """What ``read`` returns, or `Unknown` where it raises now or did before."""
        refused = self._refused.get(name)
        if refused is not None:
            return refused
        try:
            return read()
        except Exception as err:
            # Drivers and torch raise classes of their own (ImportError, AssertionError, AmdSmiException, ...).
            self._refused[name] = Unknown(f"{type(err).__name__}: {err}", lasting=True)
            _log.warning("%s is not known here: %s: %s", name, type(err).__name__, err)
            return self._refused[name]


_OF_THIS_PROCESS = Readings()


class TorchDeviceProbe:
    """Reads one device from NVML, where it is NVIDIA's, and from torch, and the host that it sits in.

    The probe never starts the device's runtime: before the process itself has used the device, torch is not asked.
    What NVML says comes first, as it costs the process's own use of the device nothing.

    Args:
        device: The device, of any kind but ``cpu``.
        module: The torch module of its kind, such as `torch.cuda`.
        is_nvidia: Whether NVML is asked too.
        host: Reads the rest.
        readings: Remembers which readings torch cannot give; by default once for the process.
        nvml: Reads NVML; made for the device where it is left out.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        module: Any,
        is_nvidia: bool = False,
        host: DeviceProbe | None = None,
        readings: Readings | None = None,
        nvml: NvmlReader | None = None,
    ) -> None:
        self._device = device
        self._module = module
        self._host = HostProbe() if host is None else host
        self._readings = _OF_THIS_PROCESS if readings is None else readings
        self._is_nvidia = is_nvidia
        self._nvml = NvmlReader(self._find) if is_nvidia and nvml is None else nvml
        self._had_started = False

    def read(self) -> DeviceState:
        """The state now."""
        has_started = self._ask("is_initialized") is not False
        values: Values = {"kind": self._device.type, "index": self._device.index, "active": None, "error": None}
        if self._nvml is not None:
            if has_started and not self._had_started:
                self._nvml.forget()  # from now on CUDA itself tells which one it is
            values |= self._nvml.read()
        self._had_started = has_started
        if values["active"] is False:
            # calls to a device that is gone fail or hang
            told: Values = dict.fromkeys(_FIELDS, Unknown(str(values["error"])))
        elif has_started:
            told = self._from_torch(has_memory=isinstance(values.get("memory_used_bytes"), int))
        else:
            told = dict.fromkeys(_FIELDS, _UNUSED)
        for name, value in told.items():
            if isinstance(values.get(name), Unknown | None) and value is not None:
                values[name] = value
        if values["active"] is None and has_started and isinstance(values.get("memory_allocated_bytes"), int):
            values["active"] = True
        return with_values(self._host.read(), values)

    def close(self) -> None:
        """Gives back to the driver what was taken for reading."""
        if self._nvml is not None:
            self._nvml.close()

    def _find(self, nvml: Nvml) -> Any:
        uuid = None
        if self._ask("is_initialized") is True:
            properties = self._ask("get_device_properties", self._device)
            uuid = None if isinstance(properties, Unknown) else getattr(properties, "uuid", None)
        return cuda_device(nvml, self._device.index or 0, None if uuid is None else str(uuid))

    def _from_torch(self, *, has_memory: bool) -> Values:
        if self._device.type == "mps":
            return {
                "memory_allocated_bytes": self._ask("current_allocated_memory"),
                "memory_reserved_bytes": self._ask("driver_allocated_memory"),
                "memory_total_bytes": self._ask("recommended_max_memory"),
            }
        values: Values = {
            "name": self._ask("get_device_name", self._device),
            "memory_allocated_bytes": self._ask("memory_allocated", self._device),
            "memory_reserved_bytes": self._ask("memory_reserved", self._device),
        }
        if not has_memory:
            values |= self._memory()
        if not self._is_nvidia:
            values |= self._sensors()
        return values

    def _memory(self) -> Values:
        free_and_total = self._ask("mem_get_info", self._device)
        if not isinstance(free_and_total, tuple):
            return dict.fromkeys(("memory_free_bytes", "memory_total_bytes", "memory_used_bytes"), free_and_total)
        free, total = free_and_total
        return {"memory_free_bytes": free, "memory_total_bytes": total, "memory_used_bytes": total - free}

    def _sensors(self) -> Values:
        """What torch reads of AMD's and Intel's drivers; 0 W and 0 MHz are how it says that it could not."""
        return {
            "utilization_frac": self._checked("utilization", frac),
            "memory_utilization_frac": self._checked("memory_usage", frac) if torch.version.hip else None,
            "temperature_celsius": self._checked("temperature", lambda degrees: celsius(round(degrees))),
            "power_w": self._checked("power_draw", lambda watts: within(watts, 1, 5000)) if torch.version.hip else None,
            "sm_clock_mhz": self._checked("clock_rate", lambda rate: within(round(rate), 1, 20_000)),
        }

    def _checked(self, function: str, check: Callable[[Any], Any]) -> Any:
        value = self._ask(function, self._device)
        return value if value is None or isinstance(value, Unknown) else check(value)

    def _ask(self, function: str, *args: object) -> Any:
        read = getattr(self._module, function, None)
        if read is None:
            return None
        return self._readings.ask(f"torch.{self._device.type}.{function}", lambda: read(*args))


_FIELDS = (
    "memory_allocated_bytes",
    "memory_reserved_bytes",
    "memory_used_bytes",
    "memory_free_bytes",
    "memory_total_bytes",
    "utilization_frac",
)


def probe_for(device: torch.device) -> DeviceProbe:
    """The probe that reads the most of ``device`` that its driver, torch and psutil know."""
    if device.type == "cpu":
        return HostProbe()
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return TorchDeviceProbe(device, module=getattr(torch, device.type, None), is_nvidia=is_nvidia)
