"""Measures how fast ranks reach each other: pairs alone and at once, all-reduces, and copies to the device.

All ranks of the group measure together or none does. What is done is fixed before it begins, by what a short pilot
took on the slowest rank, so a slow network costs exchanges and not time.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from lightning_hybrid.core.communication import CommunicationState, GroupLink, HostLink, PairLink
from lightning_hybrid.core.exchanges import (
    PILOT_BYTES,
    SMALL_BYTES,
    Depth,
    ExchangePlan,
    Pair,
    Pilot,
    partner_of,
    plan_exchanges,
    rounds_of,
)
from lightning_hybrid.core.workqueue import Keys
from lightning_hybrid.probes.host_copies import HostCopies, TorchHostCopies
from lightning_hybrid.probes.transport import GroupTransport, Transport

_log = logging.getLogger(__name__)

_PILOT_REPEATS = 3
_COPY_REPEATS = 3
_COPY_BYTES: dict[Depth, int] = {"quick": 2**22, "full": 2**25}


class CommunicationProbe:
    """Measures the links of one group, once; every rank of it calls `measure` at the same time.

    Args:
        transport: Carries the messages.
        host_copies: Copies to the device, ``None`` for a CPU.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        host_copies: HostCopies | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._transport, self._host_copies, self._clock = transport, host_copies, clock

    def measure(self, depth: Depth) -> CommunicationState:
        """What was found, the same on every rank.

        A time is the median of its repeats on the clock of the pair's lower rank, or of an all-reduce's slowest rank.

        Raises:
            ConfigError: the group has fewer than two ranks.
            PeerFailed: a rank has ended, or does not answer.
        """
        begun_s = self._clock()
        plan = plan_exchanges(depth, self._transport.num_ranks, self._pilot(depth, begun_s))
        seconds = [*self._exchanges_s(plan), *self._all_reduces_s(plan), *self._copies_s(depth)]
        agreed = self._transport.most([*seconds, self._clock() - begun_s])
        return self._state(depth, plan, [value if value > 0 else None for value in agreed])

    def _pilot(self, depth: Depth, begun_s: float) -> Pilot:
        transport = self._transport
        transport.all_reduce(SMALL_BYTES)  # the ranks have not begun at the same time
        all_reduce_s = self._median_s(lambda: transport.all_reduce(SMALL_BYTES), _PILOT_REPEATS)
        first_round = next(rounds_of(depth, transport.num_ranks))
        times_s = [0.0, 0.0, 0.0]
        peer = partner_of(transport.rank, first_round)
        if peer is not None:
            times_s = [
                self._median_s(lambda: transport.exchange(peer, SMALL_BYTES), 1),
                self._median_s(lambda: transport.exchange(peer, SMALL_BYTES), _PILOT_REPEATS),
                self._median_s(lambda: transport.exchange(peer, PILOT_BYTES), 1),
            ]
        agreed = transport.most([all_reduce_s, *times_s, self._clock() - begun_s])
        names = ("all_reduce_s", "connect_s", "small_s", "large_s", "spent_s")
        return Pilot(**dict(zip(names, agreed, strict=True)))

    def _exchanges_s(self, plan: ExchangePlan) -> Iterator[float]:
        """Times of a small and of a large exchange of every pair that is measured, 0 where this rank does not tell."""
        for pairs in plan.measurements:
            self._transport.all_reduce(SMALL_BYTES)  # until then others may still be at the measurement before
            peer = partner_of(self._transport.rank, pairs)
            times_s = (0.0, 0.0) if peer is None else self._exchange_s(peer, plan)
            for first, _ in pairs:
                yield from times_s if first == self._transport.rank else (0.0, 0.0)

    def _exchange_s(self, peer: int, plan: ExchangePlan) -> tuple[float, float]:
        transport = self._transport
        transport.exchange(peer, SMALL_BYTES)
        small_s = self._median_s(lambda: transport.exchange(peer, SMALL_BYTES), plan.repeats)
        return small_s, self._median_s(lambda: transport.exchange(peer, plan.message_bytes), plan.repeats)

    def _all_reduces_s(self, plan: ExchangePlan) -> tuple[float, float]:
        transport = self._transport
        transport.all_reduce(SMALL_BYTES)
        small_s = self._median_s(lambda: transport.all_reduce(SMALL_BYTES), plan.repeats)
        return small_s, self._median_s(lambda: transport.all_reduce(plan.message_bytes), plan.repeats)

    def _copies_s(self, depth: Depth) -> list[float]:
        """Times of a copy from pageable and from pinned memory of every rank, 0 where this rank does not tell."""
        found = [0.0] * (2 * self._transport.num_ranks)
        if (copies := self._host_copies) is None:
            return found
        for pinned in (False, True):
            copy = functools.partial(copies.copy, _COPY_BYTES[depth], pinned=pinned)
            copy()
            found[2 * self._transport.rank + pinned] = self._median_s(copy, _COPY_REPEATS)
        return found

    def _median_s(self, operation: Callable[[], None], repeats: int) -> float:
        found = []
        for _ in range(repeats):
            start_s = self._clock()
            operation()
            found.append(self._clock() - start_s)
        return statistics.median(found)

    def _state(self, depth: Depth, plan: ExchangePlan, times_s: list[float | None]) -> CommunicationState:
        transport, copy_bytes, left = self._transport, _COPY_BYTES[depth], iter(times_s)
        measured = [(pair, len(pairs) > 1, next(left), next(left)) for pairs in plan.measurements for pair in pairs]
        group = GroupLink(
            num_ranks=transport.num_ranks,
            all_reduce_latency_s=next(left),
            all_reduce_bytes_per_s=_per_s(plan.message_bytes, next(left)),
        )
        hosts = [
            HostLink(
                rank=rank,
                pageable_bytes_per_s=_per_s(copy_bytes, next(left)),
                pinned_bytes_per_s=_per_s(copy_bytes, next(left)),
            )
            for rank in range(transport.num_ranks)
        ]
        return CommunicationState(
            depth=depth,
            backend=transport.backend,
            device_kind=transport.device_kind,
            pairs=_pair_links(measured, plan.message_bytes),
            group=group,
            hosts=tuple(host for host in hosts if host != HostLink(rank=host.rank)),
            message_bytes=plan.message_bytes,
            num_exchanges=plan.num_exchanges,
            num_all_reduces=plan.num_all_reduces,
            probe_s=next(left),
        )


def num_measurable_ranks() -> int:
    """Ranks of the default process group; 0 where there is none, or of another kind than gloo or NCCL."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    if not GroupTransport.carries(dist.group.WORLD):
        _log.debug("links between ranks are not measured with the backend %s", dist.get_backend())
        return 0
    return dist.get_world_size()


def measure_group(depth: Depth, device: torch.device, timeout_s: float) -> CommunicationState:
    """Measures the default process group, with all of its ranks.

    Args:
        depth: How much is measured; the same on all ranks.
        device: This rank's device.
        timeout_s: Longest wait for one operation.

    Raises:
        PeerFailed: a rank has ended, or does not answer within ``timeout_s``.
    """
    copies = TorchHostCopies(device) if device.type == "cuda" else None
    return CommunicationProbe(GroupTransport(dist.group.WORLD, device, timeout_s), host_copies=copies).measure(depth)


def all_arrive(store: Keys, num_ranks: int, *, patience_s: float, poll_s: float) -> bool:
    """Whether all ranks have come to call this for the same store, the same answer on every rank.

    Whoever comes last says so, and whoever has waited for ``patience_s`` says that not all have come; the first word
    counts.
    """
    if store.add("arrived", 1) == num_ranks:
        return store.create("verdict", _ALL) == _ALL
    until_s = time.monotonic() + patience_s
    while (verdict := store.get_many(["verdict"])[0]) is None:
        if time.monotonic() >= until_s:
            return store.create("verdict", _NOT_ALL) == _ALL
        time.sleep(poll_s)
    return verdict == _ALL


_ALL, _NOT_ALL = b"all", b"not all"


def _pair_links(
    measured: Sequence[tuple[Pair, bool, float | None, float | None]], message_bytes: int
) -> tuple[PairLink, ...]:
    """One link for each pair, from its times at once with others (``True``) and alone."""
    links: dict[Pair, PairLink] = {}
    for pair, at_once, small_s, large_s in measured:
        link = links.get(pair, PairLink(first=pair[0], second=pair[1]))
        latency_s = None if small_s is None else small_s / 2
        bytes_per_s = _per_s(2 * message_bytes, large_s)
        if at_once:
            links[pair] = replace(link, latency_s=latency_s, concurrent_bandwidth_bytes_per_s=bytes_per_s)
        else:
            links[pair] = replace(link, latency_s=latency_s or link.latency_s, bandwidth_bytes_per_s=bytes_per_s)
    return tuple(links.values())


def _per_s(num_bytes: int, seconds: float | None) -> float | None:
    return None if seconds is None else num_bytes / seconds
