"""The few operations of a process group that the communication probe is made of, and a stand-in in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_hybrid.core.errors import PeerFailed

_DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}
_ELEMENT_BYTES = 4


class Transport(Protocol):
    """Carries messages between the ranks of one group; every call returns once the messages have arrived."""

    rank: int
    num_ranks: int
    backend: str
    device_kind: str

    def exchange(self, peer: int, num_bytes: int) -> None:
        """A message there and one back; the lower rank sends first."""
        ...

    def all_reduce(self, num_bytes: int) -> None:
        """Sums a tensor of that size over all ranks."""
        ...

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, at each place, the same on all ranks."""
        ...


class GroupTransport:
    """Messages of a process group of torch, in buffers that end with this object.

    Args:
        group: The group; all of its ranks make a transport and call the same.
        device: Where NCCL finds the messages; gloo's are on the CPU.
        timeout_s: Longest wait for one operation.
    """

    def __init__(self, group: Any, device: torch.device, timeout_s: float) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.backend: str = dist.get_backend(group)
        self.device_kind = _DEVICE_OF_BACKEND[self.backend]
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        self._device = device if self.device_kind == device.type else torch.device(self.device_kind)
        self._zeros = torch.zeros(0, device=self._device)

    @staticmethod
    def carries(group: Any) -> bool:
        """Whether a group's backend is one of those that are measured; all its ranks get the same answer."""
        return dist.get_backend(group) in _DEVICE_OF_BACKEND

    def exchange(self, peer: int, num_bytes: int) -> None:
        """A message there and one back; the lower rank sends first.

        Raises:
            PeerFailed: the other rank has ended, or does not answer within the timeout.
        """
        tensor = self._tensor(num_bytes)
        global_peer = dist.get_global_rank(self._group, peer)
        turns = (dist.isend, dist.irecv) if self.rank < peer else (dist.irecv, dist.isend)
        for turn in turns:
            # as a batch NCCL takes the connections of the group, not a communicator of its own for each pair
            operation = dist.P2POp(turn, tensor, global_peer, group=self._group)
            self._finish(functools.partial(dist.batch_isend_irecv, [operation]))

    def all_reduce(self, num_bytes: int) -> None:
        """Sums zeros over all ranks.

        Raises:
            PeerFailed: a rank has ended, or does not answer within the timeout.
        """
        tensor = self._tensor(num_bytes)
        self._finish(lambda: [dist.all_reduce(tensor, group=self._group, async_op=True)])

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, at each place.

        Raises:
            PeerFailed: a rank has ended, or does not answer within the timeout.
        """
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        largest = dist.ReduceOp.MAX
        self._finish(lambda: [dist.all_reduce(tensor, op=largest, group=self._group, async_op=True)])
        found: list[float] = tensor.tolist()
        return found

    def _tensor(self, num_bytes: int) -> torch.Tensor:
        num_elements = -(-num_bytes // _ELEMENT_BYTES)
        if len(self._zeros) < num_elements:
            self._zeros = torch.zeros(num_elements, device=self._device)
        return self._zeros[:num_elements]

    def _finish(self, begin: Callable[[], Sequence[Any]]) -> None:
        try:
            for work in begin():
                work.wait(self._timeout)
            getattr(torch, self._device.type).synchronize(self._device)
        except RuntimeError as err:
            raise PeerFailed(f"a rank did not answer while the links between ranks were measured: {err}") from err


class FakeTransport:
    """The view of one rank on a group in virtual time, where every link is the same; keeps what was asked of it.

    Args:
        rank: Who this is.
        num_ranks: Size of the group.
        latency_s: Of a message, and of an all-reduce.
        bytes_per_s: Of a message.
        slowest: How much slower the slowest rank is: all times that ranks agree on are by it.
    """

    backend, device_kind = "fake", "cpu"

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        latency_s: float = 1e-4,
        bytes_per_s: float = 1e9,
        slowest: float = 1.0,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.latency_s, self.bytes_per_s, self.slowest = latency_s, bytes_per_s, slowest
        self.now_s = 0.0
        self.exchanges: list[tuple[int, int]] = []
        """Peer and bytes of every exchange."""
        self.all_reduces: list[int] = []
        """Bytes of every all-reduce."""
        self.num_agreements = 0

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def exchange(self, peer: int, num_bytes: int) -> None:
        """Takes the time of two messages."""
        self.exchanges.append((peer, num_bytes))
        self.now_s += 2 * (self.latency_s + num_bytes / self.bytes_per_s)

    def all_reduce(self, num_bytes: int) -> None:
        """Takes the time of a ring: all but one part of the tensor goes round twice."""
        self.all_reduces.append(num_bytes)
        parts = 2 * (self.num_ranks - 1) / self.num_ranks
        self.now_s += self.latency_s + parts * num_bytes / self.bytes_per_s

    def most(self, values: Sequence[float]) -> list[float]:
        """The values of the slowest rank."""
        self.num_agreements += 1
        return [value * self.slowest for value in values]
