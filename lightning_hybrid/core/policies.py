"""The scheduling policies: which cells come first, and which replica takes from which end of the queue.

A queue is emptied from both ends at once, so an order is good when the cells that must not come late stand at the ends
and small ones where the ends meet: those even out what the replicas' speeds leave uneven. Longest processing time
first (Graham, 1969) is the case in which everybody takes from the head.

Cells of one kind that cost the same keep the order in which they were given, and where all cells cost the same every
policy keeps it as a whole and everybody takes from the head, so that results arrive in the loader's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.partition import distribute_workload
from lightning_hybrid.core.placement import (
    Order,
    all_alike,
    ascending,
    kinds,
    level,
    meet,
    meet_behind,
    memory_bounds,
    num_misfits,
    relative,
    share,
    slower,
    spread,
    too_small,
)
from lightning_hybrid.core.proposals import (
    End,
    MemoryBounds,
    NoMemoryBounds,
    Policy,
    Proposal,
    ReplicaView,
    bounded,
    validate,
)

__all__ = [
    "End",
    "Hybrid",
    "LoadBalanced",
    "MemoryAware",
    "MemoryBounds",
    "NoMemoryBounds",
    "PerformanceOptimized",
    "Policy",
    "Proposal",
    "ReplicaView",
    "bounded",
    "distribute_workload",
    "is_policy_name",
    "policy_named",
    "policy_names",
    "register_policy",
    "validate",
]

P = TypeVar("P")

_PARTS_OF_PLACE = 64
"""To what part of a place mean places are compared."""


class LoadBalanced:
    """Longest processing time first, everybody from the head; claims by speed alone."""

    name = "load_balanced"

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        """Most compute cost first."""
        return _proposal(ascending(-level(cells.compute)), [False] * len(replicas))


class PerformanceOptimized:
    """Each kind of cell where it runs best.

    Compute-heavy cells stand at the head for the fastest replicas, memory-heavy ones at the tail for the others,
    io-bound ones are spread evenly so that reading goes on beside computing, and like costs stand together. A kind is
    what a cell has most of, each measured by its mean; where memory or io costs are not known no cell is of that kind.
    Where it is known at what cost of a claim a replica's throughput peaks, it claims no more at once.
    """

    name = "performance_optimized"

    def __init__(self, config: HybridConfig | None = None) -> None:
        self._config = config or HybridConfig()

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        """Heaviest in compute at the head, heaviest in memory at the tail, the lightest between them."""
        order, at_tail = np.arange(len(cells)), [False] * len(replicas)
        if not all_alike(cells):
            order, at_tail = self._ordered(cells, [view.speed_per_s for view in replicas])
        return _proposal(order, at_tail, max_claim_costs=[view.peak_cost for view in replicas])

    def _ordered(self, cells: Costs, speeds: list[float]) -> tuple[Order, list[bool]]:
        by_memory, by_io = kinds(cells, 1 + self._config.heavy_margin_frac)
        heavy_first = ascending(-level(cells.compute))
        memory_frac = float(relative(cells.compute)[by_memory].sum()) / len(cells)
        at_tail = slower(speeds, memory_frac, self._config.head_margin_frac)
        room_frac = max(0.0, share(speeds, at_tail) - memory_frac)
        order = meet(heavy_first[~(by_memory | by_io)[heavy_first]], cells, room_frac, self._config.middle_frac)
        if cells.memory is not None:
            light_first = ascending(level(cells.memory))
            order = np.concatenate((order, light_first[by_memory[light_first]]))
        return spread(order, heavy_first[by_io[heavy_first]]), at_tail


class MemoryAware:
    """Memory-heavy cells first, and only where they fit.

    The heavy cells stand at the head, the heaviest first, the others behind them by compute. Where bounds are known
    those cells are heavy that do not fit on every replica; replicas with the largest bound take from the head, the
    others from the tail, and each leaves cells above its bound to others. Where no bound is known a cell is heavy by
    the mean cell, and replicas with most free memory take from the head. Where the memory costs are not known the
    compute cost stands in for them, and no bound can be kept.
    """

    name = "memory_aware"

    def __init__(self, config: HybridConfig | None = None) -> None:
        self._config = config or HybridConfig()

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        """Heaviest in memory at the head."""
        bounds = memory_bounds(cells, replicas)
        order, at_tail = np.arange(len(cells)), [False] * len(replicas)
        if not all_alike(cells):
            order, at_tail = self._ordered(cells, replicas)
        return _proposal(order, at_tail, memory_bounds=bounds)

    def _ordered(self, cells: Costs, replicas: Sequence[ReplicaView]) -> tuple[Order, list[bool]]:
        memory = relative(cells.compute if cells.memory is None else cells.memory)
        misfits, num_first = num_misfits(cells, replicas), 0
        if misfits is None:
            is_heavy = memory > 1 + self._config.heavy_margin_frac
            at_tail = self._short_of_memory(replicas)
        else:
            is_heavy, at_tail = misfits > 0, too_small(cells, replicas)
            num_first = int(np.count_nonzero(is_heavy))
        order = ascending(-level(cells.compute))
        order = order[ascending(-((level(memory) + 1) * is_heavy)[order])]
        return meet_behind(num_first, order, cells, replicas, at_tail, self._config.middle_frac), at_tail

    def _short_of_memory(self, replicas: Sequence[ReplicaView]) -> list[bool]:
        known = [view.memory_free_frac for view in replicas if view.memory_free_frac is not None]
        least = (1 - self._config.head_margin_frac) * sum(known) / len(known) if known else 0.0
        return [view.memory_free_frac is not None and view.memory_free_frac < least for view in replicas]


class Hybrid:
    """One weighted objective of the three others.

    A cell's place is the weighted mean of its places in the orders of the three, so each cell has exactly one. Before
    that come the cells that do not fit on every replica, those that fit on fewest first. A replica takes from the head
    unless cells stand there that do not fit on it, and each of its limits is the lowest that one of the three sets.
    Where neither memory nor io costs are known this is longest processing time first.
    """

    name = "hybrid"

    def __init__(self, config: HybridConfig | None = None) -> None:
        self._config = config or HybridConfig()
        self._parts: tuple[tuple[float, Policy], ...] = (
            (self._config.hybrid_balance_weight, LoadBalanced()),
            (self._config.hybrid_performance_weight, PerformanceOptimized(self._config)),
            (self._config.hybrid_memory_weight, MemoryAware(self._config)),
        )

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        """Lowest weighted mean place first."""
        order, at_tail = np.arange(len(cells)), [False] * len(replicas)
        if not all_alike(cells):
            order, at_tail = self._ordered(cells, replicas)
        peaks = [view.peak_cost for view in replicas]
        return _proposal(order, at_tail, max_claim_costs=peaks, memory_bounds=memory_bounds(cells, replicas))

    def _ordered(self, cells: Costs, replicas: Sequence[ReplicaView]) -> tuple[Order, list[bool]]:
        places, misfits = self._mean_places(cells), num_misfits(cells, replicas)
        if misfits is None:
            return ascending(places), [False] * len(replicas)
        order = ascending(places - misfits * (np.ptp(places) + 1))
        at_tail = too_small(cells, replicas)
        num_first = int(np.count_nonzero(misfits))
        return meet_behind(num_first, order, cells, replicas, at_tail, self._config.middle_frac), at_tail

    def _mean_places(self, cells: Costs) -> Order:
        if cells.memory is None and cells.io is None:
            return -level(cells.compute)  # the three orders are the same
        places = np.zeros(len(cells))
        for weight, policy in self._parts:
            if weight > 0:
                places[policy.propose(cells, ()).order] += weight * np.arange(len(cells))
        return np.rint(places * (_PARTS_OF_PLACE / sum(weight for weight, _ in self._parts))).astype(np.int64)


def _proposal(
    order: Order,
    at_tail: list[bool],
    *,
    max_claim_costs: Sequence[float | None] | None = None,
    memory_bounds: Sequence[float | None] | None = None,
) -> Proposal:
    no_limits = (None,) * len(at_tail)
    return Proposal(
        order=order,
        ends=tuple("tail" if flag else "head" for flag in at_tail),
        max_claim_costs=no_limits if max_claim_costs is None else tuple(max_claim_costs),
        memory_bounds=no_limits if memory_bounds is None else tuple(memory_bounds),
    )


_RESERVED = ("auto", "off")
"""What the selector calls its own choice, and no balancing."""

_REGISTRY: dict[str, Callable[[HybridConfig], Any]] = {
    LoadBalanced.name: lambda config: LoadBalanced(),
    PerformanceOptimized.name: PerformanceOptimized,
    MemoryAware.name: MemoryAware,
    Hybrid.name: Hybrid,
}


def register_policy(name: str, *, replace: bool = False) -> Callable[[type[P]], type[P]]:
    """Makes the decorated class a policy that can be chosen by ``name``.

    Every run makes an object of its own of the class, without arguments, and gives it the name. Its `propose` gets the
    costs of the cells that nobody has taken yet and what is known of the replicas; what it returns is checked before
    anything runs by it.

    Args:
        name: An identifier that no other policy has.
        replace: Take the place of the policy of that name, as a notebook's cell does that is run again.

    Raises:
        ConfigError: the name is no identifier or is taken, or the class has no method ``propose``.

    Example:
        >>> @register_policy("smallest_first")
        ... class SmallestFirst:
        ...     def propose(self, cells, replicas):
        ...         return Proposal(
        ...             order=np.argsort(cells.compute, kind="stable"),
        ...             ends=("head",) * len(replicas),
        ...             max_claim_costs=(None,) * len(replicas),
        ...             memory_bounds=tuple(view.memory_bound for view in replicas),
        ...         )
        >>> cells = Costs(compute=np.array([3.0, 1.0, 2.0]))
        >>> policy_named("smallest_first").propose(cells, [ReplicaView(replica=0, speed_per_s=1.0)]).order.tolist()
        [1, 2, 0]
    """
    if not is_policy_name(name):
        raise ConfigError("policy name", name, f"be an identifier other than {' and '.join(map(repr, _RESERVED))}")
    if name in _REGISTRY and not replace:
        raise ConfigError("policy name", name, "be new, or be given with replace=True")

    def register(policy: type[P]) -> type[P]:
        if not callable(getattr(policy, "propose", None)):
            raise ConfigError("policy", policy, "have a method propose(cells, replicas)")
        policy.name = name  # type: ignore[attr-defined]  # the class need not have the attribute before
        _REGISTRY[name] = lambda config: policy()
        return policy

    return register


def is_policy_name(name: object) -> bool:
    """Whether a policy of the user's may have this name."""
    return isinstance(name, str) and name.isidentifier() and name not in _RESERVED


def policy_names() -> tuple[str, ...]:
    """The names that a policy can be chosen by, this package's first."""
    return tuple(_REGISTRY)


def policy_named(name: str, config: HybridConfig | None = None) -> Policy:
    """A new policy of that name, with the weights and margins of ``config`` where it is one of this package's.

    Raises:
        ConfigError: there is none; names those that there are.
    """
    if name not in _REGISTRY:
        raise ConfigError("policy", name, f"be one of {', '.join(map(repr, policy_names()))}")
    policy: Policy = _REGISTRY[name](config or HybridConfig())
    return policy
