"""What a machine has, as a table, and what is not known of it and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.hardware import peak_flops_per_s
from lightning_hybrid.reports.columns import aligned

_GIB = 2**30
_TERA = 1e12

_Cell = Callable[[DeviceState], str]


def probed_text(host: DeviceState, devices: Sequence[DeviceState], missing: str | None = None) -> str:
    """The host in one line, the devices in a table, and below it what is not known, by reason.

    Args:
        host: State of the machine itself.
        devices: States of its accelerators.
        missing: Why there may be more of them than are listed.
    """
    lines = [_host(host), ""]
    if devices:
        rows = [[title for title, _ in _COLUMNS], *([cell(each) for _, cell in _COLUMNS] for each in devices)]
        lines += aligned(rows, [True] * len(_COLUMNS))
    else:
        lines.append("no accelerator found")
    if missing is not None:
        lines.append(f"NVIDIA GPUs are not known: {missing}")
    return "\n".join([*lines, *_unknown([host, *devices])])


def probed_json(host: DeviceState, devices: Sequence[DeviceState], missing: str | None = None) -> str:
    """The same and everything else that is known, as one line of JSON."""
    found = {"host": host.to_dict(), "devices": [device.to_dict() for device in devices], "missing": missing}
    return json.dumps(found, separators=(",", ":"))


def _host(state: DeviceState) -> str:
    parts = [
        _of(state.host_cpu_cores, "{:g} cores"),
        _of(state.host_load_average, "load {:.1f}"),
        _of(state.host_cpu_frac, "CPU {:.0%}"),
        _of(state.host_steal_frac or None, "{:.0%} of it taken by other machines"),
        _of(state.host_throttled_frac or None, "quota ran out in {:.0%} of the periods"),
        _of(state.host_cpu_mhz, "{:.0f} MHz"),
        _of(state.host_temperature_celsius, "{:.0f} C"),
        "RAM " + _memory(state.host_memory_used_bytes, state.host_memory_total_bytes),
    ]
    return "host: " + ", ".join(part for part in parts if part not in ("", "-"))


def _of(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _memory(used: int | None, total: int | None) -> str:
    if used is None or total is None:
        return _of(None if total is None else total / _GIB, "{:.1f} GiB")
    return f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB"


def _device(state: DeviceState) -> str:
    if state.index is not None:
        return f"{state.kind}:{state.index}"
    return state.kind if state.nvml_index is None else f"GPU {state.nvml_index}"


def _clock(state: DeviceState) -> str:
    return _pair(state.sm_clock_mhz, state.sm_clock_max_mhz, "{:.0f}")


def _power(state: DeviceState) -> str:
    return _pair(state.power_w, state.power_limit_w, "{:.0f}")


def _pair(now: float | None, most: float | None, form: str) -> str:
    return "-" if now is None else f"{_of(now, form)}/{_of(most, form)}"


def _pcie(state: DeviceState) -> str:
    if state.pcie_generation is None or state.pcie_width is None:
        return "-"
    return f"{state.pcie_generation}x{state.pcie_width}"


def _peak(state: DeviceState) -> str:
    peak = peak_flops_per_s(state.name, "bfloat16")
    return _of(None if peak is None else peak / _TERA, "{:.0f}")


def _condition(state: DeviceState) -> str:
    if state.error is not None:
        return state.error
    found = [reason for reason in state.clock_event_reasons or () if reason != "gpu_idle"]
    found += [f"XID {number}" for number in sorted(set(state.xid_events or ()))]
    if state.ecc_uncorrected:
        found.append(f"{state.ecc_uncorrected} uncorrected memory errors")
    if state.remapping_failed:
        found.append("a memory row could not be replaced")
    return ", ".join(found) or "ok"


_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("device", _device),
    ("model", lambda state: state.name or "-"),
    ("memory", lambda state: _memory(state.memory_used_bytes, state.memory_total_bytes)),
    ("use", lambda state: _of(state.utilization_frac, "{:.0%}")),
    ("SM MHz", _clock),
    ("C", lambda state: _pair(state.temperature_celsius, state.temperature_slowdown_celsius, "{:.0f}")),
    ("W", _power),
    ("PCIe", _pcie),
    ("NVLinks", lambda state: _pair(state.num_nvlinks_active, state.num_nvlinks, "{:.0f}")),
    ("BF16 TFLOP/s", _peak),
    ("condition", _condition),
)


def _unknown(states: Sequence[DeviceState]) -> list[str]:
    by_reason: dict[tuple[str, ...], list[str]] = {}
    who: dict[tuple[str, str], list[str]] = {}
    for number, state in enumerate(states):
        for name, reason in state.unknown.items():
            who.setdefault((reason, name), []).append(_device(state) if number else "host")
    for (reason, name), devices in who.items():
        by_reason.setdefault((reason, *devices), []).append(name)
    lines = [f"  {', '.join(devices)}: {', '.join(names)}: {reason}" for (reason, *devices), names in by_reason.items()]
    return ["", "not known:", *lines] if lines else []
