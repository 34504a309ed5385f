"""Shares of the cells by earliest completion, for when costs and speeds are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.cost import Costs, FloatArray

_SINGLE_CELLS = 2048
"""Heaviest and lightest cells that are placed one by one; what lies between is placed in bulk."""
_CELLS_PER_ROUND = 4
"""Cells of each replica, on average, in one round of dealing."""
_CELLS_PER_DEAL = 32
"""Cells of each replica, on average, below which the rest is placed one by one; as many at either end always are."""


def earliest_completion(
    cells: Costs, speeds: Sequence[float], free_s: Sequence[float], bounds: Sequence[float | None]
) -> npt.NDArray[np.int64]:
    """Gives each cell, in the order of ``cells``, to the replica that completes it first.

    Longest processing time first on uniform machines (Gonzalez, Ibarra and Sahni, 1977) where ``cells`` are in
    descending order. Of very many cells those in the middle are dealt out in bulk, so that all replicas are done with
    them at the same time.

    Args:
        cells: Compute costs, and memory costs where known.
        speeds: Cost units per second of each replica.
        free_s: When each replica will be free.
        bounds: Most memory cost of a cell on each replica, ``None`` where there is no bound. A cell above all bounds
            goes to the replicas with the largest.

    Returns:
        The replica of each cell.
    """
    owner = np.empty(len(cells), dtype=np.int64)
    ends_s, pace = np.asarray(free_s, dtype=np.float64).copy(), 1.0 / np.asarray(speeds, dtype=np.float64)
    num_single = min(len(cells), max(_SINGLE_CELLS, _CELLS_PER_DEAL * len(pace)))
    head = min(num_single, len(cells))
    tail = max(head, len(cells) - num_single)
    fits = _Fits(cells.memory, bounds)
    _place_singly(range(head), cells.compute, pace, ends_s, fits, owner)
    _place_in_bulk(head, tail, cells.compute, pace, ends_s, fits, owner)
    _place_singly(range(tail, len(cells)), cells.compute, pace, ends_s, fits, owner)
    return owner


class _Fits:
    """Which cells fit where."""

    def __init__(self, memory: FloatArray | None, bounds: Sequence[float | None]) -> None:
        self._memory = None if all(bound is None for bound in bounds) else memory
        self._bounds = np.array([np.inf if bound is None else bound for bound in bounds])
        self._smallest, self._largest = float(self._bounds.min()), float(self._bounds.max())

    def extra_s(self, cell: int) -> FloatArray | float:
        """Infinite for replicas that a cell does not fit, zero elsewhere."""
        if self._memory is None or self._memory[cell] <= self._smallest:
            return 0.0
        return np.where(self._bounds >= min(float(self._memory[cell]), self._largest), 0.0, np.inf)

    def fits_all(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which cells fit on every replica."""
        if self._memory is None:
            return np.ones(stop - start, dtype=np.bool_)
        return self._memory[start:stop] <= self._smallest


def _place_singly(
    positions: Sequence[int] | npt.NDArray[np.int64],
    costs: FloatArray,
    pace: FloatArray,
    ends_s: FloatArray,
    fits: _Fits,
    owner: npt.NDArray[np.int64],
) -> None:
    for position in positions:
        completions = ends_s + costs[position] * pace + fits.extra_s(int(position))
        first = int(completions.argmin())
        ends_s[first] = completions[first]
        owner[position] = first


def _place_in_bulk(
    start: int,
    stop: int,
    costs: FloatArray,
    pace: FloatArray,
    ends_s: FloatArray,
    fits: _Fits,
    owner: npt.NDArray[np.int64],
) -> None:
    """Deals out cells like cards, in proportion to what each replica can take until all are done at the same time."""
    free = fits.fits_all(start, stop)
    _place_singly(np.flatnonzero(~free) + start, costs, pace, ends_s, fits, owner)
    bulk = np.flatnonzero(free) + start
    # the lighter half is dealt out when it is known how far off the heavier one is
    while len(bulk) > _CELLS_PER_DEAL * len(pace) and costs[bulk[0]] > 0:
        half, bulk = np.array_split(bulk, 2)
        owner[half] = _dealt(costs[half], _room(float(costs[half].sum()), pace, ends_s))
        ends_s += np.bincount(owner[half], weights=costs[half], minlength=len(pace)) * pace
    _place_singly(bulk, costs, pace, ends_s, fits, owner)


def _dealt(costs: FloatArray, room: FloatArray) -> npt.NDArray[np.int64]:
    """Who takes each cell, so that everyone fills its room with cells from everywhere in the order."""
    total = float(costs.sum())
    if total <= 0:
        return np.arange(len(costs), dtype=np.int64) % len(room)
    # in rounds: a cell falls to where the cumulated cost points
    edges = np.cumsum(room) / room.sum()
    rounds = max(1, len(costs) // (_CELLS_PER_ROUND * len(room)))
    place = (np.cumsum(costs) - 0.5 * costs) / total * rounds % 1.0
    return np.minimum(np.searchsorted(edges, place, side="right"), len(room) - 1)


def _room(total: float, pace: FloatArray, ends_s: FloatArray) -> FloatArray:
    """Cost that each replica takes so that all which take any end together (water filling)."""
    order = np.argsort(ends_s, kind="stable")
    speeds, ends = 1.0 / pace[order], ends_s[order]
    # with the first k replicas the common end is (total + sum of speed * end) / sum of speeds
    common = (total + np.cumsum(speeds * ends)) / np.cumsum(speeds)
    k = int(np.flatnonzero(common >= ends)[-1])
    room: FloatArray = np.maximum(0.0, common[k] - ends_s) / pace
    return room
