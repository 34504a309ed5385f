"""What a container may use: memory and CPU limits of Linux control groups, version 1 and 2."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

_LOOK_PERIOD_S = 10.0
"""How old the limits may be; what counts against them is read each time."""
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes the largest number of pages where there is no limit."""


class CgroupReading(NamedTuple):
    """Limits of this process's control group and all above it, ``None`` where there is none.

    ``memory_used_bytes`` is what counts against the memory limit, without file pages that can be dropped at once.
    ``num_periods`` are the periods in which the CPU quota was in force so far, ``num_throttled`` those in which it ran
    out.
    """

    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    cpu_cores: float | None = None
    num_periods: int | None = None
    num_throttled: int | None = None


class Cgroup:
    """Reads the limits that this process runs under.

    Args:
        mount: Where the control groups are mounted.
        membership: The file that tells which ones this process is in.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        mount: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mount, self._membership, self._clock = mount, membership, clock
        self._memory: _MemoryLimit | None = None
        self._cpu: _CpuLimit | None = None
        self._until_s = float("-inf")

    def read(self) -> CgroupReading:
        """The limits now; nothing is known where there are no control groups."""
        now_s = self._clock()
        if now_s >= self._until_s:
            self._until_s = now_s + _LOOK_PERIOD_S
            self._look()
        reading = CgroupReading()
        if self._memory is not None:
            reading = reading._replace(memory_limit_bytes=self._memory.limit, memory_used_bytes=self._memory.used())
        if self._cpu is not None:
            counts = _entries(_text(self._cpu.group / "cpu.stat"))
            reading = reading._replace(
                cpu_cores=self._cpu.cores,
                num_periods=counts.get("nr_periods"),
                num_throttled=counts.get("nr_throttled"),
            )
        return reading

    def _look(self) -> None:
        paths = self._paths()
        self._memory = min(self._limits(_memory_limit, "memory", paths), default=None)
        self._cpu = min(self._limits(_cpu_limit, "cpu", paths), default=None)

    def _limits(self, limit_of: _LimitOf[_Limit], controller: str, paths: dict[str, str]) -> Iterator[_Limit]:
        if controller in paths:
            mount, path, is_v2 = self._mount / controller, paths[controller], False
        else:
            # beside version 1 the second version's tree is mounted one level deeper
            unified = self._mount / "unified"
            mount, path, is_v2 = unified if unified.is_dir() else self._mount, paths.get("", ""), True
        limits = (limit_of(group, is_v2) for group in _groups(mount, path))
        return (limit for limit in limits if limit is not None)

    def _paths(self) -> dict[str, str]:
        """Path of the process's group by controller; version 2 has one for all, under the empty name."""
        found = {}
        for line in (_text(self._membership) or "").splitlines():
            parts = line.split(":", 2)
            if len(parts) == 3:
                found.update(dict.fromkeys(parts[1].split(","), parts[2]))
        return found


class _MemoryLimit(NamedTuple):
    limit: int
    group: Path
    is_v2: bool

    def used(self) -> int | None:
        used = _number(_text(self.group / ("memory.current" if self.is_v2 else "memory.usage_in_bytes")))
        if used is None:
            return None
        dropped = _entries(_text(self.group / "memory.stat"))
        return max(0, used - dropped.get("inactive_file" if self.is_v2 else "total_inactive_file", 0))


class _CpuLimit(NamedTuple):
    cores: float
    group: Path


_Limit = TypeVar("_Limit", _MemoryLimit, _CpuLimit)
_LimitOf = Callable[[Path, bool], _Limit | None]


def _memory_limit(group: Path, is_v2: bool) -> _MemoryLimit | None:
    limit = _number(_text(group / ("memory.max" if is_v2 else "memory.limit_in_bytes")))
    return None if limit is None or limit >= _NO_LIMIT_BYTES else _MemoryLimit(limit, group, is_v2)


def _cpu_limit(group: Path, is_v2: bool) -> _CpuLimit | None:
    cores = _cores_v2(group) if is_v2 else _cores_v1(group)
    return None if cores is None else _CpuLimit(cores, group)


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """The group's directory and all above it; in a container the mount is the group, whatever its path outside."""
    group = mount / path.lstrip("/")
    if group.is_dir():
        while group != mount and mount in group.parents:
            yield group
            group = group.parent
    yield mount


def _cores_v2(group: Path) -> float | None:
    quota, _, period = (_text(group / "cpu.max") or "").partition(" ")
    return _quotient(_number(quota), _number(period))


def _cores_v1(group: Path) -> float | None:
    return _quotient(_number(_text(group / "cpu.cfs_quota_us")), _number(_text(group / "cpu.cfs_period_us")))


def _quotient(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period and quota > 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _number(text: str | None) -> int | None:
    """A whole number; ``max`` and what is no number mean that there is no limit."""
    try:
        return int(text or "")
    except ValueError:
        return None


def _entries(text: str | None) -> dict[str, int]:
    pairs = (line.split(maxsplit=1) for line in (text or "").splitlines())
    return {pair[0]: number for pair in pairs if len(pair) == 2 and (number := _number(pair[1])) is not None}
