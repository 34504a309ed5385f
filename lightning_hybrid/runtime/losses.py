"""The samples of an epoch that this replica could not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import TooManyErrors
from lightning_hybrid.core.failures import SampleFailure, Where, summary
from lightning_hybrid.runtime.work import Work

_HOPELESS = 16
"""So many failures of one kind, and nothing that could be run, are a fault of the program and not of the data."""


class Losses:
    """What was left out, and of which works nothing is left.

    Args:
        replica: Who this is.
        loader_idx: Index of the loader.
        config: Says how many failures end the run.
    """

    def __init__(self, replica: int, loader_idx: int, config: HybridConfig) -> None:
        self.failures: list[SampleFailure] = []
        self.works: list[Work] = []
        """Works of which no sample could be loaded; the loop never saw them."""
        self.has_run = False
        """Whether any sample could be run."""
        self._replica, self._loader_idx, self._max_errors = replica, loader_idx, config.max_errors
        self._positions: set[int] = set()

    def add(self, position: int, index: Any, where: Where, error: str, *, elsewhere: int) -> None:
        """A sample could not be run.

        Args:
            position: In the grid.
            index: Dataset index.
            where: What raised.
            error: What was raised.
            elsewhere: Samples that the other replicas could not run, as far as is known here.

        Raises:
            TooManyErrors: there are more than ``max_errors``, or none could be run so far.
        """
        failure = SampleFailure(
            position=position,
            index=index,
            where=where,
            error=error,
            replica=self._replica,
            loader_idx=self._loader_idx,
        )
        self.failures.append(failure)
        self._positions.add(position)
        total = len(self.failures) + elsewhere
        if self._max_errors is not None and total > self._max_errors:
            raise TooManyErrors(
                f"{total} samples could not be run, max_errors={self._max_errors}; here: {summary(self.failures)}"
            )
        kinds = {failed.error.partition(":")[0] for failed in self.failures}
        if not self.has_run and len(self.failures) >= _HOPELESS and len(kinds) == 1:
            raise TooManyErrors(
                f"none of the first {len(self.failures)} samples could be run: {summary(self.failures, most=2)}"
            )

    def absent(self, work: Work) -> tuple[int, ...]:
        """Positions of a work's samples that could not be run."""
        return tuple(position for position in range(work.start, work.stop) if position in self._positions)

    def kept(self, work: Work) -> Sequence[int]:
        """Positions of a work's samples that could be run so far."""
        positions = range(work.start, work.stop)
        if not self._positions or self._positions.isdisjoint(positions):
            return positions
        return [position for position in positions if position not in self._positions]
