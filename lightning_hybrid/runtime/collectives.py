"""The collectives that a rank issues: how many, how long they wait, and what is wrong with them in queue mode."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_hybrid.runtime.work import Work

_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip


class CollectiveClock:
    """Adds up the host's time inside blocking collectives, so that a wait for a slow rank does not count as work.

    While installed it stands in for the functions of `torch.distributed`; calls that were imported by name before, or
    that the device runs asynchronously, are not seen.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waited_s = 0.0
        self._clock = clock
        self._depth = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Starts to count; safe to call twice."""
        if self._originals:
            return
        for name in _COLLECTIVES:
            for module in (dist, dist.distributed_c10d):
                original = getattr(module, name)
                self._originals.append((module, name, original))
                setattr(module, name, self._counted(original))

    def remove(self) -> None:
        """Puts every function back."""
        while self._originals:
            setattr(*self._originals.pop())

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            start_s = self._clock()
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.waited_s += self._clock() - start_s

        return counted


class CollectiveCounter:
    """Counts the collectives that this rank issues, in all process groups together; asked twice per step."""

    def __init__(self) -> None:
        self._groups: Any = {}
        if dist.is_available() and dist.is_initialized():
            self._groups = dist.distributed_c10d._world.pg_map  # torch keeps this one dictionary up to date
        self._counts: list[Callable[[], int]] = []

    def __call__(self) -> int:
        """A number that moves with every collective of this rank, and with every new process group."""
        if len(self._counts) != len(self._groups):
            self._counts = [group._get_sequence_number_for_group for group in self._groups]
        total = len(self._counts)
        for count in self._counts:
            total += count()
        return total


class CollectiveWatch:
    """Notices collectives of the user's step.

    Args:
        replica: Who this is.
        stage: Of the step, for the complaint.
        count: Counts the collectives that this rank has issued.
    """

    def __init__(self, replica: int, stage: str, count: Callable[[], int]) -> None:
        self._replica, self._stage, self._count = replica, stage, count
        self._work: Work | None = None
        self._before: int | None = None

    def begin(self, work: Work) -> None:
        """The step of ``work`` begins."""
        self._work, self._before = work, self._count()

    def has_moved(self) -> bool:
        """Whether the step that runs, or ran last, has issued a collective."""
        before = self._before  # read once: the loop's thread may end the step meanwhile
        return before is not None and self._count() != before

    def end(self) -> bool:
        """The step has ended; whether it issued a collective."""
        moved, self._before = self.has_moved(), None
        return moved

    def complaint(self) -> str:
        """What is wrong with a collective in queue mode."""
        work = self._work
        assert work is not None
        return (
            f"replica {self._replica} issued a collective in the {self._stage} step of samples"
            f" {work.start} to {work.stop - 1} of the loader, but in queue mode replicas take different numbers of"
            ' steps; use HybridBalanceCallback(mode="lockstep")'
        )
