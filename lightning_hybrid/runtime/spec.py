"""What one pass over one loader is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_hybrid.core.cost import Costs, FloatArray
from lightning_hybrid.core.plan import Arrangement, Grid
from lightning_hybrid.core.versions import is_heavy_first
from lightning_hybrid.runtime.reading import Reading
from lightning_hybrid.runtime.work import Work

Stage = Literal["predict", "validate", "test"]


class SizeRange(NamedTuple):
    """Samples of a step: of the smallest, of the first, and of the largest."""

    unit: int
    start: int
    most: int


@dataclass(frozen=True, kw_only=True)
class EpochSpec:
    """What one pass over one loader is.

    ``prime_calls`` is how many batches the loader asks for before it gives out the first (0 without workers).
    ``max_size`` is the most samples of a re-cut step, ``None`` where batches must not be cut anew. ``probe_rounds`` is
    how many steps every replica takes before it is decided whether the user's step issues collectives, and
    ``read_ahead`` how many batches the loop asks for before it runs the step of the first. ``arrangement`` tells how
    the user's batches lie in ``grid``, ``None`` where they are its cells; ``costs`` are those of the cells of ``grid``.
    ``stream`` tells how far a stream was read; then ``grid`` is an `EndlessGrid` until that is all of it. ``auto``
    tells between which sizes the fastest is searched, ``None``: each cell is a step.
    """

    stage: Stage
    loader_idx: int
    epoch: int
    grid: Grid
    prime_calls: int = 0
    max_size: int | None = None
    probe_rounds: int = 1
    read_ahead: int = 0
    arrangement: Arrangement | None = None
    costs: Costs | None = None
    stream: Reading | None = None
    auto: SizeRange | None = None

    @property
    def cell_costs(self) -> Costs:
        """Costs of the cells: their numbers of samples where nothing better is known."""
        return Costs(compute=np.diff(self.grid.offsets).astype(np.float64)) if self.costs is None else self.costs

    def cost_of(self, work: Work) -> float | None:
        """What the user's costs make of a work, ``None`` where there are none; cells are taken to be even inside."""
        if self.costs is None:
            return None
        start, stop = np.interp((work.start, work.stop), self.grid.offsets, self._cost_before)
        return float(stop - start)

    def index_of(self, position: int) -> Any:
        """Dataset index of the sample at a position, ``None`` for a stream."""
        return None if self.stream is not None else self.grid.indices(position, position + 1)[0]

    def memory_of(self, work: Work) -> float | None:
        """Memory cost of a work by the user's costs, ``None`` where there are none."""
        if self.costs is None or self.costs.memory is None:
            return None
        start, stop = np.interp((work.start, work.stop), self.grid.offsets, self._memory_before)
        return float(stop - start)

    @cached_property
    def _memory_before(self) -> FloatArray:
        assert self.costs is not None
        assert self.costs.memory is not None
        return np.concatenate(([0.0], np.cumsum(self.costs.memory)))

    @cached_property
    def _cost_before(self) -> FloatArray:
        return np.concatenate(([0.0], np.cumsum(self.cell_costs.compute)))

    @property
    def usual_cost(self) -> float | None:
        """Cost of a mean cell by the user's costs."""
        return None if self.costs is None or not len(self.costs) else float(self.costs.compute.mean()) or None

    @property
    def is_heavy_first(self) -> bool:
        """Whether the cells are known to get cheaper from first to last."""
        return self.costs is not None and is_heavy_first(self.costs)

    @property
    def samples_reused(self) -> int:
        """Samples of the user's batches that are not run, because an equal one is."""
        return 0 if self.arrangement is None else self.arrangement.batches.num_samples - self.grid.num_samples

    @property
    def first_rounds(self) -> int:
        """Steps of every replica that are dealt out before it is known how to deal."""
        return self.probe_rounds + self.read_ahead
