"""Who deals out an epoch's work: the choice of the dealer, and the steps before there is a choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import load_score, prior_speeds
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.state import Mode, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.claimer import QueueDealer
from lightning_hybrid.runtime.lockstep import LockstepDealer, ghost_work
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.work import Dealer, Work

Stage = Literal["predict", "validate", "test"]


@dataclass(frozen=True, kw_only=True)
class EpochSpec:
    """What one pass over one loader is.

    ``prime_calls`` is how many batches the loader asks for before it gives out the first (0 without workers).
    ``max_size`` is the most samples of a re-cut step, ``None`` where batches must not be cut anew. ``probe_rounds`` is
    how many steps every replica takes before it is decided whether the user's step issues collectives, and
    ``read_ahead`` how many batches the loop asks for before it runs the step of the first.
    """

    stage: Stage
    loader_idx: int
    epoch: int
    grid: Grid
    prime_calls: int = 0
    max_size: int | None = None
    probe_rounds: int = 1
    read_ahead: int = 0

    @property
    def first_rounds(self) -> int:
        """Steps of every replica that are dealt out before it is known how to deal."""
        return self.probe_rounds + self.read_ahead


def probe_works(spec: EpochSpec, replica: int, num_replicas: int) -> list[Work]:
    """The first steps of ``replica``, as many as every replica takes: own cells, or ghosts where there are too few."""
    grid = spec.grid
    if grid.num_samples == 0:
        return []
    cells = [k * num_replicas + replica for k in range(spec.first_rounds)]
    return [Work(*grid.span(c), c) if c < grid.num_cells else ghost_work(grid, "static") for c in cells]


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
    prior: list[float],
    *,
    released: Callable[[], bool],
) -> Dealer:
    """The dealer of ``mode`` for everything behind the first steps.

    Args:
        mode: ``queue`` or ``lockstep``.
        spec: The epoch.
        board: What the replicas know of each other.
        queue: The epoch's keys on the store.
        config: All settings.
        prior: Relative speeds of all replicas until they have been measured.
        released: Whether cells of the queue may be reserved yet.
    """
    replica = board.record.replica
    if mode == "lockstep":
        return LockstepDealer(
            board,
            queue,
            spec.grid,
            config,
            replica=replica,
            first_cell=queue.first_cell,
            max_size=spec.max_size,
            prior=prior,
        )
    prefetch = spec.prime_calls > 0
    return QueueDealer(
        board, queue, spec.grid, config, replica=replica, prior=prior, prefetch=prefetch, released=released
    )
