"""What the steps of an epoch were like on this replica, beside their times: their sizes, and what went wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.runtime.losses import Losses
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.step_sizes import StepSizes
from lightning_hybrid.runtime.work import Work

_NEWEST_STEPS = 32
"""Steps whose mean size is told."""


class StepFacts:
    """Sizes of steps, and how often one ran out of memory.

    Args:
        spec: The epoch.
        sizes: Counts what ran out of memory, in all epochs of the run.
        losses: The samples that were left out.
    """

    def __init__(self, spec: EpochSpec, sizes: StepSizes, losses: Losses) -> None:
        self._spec, self._sizes, self._losses = spec, sizes, losses
        self._newest: deque[int] = deque(maxlen=_NEWEST_STEPS)
        self._memory_bound: float | None = None
        self._failures_before = sizes.num_failures

    def note(self, work: Work, sizes: Sequence[int], *, is_short: bool) -> None:
        """Notes how many samples the parts had in which a batch was run, one part if as a whole.

        Args:
            work: Whose batch it was.
            sizes: Samples of each part.
            is_short: Whether there are several parts for want of memory.
        """
        self._newest.extend(sizes)
        memory = self._spec.memory_of(work)
        if memory is None or not sizes:
            return
        if is_short:
            self._memory_bound = memory * max(sizes) / sum(sizes)
        elif self._memory_bound is not None and memory > self._memory_bound:
            self._memory_bound = memory  # there is more free than there was

    def told_in(self, record: ReplicaRecord) -> ReplicaRecord:
        """``record`` with all that is known here."""
        return replace(
            record,
            failed_samples=len(self._losses.failures),
            memory_failures=self._sizes.num_failures - self._failures_before,
            memory_bound=self._memory_bound,
            micro_batch_size=sum(self._newest) / len(self._newest) if self._newest else None,
        )
