"""The user's live loader, with another source of indices.

Lightning builds a second loader from the arguments of the first, which loses what a subclass added and fails on many
batch samplers. Here the loader is copied, and its copy's class is a subclass that owns `__iter__`; the user's object
stays as it was, and collate function, workers, pinning, generator and attributes are its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import ModuleType
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_hybrid.core.plan import Grid
from lightning_hybrid.lightning import _compat
from lightning_hybrid.runtime.guarded import guard

Iterate = Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]
"""Makes the loop's iterator from a function that makes the loader's own."""


def batches_itself(loader: DataLoader[Any]) -> bool:
    """Whether the dataset gives whole batches (``batch_size=None``), so that an index stands for one of them."""
    return loader.batch_sampler is None


def has_own_batch_sampler(loader: DataLoader[Any]) -> bool:
    """Whether the user's own class made the batches."""
    return type(loader.batch_sampler) is not BatchSampler


def shards_itself(loader: DataLoader[Any]) -> bool:
    """Whether the user deals the samples out to ranks with a sampler of his own."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def is_deterministic(loader: DataLoader[Any]) -> bool:
    """Whether every rank computes the same order without being told."""
    if batches_itself(loader):
        return type(loader.sampler) is SequentialSampler
    return type(loader.batch_sampler) is BatchSampler and type(loader.batch_sampler.sampler) is SequentialSampler


def num_batches(loader: DataLoader[Any]) -> int | None:
    """How many batches the loader has over all ranks, ``None`` when it cannot say."""
    return length_of(loader._index_sampler)


def length_of(thing: Any) -> int | None:
    """``len(thing)``, ``None`` when it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


UNKNOWN_LENGTH = 2**31
"""What a loader says of its length as long as its batch sampler cannot tell."""


def will_have_length(loader: object) -> bool:
    """Whether the loader that the loop gets can say how long it is."""
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return True
    return length_of(loader) is not None


def read_grid(loader: DataLoader[Any], num_cells: int | None) -> Grid:
    """The batches that the loader's own sampler deals out now, at most ``num_cells``; draws from its generator."""
    sampler: Any = loader._index_sampler
    if is_deterministic(loader):
        size = 1 if batches_itself(loader) else sampler.batch_size
        indices: Any = loader.sampler
        num_indices = len(indices)
        grid = Grid.sequential(num_indices, size, drop_last=not batches_itself(loader) and sampler.drop_last)
        return grid if num_cells is None else grid.head(num_cells)
    batches: Iterable[Any] = islice(iter(sampler), num_cells)
    return Grid.from_batches([index] for index in batches) if batches_itself(loader) else Grid.from_batches(batches)


class BatchIndices:
    """The indices of the newest batches, looked up by the rank's running batch number."""

    def __init__(self, kept: int = 8) -> None:
        self._kept = kept
        self._count = 0
        self._newest: dict[int, list[Any]] = {}

    def append(self, indices: list[Any]) -> None:
        """Adds the next batch's indices and forgets old ones."""
        self._newest[self._count] = indices
        self._newest.pop(self._count - self._kept, None)
        self._count += 1

    def __getitem__(self, batch_idx: int) -> list[Any]:
        """Indices of one of the newest batches."""
        return self._newest[batch_idx]

    def __len__(self) -> int:
        """How many batches have begun."""
        return self._count


@functools.cache
def _sampler_class(package: ModuleType) -> type[Any]:
    base: Any = _compat.index_wrapper(package)

    class WorkSampler(base):  # type: ignore[misc]  # the base is known only at run time
        """Yields the indices that ``next_indices`` gives; everything else is the user's sampler's."""

        def __init__(self, original: Any, length: int | None) -> None:
            if hasattr(original, "__dict__"):
                super().__init__(original)
            self._batch_sampler, self._iterator = original, None
            self._length = length
            self.next_indices: Callable[[], Any] = _nothing
            self.seen_batch_indices = BatchIndices()

        def __iter__(self) -> WorkSampler:
            return self

        def __next__(self) -> Any:
            return self.next_indices()

        def __len__(self) -> int:
            if self._length is None:
                raise TypeError("the user's batch sampler has no length")
            return self._length

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self._batch_sampler, name)

    return WorkSampler


def _nothing() -> Any:
    raise StopIteration


@functools.cache
def _live_class(cls: Any) -> Any:
    def make_inner(self: Any) -> Iterator[Any]:
        if not self._hybrid_guards:
            return iter(cls.__iter__(self))
        with guard(self):
            return iter(cls.__iter__(self))

    def iterate(self: Any) -> Iterator[Any]:
        iterator: Iterator[Any] = self._hybrid_iterate(lambda: make_inner(self))
        return iterator

    return type(f"Hybrid{cls.__name__}", (cls,), {"__iter__": iterate, "__module__": cls.__module__})


def live_copy(
    loader: DataLoader[Any], package: ModuleType, length: int | None, iterate: Iterate, *, guards: bool = False
) -> tuple[Any, Any]:
    """A copy of ``loader`` that asks a new sampler for indices, and that sampler.

    Args:
        loader: The user's loader; stays as it is.
        package: The Trainer's package.
        length: What ``len`` of the copy is; ``None`` when it is not known.
        iterate: Makes the iterator of each pass.
        guards: Whether the loader's own iterator gives `Loaded`, which leaves out samples that cannot be loaded.
    """
    live = copy.copy(loader)
    single = batches_itself(loader)
    sampler = _sampler_class(package)(loader.sampler if single else loader.batch_sampler, length)
    cls: Any = type(loader)
    live.__class__ = _live_class(cls)
    for name, value in {
        "sampler" if single else "batch_sampler": sampler,
        "_iterator": None,
        "in_order": True,
        "_hybrid_iterate": iterate,
        "_hybrid_guards": guards,
    }.items():
        # past the guard of DataLoader.__setattr__, which is there for users
        object.__setattr__(live, name, value)
    return live, sampler


def prime_calls(loader: DataLoader[Any]) -> int:
    """How many batches the loader asks for before it gives out the first; 0 without workers."""
    return loader.num_workers * (loader.prefetch_factor or 0)
