"""How far a replica has read a stream, and what every replica must have read alike at its end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_hybrid.core import workqueue
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.plan import Grid


class Summary(NamedTuple):
    """What a replica has read of a stream: ``sizes`` is a hash of the batch sizes, ``mark`` one of the first batch."""

    num_batches: int
    num_samples: int
    sizes: str
    mark: str | None


def are_alike(summaries: Sequence[Summary]) -> bool:
    """Whether the first batch looked alike on all replicas, as far as that was asked.

    Raises:
        PlanError: they have read batches of other numbers or sizes.
    """
    first = summaries[0]
    for other in summaries:
        if other[:3] != first[:3]:
            raise PlanError(
                f"ranks disagree about the stream: one read {first.num_samples} samples in {first.num_batches} batches,"
                f" another {other.num_samples} in {other.num_batches} (sizes {first.sizes} and {other.sizes})"
            )
    return len({summary.mark for summary in summaries} - {None}) <= 1


class Reading:
    """How far this replica has read a stream, and where its batches stand."""

    def __init__(self) -> None:
        self._offsets = array("q", [0])
        self.has_ended = False
        """Whether there are no more batches to read."""
        self.mark: str | None = None
        """What the first batch looks like, where that was asked."""

    @property
    def num_batches(self) -> int:
        """Batches that were read so far."""
        return len(self._offsets) - 1

    def add(self, num_samples: int, mark: str | None = None) -> None:
        """The next batch was read."""
        self._offsets.append(self._offsets[-1] + num_samples)
        self.mark = self.mark or mark

    def span(self, batch: int) -> tuple[int, int]:
        """First position of a batch that was read, and the position behind its last."""
        return self._offsets[batch], self._offsets[batch + 1]

    def may_end_at(self, num_batches: int) -> bool:
        """Whether the stream has ``num_batches``, as far as is known here."""
        return self.num_batches == num_batches or (not self.has_ended and self.num_batches < num_batches)

    def grid(self) -> Grid:
        """The batches that were read so far; a sample's index is its position in the stream."""
        return Grid(order=range(self._offsets[-1]), offsets=np.array(self._offsets, dtype=np.int64))

    def summary(self) -> Summary:
        """What other replicas must have read too."""
        return Summary(
            num_batches=self.num_batches,
            num_samples=self._offsets[-1],
            sizes=hashlib.sha256(self._offsets.tobytes()).hexdigest()[:16],
            mark=self.mark,
        )


class EndlessGrid(Grid):
    """Stands in for the batches of a stream until they are counted: cell ``c`` is batch ``c``, of one position."""

    @property
    def num_cells(self) -> int:
        """More than there will be."""
        return len(self.order)

    def span(self, cell: int) -> tuple[int, int]:
        """The number of the batch, and the next."""
        return cell, cell + 1

    @classmethod
    def new(cls) -> EndlessGrid:
        """The grid of any stream."""
        return cls(order=range(workqueue.MAX_CELLS), offsets=np.zeros(1, dtype=np.int64))
