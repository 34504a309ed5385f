"""Who deals out an epoch's work: the choice of the dealer, and the steps before there is a choice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.load import load_score, prior_speeds
from lightning_hybrid.core.policies import MemoryBounds, Policy
from lightning_hybrid.core.state import Mode, ReplicaRecord
from lightning_hybrid.core.versions import QueueVersion, opening_cells, opening_version
from lightning_hybrid.core.workqueue import Span
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.claimer import QueueDealer
from lightning_hybrid.runtime.lockstep import LockstepDealer, ghost_work
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.steering import Steering
from lightning_hybrid.runtime.stream import StreamQueue, StreamRounds
from lightning_hybrid.runtime.work import Dealer, Sizer, Work


def first_cells(spec: EpochSpec, num_replicas: int) -> Span:
    """The cells that are dealt out in turn before any speed is known."""
    num_first = spec.first_rounds * num_replicas
    return opening_cells(spec.grid.num_cells, num_first, heavy_first=spec.is_heavy_first)


def later_cells(spec: EpochSpec, num_replicas: int) -> Span:
    """All other cells."""
    first = first_cells(spec, num_replicas)
    return Span(0, first.start) if spec.is_heavy_first else Span(first.stop, spec.grid.num_cells)


def probe_works(spec: EpochSpec, replica: int, num_replicas: int) -> list[Work]:
    """The first steps of ``replica``, as many as every replica takes: own cells, or ghosts where there are too few."""
    grid = spec.grid
    if grid.num_samples == 0:
        return []
    first = first_cells(spec, num_replicas)
    cells = [first.start + k * num_replicas + replica for k in range(spec.first_rounds)]
    return [Work(*grid.span(c), c) if c < first.stop else ghost_work(grid, "static") for c in cells]


def first_version(spec: EpochSpec, policy: Policy, num_replicas: int) -> QueueVersion:
    """The plan version that every replica begins with, without being told."""
    dealt = first_cells(spec, num_replicas)
    return opening_version(policy, spec.cell_costs, dealt, num_replicas, costs_known=spec.costs is not None)


def prior_from(records: list[ReplicaRecord], num_replicas: int, config: HybridConfig) -> list[float]:
    """Relative speeds of the replicas before any measurement, from the load of their devices."""
    weights = config.memory_weight, config.compute_weight, config.network_weight
    scores: list[float | None] = [None] * num_replicas
    for record in records:
        if (device := record.device) is not None:
            scores[record.replica] = load_score(device.memory_frac, device.utilization_frac, None, weights=weights)
    return prior_speeds(scores)


def new_dealer(
    mode: Mode,
    spec: EpochSpec,
    board: Board,
    queue: SharedQueue,
    config: HybridConfig,
    steering: Steering,
    *,
    released: Callable[[], bool],
    sizer: Sizer | None = None,
) -> Dealer:
    """The dealer of ``mode`` for everything behind the first steps.

    Args:
        mode: ``queue`` or ``lockstep``.
        spec: The epoch.
        board: What the replicas know of each other.
        queue: The epoch's keys on the store.
        config: All settings.
        steering: Names the policy that the epoch begins with.
        released: Whether cells of the queue may be reserved yet.
        sizer: Decides how many cells of the queue are run as one step.
    """
    world = board.view.world
    if spec.stream is not None:
        first_batch = spec.first_rounds * world
        if mode == "lockstep":
            return StreamRounds(board, queue, spec.stream, config, first_batch=first_batch)
        return StreamQueue(board, queue, spec.stream, config, first_batch=first_batch, released=released)
    if mode == "lockstep":
        cells = later_cells(spec, world)
        caps = None if spec.max_size is None else _memory_caps(spec, steering.bounds_on(board), world)
        return LockstepDealer(board, queue, spec.grid, config, cells=cells, max_size=spec.max_size, caps=caps)
    return QueueDealer(
        board,
        queue,
        spec.grid,
        first_version(spec, steering.first_policy, world),
        spec.cell_costs,
        config,
        prefetch=spec.prime_calls > 0,
        released=released,
        dealt=range(*first_cells(spec, world)),
        sizer=sizer,
    )


def _memory_caps(spec: EpochSpec, known: MemoryBounds, world: int) -> Callable[[], list[int | None]]:
    """Tells how many samples of the heaviest kind fit into each replica's memory; ``None`` where that is not known."""
    memory = spec.cell_costs.memory
    sizes = np.diff(spec.grid.offsets)
    per_sample = None if memory is None or not len(memory) else float((memory / np.maximum(sizes, 1)).max())

    def caps() -> list[int | None]:
        bounds = [known.bound(r) for r in range(world)]
        return [None if not per_sample or bound is None else max(1, int(bound / per_sample)) for bound in bounds]

    return caps
