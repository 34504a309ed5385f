"""Loading that survives samples which cannot be read, or not be put into a batch.

A `DataLoader` is made to read through a dataset that gives a marker in place of what it raises, and to collate through
a function that leaves such samples out; it looks for samples that cannot be collated by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import pin_memory

from lightning_hybrid.core.failures import Where, text_of

Collate = Callable[[Any], Any]


class BadSample(NamedTuple):
    """In place of a sample that could not be read."""

    error: str


class LoadFailure(NamedTuple):
    """A sample that is not in the batch."""

    place: int
    """Among the samples that were asked for."""
    where: Where
    error: str


@dataclass(slots=True)
class Loaded:
    """A batch of the samples that could be loaded, of ``size`` that were asked for; ``None`` if there is no such."""

    batch: Any
    failures: tuple[LoadFailure, ...]
    size: int

    def pin_memory(self, *device: Any) -> Loaded:
        """The same with its batch in pinned memory, as a `DataLoader` with ``pin_memory`` asks for it."""
        pin: Any = pin_memory.pin_memory
        return Loaded(pin(self.batch, *device), self.failures, self.size)


class GuardedDataset:
    """A map-style dataset that gives a `BadSample` where another one raises.

    Args:
        dataset: The other one; all its attributes are this one's too.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        """The sample, or a marker."""
        try:
            return self._dataset[index]
        except Exception as error:  # the user's code may raise anything
            return BadSample(text_of(error))

    def __getitems__(self, indices: Sequence[Any]) -> Sequence[Any]:
        """The samples, read at once if the dataset can and none of them raises."""
        read = getattr(self._dataset, "__getitems__", None)
        if callable(read):
            try:
                return list(read(indices))
            except Exception:  # which one it was is found out one by one
                return [self[index] for index in indices]
        return [self[index] for index in indices]

    def __len__(self) -> int:
        """That of the dataset."""
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while a copy is made, before there is one
            raise AttributeError(name)
        return getattr(self._dataset, name)


class GuardedCollate:
    """Makes a `Loaded` of what a `GuardedDataset` gives.

    Args:
        collate: The loader's own function.
        is_single: Whether it is given one item, and not a list of samples (``batch_size=None``).
    """

    def __init__(self, collate: Collate, *, is_single: bool) -> None:
        self._collate, self._is_single = collate, is_single

    def __call__(self, samples: Any) -> Loaded:
        """The batch of all samples that can be loaded."""
        if self._is_single:
            return self._one(samples)
        bad = {place: sample.error for place, sample in enumerate(samples) if type(sample) is BadSample}
        failures = [LoadFailure(place, "dataset", error) for place, error in bad.items()]
        places = [place for place in range(len(samples)) if place not in bad] if bad else list(range(len(samples)))
        try:
            batch = self._collate([samples[place] for place in places] if bad else samples) if places else None
        except Exception:  # the user's code may raise anything
            batch, uncollated = self._without_odd(samples, places)
            failures += [LoadFailure(place, "collate", error) for place, error in sorted(uncollated.items())]
        return Loaded(batch, tuple(failures), len(samples))

    def _one(self, item: Any) -> Loaded:
        if type(item) is BadSample:
            return Loaded(None, (LoadFailure(0, "dataset", item.error),), 1)
        try:
            return Loaded(self._collate(item), (), 1)
        except Exception as error:  # the user's code may raise anything
            return Loaded(None, (LoadFailure(0, "collate", text_of(error)),), 1)

    def _without_odd(self, samples: Sequence[Any], places: list[int]) -> tuple[Any, dict[int, str]]:
        """The batch of the samples that can be collated together, and the errors of the others."""
        odd = dict(self._raising_alone(samples, places))
        left = [place for place in places if place not in odd]
        best: list[int] = []
        errors: dict[int, str] = {}
        for seed in left:
            kept, errors_now = self._fitting(samples, left, seed)
            if len(kept) > len(best):
                best, errors = kept, errors_now
            if 2 * len(best) >= len(left):
                break
        return (self._collate([samples[place] for place in best]) if best else None), odd | errors

    def _raising_alone(self, samples: Sequence[Any], places: list[int]) -> Iterator[tuple[int, str]]:
        """The samples of which no batch can be made, each alone; found by halves, where both may hold some."""
        try:
            self._collate([samples[place] for place in places])
        except Exception as error:  # the user's code may raise anything
            if len(places) == 1:
                yield places[0], text_of(error)
                return
            middle = len(places) // 2
            yield from self._raising_alone(samples, places[:middle])
            yield from self._raising_alone(samples, places[middle:])

    def _fitting(self, samples: Sequence[Any], places: list[int], seed: int) -> tuple[list[int], dict[int, str]]:
        """The samples that make a batch with the one at ``seed``, and what the others raise together with it."""
        kept, errors = [], {}
        for place in places:
            try:
                self._collate([samples[seed], samples[place]])
            except Exception as error:  # the user's code may raise anything
                errors[place] = text_of(error)
            else:
                kept.append(place)
        return kept, errors


@contextmanager
def guarded(loader: DataLoader[Any]) -> Iterator[None]:
    """Has the iterator that is made inside give `Loaded`; the loader keeps its dataset and collate function.

    An iterable dataset cannot be read again behind a sample that raises, so its loader stays as it is.
    """
    if isinstance(loader.dataset, IterableDataset):
        yield
        return
    before = loader.dataset, loader.collate_fn
    is_single = loader.batch_sampler is None
    _set(loader, GuardedDataset(before[0]), GuardedCollate(before[1], is_single=is_single))
    try:
        yield
    finally:
        _set(loader, *before)


def _set(loader: DataLoader[Any], dataset: Any, collate: Collate) -> None:
    # past the guard of DataLoader.__setattr__, which is there for users
    object.__setattr__(loader, "dataset", dataset)
    object.__setattr__(loader, "collate_fn", collate)
