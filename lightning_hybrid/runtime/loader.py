"""Between a `DataLoader` and a dealer: which indices to load next, and which loaded batches to run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.runtime.work import Exhausted, Work

NOTHING = object()
"""In place of a batch: none of its samples could be loaded."""


class WorkSource(Protocol):
    """Who gives works and runs them; see `lightning_hybrid.epoch.EpochRun`."""

    def take(self, *, may_wait: bool) -> Work | None:
        """The next work to load; raises `Exhausted` when there will be none."""
        ...

    def begin(self, work: Work) -> bool:
        """Whether a loaded work may be run."""
        ...

    def unpack(self, work: Work, loaded: Any) -> Any:
        """The batch of a work that has begun, from what the loader gave; `NOTHING` where there is none to run."""
        ...

    def note_wait(self, seconds: float) -> None:
        """The loop waited this long for a batch."""
        ...

    def finish(self) -> None:
        """Called once, when the loader has run out."""
        ...


class WorkFeed:
    """The order in which works go into a loader and come out of it.

    A loader with workers asks for new indices while it holds a batch that it is about to give out, so it must not be
    made to wait then. When there is no work at that moment it is told to stop; it asks again with every batch that is
    still in flight. The last one in flight is followed by a spare of one sample, which keeps the workers alive while
    there may be work to steal.

    Args:
        source: Who gives the works.
        prime_calls: How many indices the loader asks for before its first batch: ``num_workers * prefetch_factor``.
        name: The loader's class, for messages.
    """

    def __init__(self, source: WorkSource, prime_calls: int, name: str = "DataLoader") -> None:
        self._source, self._prime_calls, self._name = source, prime_calls, name
        self.is_exhausted = False
        """Whether the source has no more work."""
        self._calls = 0
        self._in_loader: deque[Work] = deque()

    def next_work(self) -> Work:
        """The work whose indices the loader should load next.

        Raises:
            StopIteration: none now; if batches are in flight the loader may ask again.
        """
        self._calls += 1
        try:
            work = self._choose()
        except Exhausted:
            self.is_exhausted = True
            raise StopIteration from None
        if work is None:
            raise StopIteration
        self._in_loader.append(work)
        return work

    def loaded(self) -> Work:
        """The work whose batch the loader just gave out.

        Raises:
            PlanError: the loader gives out more batches than it asked indices for.
        """
        if not self._in_loader:
            raise PlanError(
                f"{self._name} gave out more batches than its sampler named, so it is not known which samples they"
                " hold; make the batches in the batch sampler or in collate_fn"
            )
        return self._in_loader.popleft()

    def restart(self) -> None:
        """Prepares for a new iterator of the same loader."""
        self._calls = 0

    def _choose(self) -> Work | None:
        if self._prime_calls == 0:
            return self._source.take(may_wait=True)
        in_flight = self._in_loader
        holds_a_batch = self._calls > self._prime_calls and bool(in_flight)
        if not in_flight or (holds_a_batch and len(in_flight) == 1 and in_flight[0].spare):
            return self._source.take(may_wait=True)
        work = self._source.take(may_wait=False)
        if work is None and holds_a_batch and len(in_flight) == 1:
            start = in_flight[0].start
            return Work(start, start + 1, spare=True)
        return work


class WorkIterator:
    """The batches that this replica runs, from the loader's own iterator.

    Args:
        make_inner: Makes the loader's own iterator; again, should it end while there is work to come, because it was
            told that there is none at that moment.
        feed: Which work each of its batches belongs to.
        source: Who gives the works.
        run_ghost: Runs a batch so that collectives match, and takes it back.
    """

    def __init__(
        self,
        make_inner: Callable[[], Iterator[Any]],
        feed: WorkFeed,
        source: WorkSource,
        run_ghost: Callable[[Any], None],
    ) -> None:
        self._make_inner, self._feed, self._source, self._run_ghost = make_inner, feed, source, run_ghost
        self._inner = make_inner()
        self._gave = True
        self._is_over = False

    def __iter__(self) -> WorkIterator:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next batch to run."""
        while True:
            batch = self._next_loaded()
            work = self._feed.loaded()
            if work.spare or not self._source.begin(work):
                continue
            batch = self._source.unpack(work, batch)
            if batch is NOTHING:
                continue
            if not work.ghost:
                return batch
            self._run_ghost(batch)

    def _next_loaded(self) -> Any:
        if self._is_over:
            raise StopIteration
        start_s = time.perf_counter()
        try:
            batch = self._next_of_inner()
        except StopIteration:
            self._is_over = True
            self._source.finish()
            raise
        finally:
            self._source.note_wait(time.perf_counter() - start_s)
        self._gave = True
        return batch

    def _next_of_inner(self) -> Any:
        while True:
            try:
                return next(self._inner)
            except StopIteration:
                if self._feed.is_exhausted or not self._gave:
                    raise
                self._gave = False
                self._feed.restart()
                self._inner = self._make_inner()
