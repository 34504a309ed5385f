from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import CoordinationTimeout
from lightning_hybrid.core.workqueue import CellQueue, RangeKey
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.store import InProcessStore, Store, TorchStore, open_stores
from tests.ranks import run_ranks
from tests.runtime.servers import StoreServer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["in_process", "hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of each kind."""
    if request.param == "in_process":
        yield InProcessStore()
    elif request.param == "hash":
        yield TorchStore(dist.HashStore(), "run")
    elif request.param == "file":
        yield TorchStore(dist.FileStore(str(tmp_path / "store"), 1), "run")
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield TorchStore(server, "run")


def in_threads(function: Callable[[int], Any], count: int) -> list[Any]:
    """What ``function(i)`` returned in ``count`` threads that begin together."""
    barrier = threading.Barrier(count)

    def main(i: int) -> Any:
        barrier.wait(timeout=30)
        return function(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(main, range(count)))


def test_a_counter_begins_at_zero_and_returns_its_new_value(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -2) == 3
    assert store.add("n", 0) == 3
    assert store.add("other", 1) == 1


def test_a_counter_has_room_for_a_queue_of_the_largest_size(store: Store) -> None:
    assert store.add("n", 2**61) == 2**61
    assert store.add("n", 2**30) == 2**61 + 2**30


def test_a_counter_is_read_as_its_decimal_digits(store: Store) -> None:
    store.add("n", 2**40)

    assert store.get_many(["n"]) == [b"1099511627776"]


def test_adds_from_many_threads_each_get_a_value_of_their_own(store: Store) -> None:
    values = in_threads(lambda _: [store.add("n", 1) for _ in range(25)], 8)

    assert sorted(value for thread in values for value in thread) == list(range(1, 201))


def test_any_bytes_come_back(store: Store) -> None:
    data = bytes(range(256)) + b"\n\x00"
    store.put("k", data)

    assert store.get_many(["k"]) == [data]


def test_the_last_value_put_counts(store: Store) -> None:
    store.put("k", b"one")
    store.put("k", b"two")

    assert store.get_many(["k"]) == [b"two"]


def test_the_first_value_created_counts(store: Store) -> None:
    assert store.create("k", b"\xff\x00first") == b"\xff\x00first"
    assert store.create("k", b"second") == b"\xff\x00first"
    assert store.get_many(["k"]) == [b"\xff\x00first"]


def test_of_many_threads_that_create_at_once_one_wins_and_all_learn_it(store: Store) -> None:
    answers = in_threads(lambda i: store.create("k", f"thread {i}".encode()), 8)

    assert len(set(answers)) == 1
    assert store.get_many(["k"]) == [answers[0]]


def test_missing_keys_are_none_at_once(store: Store) -> None:
    store.put("a", b"1")
    store.add("c", 7)

    assert store.get_many(["a", "b", "c", "a"]) == [b"1", None, b"7", b"1"]
    assert store.get_many(["b"]) == [None]
    assert store.get_many([]) == []


def test_threads_that_claim_reserve_and_steal_at_once_take_every_position_once(store: Store) -> None:
    queues = [CellQueue(store, replica, 240) for replica in range(4)]
    ranges: list[RangeKey] = []  # of all of them, so that they take from each other

    def main(me: int) -> list[int]:
        mine: list[int] = []
        for turn in range(40):
            won = queues[me].claim(5, from_tail=bool(me % 2))
            loot = queues[me].steal(ranges[(turn * 7 + me) % len(ranges)], 2) if ranges else None
            ranges.extend(item for item in (won, loot) if item)
            if ranges:
                mine += range(*queues[me].reserve(ranges[turn % len(ranges)], 3))
        return mine

    taken = in_threads(main, 4)
    while (won := queues[0].seal()) is not None:
        ranges.append(won)
    taken += [range(*queues[0].reserve(item, item.size)) for item in ranges]

    assert sorted(at for part in taken for at in part) == list(range(240))


def test_keys_of_another_prefix_are_others() -> None:
    shared = dist.HashStore()
    first, second = TorchStore(shared, "first"), TorchStore(shared, "second")
    first.add("n", 3)
    first.put("k", b"first")

    assert second.get_many(["n", "k"]) == [None, None]
    assert second.create("k", b"second") == b"second"
    assert first.get_many(["n", "k"]) == [b"3", b"first"]


def test_without_a_process_group_the_store_is_in_process() -> None:
    assert isinstance(open_stores("run")("0"), InProcessStore)


# --- with a process group -------------------------------------------------------------------------------------------


def count_together(rank: int, world: int) -> list[Any]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    store = open_stores("run")("0")
    values = [store.add("n", 1) for _ in range(20)]
    agreed = store.create("grid", f"rank {rank}".encode())
    dist.barrier()
    total = store.get_many(["n", "nothing"])
    dist.barrier()
    return [values, agreed, total]


def test_ranks_meet_in_the_store_of_their_process_group() -> None:
    outcomes = run_ranks(count_together, 3, 3, deadline_s=40)

    assert sorted(value for values, _, _ in outcomes for value in values) == list(range(1, 61))
    assert len({agreed for _, agreed, _ in outcomes}) == 1
    assert [total for _, _, total in outcomes] == [[b"60", None]] * 3


# --- a store that is gone -------------------------------------------------------------------------------------------


def ask_a_killed_server(_rank: int) -> list[str]:
    server = StoreServer()
    store = TorchStore(server.client(), "run")
    store.add("n", 1)
    server.kill()
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: store.add("n", 1),
        "set": lambda: store.put("k", b""),
        "compare_set": lambda: store.create("k", b"v"),
        "get": lambda: store.get_many(["k"]),
    }
    said = []
    for operation, call in calls.items():
        with pytest.raises(CoordinationTimeout, match=rf"did not answer {operation}\(") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)
        said.append(operation)
    return said


def test_a_store_whose_server_was_killed_says_so_in_every_call() -> None:
    assert run_ranks(ask_a_killed_server, 1, deadline_s=40) == [["add", "set", "compare_set", "get"]]


def wait_for_a_stopped_server(_rank: int) -> str:
    server = StoreServer()
    config = HybridConfig(publish_period_s=0.02, claim_deadline_s=0.5)
    board = Board(SharedQueue(TorchStore(server.client(), "run"), 0, 1), 0, 1, config)
    board.start()
    with board.changed:
        board.wait(lambda: board.view.looks > 0, "the first exchange")
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(CoordinationTimeout, match="claim_deadline_s") as caught:
            board.wait(lambda: False, "what never comes")
    board.close()
    server.kill()
    return str(caught.value)


def test_a_wait_ends_at_its_deadline_when_the_server_stands_still() -> None:
    (message,) = run_ranks(wait_for_a_stopped_server, 1, deadline_s=40)

    assert "for what never comes, and no replica made progress" in message
