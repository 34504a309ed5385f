from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.runtime.collectives import CollectiveClock, CollectiveCounter
from lightning_hybrid.runtime.timing import EventTimer, HostTimer, timer_for
from lightning_hybrid.runtime.work import Work
from tests.ranks import run_ranks

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


# --- CollectiveClock ------------------------------------------------------------------------------------------------

COLLECTIVES = ("all_reduce", "all_gather_object", "barrier", "broadcast", "reduce_scatter_tensor")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives that need no process group; ``barrier`` is made of two others."""

    def barrier() -> str:
        dist.all_reduce(torch.zeros(1))
        dist.distributed_c10d.broadcast(torch.zeros(1), 0)
        return "met"

    def broadcast(*_args: Any) -> None:
        raise RuntimeError("rank 1 is gone")

    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "all_reduce", lambda tensor, *, op="sum": (tensor, op))
        monkeypatch.setattr(module, "barrier", barrier)
        monkeypatch.setattr(module, "broadcast", broadcast)


@pytest.fixture
def original() -> dict[tuple[Any, str], Any]:
    return {(module, name): getattr(module, name) for module in (dist, dist.distributed_c10d) for name in COLLECTIVES}


@pytest.mark.usefixtures("fakes")
def test_time_in_collectives_adds_up() -> None:
    clock = CollectiveClock(scripted(10.0, 12.0, 20.0, 20.5))
    clock.install()
    try:
        assert dist.all_reduce(1, op="max") == (1, "max")
        dist.distributed_c10d.all_reduce(1)
    finally:
        clock.remove()

    assert clock.waited_s == 2.5


@pytest.mark.usefixtures("fakes")
def test_a_collective_inside_another_counts_once_and_an_error_counts_as_well() -> None:
    # barrier from 10 s to 17 s; in it all_reduce and a broadcast that fails
    clock = CollectiveClock(scripted(10.0, 11.0, 14.0, 17.0, 30.0, 31.0))
    clock.install()
    try:
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            dist.barrier()
        assert clock.waited_s == 7.0
        dist.all_reduce(1)
    finally:
        clock.remove()

    assert clock.waited_s == 8.0


def test_every_function_is_put_back(original: dict[tuple[Any, str], Any]) -> None:
    clock = CollectiveClock()
    clock.install()
    clock.install()
    assert all(getattr(module, name) is not function for (module, name), function in original.items())
    assert dist.all_reduce.__name__ == "all_reduce"
    clock.remove()
    clock.remove()

    assert all(getattr(module, name) is function for (module, name), function in original.items())


def test_a_clock_can_be_installed_again(original: dict[tuple[Any, str], Any]) -> None:
    clock = CollectiveClock()
    for _ in range(2):
        clock.install()
        clock.remove()

    assert all(getattr(module, name) is function for (module, name), function in original.items())


# --- with a process group -------------------------------------------------------------------------------------------


def test_there_is_no_count_without_a_process_group() -> None:
    assert CollectiveCounter()() == 0


def count_collectives(rank: int, world: int) -> list[bool]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.new_group([0, 1])
    moved = []
    count = CollectiveCounter()

    def moves(action: Callable[[], object]) -> None:
        before = count()
        action()
        moved.append(count() != before)

    moves(lambda: torch.ones(2).sum())
    moves(lambda: dist.all_reduce(torch.ones(2)))
    moves(lambda: dist.all_gather_object([None] * world, rank))
    moves(lambda: dist.broadcast(torch.ones(2), 0))
    moves(lambda: dist.all_reduce(torch.ones(2), group=group))
    moves(lambda: None)
    dist.barrier()
    return moved


def test_a_collective_of_any_group_moves_the_count_on_every_rank() -> None:
    assert run_ranks(count_collectives, 2, 2, deadline_s=40) == [[False, True, True, True, True, False]] * 2


def time_collectives(rank: int, world: int) -> float:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    ticks = [0.0]

    def clock() -> float:
        ticks[0] += 1.0
        return ticks[0]

    collective_clock = CollectiveClock(clock)
    collective_clock.install()
    dist.all_gather_object([None] * world, {"rank": rank})
    dist.barrier()
    collective_clock.remove()
    dist.barrier()
    return collective_clock.waited_s


def test_real_collectives_are_counted_once_each() -> None:
    # the clock ticks at every reading: two collectives that are not nested read it twice each, an object gather
    # is made of further ones that read it in between
    first, second = run_ranks(time_collectives, 2, 2, deadline_s=40)

    assert first == second
    assert first >= 2.0
