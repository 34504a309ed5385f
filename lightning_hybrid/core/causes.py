"""Why a replica is slow, as far as what was read of its device, its host and its loader tells.

A reading is a cause only where the replica is slow, the reading is bad, and most of the fast replicas read better: what
all have alike explains no difference. What is not known, of the slow replica or of all fast ones, explains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median, median_high, median_low

from lightning_hybrid.core.conditions import UNKNOWN, Cause, Condition, Evidence
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.state import DeviceState

_LOW_CLOCK_FRAC = 0.2
"""How far below its maximum a clock is low."""
_OTHER_CLOCK_FRAC = 0.1
"""How much of it that must be more than on the fast replicas."""
_LOWER_LIMIT_FRAC = 0.1
"""How much lower than the fast replicas' a power limit must be, and how near to it the power drawn."""
_OTHERS_MEMORY_FRAC = 0.05
"""Part of the device's memory from which on others count as there."""
_LOST_CPU_FRAC = 0.05
"""Part of the CPU time (of the quota's periods) that counts as lost, and as more than on the fast replicas."""
_WAIT_FRAC = 0.1
"""Part of the wall time that counts as waiting, and as more than on the fast replicas."""

_THERMAL = ("hw_thermal_slowdown", "sw_thermal_slowdown")
_HARDWARE = ("hw_power_brake_slowdown", "hw_slowdown")
_POWER = ("sw_power_cap",)
_SETTINGS = ("applications_clocks_setting", "display_clock_setting", "sync_boost", "board_limit", "reliability")


def causes_of_slowness(
    slow: Condition, others: Sequence[Condition], *, threshold_frac: float = 0.25
) -> tuple[Cause, ...]:
    """What may slow a replica down, the most direct cause first.

    Args:
        slow: The replica.
        others: The other replicas, of which those are compared with that are fast themselves; or earlier conditions of
            the same replica.
        threshold_frac: How much slower than the median of the others is slow: 0.25 means more than 1.25 times the time
            per unit of work.

    Returns:
        Nothing where it is not slow or no speed is known; ``unknown`` alone where nothing that was read explains it.

    Raises:
        ConfigError: ``threshold_frac`` is negative.

    Example:
        >>> hot = DeviceState(kind="cuda", clock_event_reasons=("hw_thermal_slowdown",), temperature_celsius=91)
        >>> fine = DeviceState(kind="cuda", clock_event_reasons=(), temperature_celsius=60)
        >>> slow, fast = Condition(speed_per_s=50.0, devices=(hot,)), Condition(speed_per_s=100.0, devices=(fine,))
        >>> [cause.name for cause in causes_of_slowness(slow, [fast])]
        ['thermal_throttling']
    """
    if threshold_frac < 0:
        raise ConfigError("threshold_frac", threshold_frac, "be at least 0")
    factor = 1.0 + threshold_frac
    is_slow = _is_below(slow.speed_per_s, [other.speed_per_s for other in others], factor)
    delivers_less = _is_below(slow.delivered_per_s, [other.delivered_per_s for other in others], factor)
    if not (is_slow or delivers_less):
        return ()
    fast = [other for other in others if not _is_below(other.speed_per_s, [o.speed_per_s for o in others], factor)]
    looks = (_OF_THE_DEVICE if is_slow else ()) + (_OF_THE_LOADER if delivers_less else ())
    found = [Cause(name=name, evidence=evidence) for name, look in looks if (evidence := look(slow, fast))]
    return tuple(found) or (UNKNOWN,)


Look = Callable[[Condition, Sequence[Condition]], tuple[Evidence, ...]]
"""Compares a slow replica with the fast ones; the evidence for one cause, empty where it does not hold."""


def _thermal_throttling(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    device = _outlier(slow, fast, _has_any(_THERMAL), 0.5, 0.5)
    if device is None:
        return ()
    hottest = _evidence("temperature_celsius", device.temperature_celsius, device.temperature_slowdown_celsius)
    return (*_reasons(device, _THERMAL), *hottest, *_sm_clock(device))


def _hardware_slowdown(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    device = _outlier(slow, fast, _has_any(_HARDWARE), 0.5, 0.5)
    if device is None or _has_any(_THERMAL)(device):  # with heat the driver reports both
        return ()
    return (*_reasons(device, _HARDWARE), *_sm_clock(device))


def _power_cap(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    device = _outlier(slow, fast, _has_any(_POWER), 0.5, 0.5)
    if device is None:
        return _lower_power_limit(slow, fast)
    drawn = _evidence("power_w", device.power_w, device.power_limit_w)
    return (*_reasons(device, _POWER), *drawn, *_sm_clock(device))


def _lower_power_limit(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    """A device that draws what it may, where devices of the same model may draw more."""
    for device in slow.devices:
        if device.power_w is None or device.power_limit_w is None or device.name is None:
            continue
        alike = _known(each.power_limit_w for other in fast for each in other.devices if each.name == device.name)
        is_reached = device.power_w >= (1.0 - _LOWER_LIMIT_FRAC) * device.power_limit_w
        if is_reached and alike and device.power_limit_w < (1.0 - _LOWER_LIMIT_FRAC) * median_low(alike):
            limit = Evidence("power_limit_w", device.power_limit_w, median_low(alike))
            return limit, Evidence("power_w", device.power_w, device.power_limit_w)
    return ()


def _low_clocks(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    sm = _outlier(slow, fast, _sm_clock_lack, _LOW_CLOCK_FRAC, _OTHER_CLOCK_FRAC)
    memory = _outlier(slow, fast, _memory_clock_lack, _LOW_CLOCK_FRAC, _OTHER_CLOCK_FRAC)
    of_sm = () if sm is None else (*_sm_clock(sm), *_reasons(sm, _SETTINGS))
    return (*of_sm, *(() if memory is None else _memory_clock(memory)))


def _co_tenants(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    device = _outlier(slow, fast, _others_frac, _OTHERS_MEMORY_FRAC, _OTHERS_MEMORY_FRAC)
    if device is None or device.memory_total_bytes is None:
        return ()
    limit = _OTHERS_MEMORY_FRAC * device.memory_total_bytes
    return _evidence("memory_others_bytes", device.memory_others_bytes, limit)


def _narrow_pcie(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    """Half of the fast replicas' lanes or less."""
    mine = min(_known(device.pcie_width for device in slow.devices), default=None)
    theirs = [min(widths) for other in fast if (widths := _known(device.pcie_width for device in other.devices))]
    if mine is None or not theirs or mine > 0.5 * median_low(theirs):
        return ()
    return (Evidence("pcie_width", mine, median_low(theirs)),)


def _host_steal(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    device = _outlier(slow, fast, lambda each: each.host_steal_frac, _LOST_CPU_FRAC, _LOST_CPU_FRAC)
    return () if device is None else _evidence("host_steal_frac", device.host_steal_frac, _LOST_CPU_FRAC)


def _cpu_quota(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    device = _outlier(slow, fast, lambda each: each.host_throttled_frac, _LOST_CPU_FRAC, _LOST_CPU_FRAC)
    if device is None:
        return ()
    throttled = _evidence("host_throttled_frac", device.host_throttled_frac, _LOST_CPU_FRAC)
    return (*throttled, *_evidence("host_cpu_cores", device.host_cpu_cores, None))


def _dataloader_wait(slow: Condition, fast: Sequence[Condition]) -> tuple[Evidence, ...]:
    theirs = _known(other.wait_frac for other in fast)
    if slow.wait_frac is None or not _stands_out(slow.wait_frac, theirs, _WAIT_FRAC, _WAIT_FRAC):
        return ()
    return (Evidence("wait_frac", slow.wait_frac, _WAIT_FRAC),)


_OF_THE_DEVICE: tuple[tuple[str, Look], ...] = (
    ("thermal_throttling", _thermal_throttling),
    ("hardware_slowdown", _hardware_slowdown),
    ("power_cap", _power_cap),
    ("low_clocks", _low_clocks),
    ("co_tenants", _co_tenants),
    ("narrow_pcie", _narrow_pcie),
    ("host_steal", _host_steal),
    ("cpu_quota", _cpu_quota),
)
"""Causes of a slow step, the most direct one first: what the driver calls a cause, what it reads, what is beside it."""
_OF_THE_LOADER: tuple[tuple[str, Look], ...] = (("dataloader_wait", _dataloader_wait),)
"""Causes of long pauses between steps."""

CAUSES = tuple(name for name, _ in _OF_THE_DEVICE + _OF_THE_LOADER)
"""Names of all causes, the most direct one first."""


def _is_below(speed_per_s: float | None, all_per_s: Iterable[float | None], factor: float) -> bool:
    known = _known(all_per_s)
    return speed_per_s is not None and bool(known) and speed_per_s * factor < median(known)


def _outlier(
    slow: Condition,
    fast: Sequence[Condition],
    badness: Callable[[DeviceState], float | None],
    limit: float,
    margin: float,
) -> DeviceState | None:
    """The worst device of the slow replica, where it is bad and most of the fast replicas' worst are better."""
    known = [(bad, device) for device in slow.devices if (bad := badness(device)) is not None]
    if not known:
        return None
    worst, device = max(known, key=lambda each: each[0])
    theirs = [max(read) for other in fast if (read := _known(map(badness, other.devices)))]
    return device if _stands_out(worst, theirs, limit, margin) else None


def _stands_out(mine: float, theirs: Sequence[float], limit: float, margin: float) -> bool:
    return mine > limit and bool(theirs) and mine >= median_high(theirs) + margin


def _has_any(reasons: Iterable[str]) -> Callable[[DeviceState], float | None]:
    wanted = frozenset(reasons)

    def has_any(device: DeviceState) -> float | None:
        held_by = device.clock_event_reasons
        return None if held_by is None else float(not wanted.isdisjoint(held_by))

    return has_any


def _sm_clock_lack(device: DeviceState) -> float | None:
    return _lack(device, device.sm_clock_mhz, device.sm_clock_max_mhz)


def _memory_clock_lack(device: DeviceState) -> float | None:
    return _lack(device, device.memory_clock_mhz, device.memory_clock_max_mhz)


def _lack(device: DeviceState, clock_mhz: float | None, max_mhz: float | None) -> float | None:
    """How far a clock is below its maximum; a device that rests, or may rest, clocks down of itself."""
    if clock_mhz is None or not max_mhz or device.clock_event_reasons is None:
        return None
    return None if "gpu_idle" in device.clock_event_reasons else 1.0 - clock_mhz / max_mhz


def _others_frac(device: DeviceState) -> float | None:
    if device.memory_others_bytes is None or not device.memory_total_bytes:
        return None
    return device.memory_others_bytes / device.memory_total_bytes


def _reasons(device: DeviceState, named: Iterable[str]) -> tuple[Evidence, ...]:
    held_by = device.clock_event_reasons or ()
    return tuple(Evidence("clock_event_reasons", reason, None) for reason in named if reason in held_by)


def _sm_clock(device: DeviceState) -> tuple[Evidence, ...]:
    return _clock("sm_clock_mhz", device.sm_clock_mhz, device.sm_clock_max_mhz)


def _memory_clock(device: DeviceState) -> tuple[Evidence, ...]:
    return _clock("memory_clock_mhz", device.memory_clock_mhz, device.memory_clock_max_mhz)


def _clock(field: str, clock_mhz: float | None, max_mhz: float | None) -> tuple[Evidence, ...]:
    return _evidence(field, clock_mhz, None if max_mhz is None else (1.0 - _LOW_CLOCK_FRAC) * max_mhz)


def _evidence(field: str, value: float | None, limit: float | None) -> tuple[Evidence, ...]:
    return () if value is None else (Evidence(field, value, limit),)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
