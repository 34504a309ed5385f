"""The grid of an epoch and the plan of who ran which part of it, as plain data with an exact text form."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.cost import FloatArray
from lightning_hybrid.core.errors import PlanError

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """All micro-batches of an epoch, cut before the first step.

    ``order[position]`` is the dataset index of the sample at ``position`` in the loader's order; cell ``c`` holds
    positions ``offsets[c]`` to ``offsets[c + 1]``. ``order`` is a range or an int64 array where the indices are plain
    integers, else a list of whatever the sampler yields.
    """

    order: range | npt.NDArray[np.int64] | list[Any]
    offsets: Offsets

    @classmethod
    def sequential(cls, num_samples: int, batch_size: int, *, drop_last: bool = False) -> Grid:
        """The grid of a sequential sampler: positions are dataset indices."""
        num_samples -= num_samples % batch_size if drop_last else 0
        edges = np.arange(0, num_samples, batch_size, dtype=np.int64)
        return cls(order=range(num_samples), offsets=np.append(edges, num_samples))

    @classmethod
    def from_batches(cls, batches: Iterable[Sequence[Any]]) -> Grid:
        """The grid whose cells are ``batches``, the lists of dataset indices that a batch sampler yields."""
        order: list[Any] = []
        offsets = [0]
        for batch in batches:
            order.extend(batch)
            offsets.append(len(order))
        plain = all(type(index) is int and -(2**63) <= index < 2**63 for index in order)
        return cls(
            order=np.asarray(order, dtype=np.int64) if plain else order, offsets=np.asarray(offsets, dtype=np.int64)
        )

    @property
    def num_cells(self) -> int:
        """Number of micro-batches."""
        return len(self.offsets) - 1

    @property
    def num_samples(self) -> int:
        """Number of samples, a sample that the sampler yields twice counted twice."""
        return len(self.order)

    def span(self, cell: int) -> tuple[int, int]:
        """First position of ``cell``, and the position behind its last."""
        return int(self.offsets[cell]), int(self.offsets[cell + 1])

    def indices(self, start: int, stop: int) -> list[Any]:
        """Dataset indices at positions ``start`` to ``stop``."""
        part = self.order[start:stop]
        return part.tolist() if isinstance(part, np.ndarray) else list(part)

    def order_at(self, positions: Offsets) -> npt.NDArray[np.int64] | list[Any]:
        """Dataset indices at ``positions``, in that order."""
        if isinstance(self.order, list):
            return [self.order[position] for position in positions.tolist()]
        if isinstance(self.order, range):
            return self.order.start + self.order.step * positions
        return self.order[positions]

    def head(self, num_cells: int) -> Grid:
        """The grid of the first ``num_cells`` cells."""
        if num_cells >= self.num_cells:
            return self
        return Grid(order=self.order[: int(self.offsets[num_cells])], offsets=self.offsets[: num_cells + 1])

    @property
    def digest(self) -> str:
        """Hash of order and cuts; equal on every rank that holds the same grid."""
        digest = hashlib.sha256(self.offsets.tobytes())
        if isinstance(self.order, list):
            digest.update(repr(self.order).encode())
        elif isinstance(self.order, range):
            digest.update(np.arange(len(self.order), dtype=np.int64).tobytes())
        else:
            digest.update(self.order.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrangement:
    """How the user's batches are laid out in the grid that is run.

    ``batches`` are the user's own batches, in loader order. ``slots[position]`` is the position in the grid that is run
    whose row is the result of the sample at ``position``; ``None`` where both are the same. After ordering by cost the
    slots are a permutation; where repeated samples are run once, several positions share a slot.
    """

    batches: Grid
    slots: Offsets | None = None

    def is_cut_anew(self, grid: Grid) -> bool:
        """Whether the user's batches are not the cells of ``grid``, which is run."""
        return self.slots is not None or self.batches is not grid

    def slots_at(self, start: int, stop: int) -> Offsets:
        """Slots of the loader's positions ``start`` to ``stop``."""
        return np.arange(start, stop, dtype=np.int64) if self.slots is None else self.slots[start:stop]

    @property
    def digest(self) -> str:
        """Hash of batches and slots; equal on every rank that holds the same arrangement."""
        slots = b"" if self.slots is None else self.slots.tobytes()
        return hashlib.sha256(self.batches.digest.encode() + slots).hexdigest()[:16]


def arrange(
    batches: Grid, cell_size: int | None, *, firsts: Offsets | None = None, costs: FloatArray | None = None
) -> tuple[Grid, Arrangement]:
    """The grid to run for the user's batches: repeated samples left out, heavy samples first, like costs together.

    Args:
        batches: The user's batches.
        cell_size: Samples of a cell; the last may be smaller. ``None``: as the batches are, where no sample moves.
        firsts: For every position the first one that holds an equal sample, as `first_positions` tells; ``None``: no
            sample repeats.
        costs: Of the samples that are run, in loader order, which equal costs keep; ``None`` keeps it altogether.
    """
    num = batches.num_samples
    kept = np.arange(num, dtype=np.int64) if firsts is None else np.unique(firsts)
    if costs is not None:
        kept = kept[np.argsort(-costs, kind="stable")]
    if len(kept) == num and not (np.diff(kept) < 0).any():
        edges = batches.offsets if cell_size is None else _edges(num, cell_size)
        is_same = np.array_equal(edges, batches.offsets)
        return batches if is_same else Grid(order=batches.order, offsets=edges), Arrangement(batches=batches)
    slot_of = np.empty(num, dtype=np.int64)
    slot_of[kept] = np.arange(len(kept))
    slots = slot_of if firsts is None else slot_of[firsts]
    size = int(np.diff(batches.offsets).max()) if cell_size is None else cell_size
    grid = Grid(order=batches.order_at(kept), offsets=_edges(len(kept), size))
    return grid, Arrangement(batches=batches, slots=slots)


def _edges(num_samples: int, cell_size: int) -> Offsets:
    return np.append(np.arange(0, num_samples, cell_size, dtype=np.int64), num_samples)


def first_positions(keys: Iterable[Hashable]) -> Offsets:
    """For every position the first one whose key is equal.

    Example:
        >>> first_positions(["a", "b", "a"]).tolist()
        [0, 1, 0]
    """
    seen: dict[Hashable, int] = {}
    return np.asarray([seen.setdefault(key, position) for position, key in enumerate(keys)], dtype=np.int64)


class PlannedCell(NamedTuple):
    """Positions ``start`` to ``stop`` of the grid, run as one step by ``replica``."""

    replica: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Who ran which positions of the grid, in its order: the realised grid of one epoch of one loader.

    The grid's order is the loader's, unless samples were ordered by cost or repeated ones left out.
    """

    cells: tuple[PlannedCell, ...]

    def validate(self, num_samples: int) -> None:
        """Checks that the cells hold every position once.

        Raises:
            PlanError: positions are missing or repeated; names the first.
        """
        at = 0
        for cell in self.cells:
            if cell.stop < cell.start:
                raise PlanError(f"a cell ends before it starts: {tuple(cell)}")
            if cell.start != at:
                what = "nobody ran" if cell.start > at else "two cells hold"
                raise PlanError(f"{what} position {min(at, cell.start)} (next cell {tuple(cell)})")
            at = cell.stop
        if at != num_samples:
            raise PlanError(f"the plan ends at position {at}, the loader has {num_samples}")

    def format(self) -> str:
        """One line per cell: ``replica start stop``."""
        return "\n".join(f"{cell.replica} {cell.start} {cell.stop}" for cell in self.cells)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that `format` wrote.

        Raises:
            PlanError: a line does not hold three integers.
        """
        cells = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                replica, start, stop = map(int, line.split())
            except ValueError as err:
                raise PlanError(f"line {number} must hold three integers, got {line!r}") from err
            cells.append(PlannedCell(replica, start, stop))
        return cls(tuple(cells))
