"""The live copy of a loader of an `IterableDataset`, which gives out only the batches that are run here.

As in `lightning_hybrid.lightning.loader` the user's loader is copied and stays as it was. The innermost iterator of the
copy leaves batches out, so that an ``__iter__`` of the user's sees nothing else; those are read, but not collated where
the loader has no worker.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_hybrid.lightning import loader as live


class Read(NamedTuple):
    """A batch of the stream, how many samples it holds, and of the first one what they look like."""

    num_samples: int
    batch: Any
    mark: str | None


class Collate:
    """The user's collate function, with the number of samples beside its batch.

    Args:
        collate: The user's function.
        batched: Whether it gets a list of samples, and not what the dataset gave.
        keeps: Whether the samples of the last batch are kept, to be collated later.
    """

    def __init__(self, collate: Callable[[Any], Any], *, batched: bool, keeps: bool) -> None:
        self._collate, self._batched, self._keeps = collate, batched, keeps
        self.is_first = self.is_wanted = True
        """Whether the next batch is the first of the stream, and whether it will be run here; where not, its samples
        are only counted."""
        self._samples: Any = None

    def __call__(self, samples: Any) -> Read:
        """The batch of ``samples``, ``None`` for one that is not wanted."""
        if self._keeps:
            self._samples = samples
        mark = mark_of(samples) if self.is_first else None
        self.is_first = False
        num = len(samples) if self._batched else 1
        return Read(num, self._collate(samples) if self.is_wanted else None, mark)

    def last(self) -> Any:
        """The last batch, wanted or not."""
        return self._collate(self._samples)


def mark_of(samples: Any) -> str:
    """A hash of what samples look like; where they lie in memory, which no two processes share, does not count."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(samples))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _ClaimedOnly:
    """The loader's own iterator, without the batches that this replica does not run."""

    def __init__(self, inner: Iterator[Any], loader: Any) -> None:
        self._inner, self._loader = inner, loader

    def __iter__(self) -> _ClaimedOnly:
        return self

    def __next__(self) -> Any:
        return self._loader.hybrid_next(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)


@functools.cache
def _stream_class(cls: Any) -> Any:
    def iterate(self: Any) -> Iterator[Any]:
        iterator: Iterator[Any] = self.hybrid_iterate(lambda: iter(cls.__iter__(self)))
        return iterator

    def length(self: Any) -> int:
        if self.hybrid_length is None and not self.hybrid_has_length:
            raise TypeError("the user's loader has no length")
        return live.UNKNOWN_LENGTH if self.hybrid_length is None else self.hybrid_length

    def innermost(self: Any) -> _ClaimedOnly:
        return _ClaimedOnly(cls._get_iterator(self), self)

    members = {"__iter__": iterate, "__len__": length, "_get_iterator": innermost, "__module__": cls.__module__}
    return type(f"Hybrid{cls.__name__}", (cls,), members)


def live_copy(loader: DataLoader[Any]) -> Any:
    """A copy of ``loader`` with one worker at most, which asks for every batch whether it is run here.

    Two workers would give every sample twice, or in another order, by how the dataset shards itself. One reads as far
    ahead as all of them would.
    """
    made = copy.copy(loader)
    length = live.length_of(copy.copy(loader))  # a loader remembers that it was asked
    cls: Any = type(loader)
    made.__class__ = _stream_class(cls)
    in_process = loader.num_workers == 0
    collate: Any = loader.collate_fn
    for name, value in {
        "collate_fn": Collate(collate, batched=not live.batches_itself(loader), keeps=in_process),
        "num_workers": min(1, loader.num_workers),
        "prefetch_factor": None if in_process else live.prime_calls(loader),
        "_iterator": None,
        "hybrid_length": length,
        "hybrid_has_length": length is not None,
    }.items():
        # past the guard of DataLoader.__setattr__, which is there for users
        object.__setattr__(made, name, value)
    return made
