"""Reads the machine that a rank runs on, through psutil, within the limits of its container."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.probes.base import with_values
from lightning_hybrid.probes.cgroup import Cgroup, CgroupReading
from lightning_hybrid.probes.values import Unknown

_FIRST = Unknown("a share of time needs two readings")
_SLOW_PERIOD_S = 10.0
"""How old clocks and temperatures may be: on a machine of many cores the system takes milliseconds to read them."""


class HostSource(Protocol):
    """The part of psutil that every system has; the module itself is one."""

    def cpu_times(self) -> Any:
        """Named tuple of the seconds that all cores together spent in each state since the machine started."""
        ...

    def virtual_memory(self) -> Any:
        """Has ``total`` and ``available``, in bytes."""
        ...

    def Process(self) -> Any:  # noqa: N802 - psutil's name
        """This process."""
        ...


class HostProbe:
    """Reads load, CPU use, clock, temperature, RAM and this process's memory: all there is to know of a CPU "device".

    CPU use and stolen time are those of the whole machine since this probe's last reading; the first reading has none.
    They are taken from the raw times, because `psutil.cpu_percent` measures since *anybody's* last call and says 0.0 at
    first. Where a control group limits memory, RAM is counted as that group counts it.

    Args:
        source: Where the numbers come from.
        clock: Unix time, in seconds.
        cgroup: Reads the limits of the container.
        monotonic: Seconds that never step back.
    """

    def __init__(
        self,
        source: HostSource = psutil,
        clock: Callable[[], float] = time.time,
        *,
        cgroup: Callable[[], CgroupReading] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._clock, self._monotonic = clock, monotonic
        self._cgroup = Cgroup().read if cgroup is None else cgroup
        self._last_times: tuple[float, float, float] | None = None
        self._last_periods: tuple[int, int] | None = None
        self._slow: dict[str, Any] = {}
        self._slow_until_s = float("-inf")

    def read(self) -> DeviceState:
        """The state of the host, as a device of kind ``cpu``."""
        limits, process = self._cgroup(), _known(self._source.Process)
        state = DeviceState(kind="cpu", active=True, timestamp_s=self._clock())
        values = {
            **self._cpu_shares(),
            **self._memory(process, limits),
            **self._slow_values(),
            "host_cpu_cores": self._cores(process, limits),
            "host_load_average": self._ask("getloadavg", lambda loads: loads[0]),
            "host_throttled_frac": self._throttled_frac(limits),
        }
        return with_values(state, values)

    def _cpu_shares(self) -> dict[str, Any]:
        times = _known(self._source.cpu_times)
        if isinstance(times, Unknown):
            return {"host_cpu_frac": times, "host_steal_frac": times}
        last, self._last_times = self._last_times, _busy_total_and_stolen_s(times)
        if last is None:
            return {"host_cpu_frac": _FIRST, "host_steal_frac": _FIRST}
        busy_s, total_s, stolen_s = (now - before for now, before in zip(self._last_times, last, strict=True))
        steal = _share(stolen_s, total_s) if hasattr(times, "steal") else Unknown("this system does not count it")
        return {"host_cpu_frac": _share(busy_s, total_s), "host_steal_frac": steal}

    def _memory(self, process: Any, limits: CgroupReading) -> dict[str, Any]:
        memory = _known(self._source.virtual_memory)
        own = process if isinstance(process, Unknown) else _known(lambda: process.memory_info().rss)
        found = {"process_memory_bytes": own, "host_memory_used_bytes": memory, "host_memory_total_bytes": memory}
        if isinstance(memory, Unknown):
            return found
        used, total = memory.total - memory.available, memory.total
        if limits.memory_limit_bytes is not None and limits.memory_limit_bytes < total:
            total = limits.memory_limit_bytes
            used = Unknown("the container's use") if limits.memory_used_bytes is None else limits.memory_used_bytes
        return found | {"host_memory_used_bytes": used, "host_memory_total_bytes": total}

    def _slow_values(self) -> dict[str, Any]:
        now_s = self._monotonic()
        if now_s >= self._slow_until_s:
            self._slow_until_s = now_s + _SLOW_PERIOD_S
            self._slow = {
                "host_cpu_mhz": self._ask("cpu_freq", lambda clock: clock and clock.current),
                "host_cpu_max_mhz": self._ask("cpu_freq", lambda clock: clock and clock.max),
                "host_temperature_celsius": self._ask("sensors_temperatures", _hottest_cpu),
            }
        return self._slow

    def _cores(self, process: Any, limits: CgroupReading) -> Any:
        usable = _known(lambda: len(process.cpu_affinity())) if hasattr(process, "cpu_affinity") else None
        if not isinstance(usable, int):
            usable = self._ask("cpu_count", lambda count: count)
        quota = limits.cpu_cores
        if isinstance(usable, Unknown):
            return usable if quota is None else quota
        return float(usable if quota is None else min(usable, quota))

    def _throttled_frac(self, limits: CgroupReading) -> Any:
        if limits.num_periods is None or limits.num_throttled is None:
            return Unknown("no CPU quota is in force")
        last, self._last_periods = self._last_periods, (limits.num_periods, limits.num_throttled)
        if last is None:
            return _FIRST
        periods, throttled = limits.num_periods - last[0], limits.num_throttled - last[1]
        return throttled / periods if 0 <= throttled <= periods > 0 else Unknown("no period has passed")

    def _ask(self, function: str, take: Callable[[Any], Any]) -> Any:
        read = getattr(self._source, function, None)
        if read is None:
            return Unknown("not known on this system")
        answer = _known(read)
        if isinstance(answer, Unknown):
            return answer
        value = take(answer)
        # psutil says 0 MHz where the system does not tell
        return value if value or function == "getloadavg" else Unknown("the system does not tell")


def _busy_total_and_stolen_s(times: Any) -> tuple[float, float, float]:
    # Linux counts guests in `user` and `nice` too; the optional fields are missing on other systems.
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    stolen_s = getattr(times, "steal", 0.0)
    return total_s - times.idle - getattr(times, "iowait", 0.0), total_s, stolen_s


def _share(part_s: float, total_s: float) -> Any:
    # counters may step back a little when a core goes off line
    return min(1.0, max(0.0, part_s / total_s)) if total_s > 0 else Unknown("no time has passed")


def _hottest_cpu(sensors: dict[str, list[Any]]) -> float | None:
    """Highest plausible temperature of the sensors that Linux names for CPUs."""
    names = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "acpitz")
    for name in names:
        readings = [float(each.current) for each in sensors.get(name, []) if each.current and -55 < each.current < 150]
        if readings:
            return max(readings)
    return None


def _known(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (psutil.Error, OSError, NotImplementedError) as err:
        return Unknown(f"{type(err).__name__}: {err}")
