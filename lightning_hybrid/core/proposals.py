"""What a scheduling policy is asked and answers: cells and replicas in, an order and limits out, and its check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import PlanError

End = Literal["head", "tail"]
"""The end of the queue that a replica takes from while the cells at both ends fit."""

_MOST_NAMED = 5
"""Cells that an error names before it only counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaView:
    """What a policy is told about one replica; ``None`` is not known."""

    replica: int
    speed_per_s: float
    """Compute cost units per second; the prior's where it is not measured yet."""
    memory_bound: float | None = None
    """Most memory cost that one cell may have here; ``None``: no bound is known."""
    peak_cost: float | None = None
    """Compute cost of one claim at which its throughput peaks; ``None`` where nobody has measured that."""
    load_score: float | None = None
    memory_free_frac: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """A policy's answer: the order of the queue, and what each replica may take of it."""

    order: npt.NDArray[np.int64]
    """Every cell once, the head of the queue first."""
    ends: tuple[End, ...]
    """Per replica: the end that it takes from while both fit."""
    max_claim_costs: tuple[float | None, ...]
    """Per replica: most compute cost of one claim of several cells; ``None``: by its speed alone."""
    memory_bounds: tuple[float | None, ...]
    """Per replica: cells of more memory cost are left to others; ``None``: it takes any."""


class MemoryBounds(Protocol):
    """Knows how much memory a step may take on each replica."""

    def bound(self, replica: int) -> float | None:
        """Most memory cost that one cell may have on ``replica``; ``None`` where that is not known."""
        ...


class NoMemoryBounds:
    """Knows no bound, as long as there is no memory model."""

    def bound(self, replica: int) -> float | None:
        """``None`` for every replica."""
        return None


class Policy(Protocol):
    """Orders the cells that nobody has taken yet, and limits what each replica takes.

    A policy that learns may have a method ``observe(record: ReplicaRecord) -> None`` too.
    """

    name: str

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        """An order of ``cells`` that holds each once, and one entry per replica of everything else."""
        ...


def bounded(replicas: Sequence[ReplicaView], bounds: MemoryBounds) -> tuple[ReplicaView, ...]:
    """The ``replicas`` with the memory bounds that are known now."""
    return tuple(replace(view, memory_bound=bounds.bound(view.replica)) for view in replicas)


def validate(
    proposal: Proposal,
    cells: Costs,
    num_replicas: int,
    *,
    policy: str,
    cell_names: Sequence[int] | None = None,
) -> None:
    """Checks that ``proposal`` holds every cell once and speaks of every replica, before anything runs by it.

    Args:
        proposal: What the policy returned.
        cells: The cells that it was given.
        num_replicas: How many replicas it was given.
        policy: Its name, for the error.
        cell_names: What to call the cells in an error; by default their place in ``cells``.

    Raises:
        PlanError: cells are missing, repeated or not there, or an entry per replica is missing or impossible; names the
            policy and the first of them.
    """
    if not isinstance(proposal, Proposal):
        raise PlanError(f"policy {policy!r} must return a Proposal, got {type(proposal).__name__}")
    _check_order(proposal.order, len(cells), policy, cell_names)
    for field in ("ends", "max_claim_costs", "memory_bounds"):
        entries = getattr(proposal, field)
        if len(entries) != num_replicas:
            rule = f"{field} must have one entry per replica, {num_replicas}"
            raise PlanError(f"policy {policy!r}: {rule}, got {len(entries)}")
    for replica, end in enumerate(proposal.ends):
        if end not in get_args(End):
            raise PlanError(f"policy {policy!r}: ends[{replica}] must be 'head' or 'tail', got {end!r}")
    for field, limits in (("max_claim_costs", proposal.max_claim_costs), ("memory_bounds", proposal.memory_bounds)):
        for replica, limit in enumerate(limits):
            if not _is_limit(limit):
                raise PlanError(f"policy {policy!r}: {field}[{replica}] must be None or at least 0, got {limit!r}")


def _is_limit(limit: object) -> bool:
    return limit is None or (isinstance(limit, Real) and float(limit) >= 0)


def _check_order(order: object, num_cells: int, policy: str, cell_names: Sequence[int] | None) -> None:
    if not isinstance(order, np.ndarray) or order.ndim != 1 or order.dtype.kind not in "iu":
        what = f"{order.dtype} array of shape {order.shape}" if isinstance(order, np.ndarray) else type(order).__name__
        raise PlanError(f"policy {policy!r}: order must be a flat array of whole numbers, got {what}")
    is_there = (order >= 0) & (order < num_cells)
    times = np.bincount(order[is_there].astype(np.int64), minlength=num_cells)
    faults = [
        *_named("left out", np.flatnonzero(times == 0), cell_names),
        *_named("repeated", np.flatnonzero(times > 1), cell_names),
        *_named("not there", order[~is_there], None),
    ]
    if faults:
        raise PlanError(f"policy {policy!r} must order each of the {num_cells} cells once: {'; '.join(faults)}")


def _named(what: str, cells: npt.NDArray[np.int64], cell_names: Sequence[int] | None) -> list[str]:
    if not len(cells):
        return []
    named = [int(cell) if cell_names is None else cell_names[int(cell)] for cell in cells[:_MOST_NAMED]]
    more = f" and {len(cells) - len(named)} more" if len(cells) > len(named) else ""
    return [f"{what}: {', '.join(map(str, named))}{more}"]
