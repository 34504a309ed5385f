from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_hybrid.runtime.timing import EventTimer, HostTimer, timer_for
from lightning_hybrid.runtime.work import Work

pytestmark = pytest.mark.timeout(60)

BATCH, TAIL = Work(0, 16), Work(16, 20)


def scripted(*readings_s: float) -> Callable[[], float]:
    readings: Iterator[float] = iter(readings_s)
    return lambda: next(readings)


# --- HostTimer ------------------------------------------------------------------------------------------------------


def test_the_host_times_a_step_without_its_waiting() -> None:
    timer = HostTimer(scripted(100.0, 103.0, 110.0, 111.5))
    timer.start()
    timer.stop(BATCH, waited_s=1.0)
    timer.start()
    timer.stop(BATCH, waited_s=0.0)

    assert list(timer.finished()) == [(BATCH, 2.0, True), (BATCH, 1.5, False)]
    assert list(timer.finished()) == []


def test_the_first_step_of_each_size_is_marked() -> None:
    timer = HostTimer(scripted(*range(10)))
    for work in (BATCH, BATCH, TAIL, BATCH, TAIL):
        timer.start()
        timer.stop(work, 0.0)

    assert [first for _, _, first in timer.finished(drain=True)] == [True, False, True, False, False]


def test_a_step_that_only_waited_took_no_time() -> None:
    timer = HostTimer(scripted(100.0, 103.0))
    timer.start()
    timer.stop(BATCH, waited_s=3.5)

    assert list(timer.finished()) == [(BATCH, 0.0, True)]


# --- EventTimer -----------------------------------------------------------------------------------------------------


class Device:
    """An asynchronous device: numbers the events that are recorded, and notes which are waited for."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waited_for: list[int] = []

    def new_event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.number: int | None = None

    def record(self) -> None:
        assert self.number is None, "an event is recorded once"
        self.number = self._device.recorded
        self._device.recorded += 1

    def synchronize(self) -> None:
        assert self.number is not None
        self._device.waited_for.append(self.number)

    def elapsed_time(self, end: Event) -> float:
        assert self.number is not None
        assert end.number in self._device.waited_for, "read before it has surely run"
        return 250.0 * (end.number - self.number)


def steps_on(device: Device, in_flight: int, count: int) -> Iterator[list[tuple[Work, float, bool]]]:
    """Runs steps, and gives after each what has become known."""
    timer = EventTimer(in_flight, device.new_event)
    for i in range(count):
        timer.start()
        timer.stop(Work(i, i + 1), waited_s=0.0)
        yield list(timer.finished())


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_only_the_step_behind_the_window_is_waited_for(in_flight: int) -> None:
    device = Device()
    for i, known in enumerate(steps_on(device, in_flight, 12)):
        # step j records events 2 j and 2 j + 1
        assert device.waited_for == [2 * j + 1 for j in range(i - in_flight + 1)]
        assert [work.start for work, _, _ in known] == ([i - in_flight] if i >= in_flight else [])


def test_a_drain_waits_for_all_steps() -> None:
    device = Device()
    timer = EventTimer(2, device.new_event)
    for i in range(4):
        timer.start()
        timer.stop(Work(i, i + 1), waited_s=0.0)

    assert [work.start for work, _, _ in timer.finished(drain=True)] == [0, 1, 2, 3]
    assert device.waited_for == [1, 3, 5, 7]
    assert list(timer.finished(drain=True)) == []


def test_the_device_times_a_step_in_seconds_without_its_waiting() -> None:
    device = Device()
    timer = EventTimer(1, device.new_event)
    for work, waited_s in ((BATCH, 0.05), (BATCH, 0.0), (TAIL, 9.0)):
        timer.start()
        timer.stop(work, waited_s)

    assert list(timer.finished(drain=True)) == [
        (BATCH, pytest.approx(0.2), True),
        (BATCH, pytest.approx(0.25), False),
        (TAIL, 0.0, True),
    ]


def test_a_cpu_is_timed_by_the_host_and_cuda_by_events() -> None:
    assert isinstance(timer_for(torch.device("cpu"), 2), HostTimer)
    assert isinstance(timer_for(torch.device("cuda", 0), 2), EventTimer)
