"""Loading that leaves out the samples that raise, and tells which these were.

A `DataLoader` whose iterator is made under `guard` reads its dataset and collates through the wrappers here, in its
workers where it has some, and gives `Loaded` in place of batches. The user's loader, dataset and collate function stay
what they are. A worker that dies takes its batches with it; that error is not caught.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

# torch has no public name for it; checked on 2.13
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_hybrid.core.failures import Where, text_of
from lightning_hybrid.runtime.salvage import salvage

_Collate = Callable[[Any], Any]
_WorkerInit = Callable[[int], None]
_CHANGEABLE = (dict, list, UserDict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFailure:
    """A sample that is not in its batch."""

    place: int
    """Its place in the list of indices that the batch was to be made of."""
    where: Where
    """What raised."""
    error: str
    """Type and text of the error, at most 500 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A batch without the samples that could not be loaded."""

    batch: Any
    """What the collate function gave for the others, in their order; ``None`` when `is_empty`."""
    failures: tuple[LoadFailure, ...] = ()
    """The samples that are missing, by place."""
    size: int | None = None
    """How many samples were asked for; ``None`` for a loader that is not guarded."""

    @property
    def is_empty(self) -> bool:
        """Whether no sample was left to make a batch of."""
        return bool(self.failures) and len(self.failures) == self.size

    @property
    def kept(self) -> list[int] | None:
        """Places of the samples that the batch has, in order; ``None`` when the size is not known."""
        if self.size is None:
            return None
        missing = {failure.place for failure in self.failures}
        return [place for place in range(self.size) if place not in missing]

    def pin_memory(self, device: Any = None) -> Loaded:
        """The same with the batch in pinned memory; called by torch, by later versions with the device."""
        pinned = pin_memory(self.batch, device)  # type: ignore[no-untyped-call]  # torch's own
        return dataclasses.replace(self, batch=pinned)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a dataset gave, on its way to the collate function."""

    samples: Any
    """In the form in which the dataset gave them, mostly a list."""
    places: Sequence[int]
    """Their places in the list of indices."""
    failures: tuple[LoadFailure, ...]
    size: int
    """How many indices there were."""


class GuardedDataset:
    """Gives `Fetched` where the dataset gives samples; an error costs the sample that raised it, and no other.

    Attributes and length are the dataset's own.
    """

    def __init__(self, dataset: Any) -> None:
        self.hybrid_guarded = dataset
        self._reads_many = _reads_many(dataset)

    def __getitem__(self, index: Any) -> Fetched:
        """One index; with ``batch_size=None`` it stands for a whole batch."""
        fetched = _one_by_one(self._read, [index])
        return dataclasses.replace(fetched, samples=fetched.samples[0]) if fetched.samples else fetched

    def __getitems__(self, indices: Sequence[Any]) -> Fetched:
        """All at once where the dataset can do that; one by one when it cannot, or when it raises."""
        if not self._reads_many:
            return _one_by_one(self._read, indices)
        size = len(indices)
        try:
            return Fetched(self.hybrid_guarded.__getitems__(indices), range(size), (), size)
        except Exception:  # whatever a user's dataset raises
            alone = _one_by_one(lambda index: self.hybrid_guarded.__getitems__([index]), indices)
        if all(isinstance(samples, list | tuple) and len(samples) == 1 for samples in alone.samples):
            return dataclasses.replace(alone, samples=[samples[0] for samples in alone.samples])
        return self._in_one_piece(alone, indices)

    def __len__(self) -> int:
        return len(self.hybrid_guarded)

    def __getattr__(self, name: str) -> Any:
        # nothing is asked of the dataset while a copy or an unpickled object has none yet
        if name.startswith("__") or name == "hybrid_guarded":
            raise AttributeError(name)
        return getattr(self.hybrid_guarded, name)

    def _read(self, index: Any) -> Any:
        return self.hybrid_guarded[index]

    def _in_one_piece(self, alone: Fetched, indices: Sequence[Any]) -> Fetched:
        """The good samples again, of a dataset whose ``__getitems__`` makes batches, which cannot be joined here."""
        try:
            batch = self.hybrid_guarded.__getitems__([indices[place] for place in alone.places])
        except Exception as error:  # each is good alone, so that it is not known which one to leave out
            rest = _failures("dataset", dict.fromkeys(alone.places, text_of(error)))
            return Fetched([], (), _by_place(alone.failures + rest), alone.size)
        return dataclasses.replace(alone, samples=batch)


class GuardedCollate:
    """Makes `Loaded` of `Fetched`: collates what was read, and what is left of it when that raises.

    When samples that are dicts or lists are collated again, they are shallow copies of what the dataset gave, because a
    collate function may have taken fields out of them. A collate function that changes samples more deeply than
    that, or counts its calls, is not shielded from being called again.
    """

    def __init__(self, collate_fn: _Collate) -> None:
        self._collate = collate_fn

    def __call__(self, fetched: Fetched) -> Loaded:
        """Collates the samples."""
        samples, places, failures, size = fetched.samples, fetched.places, fetched.failures, fetched.size
        if failures and not places:
            return Loaded(batch=None, failures=failures, size=size)
        is_list = isinstance(samples, list | tuple) and len(samples) == len(places)
        untouched = _copied(samples) if is_list and places else samples
        try:
            return Loaded(batch=self._collate(samples), failures=failures, size=size)
        except Exception as error:  # whatever a user's function raises
            if not places:
                raise
            text = text_of(error)
        if not is_list:
            lost = _failures("collate", dict.fromkeys(places, text))
            return Loaded(batch=None, failures=_by_place(failures + lost), size=size)
        found = salvage(lambda kept: self._collate(_copied([untouched[i] for i in kept])), len(places), text)
        lost = _failures("collate", {places[i]: error for i, error in found.errors.items()})
        return Loaded(batch=found.result, failures=_by_place(failures + lost), size=size)


class GuardedWorkerInit:
    """Runs the user's ``worker_init_fn``; it and the dataset find the user's own dataset in `get_worker_info`."""

    def __init__(self, init_fn: _WorkerInit | None) -> None:
        self._init_fn = init_fn

    def __call__(self, worker_id: int) -> None:
        """Called in each worker before it reads."""
        info: Any = get_worker_info()
        # past the guard of WorkerInfo, which is there for users
        object.__setattr__(info, "dataset", info.dataset.hybrid_guarded)
        if self._init_fn is not None:
            self._init_fn(worker_id)


def can_guard(loader: DataLoader[Any]) -> bool:
    """Whether single samples of the user's loader can be left out.

    Not where the dataset is an iterator, which has no next sample after an error, nor where a subclass has an
    ``__iter__`` of its own, which expects batches.
    """
    cls: Any = type(loader)
    is_plain = cls.__iter__ is DataLoader.__iter__ and cls._get_iterator is DataLoader._get_iterator
    return is_plain and not isinstance(loader.dataset, IterableDataset)


@contextmanager
def guard(loader: DataLoader[Any]) -> Iterator[None]:
    """An iterator that ``loader`` makes meanwhile gives `Loaded`, in every later pass too if its workers persist.

    Args:
        loader: Has its own dataset and functions again afterwards. One whose dataset is an iterator is left alone, and
            gives its batches as they are.
    """
    if isinstance(loader.dataset, IterableDataset):
        yield
        return
    own = {name: getattr(loader, name) for name in ("dataset", "collate_fn", "worker_init_fn")}
    _assign(
        loader,
        dataset=GuardedDataset(own["dataset"]),
        collate_fn=GuardedCollate(own["collate_fn"]),
        worker_init_fn=GuardedWorkerInit(own["worker_init_fn"]),
    )
    try:
        yield
    finally:
        _assign(loader, **own)


def loaded_of(given: Any) -> Loaded:
    """What a loader's iterator gave, as `Loaded` also where the loader is not guarded."""
    return given if isinstance(given, Loaded) else Loaded(batch=given)


def _assign(loader: DataLoader[Any], **values: Any) -> None:
    for name, value in values.items():
        # past the guard of DataLoader.__setattr__, which is there for users
        object.__setattr__(loader, name, value)


def _reads_many(dataset: Any) -> bool:
    """Whether ``__getitems__`` does more than read one sample after the other, as that of a plain `Subset` does."""
    method = getattr(dataset, "__getitems__", None)
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return _reads_many(dataset.dataset)
    return callable(method)


def _one_by_one(read: Callable[[Any], Any], indices: Sequence[Any]) -> Fetched:
    samples, places, errors = [], [], {}
    for place, index in enumerate(indices):
        try:
            sample = read(index)
        except Exception as error:  # whatever a user's dataset raises
            errors[place] = text_of(error)
        else:
            samples.append(sample)
            places.append(place)
    return Fetched(samples, places, _failures("dataset", errors), len(samples) + len(errors))


def _failures(where: Where, errors: dict[int, str]) -> tuple[LoadFailure, ...]:
    return tuple(LoadFailure(place=place, where=where, error=error) for place, error in errors.items())


def _by_place(failures: tuple[LoadFailure, ...]) -> tuple[LoadFailure, ...]:
    return tuple(sorted(failures, key=lambda failure: failure.place))


def _copied(samples: Sequence[Any]) -> Sequence[Any]:
    """Samples that a collate function may change without changing these; asks the first of which type they all are."""
    if not isinstance(samples[0], _CHANGEABLE):
        return samples
    return [_copied_sample(sample) for sample in samples]


def _copied_sample(sample: Any) -> Any:
    if type(sample) is dict:
        return sample.copy()  # four times as fast as copy.copy
    return copy.copy(sample) if isinstance(sample, _CHANGEABLE) else sample
