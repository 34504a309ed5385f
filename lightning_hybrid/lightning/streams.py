"""Loaders of an `IterableDataset` whose batches the replicas claim: each reads all of them and runs its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.engine import Engine
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning.ghost import run_ghost
from lightning_hybrid.lightning.stream_loader import Read, live_copy
from lightning_hybrid.runtime.loader import WorkFeed, WorkIterator
from lightning_hybrid.runtime.reading import EndlessGrid, Reading
from lightning_hybrid.runtime.spec import EpochSpec, Stage
from lightning_hybrid.runtime.stream import needs_ghost
from lightning_hybrid.runtime.work import Exhausted, Work

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Streams:
    """The iterable loaders of one Trainer.

    Args:
        trainer: The Trainer.
        engine: Deals out the batches.
        say_once: Tells the user something, unless it was told before.
    """

    def __init__(self, trainer: Trainer, engine: Engine, say_once: Callable[[str], None]) -> None:
        self._trainer, self._engine, self._say_once = trainer, engine, say_once
        self._endless: list[Any] = []

    def claims(self, loader: object) -> bool:
        """Whether the replicas claim the batches of a loader."""
        is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        return is_stream and self._engine.config.iterable == "claim" and self._engine.num_replicas > 1

    def forget(self) -> None:
        """The loaders so far are used no more."""
        self._endless = []

    def live(self, loader: DataLoader[Any], stage: Stage, loader_idx: int, read_ahead: int) -> object:
        """A copy of ``loader`` that gives out the batches that this replica runs."""
        which = f"loader {loader_idx} of {stage}"
        if loader.num_workers > 1:
            self._say_once(
                f"{which} has an IterableDataset and num_workers={loader.num_workers}; with iterable='claim' every rank"
                " reads it with one worker, so that each sample comes once and in the order of the stream"
            )
        if self._engine.config.lease_s is not None:
            self._say_once(f"lease_s has no effect on {which}: a batch of a stream is not read a second time")
        made = live_copy(loader)
        at = _Place(stage=stage, loader_idx=loader_idx, read_ahead=read_ahead)
        made.hybrid_iterate = lambda make: StreamPass(self._trainer, self._engine, made, at).batches(make)
        if made.hybrid_length is None:
            self._endless.append(made)
        return made

    def starting(self, original: Callable[[], None]) -> Callable[[], None]:
        """Resets a loop.

        A loop that asks a loader for its length and gets none reads one batch ahead, to see which one is the last.
        That batch would be claimed a whole step too early, so for this moment streams have a length.
        """

        def reset() -> None:
            with _with_length(self._endless):
                original()

        return reset


@contextmanager
def _with_length(loaders: list[Any]) -> Iterator[None]:
    for loader in loaders:
        loader.hybrid_has_length = True
    try:
        yield
    finally:
        for loader in loaders:
            loader.hybrid_has_length = False


# --- a pass ----------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Which loader of which stage, and how many batches the loop asks for before it runs the step of the first."""

    stage: Stage
    loader_idx: int
    read_ahead: int


class StreamPass:
    """The source of works of one pass over a stream.

    Args:
        trainer: The Trainer.
        engine: Deals out the batches.
        loader: What `live_copy` made.
        place: Where the loader stands.
    """

    def __init__(self, trainer: Trainer, engine: Engine, loader: Any, place: _Place) -> None:
        self._trainer, self._engine, self._loader, self._place = trainer, engine, loader, place
        self._reading = Reading()
        self._num_at_most = num_batches_at_most(trainer, engine, loader, place.stage)
        self._inner: Iterator[Read] | None = None
        self._held: Any = None
        self._num_taken = self._num_begun = 0
        self._has_run = self._is_over = False
        self._epoch = None if trainer.sanity_checking else self._open()
        if self._epoch is not None and self._num_at_most is not None:
            _compat.raise_limit(trainer, place.stage, place.loader_idx, self._num_at_most)
        self._look_for_limit()

    def batches(self, make_inner: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches that this rank runs; in the sanity check, of which nothing is reported, the first of all."""
        self._loader.collate_fn.is_first = self._loader.collate_fn.is_wanted = True
        if self._epoch is None:
            self._loader.hybrid_next = lambda inner: next(inner).batch
            return make_inner()
        feed = WorkFeed(self, 0, type(self._loader).__bases__[0].__name__)
        feed.is_exhausted = True  # a stream is read once
        self._loader.hybrid_next = lambda inner: self._next_of(inner, feed)
        return WorkIterator(make_inner, feed, self, self._ghost)

    def take(self, *, may_wait: bool) -> Work | None:
        """The next work of this replica, with its batch read.

        Raises:
            Exhausted: the stream has ended.
        """
        if self._is_over:
            raise Exhausted
        work = self._opened.take(may_wait=may_wait)
        assert work is not None
        assert work.cell is not None
        found = self._read_to(work.cell)
        if found:
            start, stop = self._reading.span(work.cell)
            work = replace(work, start=start, stop=stop)
        elif needs_ghost(work, self._reading.num_batches, self._engine.replica):
            work = self._ghost_of_last(work)
        else:
            self._is_over = True
            raise Exhausted
        self._num_taken += 1
        return work

    def begin(self, work: Work) -> bool:
        """Always: nobody else runs this batch."""
        begins = self._opened.begin(work)
        assert begins, "a batch of a stream cannot be given back"
        self._num_begun += 1
        self._has_run = self._has_run or not work.ghost
        return True

    def unpack(self, work: Work, loaded: Any) -> Any:
        """The batch as it was read."""
        return loaded

    def note_wait(self, seconds: float) -> None:
        """The loop waited this long for a batch."""
        self._opened.note_wait(seconds)

    def finish(self) -> None:
        """The loader has run out.

        Raises:
            PlanError: it did before the stream had ended, or it kept batches to itself.
        """
        name = type(self._loader).__bases__[0].__name__
        if not self._reading.has_ended:
            raise PlanError(
                f"{name} stopped after batch {self._reading.num_batches} of its IterableDataset, of which more batches"
                " may be claimed; with iterable='claim' end the stream in the dataset, or limit the Trainer's batches"
            )
        if self._num_begun != self._num_taken:
            raise PlanError(f"{name} gave out {self._num_begun} of the {self._num_taken} batches that it was to run")
        self._opened.finish()

    # --- reading ------------------------------------------------------------------------------------------------

    def _next_of(self, inner: Iterator[Read], feed: WorkFeed) -> Any:
        self._inner = inner
        try:
            feed.next_work()  # by way of `take`, which reads
        finally:
            self._inner = None  # its workers end when the loop lets go of it
        held, self._held = self._held, None
        return held

    def _read_to(self, batch: int) -> bool:
        """Reads the stream up to a batch and holds that one; whether there is one."""
        assert self._inner is not None
        collate, reading = self._loader.collate_fn, self._reading
        while not reading.has_ended and reading.num_batches <= batch:
            collate.is_wanted = reading.num_batches == batch
            try:
                read = next(self._inner)
            except StopIteration:
                self._end()
                break
            self._held = read.batch
            reading.add(read.num_samples, read.mark)
            self._look_for_limit()
        return batch < reading.num_batches

    def _ghost_of_last(self, work: Work) -> Work:
        if self._held is None:
            self._held = self._loader.collate_fn.last()
        last = self._reading.num_batches - 1
        start, stop = self._reading.span(last)
        return replace(work, start=start, stop=stop, cell=last, ghost=True)

    def _look_for_limit(self) -> None:
        if self._num_at_most is not None and self._reading.num_batches >= self._num_at_most:
            self._end()

    def _end(self) -> None:
        if self._epoch is not None:
            self._epoch.measured(self._reading.grid())
        self._reading.has_ended = True

    # --- the epoch ----------------------------------------------------------------------------------------------

    @property
    def _opened(self) -> EpochRun:
        assert self._epoch is not None
        return self._epoch

    def _ghost(self, batch: Any) -> None:
        place = self._place
        run_ghost(self._trainer, place.stage, batch, place.loader_idx, is_first=not self._has_run)
        self._has_run = True

    def _open(self) -> EpochRun:
        store, number = self._engine.open_store(self._place.stage, self._place.loader_idx)
        spec = EpochSpec(
            stage=self._place.stage,
            loader_idx=self._place.loader_idx,
            epoch=number,
            grid=EndlessGrid.new(),
            stream=self._reading,
            # in fit the step goes through DDP's forward, which broadcasts buffers before it is like any other step
            probe_rounds=2 if _compat.in_fit(self._trainer) else 1,
            read_ahead=self._place.read_ahead,
        )
        return self._engine.balanced(spec, store)


def num_batches_at_most(trainer: Trainer, engine: Engine, loader: Any, stage: Stage) -> int | None:
    """How many batches of a stream all ranks run together at most, ``None``: to its end, wherever that is."""
    limit, length = _compat.limit_of(trainer, stage), loader.hybrid_length
    if isinstance(limit, int):
        most = limit * engine.num_replicas
        return most if length is None else min(length, most)
    return None if length is None else int(length * limit)
