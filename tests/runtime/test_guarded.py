"""Real loaders whose datasets and collate functions raise for some samples."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
    get_worker_info,
)

from lightning_hybrid.runtime.guarded import (
    Fetched,
    GuardedCollate,
    GuardedDataset,
    Loaded,
    LoadFailure,
    can_guard,
    guard,
    loaded_of,
)

pytestmark = pytest.mark.timeout(60)

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Samples(Dataset[Any]):
    """Gives a tensor of its index, and raises for the bad indices."""

    def __init__(self, num: int = 12, bad: Sequence[int] = ()) -> None:
        self.num, self.bad = num, frozenset(bad)
        self.num_reads = 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        if index in self.bad:
            raise ValueError(f"sample {index} is broken")
        return torch.tensor(index)


class Many(Samples):
    """Reads several at once, as data sets of tables do."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Batches(Samples):
    """Makes the batch itself, so that the collate function has nothing to do."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.stack([self[index] for index in indices])}


class Refusing:
    """A collate function that raises for some samples; counts its calls."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad, self.num_calls = frozenset(bad), 0

    def __call__(self, samples: list[Any]) -> list[int]:
        self.num_calls += 1
        values = [int(sample) for sample in samples]
        if self.bad & set(values):
            raise TypeError("refused")
        return values


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Pair(NamedTuple):
    x: Any
    y: Any


def loader_of(dataset: Any, workers: int = 0, **options: Any) -> DataLoader[Any]:
    if workers:
        options = {"multiprocessing_context": "fork", "timeout": 30, **options}
    return DataLoader(dataset, num_workers=workers, **{"batch_size": 4, **options})


def loaded_by(loader: DataLoader[Any]) -> list[Loaded]:
    with guard(loader):
        iterator = iter(loader)
    return list(iterator)


def values(loaded: Loaded) -> list[int] | None:
    return None if loaded.batch is None else [int(value) for value in loaded.batch]


def of_dataset(place: int, index: int) -> LoadFailure:
    return LoadFailure(place=place, where="dataset", error=f"ValueError: sample {index} is broken")


def of_collate(place: int, error: str = "TypeError: refused") -> LoadFailure:
    return LoadFailure(place=place, where="collate", error=error)


# --- the dataset raises ---------------------------------------------------------------------------------------------


@WORKERS
def test_samples_that_cannot_be_read_are_left_out(workers: int) -> None:
    given = loaded_by(loader_of(Samples(12, bad=[1, 4, 7]), workers))

    assert [values(loaded) for loaded in given] == [[0, 2, 3], [5, 6], [8, 9, 10, 11]]
    assert [loaded.failures for loaded in given] == [(of_dataset(1, 1),), (of_dataset(0, 4), of_dataset(3, 7)), ()]
    assert [loaded.size for loaded in given] == [4, 4, 4]
    assert [loaded.kept for loaded in given] == [[0, 2, 3], [1, 2], [0, 1, 2, 3]]


@WORKERS
def test_a_batch_without_a_good_sample_is_empty(workers: int) -> None:
    first, second = loaded_by(loader_of(Samples(6, bad=range(4)), workers))

    assert first.is_empty
    assert first.batch is None
    assert first.failures == tuple(of_dataset(place, place) for place in range(4))
    assert not second.is_empty
    assert values(second) == [4, 5]


def test_spawned_workers() -> None:
    loader = loader_of(Samples(4, bad=[2]), 1, multiprocessing_context="spawn")

    assert [values(loaded) for loaded in loaded_by(loader)] == [[0, 1, 3]]


@pytest.mark.parametrize("persistent", [False, True])
def test_two_passes(persistent: bool) -> None:
    loader = loader_of(Samples(8, bad=[5]), 2, persistent_workers=persistent)

    for _ in range(2):
        assert [values(loaded) for loaded in loaded_by(loader)] == [[0, 1, 2, 3], [4, 6, 7]]


def test_persistent_workers_stay_guarded_in_a_pass_that_is_not() -> None:
    loader = loader_of(Samples(4, bad=[0]), 1, persistent_workers=True)
    loaded_by(loader)

    assert [values(loaded) for loaded in loader] == [[1, 2, 3]]


@WORKERS
def test_indices_that_are_whole_batches(workers: int) -> None:
    given = loaded_by(loader_of(Samples(3, bad=[1]), workers, batch_size=None))

    assert [loaded.batch for loaded in given] == [torch.tensor(0), None, torch.tensor(2)]
    assert given[1] == Loaded(batch=None, failures=(of_dataset(0, 1),), size=1)
    assert given[1].is_empty


def test_lists_of_indices_that_are_whole_batches() -> None:
    class Rows(Dataset[Any]):
        def __getitem__(self, indices: list[int]) -> Any:
            if 3 in indices:
                raise ValueError("sample 3 is broken")
            return torch.tensor(indices)

    sampler = BatchSampler(range(6), batch_size=2, drop_last=False)
    given = loaded_by(loader_of(Rows(), batch_size=None, sampler=sampler))

    assert [values(loaded) for loaded in given] == [[0, 1], None, [4, 5]]
    assert given[1].failures == (of_dataset(0, 3),)


def test_a_conversion_that_raises_for_a_whole_batch() -> None:
    given = loaded_by(loader_of(Samples(3), batch_size=None, collate_fn=lambda sample: [0, 1, 2].index(sample + 1)))

    assert [loaded.batch for loaded in given] == [1, 2, None]
    assert given[2].failures[0].where == "collate"


@pytest.mark.parametrize("error", [Unreadable(), StopIteration(), MemoryError("all of it"), NotImplementedError()])
def test_any_error_is_one_of_the_sample(error: Exception) -> None:
    class Raising(Samples):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise error
            return index

    (loaded,) = loaded_by(loader_of(Raising(4)))

    assert values(loaded) == [0, 2, 3]
    assert loaded.failures[0].error.startswith(type(error).__name__)


def test_an_error_that_cannot_be_pickled_leaves_its_worker() -> None:
    class Raising(Samples):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise ValueError(lambda: None)
            return index

    (loaded,) = loaded_by(loader_of(Raising(4), 1))

    assert values(loaded) == [0, 2, 3]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", ["dataset", "many", "collate"])
def test_an_interrupt_is_not_caught(interrupt: type[BaseException], where: str) -> None:
    def interrupted(*_args: Any) -> Any:
        raise interrupt

    dataset = Many() if where == "many" else Samples()
    if where != "collate":
        type(dataset).__getitem__, kept = interrupted, type(dataset).__getitem__  # type: ignore[assignment]
    try:
        loader = loader_of(dataset, collate_fn=interrupted if where == "collate" else None)
        with guard(loader):
            iterator = iter(loader)
        with pytest.raises(interrupt):
            next(iterator)
    finally:
        if where != "collate":
            type(dataset).__getitem__ = kept  # type: ignore[method-assign]


# --- datasets that read several samples at once ---------------------------------------------------------------------


@WORKERS
def test_a_dataset_that_reads_many_is_asked_one_by_one_when_it_raises(workers: int) -> None:
    given = loaded_by(loader_of(Many(8, bad=[2]), workers))

    assert [values(loaded) for loaded in given] == [[0, 1, 3], [4, 5, 6, 7]]
    assert given[0].failures == (of_dataset(2, 2),)


def test_a_dataset_that_reads_many_is_asked_once_when_it_can() -> None:
    dataset = Many(8)
    loaded_by(loader_of(dataset))

    assert dataset.num_reads == 8


def test_a_dataset_that_makes_batches_makes_one_of_the_good_samples() -> None:
    given = loaded_by(loader_of(Batches(8, bad=[1, 2]), collate_fn=dict))

    assert [loaded.batch["x"].tolist() for loaded in given] == [[0, 3], [4, 5, 6, 7]]
    assert given[0].failures == (of_dataset(1, 1), of_dataset(2, 2))
    assert given[0].size == 4


def test_a_dataset_that_makes_batches_and_raises_only_for_several() -> None:
    class Unlike(Batches):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index)

    (loaded,) = loaded_by(loader_of(Unlike(3), collate_fn=dict))

    assert loaded.is_empty
    assert [failure.place for failure in loaded.failures] == [0, 1, 2]
    assert loaded.failures[0].where == "dataset"


def test_a_batch_of_the_dataset_that_cannot_be_collated_is_lost_as_a_whole() -> None:
    def refuse(batch: Any) -> Any:
        raise TypeError("refused")

    (loaded,) = loaded_by(loader_of(Batches(4, bad=[1]), collate_fn=refuse))

    assert loaded.is_empty
    assert loaded.failures == (of_collate(0), of_dataset(1, 1), of_collate(2), of_collate(3))


@pytest.mark.parametrize("cls", [Samples, Many])
@pytest.mark.parametrize("depth", [1, 2])
def test_subsets(cls: type[Samples], depth: int) -> None:
    dataset: Any = cls(20, bad=[13])
    for _ in range(depth):
        dataset = Subset(dataset, list(range(len(dataset)))[::-1])
    (loaded,) = loaded_by(loader_of(Subset(dataset, [3, 13, 6, 9]), batch_size=4))

    lost = 13 if depth == 2 else 6
    assert values(loaded) == [index if depth == 2 else 19 - index for index in (3, 13, 6, 9) if index != lost]
    assert loaded.failures == (of_dataset([3, 13, 6, 9].index(lost), 13),)


def test_a_subset_of_a_plain_dataset_reads_each_sample_once() -> None:
    dataset = Samples(8, bad=[3, 6])
    loaded_by(loader_of(Subset(dataset, range(8)), batch_size=8))

    assert dataset.num_reads == 8


def test_a_concatenation() -> None:
    given = loaded_by(loader_of(ConcatDataset([Samples(2, bad=[0]), Many(2, bad=[1])])))

    assert [values(loaded) for loaded in given] == [[1, 0]]


# --- the collate function raises ------------------------------------------------------------------------------------


@WORKERS
def test_samples_that_the_collate_function_refuses_are_left_out(workers: int) -> None:
    given = loaded_by(loader_of(Samples(12, bad=[1]), workers, collate_fn=Refusing([2, 4, 5, 6, 7])))

    assert [loaded.batch for loaded in given] == [[0, 3], None, [8, 9, 10, 11]]
    assert given[0].failures == (of_dataset(1, 1), of_collate(2))
    assert given[1].failures == tuple(of_collate(place) for place in range(4))
    assert given[1].is_empty


@pytest.mark.parametrize("odd", [0, 3, 7])
def test_one_shape_that_differs_is_left_out(odd: int) -> None:
    shapes = [torch.zeros(5 if place == odd else 2) for place in range(8)]
    (loaded,) = loaded_by(loader_of(shapes, batch_size=8))

    assert loaded.batch.shape == (7, 2)
    assert [failure.place for failure in loaded.failures] == [odd]
    assert "stack expects each tensor to be equal size" in loaded.failures[0].error


@pytest.mark.parametrize(
    "sample",
    [
        lambda n: {"x": torch.zeros(2), "n": n},
        lambda n: (torch.zeros(2), {"n": n}),
        lambda n: Pair(torch.zeros(2), n),
        lambda n: [torch.zeros(2), str(n)],
    ],
)
def test_samples_of_any_structure(sample: Callable[[int], Any]) -> None:
    samples = [None, *map(sample, range(3)), {"y": 0}, None]
    (loaded,) = loaded_by(loader_of(samples, batch_size=6))

    expected = default_collate([sample(n) for n in range(3)])
    assert str(loaded.batch) == str(expected)
    assert type(loaded.batch) is type(expected)
    assert loaded.kept == [1, 2, 3]


@pytest.mark.parametrize("mapping", [dict, UserDict])
def test_a_collate_function_that_takes_fields_out_of_samples_can_run_again(mapping: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        labels = [sample.pop("label") for sample in samples]
        return [sample["x"] / 1 for sample in samples], labels

    samples = [mapping(x=None if n == 2 else n, label=n) for n in range(5)]
    (loaded,) = loaded_by(loader_of(samples, batch_size=5, collate_fn=collate))

    assert loaded.batch == ([0.0, 1.0, 3.0, 4.0], [0, 1, 3, 4])
    assert [failure.place for failure in loaded.failures] == [2]


def test_the_samples_that_a_dataset_keeps_are_changed_as_without_a_guard_and_not_by_later_tries() -> None:
    def collate(samples: list[Any]) -> Any:
        for sample in samples:
            sample["tries"] += 1
        return [sample["x"] / 1 for sample in samples]

    samples = [{"x": None if n == 2 else n, "tries": 0} for n in range(5)]
    (loaded,) = loaded_by(loader_of(samples, batch_size=5, collate_fn=collate))

    assert loaded.batch == [0.0, 1.0, 3.0, 4.0]
    assert [sample["tries"] for sample in samples] == [1] * 5


def test_a_batch_of_no_samples_raises_what_it_raises_without_a_guard() -> None:
    with pytest.raises(IndexError):
        loaded_by(loader_of(Samples(), batch_size=1, batch_sampler=[[]]))


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)), st.sets(st.integers(0, n - 1)))
    ),
    st.integers(1, 16),
    st.sampled_from([Samples, Many]),
)
@settings(deadline=None)
def test_exactly_the_good_samples_are_kept_in_their_order(
    case: tuple[int, set[int], set[int]], batch_size: int, cls: type[Samples]
) -> None:
    num, unread, refused = case
    collate = Refusing(list(refused))
    given = loaded_by(loader_of(cls(num, list(unread)), batch_size=batch_size, collate_fn=collate))

    kept = [value for loaded in given for value in loaded.batch or []]
    assert kept == [n for n in range(num) if n not in unread | refused]
    wheres = {
        number * batch_size + failure.place: failure.where
        for number, loaded in enumerate(given)
        for failure in loaded.failures
    }
    assert wheres == {n: "dataset" if n in unread else "collate" for n in unread | refused}
    assert all(list(loaded.failures) == sorted(loaded.failures, key=lambda each: each.place) for loaded in given)
    assert collate.num_calls <= 4 * num


# --- what the user has and sees -------------------------------------------------------------------------------------


@WORKERS
def test_the_loader_keeps_its_own_dataset_and_functions(workers: int) -> None:
    loader = loader_of(Samples(), workers, collate_fn=Refusing(), worker_init_fn=print if workers else None)
    own = loader.dataset, loader.collate_fn, loader.worker_init_fn
    with guard(loader):
        iter(loader)

    assert (loader.dataset, loader.collate_fn, loader.worker_init_fn) == own


def test_the_loader_has_them_again_after_an_error() -> None:
    loader = loader_of(Samples())
    dataset = loader.dataset
    with pytest.raises(RuntimeError), guard(loader):
        raise RuntimeError

    assert loader.dataset is dataset


class Informed(Samples):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return self.offset + index  # type: ignore[attr-defined]


def set_offset(_worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Informed)
    info.dataset.offset = 100  # type: ignore[attr-defined]


def test_in_a_worker_the_users_functions_find_their_own_dataset() -> None:
    (loaded,) = loaded_by(loader_of(Informed(3), 1, worker_init_fn=set_offset))

    assert values(loaded) == [100, 101, 102]


@WORKERS
def test_an_iterator_as_dataset_is_left_alone(workers: int) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(2))

    loader = loader_of(Stream(), min(workers, 1))
    with guard(loader):
        iterator = iter(loader)
    (batch,) = iterator

    assert not can_guard(loader)
    assert batch.tolist() == [0, 1]
    assert loaded_of(batch) == Loaded(batch=batch)
    assert not loaded_of(batch).is_empty
    assert loaded_of(batch).kept is None


def test_what_is_loaded_stays_as_it_is() -> None:
    loaded = Loaded(batch=1, size=1)

    assert loaded_of(loaded) is loaded


def test_a_loader_with_its_own_iter_is_not_one_to_guard() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([batch + 1 for batch in super().__iter__()])

    assert not can_guard(Own(Samples()))
    assert can_guard(DataLoader(Samples()))


@pytest.mark.parametrize("remade", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_guarded_dataset_can_be_copied_and_has_the_attributes_of_its_own(remade: Callable[[Any], Any]) -> None:
    guarded = remade(GuardedDataset(Samples(7, bad=[2])))

    assert len(guarded) == 7
    assert guarded.bad == {2}
    assert guarded[2].failures == (of_dataset(0, 2),)
    assert not hasattr(guarded, "absent")


# --- pinned memory and processes ------------------------------------------------------------------------------------


class Pinnable:
    is_pinned = False

    def pin_memory(self) -> Pinnable:
        pinned = Pinnable()
        pinned.is_pinned = True
        return pinned


def test_what_is_in_the_batch_is_pinned_and_keeps_its_structure() -> None:
    failures = (of_collate(1),)
    loaded = Loaded(batch={"pair": Pair(Pinnable(), "text"), "list": [Pinnable()]}, failures=failures, size=3)
    pinned = loaded.pin_memory()

    assert pinned.batch["pair"].x.is_pinned
    assert pinned.batch["pair"].y == "text"
    assert type(pinned.batch["pair"]) is Pair
    assert pinned.batch["list"][0].is_pinned
    assert (pinned.failures, pinned.size) == (failures, 3)


def test_a_batch_that_pins_itself() -> None:
    assert Loaded(batch=Pinnable(), size=1).pin_memory().batch.is_pinned


def test_an_empty_batch_is_pinned_to_nothing() -> None:
    assert Loaded(batch=None, failures=(of_collate(0),), size=1).pin_memory().is_empty


def test_what_is_loaded_can_be_pickled() -> None:
    loaded = Loaded(batch=[1], failures=(of_collate(1),), size=2)

    assert pickle.loads(pickle.dumps(loaded)) == loaded


# --- the parts ------------------------------------------------------------------------------------------------------


def test_a_good_batch_is_collated_once_from_what_the_dataset_gave() -> None:
    given: list[Any] = []
    samples = ({"n": 0}, {"n": 1})
    GuardedCollate(given.append)(Fetched(samples, range(2), (), 2))

    assert given == [samples]
    assert given[0] is samples
