"""How many samples a replica runs in one step where the grid is cut finely: as many as it runs fastest, and as fit."""

from __future__ import annotations

from typing import Protocol

from lightning_hybrid.core.size_search import SizeSearch
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.work import Work

_LOOK_STEPS = 8
"""So often it is looked whether more or less fits into memory."""


class Fits(Protocol):
    """Knows how many samples fit into one step; see `lightning_hybrid.runtime.step_sizes`."""

    def fitting(self, samples: int, elements: int | None) -> int:
        """How many samples of a batch fit into one step, 1 to ``samples``."""
        ...


class StepSizer:
    """Decides which cells are run as one step, in one epoch on one replica.

    Where samples cost differently a size counts samples of mean cost, so that a step holds fewer heavy than light ones.

    Args:
        spec: The epoch.
        search: Finds the size at which most is done per second; goes on from epoch to epoch.
        fits: Knows what fits into memory.
        max_samples: Most samples of one step.
    """

    def __init__(self, spec: EpochSpec, search: SizeSearch, fits: Fits, max_samples: int) -> None:
        self._spec, self._search, self._fits, self._max_samples = spec, search, fits, max_samples
        self._unit = 1 if spec.auto is None else spec.auto.unit
        costs, num = spec.cell_costs.compute, max(1, spec.grid.num_samples)
        self._mean_cost = float(costs.sum()) / num or 1.0
        self._elements_per_cost: float | None = None
        self._steps = 0

    @property
    def step_cost(self) -> float:
        """Compute cost of a step of the size that is searched for now."""
        return self._search.size * self._mean_cost

    def has_room(self, start: int, stop: int) -> bool:
        """Whether positions ``start`` to ``stop`` are not too many for one step."""
        samples, cost = stop - start, self._cost(start, stop)
        if samples > self._max_samples or cost > self.step_cost * (1 + 1e-9):
            return False
        return self._fits.fitting(samples, self._elements(cost)) >= samples

    def observe(self, work: Work, seconds: float, elements: int | None) -> None:
        """A step has taken that long."""
        cost = self._cost(work.start, work.stop)
        if elements is not None and cost > 0:
            self._elements_per_cost = elements / cost
        self._steps += 1
        if self._steps % _LOOK_STEPS == 1:
            most = self._fits.fitting(self._max_samples, self._elements(self._max_samples * self._mean_cost))
            self._search.limit(max(self._unit, most))
        self._search.observe(max(1, round(cost / self._mean_cost)), cost, seconds)

    def _elements(self, cost: float) -> int | None:
        """About how many elements a batch of that cost has, by the newest one; ``None`` where that is not known."""
        return None if self._elements_per_cost is None else round(cost * self._elements_per_cost)

    def _cost(self, start: int, stop: int) -> float:
        cost = self._spec.cost_of(Work(start, stop))
        return float(stop - start) if cost is None else cost
