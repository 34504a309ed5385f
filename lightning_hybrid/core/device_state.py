"""One reading of a device: what each field is, where it is read, and when it is not known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from lightning_hybrid.core.errors import ConfigError

CLOCK_EVENT_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of NVML's ``nvmlClocksEventReasons`` (before driver 535: ``nvmlClocksThrottleReasons``) and their names."""


class DeviceProcess(NamedTuple):
    """A process on a device, as its driver sees it."""

    pid: int
    memory_bytes: int | None


def _reading(what: str, *, source: str, absent: str = "") -> Any:
    return field(default=None, metadata={"what": what, "source": source, "absent": absent})


_HERE = "never"
_CUDA = "cpu; before this process used the device"
_NVML = "devices without NVML"
_GPU = "MIG slices (measured for the whole GPU); devices without NVML or ROCm"
_RATE = "the first reading; GPUs without NVLink; a counter that went back"
_GPM = "GPUs before Hopper; drivers without GPM; the first reading"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """One reading of a device and of the host that it sits in.

    A field that is ``None`` is not known; ``unknown`` has the reason where one was given. ``_bytes``, ``_w`` (watt),
    ``_j`` (joule), ``_mhz``, ``_celsius``, ``_s`` and ``_per_s`` are units, ``_frac`` is from 0 to 1. Rates and
    ``energy_j`` compare with earlier readings of the same probe. ``docs/telemetry.md`` lists the source of every
    field, from the same table as `field_table`.

    ``memory_used_bytes`` counts every process on the device, ``memory_allocated_bytes`` this process alone. For a CPU
    "device" the memory fields are ``None``: the host fields tell. With a limit of a container (cgroup) the host's
    memory is that of the container.
    """

    kind: str = field(
        metadata={"what": "device type as torch names it: cpu, cuda, mps, xpu", "source": "torch", "absent": _HERE}
    )
    name: str | None = _reading("name of the model", source="NVML, torch", absent="cpu, mps")
    index: int | None = _reading("index in torch: the n of cuda:n", source="the probe", absent="devices torch lacks")
    nvml_index: int | None = _reading("number that `nvidia-smi` gives the GPU", source="NVML", absent=_NVML)
    uuid: str | None = _reading("UUID of the GPU or MIG slice", source="NVML", absent=_NVML)
    pci_bus_id: str | None = _reading("PCI address, domain:bus:device.function", source="NVML", absent=_NVML)
    driver_version: str | None = _reading("version of the driver", source="NVML", absent=_NVML)
    compute_capability: str | None = _reading("CUDA compute capability", source="NVML", absent=_NVML)
    mig_parent_uuid: str | None = _reading("UUID of the GPU that a MIG slice is of", source="NVML", absent="not MIG")
    mig_gpu_instance: int | None = _reading("id of a MIG slice's GPU instance", source="NVML", absent="not MIG")
    mig_compute_instance: int | None = _reading("id of its compute instance", source="NVML", absent="not MIG")
    active: bool | None = _reading(
        "whether the device answered this reading", source="the probe", absent="before the first reading"
    )
    error: str | None = _reading("why it did not, or why it must be reset", source="the probe", absent="all is well")

    memory_used_bytes: int | None = _reading(
        "memory in use by all processes", source="NVML, torch mem_get_info", absent="cpu, mps"
    )
    memory_free_bytes: int | None = _reading(
        "memory that can still be had", source="NVML, torch mem_get_info", absent="cpu, mps"
    )
    memory_total_bytes: int | None = _reading(
        "all memory; mps: the recommended maximum", source="NVML, torch", absent="cpu"
    )
    memory_driver_reserved_bytes: int | None = _reading(
        "memory that the driver keeps for itself; not in `memory_used_bytes`",
        source="NVML memory info v2",
        absent="drivers before 510, where it counts as used",
    )
    memory_allocated_bytes: int | None = _reading("of tensors of this process", source="torch", absent=_CUDA)
    memory_reserved_bytes: int | None = _reading(
        "held by this process's caching allocator, tensors included; mps: by Metal", source="torch", absent=_CUDA
    )
    memory_process_bytes: int | None = _reading(
        "memory of this process, context included",
        source="NVML processes",
        absent="where the driver does not list this process: other PID namespaces, no context yet",
    )
    memory_others_bytes: int | None = _reading(
        "memory of everybody else: used less this process's", source="NVML", absent="as `memory_process_bytes`"
    )

    utilization_frac: float | None = _reading(
        "share of the driver's last sampling period with work on it; MIG: since the last reading",
        source="NVML utilisation, GPM; torch (ROCm, XPU)",
        absent="MIG before Hopper; WSL and some Jetsons; cpu, mps",
    )
    memory_utilization_frac: float | None = _reading(
        "share of that period in which device memory was read or written",
        source="NVML utilisation; torch (ROCm)",
        absent=_GPU,
    )
    sm_active_frac: float | None = _reading("share of SMs busy since the last reading", source="GPM", absent=_GPM)
    tensor_active_frac: float | None = _reading("the same of tensor cores", source="GPM", absent=_GPM)
    dram_active_frac: float | None = _reading("memory bandwidth over its peak, since then", source="GPM", absent=_GPM)
    sm_clock_mhz: int | None = _reading("clock of the SMs", source="NVML; torch (ROCm, XPU)", absent="cpu, mps")
    sm_clock_max_mhz: int | None = _reading("its maximum", source="NVML", absent=_NVML)
    memory_clock_mhz: int | None = _reading("clock of the memory", source="NVML", absent=_NVML)
    memory_clock_max_mhz: int | None = _reading("its maximum", source="NVML", absent=_NVML)
    clock_event_reasons: tuple[str, ...] | None = _reading(
        "why the clock is not higher, by name; empty: nothing holds it down", source="NVML", absent=_NVML
    )
    performance_state: int | None = _reading("0 (fastest) to 15", source="NVML", absent=_NVML)
    temperature_celsius: int | None = _reading("of the GPU", source="NVML; torch (ROCm, XPU)", absent="cpu, mps")
    temperature_slowdown_celsius: int | None = _reading(
        "at which the hardware slows the clocks down", source="NVML", absent="Hopper and later on some drivers"
    )
    memory_temperature_celsius: int | None = _reading("of the memory", source="NVML", absent="GPUs without HBM")
    power_w: float | None = _reading("power drawn", source="NVML; torch (ROCm)", absent=_GPU)
    power_limit_w: float | None = _reading("power limit in force", source="NVML", absent=_GPU)
    energy_j: float | None = _reading(
        "energy since this probe's first reading", source="NVML", absent=_GPU + "; after the counter went backwards"
    )

    pcie_generation: int | None = _reading("of the link now; low when idle", source="NVML", absent=_NVML)
    pcie_generation_max: int | None = _reading("highest that GPU and slot allow", source="NVML", absent=_NVML)
    pcie_width: int | None = _reading("lanes of the link now", source="NVML", absent=_NVML)
    pcie_width_max: int | None = _reading("most that GPU and slot allow", source="NVML", absent=_NVML)
    pcie_tx_bytes_per_s: float | None = _reading(
        "sent by the GPU, in the driver's last 20 ms", source="NVML", absent=_NVML
    )
    pcie_rx_bytes_per_s: float | None = _reading("received by it, likewise", source="NVML", absent=_NVML)
    pcie_replays: int | None = _reading("packets that had to be sent again so far", source="NVML", absent=_NVML)
    num_nvlinks: int | None = _reading("NVLinks that the GPU has", source="NVML", absent="GPUs without NVLink")
    num_nvlinks_active: int | None = _reading("those that are up", source="NVML", absent="GPUs without NVLink")
    nvlink_tx_bytes_per_s: float | None = _reading(
        "data sent over all links since the last reading", source="NVML", absent=_RATE
    )
    nvlink_rx_bytes_per_s: float | None = _reading("received, likewise", source="NVML", absent=_RATE)

    ecc_corrected: int | None = _reading(
        "corrected memory errors since the driver started", source="NVML", absent="ECC off or absent"
    )
    ecc_uncorrected: int | None = _reading("uncorrected ones", source="NVML", absent="ECC off or absent")
    remapped_rows_corrected: int | None = _reading(
        "memory rows replaced after corrected errors", source="NVML", absent="GPUs before Ampere"
    )
    remapped_rows_uncorrected: int | None = _reading("after uncorrected ones", source="NVML", absent="before Ampere")
    remapping_pending: bool | None = _reading("a row waits for a reset", source="NVML", absent="before Ampere")
    remapping_failed: bool | None = _reading("a row could not be replaced", source="NVML", absent="before Ampere")
    xid_events: tuple[int, ...] | None = _reading(
        "newest 16 XID errors since the first reading", source="NVML events", absent="where events are not given out"
    )
    processes: tuple[DeviceProcess, ...] | None = _reading(
        "compute processes, most memory first, 32 at most", source="NVML", absent=_NVML
    )

    host_cpu_frac: float | None = _reading("use of all cores", source="psutil", absent="the first reading")
    host_cpu_cores: float | None = _reading(
        "cores that this process may use: affinity and quota of the container", source="psutil, cgroup", absent=_HERE
    )
    host_load_average: float | None = _reading("runnable processes, 1 min mean", source="psutil", absent="Windows")
    host_cpu_mhz: float | None = _reading("mean clock of the cores", source="psutil", absent="many containers")
    host_cpu_max_mhz: float | None = _reading("their maximum", source="psutil", absent="many virtual machines")
    host_temperature_celsius: float | None = _reading("hottest CPU sensor", source="psutil", absent="virtual machines")
    host_steal_frac: float | None = _reading(
        "CPU time that the hypervisor gave to others", source="psutil", absent="the first reading; not Linux"
    )
    host_throttled_frac: float | None = _reading(
        "periods since the last reading in which the container's CPU quota ran out",
        source="cgroup cpu.stat",
        absent="no quota; the first reading",
    )
    host_memory_used_bytes: int | None = _reading("RAM in use", source="psutil, cgroup", absent=_HERE)
    host_memory_total_bytes: int | None = _reading("RAM that can be used", source="psutil, cgroup", absent=_HERE)
    process_memory_bytes: int | None = _reading("RAM of this process", source="psutil", absent="no permission")
    timestamp_s: float | None = _reading("Unix time of the reading", source="the clock", absent="made up states")
    unknown: Mapping[str, str] = field(
        default_factory=dict,
        hash=False,
        metadata={"what": "fields that are not known, and why", "source": "the probe", "absent": _HERE},
    )

    @property
    def memory_frac(self) -> float | None:
        """Used share of the device's memory, 0..1."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return self.memory_used_bytes / self.memory_total_bytes

    @property
    def is_mig(self) -> bool:
        """Whether the device is a MIG slice of a GPU."""
        return self.mig_gpu_instance is not None

    def silent(self, why: str) -> DeviceState:
        """Who the device is, without what it was doing when it was last read; ``error`` says ``why``."""
        return DeviceState(**{name: getattr(self, name) for name in _WHO}, error=why)

    def to_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """What is known, under the fields' names, for JSON.

        Args:
            compact: Leave out ``processes`` and ``unknown``, which are long and seldom change.
        """
        found: dict[str, Any] = {}
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and not (compact and name in _LONG):
                found[name] = value
        if not found.get("unknown", True):
            del found["unknown"]
        return found

    def to_json(self, *, compact: bool = False) -> str:
        """The state as one line of JSON; see `to_dict`."""
        return json.dumps(self.to_dict(compact=compact), separators=(",", ":"))

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> DeviceState:
        """The state that `to_dict` wrote; names of another version of this package are passed over.

        Raises:
            ConfigError: ``kind`` is missing or is no text.
        """
        known = {name: value for name, value in found.items() if name in _KNOWN}
        if not isinstance(known.get("kind"), str):
            raise ConfigError("kind", known.get("kind"), "be the type of the device, as text")
        for name in ("clock_event_reasons", "xid_events"):
            if known.get(name) is not None:
                known[name] = tuple(known[name])
        if known.get("processes") is not None:
            known["processes"] = tuple(DeviceProcess(*process) for process in known["processes"])
        return cls(**known)

    @classmethod
    def from_json(cls, text: str | bytes) -> DeviceState:
        """The state that `to_json` wrote.

        Raises:
            ConfigError: ``kind`` is missing.
            ValueError: ``text`` is no JSON.
        """
        return cls.from_dict(json.loads(text))


_NAMES = tuple(each.name for each in fields(DeviceState))
_KNOWN = frozenset(_NAMES)
_WHO = (
    "kind",
    "name",
    "index",
    "nvml_index",
    "uuid",
    "pci_bus_id",
    "mig_parent_uuid",
    "mig_gpu_instance",
    "mig_compute_instance",
    "memory_total_bytes",
    "host_memory_total_bytes",
    "timestamp_s",
)
_LONG = frozenset({"processes", "unknown"})


def clock_event_reasons(bits: int) -> tuple[str, ...]:
    """Names of the reasons in NVML's bit mask; a bit without a name is ``bit_0x...``.

    Example:
        >>> clock_event_reasons(0x44)
        ('sw_power_cap', 'hw_thermal_slowdown')
    """
    found = [1 << place for place in range(bits.bit_length()) if bits >> place & 1]
    return tuple(CLOCK_EVENT_REASONS.get(bit, f"bit_{bit:#x}") for bit in found)


def field_table() -> str:
    """A Markdown table of every field: what it is, its source, and what it is ``None`` for."""
    rows = ["| field | meaning | source | `None` for |", "|---|---|---|---|"]
    for each in fields(DeviceState):
        told = each.metadata
        rows.append(f"| `{each.name}` | {told['what']} | {told['source']} | {told['absent']} |")
    return "\n".join(rows)
