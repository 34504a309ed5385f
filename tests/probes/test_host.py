from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.probes.host import HostProbe


class LinuxTimes(NamedTuple):
    user: float
    system: float
    idle: float
    iowait: float = 0.0
    guest: float = 0.0
    guest_nice: float = 0.0


class MacTimes(NamedTuple):
    user: float
    system: float
    idle: float


class ScriptedSource:
    """A machine of 100 bytes whose CPU times are scripted; an exception in the script is raised."""

    def __init__(self, *times: Any) -> None:
        self._times: Iterator[Any] = iter(times)

    def cpu_times(self) -> Any:
        times = next(self._times)
        if isinstance(times, Exception):
            raise times
        return times

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=100, available=30, used=60)

    def Process(self) -> Any:
        return SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=7))


def test_the_first_reading_has_everything_but_cpu_use() -> None:
    probe = HostProbe(ScriptedSource(LinuxTimes(1, 1, 8)), clock=lambda: 12.5)

    assert probe.read() == DeviceState(
        kind="cpu",
        host_memory_used_bytes=70,
        host_memory_total_bytes=100,
        process_memory_bytes=7,
        timestamp_s=12.5,
    )


@pytest.mark.parametrize(
    ("before", "now", "cpu_frac"),
    [
        (LinuxTimes(1, 1, 8), LinuxTimes(3, 2, 9), 0.75),
        (LinuxTimes(0, 0, 0), LinuxTimes(2, 0, 1, iowait=1), 0.5),
        (LinuxTimes(0, 0, 0), LinuxTimes(3, 0, 1, guest=2), 0.75),
        (MacTimes(0, 0, 0), MacTimes(1, 0, 3), 0.25),
        (LinuxTimes(5, 0, 5), LinuxTimes(4, 0, 7), 0.0),
        (LinuxTimes(5, 0, 5), LinuxTimes(8, 0, 4), 1.0),
    ],
)
def test_cpu_use_is_that_since_the_last_reading(before: Any, now: Any, cpu_frac: float) -> None:
    probe = HostProbe(ScriptedSource(before, now))
    probe.read()

    assert probe.read().host_cpu_frac == cpu_frac


def test_cpu_use_is_unknown_when_no_time_has_passed() -> None:
    probe = HostProbe(ScriptedSource(LinuxTimes(1, 1, 8), LinuxTimes(1, 1, 8)))
    probe.read()

    assert probe.read().host_cpu_frac is None


def test_a_failed_reading_is_unknown_and_the_next_one_covers_the_gap() -> None:
    probe = HostProbe(ScriptedSource(LinuxTimes(0, 0, 0), PermissionError("/proc/stat"), LinuxTimes(3, 0, 1)))

    assert [probe.read().host_cpu_frac for _ in range(3)] == [None, None, 0.75]


def test_a_process_that_may_not_be_read_leaves_the_rest_known() -> None:
    class Guarded(ScriptedSource):
        def Process(self) -> Any:
            raise psutil.AccessDenied(1)

    state = HostProbe(Guarded(LinuxTimes(0, 0, 0))).read()

    assert state.process_memory_bytes is None
    assert state.host_memory_total_bytes == 100


def test_this_machine_can_be_read() -> None:
    probe = HostProbe()
    first, second = probe.read(), probe.read()

    assert first.host_cpu_frac is None
    assert second.host_cpu_frac is None or 0 <= second.host_cpu_frac <= 1
    assert first.host_memory_used_bytes is not None
    assert first.host_memory_total_bytes is not None
    assert 0 < first.host_memory_used_bytes < first.host_memory_total_bytes
    assert first.process_memory_bytes is not None
    assert first.process_memory_bytes > 2**20


def test_a_forked_child_reads_its_own_memory() -> None:
    probe = HostProbe()
    asked: list[int] = []

    class Source(ScriptedSource):
        def Process(self) -> Any:
            asked.append(psutil.Process().pid)
            return psutil.Process()

    HostProbe(Source(LinuxTimes(0, 0, 0))).read()
    assert asked == [os.getpid()]
    assert probe.read().process_memory_bytes is not None
