"""How many samples a replica runs in one step where the grid is cut finely: as many as it runs fastest, and as fit."""

from __future__ import annotations

from typing import Protocol

from lightning_hybrid.core.size_search import SizeSearch
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.work import Work


class Fits(Protocol):
    """Knows how many samples fit into one step; see `lightning_hybrid.runtime.step_sizes`."""

    def most(self, samples: int, elements: int | None) -> int:
        """How many samples of a batch to run at once, 1 to ``samples``."""
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
        costs, num = spec.cell_costs.compute, max(1, spec.grid.num_samples)
        self._mean_cost = float(costs.sum()) / num or 1.0
        self._elements_per_cost: float | None = None

    @property
    def step_cost(self) -> float:
        """Compute cost of a step of the size that is searched for now."""
        return self._search.size * self._mean_cost

    def has_room(self, start: int, stop: int) -> bool:
        """Whether positions ``start`` to ``stop`` are not too many for one step."""
        samples, cost = stop - start, self._cost(start, stop)
        if samples > self._max_samples or cost > self.step_cost * (1 + 1e-9):
            return False
        elements = None if self._elements_per_cost is None else round(cost * self._elements_per_cost)
        return self._fits.most(samples, elements) >= samples

    def observe(self, work: Work, seconds: float, elements: int | None) -> None:
        """A step has taken that long."""
        cost = self._cost(work.start, work.stop)
        if elements is not None and cost > 0:
            self._elements_per_cost = elements / cost
        self._search.observe(max(1, round(cost / self._mean_cost)), cost, seconds)

    def limit(self, samples: int) -> None:
        """More samples of mean cost than this do not fit."""
        self._search.limit(samples)

    def _cost(self, start: int, stop: int) -> float:
        cost = self._spec.cost_of(Work(start, stop))
        return float(stop - start) if cost is None else cost
