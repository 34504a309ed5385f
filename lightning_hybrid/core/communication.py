"""How fast ranks reach each other and their devices: the record that the communication probe leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_hybrid.core.exchanges import Depth
from lightning_hybrid.core.records import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLink(Record):
    """What two ranks measured between them; a bandwidth is that of one direction, its latency counted in."""

    first: int
    second: int
    latency_s: float | None = None
    """Half of the time of a small message there and one back, without other traffic where that was measured."""
    bandwidth_bytes_per_s: float | None = None
    """While no other pair exchanged messages."""
    concurrent_bandwidth_bytes_per_s: float | None = None
    """While the other pairs of its round exchanged messages too."""

    @property
    def contention_frac(self) -> float | None:
        """1 - bandwidth under load / bandwidth alone, 0..1; ``None`` where one of them was not measured."""
        if self.concurrent_bandwidth_bytes_per_s is None or not self.bandwidth_bytes_per_s:
            return None
        return max(0.0, 1.0 - self.concurrent_bandwidth_bytes_per_s / self.bandwidth_bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLink(Record):
    """What all-reduces of one process group took, on its slowest rank."""

    num_ranks: int
    all_reduce_latency_s: float | None = None
    """Time of an all-reduce of a few bytes."""
    all_reduce_bytes_per_s: float | None = None
    """Algorithm bandwidth: bytes of one rank's tensor over the time of its all-reduce."""

    @property
    def bus_bandwidth_bytes_per_s(self) -> float | None:
        """Algorithm bandwidth times 2 (n - 1) / n, which compares with the links' own whatever n is.

        Source: nccl-tests, doc/PERFORMANCE.md.
        """
        if self.all_reduce_bytes_per_s is None:
            return None
        return self.all_reduce_bytes_per_s * 2 * (self.num_ranks - 1) / self.num_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink(Record):
    """What copies from one rank's host to its device reach while the other ranks copy too; ``None`` for a CPU."""

    rank: int
    pageable_bytes_per_s: float | None = None
    pinned_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationState(Record):
    """What the communication probe found, the same on every rank; what was not measured is ``None`` or not listed."""

    depth: Depth
    backend: str
    """Of the process group: gloo or nccl."""
    device_kind: str
    """Where the messages lay: cpu for gloo, cuda for NCCL."""
    pairs: tuple[PairLink, ...] = ()
    group: GroupLink
    hosts: tuple[HostLink, ...] = ()
    """One entry for each rank whose copies to its device were measured."""
    message_bytes: int
    """Size of the messages and tensors that the bandwidths are of."""
    num_exchanges: int
    """Messages there and back of all ranks together, the pilot's left out."""
    num_all_reduces: int
    probe_s: float | None = None
    """Seconds that the slowest rank took for all of it."""

    @property
    def slowest_latency_s(self) -> float | None:
        """Of the pair where it is longest."""
        return max(_known(link.latency_s for link in self.pairs), default=None)

    @property
    def slowest_bandwidth_bytes_per_s(self) -> float | None:
        """Of the pair where it is lowest, alone where that was measured, else under load."""
        every = (link.bandwidth_bytes_per_s or link.concurrent_bandwidth_bytes_per_s for link in self.pairs)
        return min(_known(every), default=None)

    @property
    def contention_frac(self) -> float | None:
        """1 - sum of bandwidths under load / sum of the same pairs' bandwidths alone, 0..1."""
        both = [
            (link.concurrent_bandwidth_bytes_per_s, link.bandwidth_bytes_per_s)
            for link in self.pairs
            if link.contention_frac is not None
        ]
        alone = sum(_known(alone for _, alone in both))
        return max(0.0, 1.0 - sum(_known(loaded for loaded, _ in both)) / alone) if alone else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
