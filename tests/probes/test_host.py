from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.probes.cgroup import CgroupReading
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

    state = probe.read()
    assert replace(state, unknown={}, host_cpu_cores=None, host_throttled_frac=None) == DeviceState(
        kind="cpu",
        active=True,
        host_memory_used_bytes=70,
        host_memory_total_bytes=100,
        process_memory_bytes=7,
        timestamp_s=12.5,
    )
    assert state.unknown["host_cpu_frac"] == "a share of time needs two readings"
    assert state.unknown["host_cpu_mhz"] == "not known on this system"


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


class RichSource(ScriptedSource):
    """A machine that exposes everything."""

    def getloadavg(self) -> Any:
        return (3.5, 2.0, 1.0)

    def cpu_count(self) -> int:
        return 8

    def cpu_freq(self) -> Any:
        return SimpleNamespace(current=2400.0, max=3500.0)

    def sensors_temperatures(self) -> Any:
        return {
            "nvme": [SimpleNamespace(current=99.0)],
            "coretemp": [SimpleNamespace(current=55.0), SimpleNamespace(current=61.0), SimpleNamespace(current=0.0)],
        }


class StolenTimes(NamedTuple):
    user: float
    idle: float
    steal: float


def test_everything_that_a_machine_exposes() -> None:
    probe = HostProbe(RichSource(StolenTimes(0, 0, 0), StolenTimes(1, 2, 1)), cgroup=CgroupReading)
    probe.read()

    state = probe.read()

    assert (state.host_load_average, state.host_cpu_cores) == (3.5, 8.0)
    assert (state.host_cpu_mhz, state.host_cpu_max_mhz, state.host_temperature_celsius) == (2400.0, 3500.0, 61.0)
    assert (state.host_cpu_frac, state.host_steal_frac) == (0.5, 0.25)
    assert state.unknown == {"host_throttled_frac": "no CPU quota is in force"}


def test_a_container_has_its_own_memory_and_cores() -> None:
    readings = iter([CgroupReading(50, 30, 1.5, 10, 2), CgroupReading(50, 30, 1.5, 20, 7)])
    probe = HostProbe(RichSource(*[MacTimes(0, 0, 0)] * 2), cgroup=lambda: next(readings))
    first, second = probe.read(), probe.read()

    assert (first.host_memory_used_bytes, first.host_memory_total_bytes) == (30, 50)
    assert first.host_cpu_cores == 1.5
    assert (first.host_throttled_frac, second.host_throttled_frac) == (None, 0.5)


def test_a_limit_above_the_machines_memory_is_none() -> None:
    probe = HostProbe(RichSource(MacTimes(0, 0, 0)), cgroup=lambda: CgroupReading(1000, 30, 64.0))

    state = probe.read()

    assert (state.host_memory_used_bytes, state.host_memory_total_bytes, state.host_cpu_cores) == (70, 100, 8.0)


def test_zero_is_how_psutil_says_that_a_clock_is_not_known() -> None:
    class Silent(RichSource):
        def cpu_freq(self) -> Any:
            return SimpleNamespace(current=2400.0, max=0.0)

        def sensors_temperatures(self) -> Any:
            return {}

    state = HostProbe(Silent(MacTimes(0, 0, 0)), cgroup=CgroupReading).read()

    assert (state.host_cpu_mhz, state.host_cpu_max_mhz, state.host_temperature_celsius) == (2400.0, None, None)
    assert state.unknown["host_cpu_max_mhz"] == "the system does not tell"


def test_clocks_and_temperatures_are_read_every_ten_seconds() -> None:
    asked: list[float] = []
    now = [0.0]

    class Counted(RichSource):
        def cpu_freq(self) -> Any:
            asked.append(now[0])
            return super().cpu_freq()

    probe = HostProbe(Counted(*[MacTimes(0, 0, 0)] * 4), cgroup=CgroupReading, monotonic=lambda: now[0])
    for now[0] in (0.0, 1.0, 9.9, 10.0):
        probe.read()

    assert sorted(set(asked)) == [0.0, 10.0]
