"""Plan versions: in which order the cells of an epoch stand in the work queue, and what each replica may take.

A version is plain data with an exact byte form. The first one of an epoch is known to every replica without being
told; a later one is made of what was left of the one before, by the replica that sealed it.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.cost import Costs, FloatArray
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.placement import memory_bounds
from lightning_hybrid.core.policies import End, Policy, Proposal, ReplicaView, validate
from lightning_hybrid.core.shares import earliest_completion
from lightning_hybrid.core.workqueue import RangeKey, Span

_SLACK = 1e-9
"""Relative error of sums of costs that is overlooked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QueueVersion:
    """One version of the queue: cell ``cells[p]`` stands at position ``p``.

    ``costs`` are those of the cells in this order. With ``shares`` the positions are given out already: replica ``r``
    owns ``shares[r]`` until somebody steals from it. ``is_dealt`` tells that every replica takes an equal share at once
    and keeps it, which is how balancing is turned off.
    """

    number: int
    policy: str
    cells: npt.NDArray[np.int64]
    costs: Costs
    ends: tuple[End, ...]
    max_claim_costs: tuple[float | None, ...]
    memory_bounds: tuple[float | None, ...]
    shares: tuple[Span, ...] | None = None
    is_dealt: bool = False
    _sums: array[float] = field(init=False, repr=False)
    """Cost of all positions before each; looked up one by one, for which numpy is slow."""

    def __post_init__(self) -> None:
        prefix = np.concatenate(([0.0], np.cumsum(self.costs.compute)))
        object.__setattr__(self, "_sums", array("d", prefix.tobytes()))

    @classmethod
    def proposed(
        cls, number: int, policy: Policy, cells: npt.NDArray[np.int64], costs: Costs, replicas: Sequence[ReplicaView]
    ) -> QueueVersion:
        """What ``policy`` makes of the remaining ``cells``, checked.

        Cells that its bounds leave to nobody are run where the bound is largest.

        Args:
            number: Of the version.
            policy: Orders the cells.
            cells: Cells of the grid.
            costs: Of these cells, in the same order.
            replicas: What is known of all replicas.

        Raises:
            PlanError: the policy dropped or repeated cells; names them.
        """
        proposal: Proposal = policy.propose(costs, replicas)
        validate(proposal, costs, len(replicas), policy=policy.name, cell_names=cells.tolist())
        views = [replace(view, memory_bound=b) for view, b in zip(replicas, proposal.memory_bounds, strict=True)]
        return cls(
            number=number,
            policy=policy.name,
            cells=cells[proposal.order],
            costs=costs.take(proposal.order),
            ends=proposal.ends,
            max_claim_costs=_plain(proposal.max_claim_costs),
            memory_bounds=_plain(memory_bounds(costs, views)),
        )

    def shared_out(self, replicas: Sequence[ReplicaView], free_s: Sequence[float]) -> QueueVersion:
        """The same cells in the same order, given out by earliest completion.

        Args:
            replicas: With their measured speeds.
            free_s: When each replica will be free, from now.
        """
        speeds = [view.speed_per_s for view in replicas]
        owner = earliest_completion(self.costs, speeds, free_s, self.memory_bounds)
        order = np.argsort(owner, kind="stable")
        stops = np.cumsum(np.bincount(owner, minlength=len(replicas))).tolist()
        return replace(
            self,
            cells=self.cells[order],
            costs=self.costs.take(order),
            shares=tuple(Span(start, stop) for start, stop in zip([0, *stops], stops, strict=False)),
        )

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def num_to_claim(self) -> int:
        """Positions that nobody owns from the start."""
        return len(self.cells) if self.shares is None else 0

    def share_key(self, replica: int) -> RangeKey | None:
        """The range that a replica owns from the start."""
        if self.shares is None or not self.shares[replica].size:
            return None
        share = self.shares[replica]
        return RangeKey(f"range/{replica}/{self.number}.share", share.start, share.size, self.number)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all cells cost the same, as far as is known; the last of several may cost less."""
        compute = self.costs.compute
        if len(compute) > 2 and compute[-1] < compute[0]:
            compute = compute[:-1]
        return len(compute) < 2 or bool((compute == compute[0]).all())

    @property
    def is_alike(self) -> bool:
        """Whether nothing tells the cells apart, neither compute nor memory."""
        return self.is_uniform and self.costs.memory is None

    @property
    def mean_cost(self) -> float:
        """Compute cost of a mean cell."""
        return self._sums[-1] / len(self.cells) if len(self.cells) else 1.0

    def cost(self, start: int, stop: int) -> float:
        """Compute cost of the positions ``start`` to ``stop``."""
        return self._sums[stop] - self._sums[start]

    def num_within(self, start: int, stop: int, cost: float, *, from_tail: bool = False) -> int:
        """How many positions from one end of ``start`` to ``stop`` cost at most ``cost`` together."""
        sums = self._sums
        slack = _SLACK * sums[-1]
        if from_tail:
            return stop - bisect.bisect_left(sums, sums[stop] - cost - slack, start, stop)
        return max(start, bisect.bisect_right(sums, sums[start] + cost + slack, start, stop + 1) - 1) - start

    def fits(self, replica: int, position: int) -> bool:
        """Whether the memory of ``replica`` is enough for the cell at ``position``, as far as is known."""
        bound, memory = self.memory_bounds[replica], self.costs.memory
        return bound is None or memory is None or float(memory[position]) <= bound

    def fits_each(self, position: int) -> npt.NDArray[np.bool_]:
        """Which replicas have enough memory for the cell at ``position``, as far as is known."""
        memory = self.costs.memory
        if memory is None or not self._has_bounds:
            return np.ones(len(self.memory_bounds), dtype=np.bool_)
        is_enough: npt.NDArray[np.bool_] = memory[position] <= self._bounds
        return is_enough

    @cached_property
    def _has_bounds(self) -> bool:
        return any(bound is not None for bound in self.memory_bounds)

    @cached_property
    def _bounds(self) -> FloatArray:
        return np.array([np.inf if bound is None else bound for bound in self.memory_bounds])

    def num_fitting(self, replica: int, start: int, stop: int, *, from_tail: bool = False) -> int:
        """How many positions from one end of ``start`` to ``stop`` fit ``replica`` one behind the other."""
        bound, memory = self.memory_bounds[replica], self.costs.memory
        if bound is None or memory is None:
            return stop - start
        part = memory[start:stop][::-1] if from_tail else memory[start:stop]
        too_large = part > bound
        return int(too_large.argmax()) if too_large.any() else stop - start

    @property
    def digest(self) -> str:
        """Hash of order and parameters; equal on every replica that holds the same version."""
        return hashlib.sha256(self._head().encode() + self.cells.astype("<i8").tobytes()).hexdigest()[:16]

    def to_bytes(self) -> bytes:
        """The version without its costs, which every replica has."""
        body = zlib.compress(self.cells.astype("<i8").tobytes(), 1)
        return f"{self.digest}\n{self._head()}\n".encode() + body

    @classmethod
    def from_bytes(cls, data: bytes, costs: Costs) -> QueueVersion:
        """What `to_bytes` wrote.

        Args:
            data: The bytes.
            costs: Of all cells of the grid.

        Raises:
            PlanError: the bytes do not hold what their hash says.
        """
        digest, head, body = data.split(b"\n", 2)
        cells = np.frombuffer(zlib.decompress(body), dtype="<i8").astype(np.int64)
        number, policy, ends, claims, bounds, shares, is_dealt = json.loads(head)
        version = cls(
            number=number,
            policy=policy,
            cells=cells,
            costs=costs.take(cells),
            ends=tuple(ends),
            max_claim_costs=tuple(claims),
            memory_bounds=tuple(bounds),
            shares=None if shares is None else tuple(Span(*share) for share in shares),
            is_dealt=is_dealt,
        )
        if (told := digest.decode()) != version.digest:
            raise PlanError(f"version {number} of the plan has hash {version.digest}, its writer says {told}")
        return version

    def _head(self) -> str:
        limits = [self.ends, self.max_claim_costs, self.memory_bounds]
        return json.dumps([self.number, self.policy, *limits, self.shares, self.is_dealt], separators=(",", ":"))


def _plain(limits: Sequence[float | None]) -> tuple[float | None, ...]:
    """Limits as Python's own numbers, which can be written as JSON."""
    return tuple(None if limit is None else float(limit) for limit in limits)


def is_heavy_first(costs: Costs) -> bool:
    """Whether cells get cheaper from first to last."""
    return bool((np.diff(costs.compute) <= 0).all())


def opening_cells(num_cells: int, num_first: int, *, heavy_first: bool) -> Span:
    """The cells that are dealt out before any speed is known: the first ones, or the lightest where those come last."""
    num_first = min(num_first, num_cells)
    return Span(num_cells - num_first, num_cells) if heavy_first else Span(0, num_first)


def opening_version(policy: Policy, costs: Costs, dealt: Span, num_replicas: int, *, costs_known: bool) -> QueueVersion:
    """The version that every replica begins with, without being told: what ``policy`` makes of equal replicas.

    Args:
        policy: Orders the cells; without known costs there is nothing to order by, and they stand in loader order.
        costs: Of all cells of the grid.
        dealt: The cells that are dealt out otherwise, at one end of the grid.
        num_replicas: How many replicas there are.
        costs_known: Whether ``costs`` are more than numbers of samples.
    """
    later = Span(0, dealt.start) if dealt.stop == len(costs) and dealt.start else Span(dealt.stop, len(costs))
    cells = np.arange(*later, dtype=np.int64)
    if costs_known:
        replicas = [ReplicaView(replica=r, speed_per_s=1.0) for r in range(num_replicas)]
        return QueueVersion.proposed(0, policy, cells, costs.take(cells), replicas)
    head: End = "head"
    nothing = (None,) * num_replicas
    return QueueVersion(
        number=0,
        policy=policy.name,
        cells=cells,
        costs=costs.take(cells),
        ends=(head,) * num_replicas,
        max_claim_costs=nothing,
        memory_bounds=nothing,
    )
