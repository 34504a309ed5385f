"""Where cells stand in a queue that is emptied from both ends, and who takes from which end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.cost import Costs, FloatArray
from lightning_hybrid.core.proposals import ReplicaView

Order = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_RESOLUTION = 2.0**20
"""Steps per mean cost in which costs are compared: the same sum, added up in another way, differs by less."""

_KEY_BITS = 62
_ODD = 0x5851F42D4C957F2D
"""A multiplier that spreads neighbours over the whole range (Knuth's MMIX generator)."""


def relative(values: FloatArray) -> FloatArray:
    """The costs in units of their mean; zeros where all are zero."""
    highest = float(values.max()) if len(values) else 0.0
    if highest <= 0:
        return np.zeros(len(values))
    scaled = values / highest  # neither end of the number range is left this way
    means: FloatArray = scaled / scaled.mean()
    return means


def level(values: FloatArray) -> Order:
    """The costs as whole numbers, so that rounding errors make no difference between equal ones."""
    return np.rint(relative(values) * _RESOLUTION).astype(np.int64)


def ascending(levels: Order) -> Order:
    """The cells in the order of their levels, as `np.argsort` gives it for a stable sort, in half of its time."""
    lowest, highest = (int(levels.min()), int(levels.max())) if len(levels) else (0, 0)
    index_bits = len(levels).bit_length()
    if (highest - lowest).bit_length() + index_bits > _KEY_BITS:
        return np.argsort(levels, kind="stable")
    keys = np.left_shift(levels - lowest, index_bits)
    keys += np.arange(len(levels))
    keys.sort()
    keys &= (1 << index_bits) - 1
    return keys


def all_alike(cells: Costs) -> bool:
    """Whether all cells cost the same; the last one, which a loader may leave smaller, may cost less."""
    for values in (cells.compute, cells.memory, cells.io):
        levels = np.zeros(0, dtype=np.int64) if values is None else level(values)
        if len(levels) > 1 and not ((levels[:-1] == levels[0]).all() and levels[-1] <= levels[0]):
            return False
    return True


def kinds(cells: Costs, factor: float) -> tuple[Flags, Flags]:
    """Which cells are memory-heavy, and which are io-bound; the others are compute-heavy, and none is both.

    Each cost is measured by its mean; a cell is of a kind when it has ``factor`` times as much of it as of the others.
    Where a cost is not known no cell is of its kind.
    """
    nothing = np.zeros(len(cells))
    compute = relative(cells.compute)
    memory = nothing if cells.memory is None else relative(cells.memory)
    io = nothing if cells.io is None else relative(cells.io)
    by_io = io > factor * np.maximum(compute, memory)
    return (memory > factor * compute) & ~by_io, by_io


def memory_bounds(cells: Costs, replicas: Sequence[ReplicaView]) -> list[float | None]:
    """The bound of each replica that it should keep.

    Without memory costs there is nothing to compare with a bound. Cells that fit nowhere are left to the replicas with
    the largest bound, or nobody would ever run them.
    """
    if cells.memory is None or not len(cells):
        return [None] * len(replicas)
    bounds = [view.memory_bound for view in replicas]
    known = [bound for bound in bounds if bound is not None]
    if len(known) == len(bounds) and known and cells.memory.max() > max(known):
        return [None if bound == max(known) else bound for bound in bounds]
    return bounds


def num_misfits(cells: Costs, replicas: Sequence[ReplicaView]) -> Order | None:
    """On how many replicas each cell does not fit; ``None`` where no bound is known, or no memory cost."""
    known = [view.memory_bound for view in replicas if view.memory_bound is not None]
    if cells.memory is None or not known:
        return None
    return np.searchsorted(np.sort(np.asarray(known, dtype=np.float64)), cells.memory, side="left").astype(np.int64)


def too_small(cells: Costs, replicas: Sequence[ReplicaView]) -> list[bool]:
    """Which replicas cannot run the heaviest cells that another one can."""
    if cells.memory is None or not len(cells) or not replicas:
        return [False] * len(replicas)
    heaviest = float(cells.memory.max())
    rooms = [heaviest if view.memory_bound is None else min(heaviest, view.memory_bound) for view in replicas]
    return [room < max(rooms) for room in rooms]


def share(speeds: Sequence[float], flags: Sequence[bool]) -> float:
    """Share of all replicas' speed that the flagged ones have, 0..1."""
    flagged = sum(speed for speed, flag in zip(speeds, flags, strict=True) if flag)
    return flagged / sum(speeds) if flagged > 0 else 0.0


def slower(speeds: Sequence[float], at_least_frac: float, margin_frac: float) -> list[bool]:
    """Which replicas are slow: below the mean by more than the margin, and the next slowest until they are enough.

    Args:
        speeds: Of all replicas.
        at_least_frac: Share of all speed that the slow ones should about have; one is slow where it is positive.
        margin_frac: What is less below the mean is as fast as the mean.
    """
    total = sum(speeds)
    if not total > 0:
        return [False] * len(speeds)
    least = (1 - margin_frac) * total / len(speeds)
    flags = [speed < least for speed in speeds]
    num_fast, slow_frac = flags.count(False), share(speeds, flags)
    for replica in sorted(range(len(speeds)), key=lambda r: (speeds[r], -r)):
        own_frac = speeds[replica] / total
        is_enough = slow_frac >= at_least_frac or (slow_frac > 0 and slow_frac + own_frac / 2 > at_least_frac)
        if num_fast <= 1 or is_enough:
            break
        if not flags[replica]:
            flags[replica] = True
            num_fast, slow_frac = num_fast - 1, slow_frac + own_frac
    return flags


def meet(heavy_first: Order, cells: Costs, tail_frac: float, middle_frac: float) -> Order:
    """``heavy_first`` so that takers from head and tail both find heavy cells first, and meet at the lightest.

    The heaviest stay at the head, the next stand at the tail, the heaviest of them outermost, and the lightest between
    them: where the ends meet a small cell evens out what the speeds leave uneven, and more of them make up for speeds
    that were misjudged.

    Args:
        heavy_first: Some of the cells.
        cells: The costs of all cells.
        tail_frac: Share of the compute cost of all cells that is taken from the tail; with 0 the order stays.
        middle_frac: Share of it that the lightest cells between the two parts have.
    """
    if tail_frac <= 0 or not len(heavy_first):
        return heavy_first
    from_light_end = np.cumsum(relative(cells.compute)[heavy_first[::-1]]) / len(cells)
    not_head_frac = middle_frac + tail_frac * (1 - middle_frac)
    num_middle, num_not_head = np.searchsorted(from_light_end, [middle_frac, not_head_frac])
    middle, tail = len(heavy_first) - int(num_middle), len(heavy_first) - int(num_not_head)
    outward = np.concatenate((heavy_first[middle:], heavy_first[tail:middle][::-1]))
    return np.concatenate((heavy_first[:tail], _keep_ties(outward, cells)))


def meet_behind(
    num_first: int, order: Order, cells: Costs, replicas: Sequence[ReplicaView], at_tail: list[bool], middle_frac: float
) -> Order:
    """`meet` for the cells behind the first ``num_first`` of ``order``, which stay where they are."""
    tail_frac = share([view.speed_per_s for view in replicas], at_tail)
    return np.concatenate((order[:num_first], meet(order[num_first:], cells, tail_frac, middle_frac)))


def spread(order: Order, evenly: Order) -> Order:
    """The cells of ``order``, and at even distances between them those of ``evenly``."""
    num_cells = len(order) + len(evenly)
    is_even = np.zeros(num_cells, dtype=np.bool_)
    is_even[(2 * np.arange(len(evenly)) + 1) * num_cells // (2 * max(1, len(evenly)))] = True
    mixed = np.empty(num_cells, dtype=np.int64)
    mixed[is_even] = evenly
    mixed[~is_even] = order
    return mixed


def _keep_ties(places: Order, cells: Costs) -> Order:
    """``places`` with cells that cost the same in the order in which they were given."""
    known = [level(values[places]) for values in (cells.compute, cells.memory, cells.io) if values is not None]
    identity = np.zeros(len(places), dtype=np.int64)
    for levels in known:
        identity = identity * _ODD + levels  # overflows wrap around, and hardly ever make different costs the same
    grouped = np.argsort(identity, kind="stable")
    differs = np.diff(identity[grouped]) != 0
    if differs.all():
        return places
    group = np.concatenate(([0], np.cumsum(differs)))
    kept = np.empty_like(places)
    cells_in_group = places[grouped]
    kept[grouped] = cells_in_group[ascending(group * len(cells) + cells_in_group)]
    return kept
