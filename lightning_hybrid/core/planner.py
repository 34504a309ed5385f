"""Makes new plan versions of the queue: takes what nobody has reserved, lets a policy order it, and publishes it.

Each cell belongs to one version at a time, so that each is run once, whatever is switched when.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.claims import Board, Claimant
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.peers import speed_of
from lightning_hybrid.core.policies import MemoryBounds, Policy, ReplicaView, bounded
from lightning_hybrid.core.pressures import score_of
from lightning_hybrid.core.selector import OFF
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import Keys, Span

BOUND_CHANGE_FRAC = 0.1
"""A memory bound that changed by more than this is a reason to order the rest anew."""


class QueuePlanner:
    """Puts policies into force in queue mode; on the background thread of one replica.

    Args:
        claimant: This replica's part of the queue.
        board: What the replicas know of each other.
        keys: What all replicas share.
        costs: Of all cells of the grid.
        config: Weights of the load score.
        bounds: How much memory a step may take on each replica.
    """

    def __init__(
        self, claimant: Claimant, board: Board, keys: Keys, costs: Costs, config: HybridConfig, bounds: MemoryBounds
    ) -> None:
        self._claimant, self._board, self._keys, self._costs = claimant, board, keys, costs
        self._config, self._bounds, self._peers = config, bounds, claimant.peers
        self._used_bounds: tuple[float | None, ...] = ()

    def enforce(self, policy: Policy, *, off: bool) -> None:
        """Orders all that nobody has reserved by ``policy``; with ``off`` it is dealt out in equal shares for good."""
        self._issue(policy, off=off)

    def revise(self, policy: Policy) -> None:
        """Gives the cells out anew where what is known by now asks for it: the speeds, or other bounds."""
        if self._should_revise():
            self._issue(policy, off=False)

    def _should_revise(self) -> bool:
        """Whether the cells in force should be ordered and given out anew under the same policy."""
        version = self._claimant.version
        if version.is_uniform or self._claimant.unreserved_anywhere() <= self._peers.world:
            return False
        if version.shares is None:
            return not self._peers.is_sampled
        bounds = self._memory_bounds()
        return any(bound is not None for bound in version.memory_bounds) and _differ(bounds, self._used_bounds)

    def _issue(self, policy: Policy, *, off: bool) -> bool:
        """Makes a new version of all that nobody has reserved; whether there was anything."""
        number, me = self._claimant.version.number + 1, str(self._peers.me).encode()
        if self._keys.create(f"version/{number}/owner", me) != me:
            return False
        cells = self._seal()
        if len(cells) == 0:
            return False
        views = self._views()
        self._used_bounds = tuple(view.memory_bound for view in views)
        version = QueueVersion.proposed(number, policy, cells, self._costs.take(cells), views)
        version = self._dealt(version) if off else self._shared_out(version, views)
        self._keys.put(f"version/{number}", version.to_bytes())
        self._keys.add("version", 1)
        self._claimant.adopt(version)
        self._board.publish()
        return True

    def _seal(self) -> npt.NDArray[np.int64]:
        claimant = self._claimant
        self._board.look()
        ranges = [item for _, item, _ in claimant.open_anywhere()]
        parts = claimant.seal(ranges)
        cells = [claimant.versions[number].cells[span.start : span.stop] for number, span in parts]
        return np.sort(np.concatenate(cells)) if cells else np.empty(0, dtype=np.int64)

    def _shared_out(self, version: QueueVersion, views: Sequence[ReplicaView]) -> QueueVersion:
        if version.is_uniform and version.costs.memory is None:
            return version  # equal cells are best claimed as they come
        if self._peers.is_sampled:
            return version
        return version.shared_out(views, [self._free_s(view.replica) for view in views])

    def _dealt(self, version: QueueVersion) -> QueueVersion:
        """The version with equal shares, which nobody steals from."""
        if self._peers.is_sampled:
            return replace(version, policy=OFF)  # some may have stopped, and nobody would find their shares
        edges = [round(i * len(version) / self._peers.world) for i in range(self._peers.world + 1)]
        shares = tuple(Span(start, stop) for start, stop in itertools.pairwise(edges))
        return replace(version, policy=OFF, shares=shares, is_dealt=True)

    def _free_s(self, replica: int) -> float:
        """When a replica will have done what it runs and has reserved, from now."""
        record, reserved = self._record_of(replica)
        speed = speed_of(record)
        done = record.samples if record.cost is None else record.cost
        return 0.0 if speed is None else max(0.0, reserved - done) / speed

    def _record_of(self, replica: int) -> tuple[ReplicaRecord, float]:
        if replica == self._peers.me:
            return self._peers.record, self._claimant.reserved_cost
        peer = self._peers.published[replica]
        return peer.record, peer.reserved_cost

    def _views(self) -> list[ReplicaView]:
        peers = self._peers
        return list(bounded([self._view(r) for r in range(peers.world)], self._bounds))

    def _view(self, replica: int) -> ReplicaView:
        if replica != self._peers.me and replica not in self._peers.published:
            return ReplicaView(replica=replica, speed_per_s=1.0)
        record = self._record_of(replica)[0]
        memory_frac = None if record.device is None else record.device.memory_frac
        return ReplicaView(
            replica=replica,
            speed_per_s=speed_of(record) or 1.0,
            load_score=score_of(record, self._config),
            memory_free_frac=None if memory_frac is None else 1.0 - memory_frac,
        )

    def _memory_bounds(self) -> tuple[float | None, ...]:
        return tuple(self._bounds.bound(r) for r in range(self._peers.world))


def _differ(now: Sequence[float | None], before: Sequence[float | None] | None) -> bool:
    if before is None:
        return False
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > BOUND_CHANGE_FRAC * max(a, b))
        for a, b in zip(now, before, strict=True)
    )
