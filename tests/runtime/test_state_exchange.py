"""What rank zero learns of the others' devices through a store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import CoordinationTimeout
from lightning_hybrid.runtime.state_exchange import StateExchange
from lightning_hybrid.runtime.store import InProcessStore, Store, TorchStore
from tests.ranks import run_ranks
from tests.runtime.servers import StoreServer

DEADLINE_S = 20.0


def state(power_w: float, timestamp_s: float = 1.0) -> DeviceState:
    return DeviceState(kind="cuda", name="GPU", active=True, power_w=power_w, timestamp_s=timestamp_s)


def wait_until(ready: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not ready():
        assert time.monotonic() < until_s, "it did not happen"
        pause.wait(0.002)


@pytest.fixture
def join() -> Iterator[Callable[..., StateExchange]]:
    """Makes exchanges that are started, and stopped in the end."""
    joined: list[StateExchange] = []

    def make(store: Store, rank: int, num_ranks: int, read: Any, **options: Any) -> StateExchange:
        exchange = StateExchange(store, rank, num_ranks, read, **{"period_s": 0.005} | options)
        joined.append(exchange)
        exchange.start()
        return exchange

    yield make
    for exchange in joined:
        exchange.stop()


def test_rank_zero_learns_every_field_and_the_others_know_their_own(join: Callable[..., StateExchange]) -> None:
    store = InProcessStore()
    zero = join(store, 0, 2, lambda: state(100.0))
    told = DeviceState(kind="cuda", power_w=200.0, xid_events=(79,), unknown={"energy_j": "no"}, timestamp_s=5.0)
    one = join(store, 1, 2, lambda: told)

    wait_until(lambda: len(zero.states()) == 2)

    assert zero.states() == {0: state(100.0), 1: told}
    assert one.states() == {1: told}


def test_sixteen_ranks_write_one_key_each_however_long_it_lasts(join: Callable[..., StateExchange]) -> None:
    class Noting(InProcessStore):
        def __init__(self) -> None:
            super().__init__()
            self.puts: list[str] = []

        def put(self, key: str, value: bytes) -> None:
            super().put(key, value)
            self.puts.append(key)

    store = Noting()
    zero = join(store, 0, 16, lambda: state(0.0))
    for rank in range(1, 16):
        join(store, rank, 16, lambda rank=rank: state(10.0 * rank))

    wait_until(lambda: len(zero.states()) == 16 and len(store.puts) > 200)

    assert [zero.states()[rank].power_w for rank in range(16)] == [10.0 * rank for rank in range(16)]
    assert set(store.puts) == {"reader", *(f"rank/{rank}" for rank in range(1, 16))}


def test_a_new_reading_is_told_at_once(join: Callable[..., StateExchange]) -> None:
    store, power = InProcessStore(), [1.0]
    zero = join(store, 0, 2, lambda: state(0.0), period_s=1000.0)
    one = join(store, 1, 2, lambda: state(power[0]), period_s=1000.0)

    def told(watts: float) -> bool:
        one.wake()
        zero.wake()
        return 1 in zero.states() and zero.states()[1].power_w == watts

    wait_until(lambda: told(1.0))
    power[0] = 2.0
    wait_until(lambda: told(2.0))


def test_a_rank_that_ends_is_silent_after_five_seconds_of_rank_zeros_clock(
    join: Callable[..., StateExchange],
) -> None:
    now_s = [0.0]
    store = InProcessStore()
    zero = join(store, 0, 2, lambda: state(0.0), clock=lambda: now_s[0])
    one = join(store, 1, 2, lambda: state(1.0))
    wait_until(lambda: 1 in zero.states())
    one.stop()
    looked = threading.Semaphore(0)
    zero.after.append(looked.release)
    for _ in range(2):  # what it wrote last has been read
        assert looked.acquire(timeout=DEADLINE_S)

    now_s[0] += 4.0
    assert zero.states()[1].power_w == 1.0
    now_s[0] += 2.0
    assert zero.states()[1].power_w is None
    assert "rank 1 has told nothing" in (zero.states()[1].error or "")
    assert zero.states()[0].power_w == 0.0


def test_a_second_run_on_the_same_store_begins_with_nobody(join: Callable[..., StateExchange]) -> None:
    store = InProcessStore()
    first, one = join(store, 0, 2, lambda: state(0.0)), join(store, 1, 2, lambda: state(1.0))
    wait_until(lambda: 1 in first.states())
    for exchange in (one, first):
        exchange.stop()

    looked = threading.Semaphore(0)
    second = StateExchange(store, 0, 2, lambda: state(0.0), period_s=0.005)
    second.after.append(looked.release)
    second.start()
    for _ in range(3):
        assert looked.acquire(timeout=DEADLINE_S)

    assert set(second.states()) == {0}
    join(store, 1, 2, lambda: state(3.0))
    wait_until(lambda: 1 in second.states())
    assert second.states()[1].power_w == 3.0
    second.stop()


class Failing(InProcessStore):
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        raise CoordinationTimeout("the store is gone")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_is_said_on_rank_zero_and_ends_no_run(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    exchange = StateExchange(Failing(), rank, 2, lambda: state(7.0), period_s=0.005)
    exchange.start()
    wait_until(lambda: not any(thread.name == "lightning_hybrid-states" for thread in threading.enumerate()))

    said = "the states of the other ranks' devices are not known from here on: the store is gone"
    assert caplog.messages == ([said] if rank == 0 else [])
    assert exchange.states() == {rank: state(7.0)}
    exchange.stop()
    exchange.stop()


def test_a_store_that_hangs_delays_neither_reading_nor_the_end() -> None:
    class Hanging(InProcessStore):
        go_on = threading.Event()

        def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
            self.go_on.wait(DEADLINE_S)
            return super().get_many(keys)

    store = Hanging()
    exchange = StateExchange(store, 0, 2, lambda: state(7.0))
    exchange.start()
    began_s = time.perf_counter()
    found = exchange.states()
    exchange.stop(timeout_s=0.05)
    passed_s = time.perf_counter() - began_s
    store.go_on.set()

    assert found == {0: state(7.0)}
    assert passed_s < 1.0


def _tell_and_wait(rank: int, port: int) -> dict[int, float | None]:
    store = TorchStore(StoreServer.client_of(port), "job")
    exchange = StateExchange(store, rank, 4, lambda: state(10.0 * rank), period_s=0.02)
    exchange.start()
    if rank == 0:
        wait_until(lambda: len(exchange.states()) == 4)
        store.put("done", b"")
    wait_until(lambda: store.get_many(["done"]) == [b""])
    exchange.stop()
    return {each: found.power_w for each, found in exchange.states().items()}


def test_processes_tell_each_other_through_a_tcp_store() -> None:
    server = StoreServer()
    try:
        found = run_ranks(_tell_and_wait, 4, server.port, deadline_s=DEADLINE_S)
    finally:
        server.kill()

    assert found == [{0: 0.0, 1: 10.0, 2: 20.0, 3: 30.0}, {1: 10.0}, {2: 20.0}, {3: 30.0}]


def test_of_very_many_ranks_none_is_read_more_often_than_the_bound_whoever_wakes(
    join: Callable[..., StateExchange],
) -> None:
    looks, clock_s = [0], [0.0]
    exchange = StateExchange(InProcessStore(), 0, 400, lambda: state(0.0), period_s=0.005, clock=lambda: clock_s[0])
    exchange.after.append(lambda: looks.__setitem__(0, looks[0] + 1))
    exchange.start()
    try:
        wait_until(lambda: looks[0] == 1)
        pause = threading.Event()
        for _ in range(20):
            exchange.wake()
            pause.wait(0.005)
        assert looks[0] == 1  # 400 ranks at 200 a second: not before two seconds have passed
    finally:
        exchange.stop()


def test_a_state_that_cannot_be_told_is_named_once_and_the_next_one_is_told(
    join: Callable[..., StateExchange], caplog: pytest.LogCaptureFixture
) -> None:
    store, power = InProcessStore(), [float("nan")]
    zero = join(store, 0, 2, lambda: state(0.0))

    class Odd(DeviceState):
        def to_json(self, **_: Any) -> str:
            raise TypeError("Object of type float32 is not JSON serializable")

        def to_dict(self, **_: Any) -> dict[str, Any]:
            raise TypeError("Object of type float32 is not JSON serializable")

    def read() -> DeviceState:
        return Odd(kind="cuda") if power[0] != power[0] else state(power[0])

    with caplog.at_level(logging.WARNING):
        join(store, 1, 2, read)
        wait_until(lambda: "cannot be told" in caplog.text)
        power[0] = 7.0
        wait_until(lambda: 1 in zero.states() and zero.states()[1].power_w == 7.0)
    assert caplog.text.count("cannot be told") == 1
