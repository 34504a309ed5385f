"""The questions to NVML: which function answers which fields of `DeviceState`, and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_hybrid.core.device_state import DeviceProcess, clock_event_reasons
from lightning_hybrid.probes.nvml import Nvml
from lightning_hybrid.probes.values import Unknown, celsius, count, frac, mhz, num_bytes, watts, within

_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_GPU_SENSOR = 0
_SLOWDOWN = 1
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE = 0
_PCIE_TX, _PCIE_RX = 0, 1
_FIELD_MEMORY_TEMPERATURE = 82
_FIELD_NVLINK_TX_KIB, _FIELD_NVLINK_RX_KIB = 138, 139
_ALL_LINKS = 0xFFFF_FFFF
_MEMORY_AND_LINKS = [
    (_FIELD_MEMORY_TEMPERATURE, 0),
    (_FIELD_NVLINK_TX_KIB, _ALL_LINKS),
    (_FIELD_NVLINK_RX_KIB, _ALL_LINKS),
]
_MOST_LINKS = 36
_MEMORY_V2 = 0x02000028

Call = tuple[str, tuple[Any, ...]]
"""A function of nvidia-ml-py, and its arguments behind the handle."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question.

    ``calls`` are ways to ask it, the best first; the first that this driver and binding know is used. ``take`` makes
    the answer into the value of the only one of ``fields``, or into a tuple of their values; any may be `Unknown`.
    ``of`` is what is asked where the device is a MIG slice: the slice, the GPU that it is part of, or nothing, because
    the GPU's value says nothing about the slice. ``once``: the answer does not change; ``seldom``: it seldom does, and
    may be ten seconds old.
    """

    fields: tuple[str, ...]
    calls: tuple[Call, ...]
    take: Callable[[Any], Any]
    of: Literal["slice", "gpu", "whole"] = "gpu"
    once: bool = False
    seldom: bool = False


def _as_it_is(answer: Any) -> Any:
    return answer


def _memory(info: Any) -> tuple[Any, ...]:
    total = num_bytes(info.total)
    most = 0 if isinstance(total, Unknown) else total
    if not total:  # shared memory of integrated GPUs
        total = Unknown("the driver says that the device has no memory")
    used, free = num_bytes(info.used, most), num_bytes(info.free, most)
    reserved = getattr(info, "reserved", None)
    kept = Unknown("drivers before 510 count it as used") if reserved is None else num_bytes(reserved, most)
    return total, used, free, kept


def _utilization(rates: Any) -> tuple[Any, ...]:
    return frac(rates.gpu), frac(rates.memory)


def _performance_state(state: int) -> Any:
    return Unknown("the driver does not know") if state == 32 else within(state, 0, 15)


def _width(lanes: int) -> Any:
    return lanes if lanes in (1, 2, 4, 8, 12, 16, 32) else Unknown(f"the driver says {lanes} lanes, which cannot be")


def _kilobytes_per_s(value: int) -> Any:
    found = within(value, 0, 1_000_000_000)
    return found if isinstance(found, Unknown) else found * 1000.0


def _remapped(answer: tuple[int, int, int, int]) -> tuple[Any, ...]:
    corrected, uncorrected, pending, failed = answer
    return count(corrected), count(uncorrected), bool(pending), bool(failed)


def _processes(found: list[Any]) -> Any:
    memory = {each.pid: each.usedGpuMemory for each in found}
    listed = [
        DeviceProcess(pid, None if used is None or isinstance(num_bytes(used), Unknown) else used)
        for pid, used in memory.items()
    ]
    return tuple(sorted(listed, key=lambda each: (-(each.memory_bytes or 0), each.pid)))


def _capability(answer: tuple[int, int]) -> str:
    return f"{answer[0]}.{answer[1]}"


def _text(answer: Any) -> Any:
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    return text.strip() or Unknown("the driver gives an empty name")


def _bus_id(info: Any) -> Any:
    return _text(info.busId)


QUERIES = (
    Query(("name",), (("nvmlDeviceGetName", ()),), _text, of="slice", once=True),
    Query(("pci_bus_id",), (("nvmlDeviceGetPciInfo", ()),), _bus_id, once=True),
    Query(("compute_capability",), (("nvmlDeviceGetCudaComputeCapability", ()),), _capability, once=True),
    Query(
        ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_driver_reserved_bytes"),
        (("nvmlDeviceGetMemoryInfo", (_MEMORY_V2,)), ("nvmlDeviceGetMemoryInfo", ())),
        _memory,
        of="slice",
    ),
    Query(
        ("processes",),
        (("nvmlDeviceGetComputeRunningProcesses_v3", ()), ("nvmlDeviceGetComputeRunningProcesses_v2", ())),
        _processes,
        of="slice",
    ),
    Query(
        ("utilization_frac", "memory_utilization_frac"),
        (("nvmlDeviceGetUtilizationRates", ()),),
        _utilization,
        of="whole",
    ),
    Query(("sm_clock_mhz",), (("nvmlDeviceGetClockInfo", (_SM_CLOCK,)),), mhz),
    Query(("memory_clock_mhz",), (("nvmlDeviceGetClockInfo", (_MEMORY_CLOCK,)),), mhz, seldom=True),
    Query(("sm_clock_max_mhz",), (("nvmlDeviceGetMaxClockInfo", (_SM_CLOCK,)),), mhz, once=True),
    Query(("memory_clock_max_mhz",), (("nvmlDeviceGetMaxClockInfo", (_MEMORY_CLOCK,)),), mhz, once=True),
    Query(
        ("clock_event_reasons",),
        (("nvmlDeviceGetCurrentClocksEventReasons", ()), ("nvmlDeviceGetCurrentClocksThrottleReasons", ())),
        lambda bits: clock_event_reasons(bits) if bits < 1 << 32 else within(bits, 0, 1 << 32),
    ),
    Query(("performance_state",), (("nvmlDeviceGetPerformanceState", ()),), _performance_state, seldom=True),
    Query(
        ("temperature_celsius",),
        (("nvmlDeviceGetTemperatureV", (_GPU_SENSOR,)), ("nvmlDeviceGetTemperature", (_GPU_SENSOR,))),
        celsius,
    ),
    Query(
        ("temperature_slowdown_celsius",),
        (("nvmlDeviceGetTemperatureThreshold", (_SLOWDOWN,)),),
        celsius,
        once=True,
    ),
    Query(("power_w",), (("nvmlDeviceGetPowerUsage", ()),), watts, of="whole"),
    Query(
        ("power_limit_w",),
        (("nvmlDeviceGetEnforcedPowerLimit", ()), ("nvmlDeviceGetPowerManagementLimit", ())),
        watts,
        of="whole",
        seldom=True,
    ),
    Query(("energy_j",), (("nvmlDeviceGetTotalEnergyConsumption", ()),), _as_it_is, of="whole"),
    Query(
        ("pcie_generation",),
        (("nvmlDeviceGetCurrPcieLinkGeneration", ()),),
        lambda generation: within(generation, 1, 8),
        seldom=True,
    ),
    Query(
        ("pcie_generation_max",),
        (("nvmlDeviceGetMaxPcieLinkGeneration", ()),),
        lambda generation: within(generation, 1, 8),
        once=True,
    ),
    Query(("pcie_width",), (("nvmlDeviceGetCurrPcieLinkWidth", ()),), _width, seldom=True),
    Query(("pcie_width_max",), (("nvmlDeviceGetMaxPcieLinkWidth", ()),), _width, once=True),
    Query(("pcie_tx_bytes_per_s",), (("nvmlDeviceGetPcieThroughput", (_PCIE_TX,)),), _kilobytes_per_s),
    Query(("pcie_rx_bytes_per_s",), (("nvmlDeviceGetPcieThroughput", (_PCIE_RX,)),), _kilobytes_per_s),
    Query(("pcie_replays",), (("nvmlDeviceGetPcieReplayCounter", ()),), count, seldom=True),
    Query(("ecc_corrected",), (("nvmlDeviceGetTotalEccErrors", (_CORRECTED, _VOLATILE)),), count, seldom=True),
    Query(("ecc_uncorrected",), (("nvmlDeviceGetTotalEccErrors", (_UNCORRECTED, _VOLATILE)),), count, seldom=True),
    Query(
        ("remapped_rows_corrected", "remapped_rows_uncorrected", "remapping_pending", "remapping_failed"),
        (("nvmlDeviceGetRemappedRows", ()),),
        _remapped,
        seldom=True,
    ),
)
"""What is asked of a GPU by one function of one handle."""


def nvlinks(nvml: Nvml, gpu: Any) -> tuple[Any, Any]:
    """How many NVLinks the GPU has, and how many of them are up."""
    states: list[int] = []
    for link in range(_MOST_LINKS):
        state = nvml.call("nvmlDeviceGetNvLinkState", gpu, link)
        if isinstance(state, Unknown):
            if state.lost or not states or not state.lasting:
                return state, state
            break
        states.append(state)
    return len(states), sum(1 for state in states if state == 1)


def memory_and_links(nvml: Nvml, gpu: Any) -> tuple[Any, Any, Any]:
    """Temperature of the memory in degrees Celsius, and bytes sent and received over all NVLinks so far."""
    temperature, sent, received = nvml.field_values(gpu, _MEMORY_AND_LINKS)
    if temperature == 0:  # what GPUs without the sensor say
        temperature = Unknown("the GPU has no sensor at its memory", lasting=True)
    elif not isinstance(temperature, Unknown):
        temperature = celsius(temperature)
    return temperature, _from_kib(sent), _from_kib(received)


def _from_kib(found: Any) -> Any:
    found = found if isinstance(found, Unknown) else count(found)
    return found if isinstance(found, Unknown) else found * 1024
