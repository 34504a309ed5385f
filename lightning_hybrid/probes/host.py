"""Reads the machine that a rank runs on, through psutil."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from lightning_hybrid.core.state import DeviceState


class HostSource(Protocol):
    """The part of psutil that is used; the module itself is one."""

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
    """Reads CPU use, RAM and this process's memory: all that there is to know of a CPU "device".

    CPU use is that of the whole machine since this probe's last reading; the first reading has none. It is taken from
    the raw times, because `psutil.cpu_percent` measures since *anybody's* last call and says 0.0 at first.

    Args:
        source: Where the numbers come from.
        clock: Unix time, in seconds.
    """

    def __init__(self, source: HostSource = psutil, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._clock = clock
        self._last_times_s: tuple[float, float] | None = None

    def read(self) -> DeviceState:
        """The state of the host, as a device of kind ``cpu``."""
        memory = _known(self._source.virtual_memory)
        process_memory = _known(lambda: self._source.Process().memory_info())
        return DeviceState(
            kind="cpu",
            host_cpu_frac=self._cpu_frac(),
            host_memory_used_bytes=None if memory is None else memory.total - memory.available,
            host_memory_total_bytes=None if memory is None else memory.total,
            process_memory_bytes=None if process_memory is None else process_memory.rss,
            timestamp_s=self._clock(),
        )

    def _cpu_frac(self) -> float | None:
        times = _known(self._source.cpu_times)
        if times is None:
            return None
        last, self._last_times_s = self._last_times_s, _busy_and_total_s(times)
        if last is None:
            return None
        busy_s, total_s = (now - before for now, before in zip(self._last_times_s, last, strict=True))
        # counters may step back a little when a core goes off line
        return min(1.0, max(0.0, busy_s / total_s)) if total_s > 0 else None


def _busy_and_total_s(times: Any) -> tuple[float, float]:
    # Linux counts guests in `user` and `nice` too; the optional fields are missing on other systems.
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total_s - times.idle - getattr(times, "iowait", 0.0), total_s


def _known(read: Callable[[], Any]) -> Any | None:
    try:
        return read()
    except (psutil.Error, OSError, NotImplementedError):
        return None
