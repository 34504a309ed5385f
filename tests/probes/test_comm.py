"""The communication probe, in virtual time and between real ranks with gloo."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.core.communication import CommunicationState, HostLink, PairLink
from lightning_hybrid.core.errors import PeerFailed
from lightning_hybrid.core.exchanges import SMALL_BYTES, Depth, rounds_of
from lightning_hybrid.probes.comm import CommunicationProbe, all_arrive, measure_group
from lightning_hybrid.probes.host_copies import TorchHostCopies
from lightning_hybrid.probes.transport import FakeTransport, GroupTransport
from lightning_hybrid.runtime.store import InProcessStore, open_stores
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def measured(
    transport: FakeTransport, depth: Depth = "quick", copies: Callable[[FakeTransport], Any] = lambda _: None
) -> CommunicationState:
    return CommunicationProbe(transport, host_copies=copies(transport), clock=transport.clock).measure(depth)


# --- in virtual time -------------------------------------------------------------------------------------------------


def test_latency_and_bandwidth_are_those_of_the_link() -> None:
    state = measured(FakeTransport(0, 2, latency_s=1e-4, bytes_per_s=1e9))

    (link,) = state.pairs
    assert (link.first, link.second) == (0, 1)
    assert link.latency_s == pytest.approx(1e-4 + SMALL_BYTES / 1e9)
    assert link.bandwidth_bytes_per_s == pytest.approx(2**20 / (1e-4 + 2**20 / 1e9))
    assert link.contention_frac is None
    assert state.group.num_ranks == 2
    assert state.group.all_reduce_latency_s == pytest.approx(1e-4, rel=1e-3)
    assert state.group.bus_bandwidth_bytes_per_s == pytest.approx(2**20 / (1e-4 + 2**20 / 1e9))
    assert state.hosts == ()


def test_only_the_lower_rank_of_a_pair_tells_its_time() -> None:
    state = measured(FakeTransport(1, 4))

    known = {(link.first, link.second) for link in state.pairs if link.latency_s is not None}
    assert known == {(1, 2)}
    assert len(state.pairs) == 4


@pytest.mark.parametrize("depth", ["quick", "full"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_every_rank_does_what_the_state_counts_beside_the_pilot(depth: Depth, num_ranks: int) -> None:
    transports = [FakeTransport(rank, num_ranks) for rank in range(num_ranks)]
    states = [measured(transport, depth) for transport in transports]

    assert len({(state.num_exchanges, state.num_all_reduces) for state in states}) == 1
    pilots = 5 * 2 * len(next(rounds_of(depth, num_ranks)))
    assert sum(len(each.exchanges) for each in transports) == 2 * states[0].num_exchanges + pilots
    for each in transports:
        assert len(each.all_reduces) == states[0].num_all_reduces + 4
        assert each.num_agreements == 2


def test_one_slow_rank_makes_all_ranks_exchange_less() -> None:
    quick, slow = FakeTransport(0, 4), FakeTransport(0, 4, slowest=200)
    many, few = measured(quick), measured(slow)

    assert few.num_exchanges < many.num_exchanges
    assert few.message_bytes < many.message_bytes
    assert len(slow.exchanges) < len(quick.exchanges)


@pytest.mark.parametrize(("depth", "budget_s"), [("quick", 0.2), ("full", 2.0)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("latency_s", [1e-6, 2e-3])
def test_the_budget_holds_where_a_link_keeps_its_speed(
    depth: Depth, budget_s: float, num_ranks: int, latency_s: float
) -> None:
    transport = FakeTransport(0, num_ranks, latency_s=latency_s, bytes_per_s=1e9)
    state = measured(transport, depth)

    assert transport.now_s <= budget_s
    assert state.probe_s == pytest.approx(transport.now_s)


class FakeCopies:
    """Copies at 10 GB/s from pinned memory and at 4 GB/s from other memory, after a slow first one of each."""

    def __init__(self, transport: FakeTransport) -> None:
        self.transport, self.seen = transport, set[bool]()

    def copy(self, num_bytes: int, *, pinned: bool) -> None:
        warm_up_s = 0.0 if pinned in self.seen else 0.1
        self.seen.add(pinned)
        self.transport.now_s += warm_up_s + num_bytes / (1e10 if pinned else 4e9)


def test_copies_to_the_device_are_told_with_and_without_pinning() -> None:
    (host,) = measured(FakeTransport(1, 2), copies=FakeCopies).hosts

    assert host.rank == 1
    assert host.pinned_bytes_per_s == pytest.approx(1e10)
    assert host.pageable_bytes_per_s == pytest.approx(4e9)
    assert host != HostLink(rank=1)


def test_torch_copies_wait_for_the_device_and_use_their_buffers_again() -> None:
    made: list[tuple[int, bool]] = []
    waits: list[Any] = []

    def empty(num_bytes: int, *, dtype: torch.dtype, device: Any = None, pin_memory: bool = False) -> torch.Tensor:
        made.append((num_bytes, pin_memory))
        return torch.zeros(num_bytes, dtype=dtype)

    copies = TorchHostCopies(CPU, empty=empty, synchronize=waits.append)
    for pinned in (True, False, True):
        copies.copy(16, pinned=pinned)

    assert made == [(16, False), (16, True), (16, False), (16, False)]
    assert waits == [CPU] * 3


# --- who is there ----------------------------------------------------------------------------------------------------


def test_all_have_arrived_when_the_last_one_comes() -> None:
    store, answers = InProcessStore(), []

    def arrive() -> None:
        answers.append(all_arrive(store, 3, patience_s=30.0, poll_s=0.001))

    threads = [threading.Thread(target=arrive) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert answers == [True] * 3


def test_whoever_comes_after_the_others_lost_patience_gets_their_answer() -> None:
    store = InProcessStore()

    assert not all_arrive(store, 2, patience_s=0.0, poll_s=0.001)
    assert not all_arrive(store, 2, patience_s=30.0, poll_s=0.001)


# --- real ranks ------------------------------------------------------------------------------------------------------


def measure_both(rank: int, world: int) -> list[CommunicationState | None]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    store = open_stores("comm")("first")
    assert all_arrive(store, world, patience_s=30.0, poll_s=0.01)
    return [measure_group(depth, CPU, 30.0) for depth in ("quick", "full")]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_real_ranks_find_the_same(world: int) -> None:
    found = run_ranks(measure_both, world, world, deadline_s=30)

    assert all(states == found[0] for states in found)
    quick, full = found[0]
    assert (quick.backend, quick.device_kind, quick.hosts) == ("gloo", "cpu", ())
    for state in found[0]:
        assert state.group.all_reduce_latency_s > 0
        assert state.group.bus_bandwidth_bytes_per_s > 0
        assert all(link.latency_s > 0 for link in state.pairs)
        assert state.slowest_bandwidth_bytes_per_s > 0
        assert state.probe_s > 0
    assert full.depth == "full"
    assert CommunicationState.from_json(full.to_json()) == full


def measure_among_some(rank: int) -> list[int] | None:
    dist.init_process_group("gloo", rank=rank, world_size=3)
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    state = CommunicationProbe(GroupTransport(group, CPU, 30.0)).measure("quick")
    assert isinstance(state.pairs[0], PairLink)
    return [state.group.num_ranks, state.pairs[0].first, state.pairs[0].second]


def test_ranks_of_a_smaller_group_are_counted_inside_it() -> None:
    assert run_ranks(measure_among_some, 3, deadline_s=30) == [[2, 0, 1], None, [2, 0, 1]]


def be_left_alone(rank: int) -> str:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has begun"], timedelta(seconds=20))
        return ""
    store.set("rank 0 has begun", "")
    with pytest.raises(PeerFailed) as caught:
        measure_group("quick", CPU, 2.0)
    return str(caught.value)


def test_a_rank_whose_peer_has_gone_ends_with_a_reason() -> None:
    (text, _) = run_ranks(be_left_alone, 2, deadline_s=30)

    assert text.startswith("a rank did not answer while the links between ranks were measured")


def measure_and_look(rank: int) -> list[bool]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    transport = GroupTransport(dist.group.WORLD, CPU, 30.0)
    CommunicationProbe(transport).measure("quick")
    buffer = weakref.ref(transport._zeros)
    was_held = buffer() is not None
    del transport
    gc.collect()
    return [was_held, buffer() is None]


def test_no_buffer_is_left() -> None:
    assert run_ranks(measure_and_look, 2, deadline_s=30) == [[True, True]] * 2
