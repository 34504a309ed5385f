"""The collectives of a rank are counted, timed and complained of; across real ranks with gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.runtime.collectives import CollectiveClock, CollectiveCounter, CollectiveWatch
from lightning_hybrid.runtime.work import Work
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


def scripted(*readings_s: float) -> Callable[[], float]:
    readings: Iterator[float] = iter(readings_s)
    return lambda: next(readings)


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


def make_a_group(rank: int, world: int) -> list[bool]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    count, moved = CollectiveCounter(), []
    before = count()
    group = dist.new_group([0, 1])
    moved.append(count() != before)
    before = count()
    dist.all_reduce(torch.ones(1), group=group)  # of a group that is younger than the counter
    moved.append(count() != before)
    before = count()
    moved.append(count() != before)
    dist.barrier()
    return moved


def test_a_group_that_is_made_later_moves_the_count_and_its_collectives_do_too() -> None:
    assert run_ranks(make_a_group, 2, 2, deadline_s=40) == [[True, True, False]] * 2


def call_each(rank: int, world: int) -> dict[str, int]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    ticks = [0]

    def clock() -> float:
        ticks[0] += 1
        return float(ticks[0])

    ones, both = torch.ones(world), [torch.ones(1) for _ in range(world)]
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather(both, torch.ones(1)),
        "all_reduce": lambda: dist.all_reduce(ones),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(world), ones),
        "barrier": lambda: dist.barrier(),  # looked up when it is called
        "broadcast": lambda: dist.broadcast(ones, 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "gather": lambda: dist.gather(torch.ones(1), both if rank == 0 else None),
        "gather_object": lambda: dist.gather_object(rank, [None] * world if rank == 0 else None),
        "reduce": lambda: dist.reduce(ones, 0),
        "scatter": lambda: dist.scatter(torch.empty(1), both if rank == 0 else None),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [0] * world if rank == 0 else None),
    }
    waited: dict[str, int] = {}
    for name, call in calls.items():
        collective_clock, count = CollectiveClock(clock), CollectiveCounter()
        before = count()
        collective_clock.install()
        call()
        collective_clock.remove()
        assert count() != before, name
        waited[name] = int(collective_clock.waited_s)
    dist.barrier()
    return waited


def test_every_kind_of_collective_is_timed_and_counted() -> None:
    for waited in run_ranks(call_each, 2, 2, deadline_s=40):
        assert [name for name, ticks in waited.items() if ticks == 0] == []


# --- CollectiveWatch ------------------------------------------------------------------------------------------------


class Issued:
    """How many collectives this rank has issued."""

    def __init__(self) -> None:
        self.num = 7

    def __call__(self) -> int:
        return self.num


def test_a_step_without_a_collective_moves_nothing() -> None:
    watch = CollectiveWatch(0, "predict", Issued())
    watch.begin(Work(0, 4))

    assert not watch.has_moved()
    assert not watch.end()


def test_a_collective_is_noticed_while_the_step_runs_and_when_it_has_ended() -> None:
    issued = Issued()
    watch = CollectiveWatch(0, "predict", issued)
    watch.begin(Work(0, 4))
    issued.num += 1

    assert watch.has_moved()
    assert watch.end()


def test_collectives_between_two_steps_are_not_those_of_a_step() -> None:
    issued = Issued()
    watch = CollectiveWatch(0, "predict", issued)
    issued.num += 1
    assert not watch.has_moved()  # before the first

    watch.begin(Work(0, 4))
    assert not watch.end()
    issued.num += 1
    assert not watch.has_moved()
    assert not watch.end()
    watch.begin(Work(4, 8))
    assert not watch.end()


def test_the_complaint_names_replica_stage_samples_and_the_cure() -> None:
    watch = CollectiveWatch(3, "validate", Issued())
    watch.begin(Work(0, 4))
    watch.end()
    watch.begin(Work(40, 44, 10))

    assert watch.complaint() == (
        "replica 3 issued a collective in the validate step of samples 40 to 43 of the loader, but in queue mode"
        ' replicas take different numbers of steps; use HybridBalanceCallback(mode="lockstep")'
    )


def watch_steps(rank: int, world: int) -> list[tuple[bool, bool]]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    watch, seen = CollectiveWatch(rank, "test", CollectiveCounter()), []
    for issues in (False, True, False):
        watch.begin(Work(rank, rank + 1))
        if issues:
            dist.all_reduce(torch.ones(1))
        seen.append((watch.has_moved(), watch.end()))
        dist.barrier()  # of the loop, not of a step
    return seen


def test_on_every_rank_the_step_with_the_collective_is_found() -> None:
    assert run_ranks(watch_steps, 2, 2, deadline_s=40) == [[(False, False), (True, True), (False, False)]] * 2
