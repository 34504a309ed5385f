"""Makes new plan versions of the queue: takes what nobody has reserved, lets a policy order it, and publishes it.

Each cell belongs to one version at a time, so that each is run once, whatever is switched when.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.claims import Claimant
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.holdings import Board
from lightning_hybrid.core.others import speed_of
from lightning_hybrid.core.policies import MemoryBounds, Policy, ReplicaView, bounded, policy_named
from lightning_hybrid.core.pressures import score_of
from lightning_hybrid.core.selector import OFF
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import Keys, Span

FALLBACK = "load_balanced"
"""In force instead of a policy whose answer cannot be used."""

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
        self._used_bounds: tuple[float | None, ...] = (None,) * self._peers.world

    def enforce(self, policy: Policy, *, off: bool) -> str | None:
        """Orders all that nobody has reserved by ``policy``; with ``off`` it is dealt out in equal shares for good.

        Where a memory bound is known nothing is dealt out for good.
        """
        bounds = self._memory_bounds()
        return self._issue(policy, off=off and all(bound is None for bound in bounds))

    def revise(self, policy: Policy) -> str | None:
        """Gives the cells out anew where what is known by now asks for it: the speeds, or other bounds."""
        return self._issue(policy, off=False) if self._should_revise() else None

    def _should_revise(self) -> bool:
        """Whether the cells in force should be ordered and given out anew under the same policy."""
        version = self._claimant.version
        if version.is_alike or self._claimant.unreserved_anywhere() <= self._peers.world:
            return False
        if version.shares is None:
            return not self._peers.is_sampled
        bounds = self._memory_bounds()
        # while no bound was known it cannot be told whether the policy minds any
        may_mind = any(b is not None for b in version.memory_bounds) or all(b is None for b in self._used_bounds)
        return may_mind and version.costs.memory is not None and _differ(bounds, self._used_bounds)

    def _issue(self, policy: Policy, *, off: bool) -> str | None:
        """Makes a new version of all that nobody has reserved; what was wrong with the policy's answer, if anything."""
        number, me = self._claimant.version.number + 1, str(self._peers.me).encode()
        if self._keys.create(f"version/{number}/owner", me) != me:
            return None
        self._claimant.is_planning = True
        try:
            cells = self._seal()
            return self._publish(number, policy, cells, off=off) if len(cells) else None
        finally:
            self._claimant.is_planning = False

    def _publish(self, number: int, policy: Policy, cells: npt.NDArray[np.int64], *, off: bool) -> str | None:
        views, costs = self._views(), self._costs.take(cells)
        self._used_bounds = tuple(view.memory_bound for view in views)
        complaint = None
        try:
            version = QueueVersion.proposed(number, policy, cells, costs, views)
        except Exception as error:  # of the user's policy: the cells are in hand, and must be given out all the same
            complaint = f"{type(error).__name__}: {error}"
            version = QueueVersion.proposed(number, policy_named(FALLBACK), cells, costs, views)
        version = self._dealt(version) if off else self._shared_out(version, views)
        self._keys.put(f"version/{number}", version.to_bytes())
        self._keys.add("version", 1)
        self._claimant.adopt(version)
        self._board.publish()
        return complaint

    def _seal(self) -> npt.NDArray[np.int64]:
        claimant = self._claimant
        self._board.look()
        ranges = [item for _, item, _ in claimant.open_anywhere()]
        parts = claimant.seal(ranges)
        cells = [claimant.versions[number].cells[span.start : span.stop] for number, span in parts]
        return np.sort(np.concatenate(cells)) if cells else np.empty(0, dtype=np.int64)

    def _shared_out(self, version: QueueVersion, views: Sequence[ReplicaView]) -> QueueVersion:
        if version.is_alike:
            return version  # equal cells are best claimed as they come
        if self._peers.is_sampled or not self._peers.knows_all_speeds():
            return version
        return version.shared_out(views, [self._free_s(view.replica) for view in views])

    def _dealt(self, version: QueueVersion) -> QueueVersion:
        """The version with equal shares, each of which its owner reserves as a whole."""
        if self._peers.is_sampled:
            return replace(version, policy=OFF)  # some may have stopped, and nobody would find their shares
        world = self._peers.world
        order = np.concatenate([np.arange(r, len(version), world) for r in range(world)])  # like cards: heavy ones too
        edges = np.cumsum([0, *(len(range(r, len(version), world)) for r in range(world))]).tolist()
        return replace(
            version,
            policy=OFF,
            cells=version.cells[order],
            costs=version.costs.take(order),
            shares=tuple(Span(start, stop) for start, stop in itertools.pairwise(edges)),
            is_dealt=True,
        )

    def _free_s(self, replica: int) -> float:
        """When a replica will have done what it runs and has reserved, from now."""
        record, reserved = self._record_of(replica)
        speed = speed_of(record)
        done = record.samples if record.cost is None else record.cost
        beforehand = float(self._costs.compute[list(self._claimant.dealt[replica :: self._peers.world])].sum())
        return 0.0 if speed is None else max(0.0, reserved + beforehand - done) / speed

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


def _differ(now: Sequence[float | None], before: Sequence[float | None]) -> bool:
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > BOUND_CHANGE_FRAC * max(a, b))
        for a, b in zip(now, before, strict=True)
    )
