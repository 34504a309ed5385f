"""A prediction writer beside the callback is told whose rows it gets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_hybrid import HybridBalanceCallback
from tests.lightning.scenes import Echo, Ids, Stream, trainer
from tests.ranks import run_ranks


class Squares(Ids):
    """Sample i is ``float(i * i)``, so that a value does not pass for an index."""

    def __getitem__(self, i: int) -> float:
        return float(i * i)


class Writer(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self, interval: Any = "batch_and_epoch") -> None:
        super().__init__(interval)
        self.by_batch: list[tuple[int, Any, list[float]]] = []
        """For each call its loader, the indices and the rows."""
        self.by_epoch: list[tuple[Any, Any]] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        assert prediction.tolist() == batch.tolist()
        self.by_batch.append((dataloader_idx, indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Sequence[Any], indices: Sequence[Any]) -> None:
        single = trainer.predict_loop.num_dataloaders == 1
        lists = [predictions] if single else predictions
        self.by_epoch.append(([[p.tolist() for p in batches] for batches in lists], [list(of) for of in indices]))


def _written(writer: Writer, loader: int = 0) -> list[tuple[int, float]]:
    """Index and row of every sample that was written by batch, the same that were written by epoch."""
    rows = []
    for idx, indices, values in writer.by_batch:
        if idx == loader:
            assert len(indices) == len(values)
            rows += list(zip(indices, values, strict=True))
    if writer.interval.on_epoch:
        ((predictions, epoch_indices),) = writer.by_epoch
        assert [len(i) for i in epoch_indices[loader]] == [len(p) for p in predictions[loader]]
        by_epoch = [
            pair
            for indices, values in zip(epoch_indices[loader], predictions[loader], strict=True)
            for pair in zip(indices, values, strict=True)
        ]
        if not writer.interval.on_batch:
            return by_epoch
        assert by_epoch == rows
    return rows


def _check(written: Sequence[list[tuple[int, float]]], want: Sequence[int]) -> None:
    """Every index belongs to its row, and over all ranks each was written once."""
    pairs = [pair for rank in written for pair in rank]
    assert [value for _, value in pairs] == [float(index * index) for index, _ in pairs]
    assert sorted(index for index, _ in pairs) == sorted(want)


LOADERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "plain": ({"batch_size": 2}, list(range(11))),
    "shuffled": ({"batch_size": 2, "shuffle": True}, list(range(11))),
    "in a custom order": ({"batch_size": 2, "sampler": [8, 1, 9, 0, 4]}, [8, 1, 9, 0, 4]),
    "drop_last": ({"batch_size": 3, "drop_last": True}, list(range(9))),
    "own batch sampler": ({"batch_sampler": [[5], [1, 2, 3], [0, 4]]}, list(range(6))),
    "one batch": ({"batch_size": 16}, list(range(11))),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_indices_are_those_of_the_rows_with_workers_and_without(kind: str) -> None:
    settings, want = LOADERS[kind]

    def written(num_workers: int) -> list[tuple[int, float]]:
        writer = Writer()
        trainer(2, writer).predict(Echo(), DataLoader(Squares(11), num_workers=num_workers, **settings))
        return _written(writer)

    def rank(_: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        return written(0), written(2)

    (zero, zero_workers), (one, one_workers) = run_ranks(rank, 2, deadline_s=20)
    _check([zero, one], want)
    _check([zero_workers, one_workers], want)


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_every_interval_gets_indices_whether_predictions_are_returned_or_not(interval: str) -> None:
    def written(return_predictions: bool) -> list[tuple[int, float]]:
        writer = Writer(interval)
        loader = DataLoader(Squares(7), batch_size=2)
        trainer(2, writer).predict(Echo(), loader, return_predictions=return_predictions)
        return _written(writer)

    def rank(_: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        return written(True), written(False)

    (zero, zero_none), (one, one_none) = run_ranks(rank, 2, deadline_s=20)
    _check([zero, one], range(7))
    _check([zero_none, one_none], range(7))


class Slow(Echo):
    """Rank 1 is three times slower."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        time.sleep(0.003 * len(batch) * (3 if self.global_rank == 1 else 1))  # the emulated device
        return batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_indices_are_right_where_lockstep_cuts_batches_anew(num_workers: int) -> None:
    def rank(_: int) -> tuple[list[tuple[int, float]], set[int]]:
        writer = Writer()
        callback = HybridBalanceCallback(mode="lockstep")
        loader = DataLoader(Squares(300), batch_size=6, shuffle=True, num_workers=num_workers)
        trainer(2, callback, writer).predict(Slow(), loader)
        return _written(writer), {stop - start for rank, start, stop in callback.plan.cells if rank == 1}

    (zero, sizes), (one, _) = run_ranks(rank, 2, deadline_s=20)
    _check([zero, one], range(300))
    assert min(sizes) < 4


def test_indices_are_right_where_batches_were_stolen_after_they_were_loaded() -> None:
    def rank(_: int) -> tuple[list[tuple[int, float]], int]:
        writer, callback = Writer(), HybridBalanceCallback(mode="queue")
        loader = DataLoader(Squares(90), batch_size=1, num_workers=2, prefetch_factor=6)
        trainer(2, callback, writer).predict(Slow(), loader)
        return _written(writer), callback.statistics.replicas[0].cells_stolen

    (zero, stolen), (one, _) = run_ranks(rank, 2, deadline_s=20)
    _check([zero, one], range(90))
    assert stolen > 0


def test_rank_without_a_batch_writes_nothing() -> None:
    def rank(_: int) -> list[tuple[int, float]]:
        writer = Writer()
        trainer(3, writer).predict(Echo(), DataLoader(Squares(2), batch_size=1))
        return _written(writer)

    _check(run_ranks(rank, 3, deadline_s=20), range(2))


def test_second_run_has_the_indices_of_its_own_loader() -> None:
    def rank(_: int) -> list[tuple[int, float]]:
        writer = Writer()
        the_trainer = trainer(2, writer)
        the_trainer.predict(Echo(), DataLoader(Squares(40), batch_size=2))
        writer.by_batch.clear()
        writer.by_epoch.clear()
        the_trainer.predict(Echo(), DataLoader(Squares(9), batch_size=2, sampler=range(8, -1, -1)))
        return _written(writer)

    _check(run_ranks(rank, 2, deadline_s=20), range(9))


def test_indices_of_several_loaders_are_kept_apart() -> None:
    def rank(_: int) -> list[list[tuple[int, float]]]:
        writer = Writer()
        loaders = [DataLoader(Squares(n), batch_size=2, shuffle=n == 5) for n in (7, 5, 1)]
        trainer(2, writer).predict(Echo(), loaders)
        return [_written(writer, loader) for loader in range(3)]

    zero, one = run_ranks(rank, 2, deadline_s=20)
    for loader, n in enumerate((7, 5, 1)):
        _check([zero[loader], one[loader]], range(n))


class Whole(Squares):
    """Gives whole batches."""

    def __getitem__(self, i: int) -> Any:
        return torch.full((2,), float(i * i))


class Plain:
    """What can be iterated over, and is no DataLoader."""

    def __iter__(self) -> Any:
        return iter([torch.ones(2), torch.zeros(1)])


WITHOUT_INDICES: dict[str, Any] = {
    "a stream": lambda: DataLoader(Stream(4), batch_size=2),
    "batches that the dataset makes": lambda: DataLoader(Whole(3), batch_size=None),
    "no DataLoader": Plain,
}


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
@pytest.mark.parametrize("kind", WITHOUT_INDICES)
@pytest.mark.parametrize("first", [True, False])
def test_where_there_are_no_indices_no_other_loaders_are_given(kind: str, first: bool) -> None:
    without = 0 if first else 1

    def written(interval: str) -> tuple[list[Any], list[tuple[int, float]], list[Any]]:
        writer = Writer(interval)
        loaders = [DataLoader(Squares(7), batch_size=2), WITHOUT_INDICES[kind]()]
        if first:
            loaders.reverse()
        trainer(2, writer).predict(Echo(), loaders)
        rows = [pair for idx, i, p in writer.by_batch if idx != without for pair in zip(i, p, strict=True)]
        on_epoch = writer.by_epoch[0][1][without] if writer.by_epoch else []
        return [indices for idx, indices, _ in writer.by_batch if idx == without], rows, on_epoch

    def rank(_: int) -> list[Any]:
        return [written("batch"), written("batch_and_epoch")]

    zero, one = run_ranks(rank, 2, deadline_s=20)
    for (zero_none, zero_rows, zero_epoch), (one_none, one_rows, one_epoch) in zip(zero, one, strict=True):
        _check([zero_rows, one_rows], range(7))
        assert zero_none + one_none != []
        assert all(indices is None or indices == [] for indices in zero_none + one_none + zero_epoch + one_epoch)


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_batches_that_the_dataset_makes_alone_have_no_indices() -> None:
    def rank(_: int) -> list[Any]:
        writer = Writer("batch")
        trainer(2, writer).predict(Echo(), DataLoader(Whole(5), batch_size=None))
        return [indices for _, indices, _ in writer.by_batch]

    found = [indices for rank in run_ranks(rank, 2, deadline_s=20) for indices in rank]
    assert len(found) == 5
    assert all(indices is None or indices == [] for indices in found)


def test_indices_are_the_users_keys() -> None:
    class Keyed(Ids):
        def __getitem__(self, key: Any) -> float:
            return float(ord(key))

    def rank(_: int) -> list[tuple[Any, float]]:
        writer = Writer()
        trainer(2, writer).predict(Echo(), DataLoader(Keyed(5), batch_size=2, sampler=list("abcde")))
        return _written(writer)

    found = [pair for rank in run_ranks(rank, 2, deadline_s=20) for pair in rank]
    assert sorted(found) == [(key, float(ord(key))) for key in "abcde"]


def test_one_device_gives_the_indices_that_stock_gives() -> None:
    def written(enabled: bool) -> tuple[Any, Any]:
        writer = Writer()
        the_trainer = trainer(1, HybridBalanceCallback(enabled=enabled), writer)
        the_trainer.predict(Echo(), [DataLoader(Squares(n), batch_size=2) for n in (5, 4)])
        return writer.by_batch, writer.by_epoch

    assert written(True) == written(False)


@pytest.mark.parametrize("world", [1, 2])
def test_memory_of_seen_indices_is_bounded(world: int) -> None:
    class Probe(Writer):
        most = 0

        def write_on_batch_end(self, trainer: Any, *args: Any) -> None:
            sampler = trainer.predict_dataloaders.batch_sampler
            self.most = max(self.most, len(sampler.seen_batch_indices._newest))

    def rank(_: int) -> int:
        writer = Probe("batch")
        trainer(world, writer).predict(Echo(), DataLoader(Squares(200), batch_size=1), return_predictions=False)
        return writer.most

    assert all(0 < most <= 8 for most in run_ranks(rank, world, deadline_s=20))


def test_own_batch_sampler_of_indices_that_are_lists_of_numpy_integers() -> None:
    import numpy as np

    class Numpy(Sampler[Any]):
        def __iter__(self) -> Any:
            return iter(np.array([[4, 3], [2, 1]]))

        def __len__(self) -> int:
            return 2

    def rank(_: int) -> list[tuple[Any, float]]:
        writer = Writer()
        loader = DataLoader(Squares(5), batch_sampler=Numpy())
        trainer(2, writer).predict(Echo(), loader)
        assert type(loader.batch_sampler) is not BatchSampler
        return [(int(index), value) for index, value in _written(writer)]

    _check(run_ranks(rank, 2, deadline_s=10), [4, 3, 2, 1])
