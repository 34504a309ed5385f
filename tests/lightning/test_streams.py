"""A stream whose batches the replicas claim is run once, in its order, wherever it ends and however it is read."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter, TQDMProgressBar
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_hybrid import HybridBalanceCallback, HybridConfig
from lightning_hybrid.lightning.stream_loader import live_copy, mark_of
from tests.lightning.scenes import Echo, Logs, Stream, balance_of, flat, ids, messages, trainer
from tests.lightning.test_modes import KINDS, Steps
from tests.ranks import run_ranks

pytestmark = [
    # Lightning's `all_gather` calls what torch wants to end
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated"),
    # true in stock too: the batches of a stream have no indices, and its length is for one reader
    pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
]


class OfEveryWorker(Stream):
    """Deals its samples out to the workers."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        every = super().__iter__()
        return every if info is None else itertools.islice(every, info.id, None, info.num_workers)


class Sized(Stream):
    """Says how long it is, or something else."""

    def __init__(self, n: int, says: int | None = None) -> None:
        super().__init__(n)
        self.says = n if says is None else says

    def __len__(self) -> int:
        return self.says


class Batches(IterableDataset[torch.Tensor]):
    """Gives whole batches, of growing sizes."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10.0).split([1, 2, 3, 4]))


class Late(Echo):
    """Rank 1 is ten times slower."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        time.sleep(0.05 if self.global_rank == 1 else 0.005)  # the emulated device
        return batch


def claiming(world: int = 2, *callbacks: Any, mode: Any = "auto", gather: Any = "all", **kwargs: Any) -> Any:
    balance = HybridBalanceCallback(iterable="claim", mode=mode, gather=gather)
    return trainer(world, balance, *callbacks, **kwargs)


def stream(n: int, batch_size: int | None = 2, kind: type[Stream] = Stream, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(kind(n), batch_size=batch_size, **kwargs)


def _lists(batches: Any) -> list[list[float]]:
    return [batch.tolist() for batch in batches]


def _spans(the_trainer: Any) -> list[tuple[int, int]]:
    return [(start, stop) for _, start, stop in balance_of(the_trainer).plan.cells]


def _assert_all_raised(texts: list[Any], *words: str) -> None:
    for text in texts:
        assert "Traceback" in str(text), text
        for word in words:
            assert word in str(text), text


# --- once, in order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Stream, OfEveryWorker, Sized])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_five_samples_come_once_and_in_order_on_every_rank(kind: type[Stream], num_workers: int) -> None:
    def rank(_: int) -> list[Any]:
        the_trainer = claiming(2)
        found: list[Any] = []
        for batch_size in (2, 1):
            loader = stream(5, batch_size, kind, num_workers=num_workers)
            found.append(_lists(the_trainer.predict(Echo(), loader)))
            found.append(_spans(the_trainer))
        return found

    twos, ones = [[0, 1], [2, 3], [4]], [[i] for i in range(5)]
    want = [twos, [(0, 2), (2, 4), (4, 5)], ones, [(i, i + 1) for i in range(5)]]
    assert run_ranks(rank, 2, deadline_s=30) == [want] * 2


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_any_number_of_batches_over_three_ranks(mode: str) -> None:
    def rank(_: int) -> list[list[float]]:
        return [flat(claiming(3, mode=mode).predict(Echo(), stream(n, 1))) for n in (0, 1, 2, 3, 4, 7)]

    want = [list(map(float, range(n))) for n in (0, 1, 2, 3, 4, 7)]
    assert run_ranks(rank, 3, deadline_s=45) == [want] * 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_last_batch_is_dropped_where_the_loader_drops_it(num_workers: int) -> None:
    def rank(_: int) -> list[list[float]]:
        return _lists(claiming().predict(Echo(), stream(9, 2, drop_last=True, num_workers=num_workers)))

    assert run_ranks(rank, 2, deadline_s=20) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_the_dataset_makes_are_kept(num_workers: int) -> None:
    def rank(_: int) -> list[list[float]]:
        return _lists(claiming().predict(Echo(), DataLoader(Batches(), batch_size=None, num_workers=num_workers)))

    assert run_ranks(rank, 2, deadline_s=20) == [[[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]] * 2


def test_length_that_is_too_large_or_too_small_does_as_on_one_device() -> None:
    def rank(_: int) -> list[list[float]]:
        loaders = [DataLoader(Sized(5, says), batch_size=1) for says in (9, 4)]
        return [flat(claiming().predict(Echo(), loader)) for loader in loaders]

    assert run_ranks(rank, 2, deadline_s=20) == [[[0, 1, 2, 3, 4], [0, 1, 2, 3]]] * 2


class Endless(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return map(float, itertools.count())


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_limit_counts_per_rank_and_ends_an_endless_stream(num_workers: int, mode: str) -> None:
    def rank(_: int) -> list[list[float]]:
        found = []
        for dataset, limit in ((Endless(), 3), (Stream(3), 2), (Sized(8), 0.5), (Endless(), 1)):
            loader = DataLoader(dataset, batch_size=1, num_workers=num_workers)
            found.append(flat(claiming(mode=mode, limit_predict_batches=limit).predict(Echo(), loader)))
        return found

    assert run_ranks(rank, 2, deadline_s=30) == [[[0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1, 2, 3], [0, 1]]] * 2


def test_share_of_an_unknown_length_raises_lightnings_error() -> None:
    def rank(_: int) -> Any:
        return claiming(limit_predict_batches=0.5).predict(Echo(), stream(5))

    _assert_all_raised(run_ranks(rank, 2, deadline_s=20, expect_failure=True), "must be `1.0` or an int")


def test_slow_rank_takes_fewer_batches() -> None:
    def rank(_: int) -> Any:
        the_trainer = claiming()
        assert flat(the_trainer.predict(Late(), stream(60, 1))) == list(range(60))
        return [record.samples for record in balance_of(the_trainer).statistics.replicas]

    for fast, slow in run_ranks(rank, 2, deadline_s=20):
        assert fast + slow == 60
        assert fast > 3 * slow


@pytest.mark.parametrize("gather", ["all", "rank_zero", "none"])
def test_results_go_where_gather_says(gather: str) -> None:
    def rank(_: int) -> tuple[list[float], list[float]]:
        the_trainer = claiming(gather=gather)
        out = flat(the_trainer.predict(Echo(), stream(9, 2)))
        return out, [row.item() for row in balance_of(the_trainer).rows()]

    (zero, zero_rows), (one, one_rows) = run_ranks(rank, 2, deadline_s=20)
    every = list(map(float, range(9)))
    assert zero == zero_rows
    assert one == one_rows
    assert zero == (sorted(set(every) - set(one)) if gather == "none" else every)
    assert one == every or gather != "all"


# --- metrics, modes, ghosts ------------------------------------------------------------------------------------------


NUMBERS = ("metric", "count", "mean", "sum", "max", "min", "hook")


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_metrics_are_those_of_one_device(mode: str) -> None:
    def rank(_: int) -> Any:
        found = []
        for n in (1, 2, 11):
            model = Logs()
            (values,) = claiming(3, mode=mode).validate(model, stream(n, 2), verbose=False)
            found.append(({name: values[name] for name in NUMBERS}, model.hooks, model.seen))
        return found

    ranks = run_ranks(rank, 3, deadline_s=45)
    for i, n in enumerate((1, 2, 11)):
        alone = Logs()
        (want,) = trainer(1, HybridBalanceCallback(enabled=False)).validate(alone, stream(n, 2), verbose=False)
        for values, _, _ in (found[i] for found in ranks):
            assert values == pytest.approx({name: want[name] for name in NUMBERS}, rel=1e-5)
        assert sorted(x for found in ranks for x in found[i][1]) == alone.hooks
        assert sorted(x for found in ranks for x in found[i][2]) == alone.seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_kind_of_step_finishes_in_the_mode_that_it_needs(kind: str, num_workers: int) -> None:
    def rank(_: int) -> list[Any]:
        found = []
        for n, batch_size in ((11, 2), (3, 1), (1, 1)):
            the_trainer, model = claiming(2), Steps(kind, step_s=0.001)
            for run in (the_trainer.validate, the_trainer.test):
                model.seen = []
                (values,) = run(model, stream(n, batch_size, num_workers=num_workers), verbose=False)
                found.append((n, values["count"], values["metric"], balance_of(the_trainer).statistics.mode))
        return found

    for found in run_ranks(rank, 2, deadline_s=45):
        for n, count, mean, mode in found:
            assert (count, mean) == pytest.approx((n, (n - 1) / 2))
            assert mode == KINDS[kind]


def test_lockstep_deals_in_turn_and_ends_with_ghosts_that_leave_no_trace() -> None:
    class Counts(Steps):
        steps = 0

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            type(self).steps += 1
            return super().predict_step(batch, batch_idx)

    def rank(_: int) -> Any:
        the_trainer, model = claiming(3), Counts("collective", step_s=0.001)
        out = flat(the_trainer.predict(model, stream(7, 1)))
        return out, [cell.replica for cell in balance_of(the_trainer).plan.cells], Counts.steps, model.seen

    ranks = run_ranks(rank, 3, deadline_s=20)
    for r, (out, replicas, steps, seen) in enumerate(ranks):
        assert out == list(range(7))
        assert replicas == [0, 1, 2, 0, 1, 2, 0]
        assert steps == 3
        assert seen == list(range(r, 7, 3))


class Fits(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.found: list[tuple[float, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch.float().unsqueeze(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.found += [tuple(self.trainer.callback_metrics[key].item() for key in ("count", "mean"))]  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_validation_of_every_epoch_of_fit_reads_the_stream_anew(num_workers: int) -> None:
    def rank(_: int) -> list[tuple[float, float]]:
        model, the_trainer = Fits(), claiming(max_epochs=2, num_sanity_val_steps=2)
        loader = stream(9, 2, num_workers=num_workers, persistent_workers=num_workers > 0)
        the_trainer.fit(model, ids(4), loader)
        return model.found

    assert run_ranks(rank, 2, deadline_s=45) == [[(9, 4), (9, 4)]] * 2


# --- loaders ---------------------------------------------------------------------------------------------------------


class Tagged(DataLoader[float]):
    """Changes what it gives out."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield {"tag": "x", "batch": batch}


class ReadsAhead(DataLoader[float]):
    def __iter__(self) -> Iterator[Any]:
        inner = super().__iter__()
        held = next(inner, None)
        while held is not None:
            ahead = next(inner, None)
            yield held
            held = ahead


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterator_of_the_users_own_sees_the_batches_that_are_run(num_workers: int) -> None:
    def rank(_: int) -> tuple[list[float], list[float]]:
        tagged = claiming().predict(Echo(), Tagged(Stream(9), batch_size=2, num_workers=num_workers))
        assert {batch["tag"] for batch in tagged} == {"x"}
        ahead = claiming().predict(Echo(), ReadsAhead(Stream(9), batch_size=2, num_workers=num_workers))
        return flat([batch["batch"] for batch in tagged]), flat(ahead)

    every = list(map(float, range(9)))
    assert run_ranks(rank, 2, deadline_s=30) == [(every, every)] * 2


class Stops(DataLoader[float]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), 2)


class Halves(DataLoader[float]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch[:1]
            yield batch[1:]


class Skips(DataLoader[float]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), 1, None)


@pytest.mark.parametrize("cls", [Stops, Halves, Skips])
def test_loader_that_gives_other_batches_than_its_dataset_gets_an_error(cls: type[DataLoader[float]]) -> None:
    def rank(_: int) -> Any:
        return claiming().predict(Echo(), cls(Stream(20), batch_size=2))

    texts = run_ranks(rank, 2, deadline_s=20, expect_failure=True)
    assert any("PlanError" in str(text) and cls.__name__ in str(text) for text in texts), texts
    _assert_all_raised(texts)


class CountingCollate:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[float]) -> torch.Tensor:
        self.calls += 1
        return torch.tensor(samples)


def test_batches_of_others_are_not_collated_without_workers() -> None:
    def rank(_: int) -> tuple[int, int]:
        collate, the_trainer = CountingCollate(), claiming()
        assert len(the_trainer.predict(Late(), stream(40, 2, collate_fn=collate))) == 20
        mine = balance_of(the_trainer).statistics.replicas[the_trainer.global_rank]
        return collate.calls, mine.steps

    for calls, steps in run_ranks(rank, 2, deadline_s=20):
        assert calls == steps < 20


class Counted(Stream):
    """Counts what is read."""

    read = 0

    def __iter__(self) -> Iterator[float]:
        for sample in super().__iter__():
            self.read += 1
            yield sample


@pytest.mark.parametrize("beside", [False, True])
def test_no_batch_is_read_before_the_step_of_the_one_before(beside: bool) -> None:
    class Looks(Echo):
        def __init__(self, dataset: Counted) -> None:
            super().__init__()
            self.dataset, self.seen = dataset, []

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            if dataloader_idx == int(beside):
                self.seen.append(self.dataset.read - int(batch[-1]))
            return batch

    def rank(_: int) -> set[int]:
        dataset = Counted(30)
        model, loader = Looks(dataset), DataLoader(dataset, batch_size=1)
        claiming().predict(model, [ids(4), loader] if beside else loader)
        return set(model.seen)

    assert run_ranks(rank, 2, deadline_s=20) == [{1}] * 2


def test_what_the_workers_get_can_be_sent_to_them() -> None:
    collate = live_copy(stream(5, num_workers=2, collate_fn=CountingCollate())).collate_fn
    num_samples, batch, mark = pickle.loads(pickle.dumps(collate))([1.0, 2.0])

    assert (num_samples, batch.tolist(), mark) == (2, [1, 2], mark_of([1.0, 2.0]))


def test_workers_read_as_far_ahead_as_the_users() -> None:
    loader = live_copy(stream(5, num_workers=2, prefetch_factor=6))

    assert (loader.num_workers, loader.prefetch_factor) == (1, 12)
    assert (live_copy(stream(5)).num_workers, live_copy(stream(5)).prefetch_factor) == (0, None)


def test_mark_tells_samples_apart_and_not_where_they_lie() -> None:
    assert mark_of([object()]) == mark_of([object()])
    assert mark_of([torch.ones(2)]) == mark_of([torch.ones(2)]) != mark_of([torch.zeros(2)])


def test_users_loader_is_untouched_after_the_run() -> None:
    def rank(_: int) -> None:
        for users in (stream(5, num_workers=2), stream(5, kind=Sized), Tagged(Stream(5), batch_size=1)):
            cls, before = type(users), dict(vars(users))
            claiming().predict(Echo(), users)
            assert type(users) is cls
            assert vars(users).keys() == before.keys()
            assert all(vars(users)[name] is value for name, value in before.items())

    run_ranks(rank, 2, deadline_s=30)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.by_batch: list[tuple[int, Any, list[float]]] = []
        self.by_epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        self.by_batch.append((dataloader_idx, indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.by_epoch = indices


@pytest.mark.parametrize("mode", ["auto", "lockstep"])
def test_stream_beside_map_style_loaders(mode: str) -> None:
    def rank(_: int) -> Any:
        writer = Writer()
        loaders = [ids(5), stream(7, 2), ids(4), stream(1)]
        outs = claiming(2, writer, mode=mode).predict(Echo(), loaders)
        return [flat(batches) for batches in outs], writer.by_batch, writer.by_epoch

    ranks = run_ranks(rank, 2, deadline_s=20)
    for outs, by_batch, by_epoch in ranks:
        assert outs == [list(map(float, range(n))) for n in (5, 7, 4, 1)]
        for loader, indices, values in by_batch:
            assert indices == ([] if loader in (1, 3) else values)
        assert by_epoch[1] == by_epoch[3] == []


class Plain:
    """What can be iterated over, and is no DataLoader."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(3.0).split(1))


@pytest.mark.parametrize("kind", ["none", "collective"])
def test_stream_beside_a_loader_that_makes_the_loop_read_ahead(kind: str) -> None:
    class Beside(Steps):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            return super().predict_step(batch, batch_idx)

    def rank(_: int) -> list[list[list[float]]]:
        found = []
        for n in (0, 1, 2, 3, 9):
            outs = claiming().predict(Beside(kind, step_s=0.001), [stream(n, 1), Plain(), stream(n, 1)])
            found.append([flat(batches) for batches in outs])
        return found

    want = [[list(map(float, range(n))), [0, 1, 2], list(map(float, range(n)))] for n in (0, 1, 2, 3, 9)]
    assert run_ranks(rank, 2, deadline_s=45) == [want] * 2


# --- what the user sees ----------------------------------------------------------------------------------------------


def test_reading_with_one_worker_is_told_once() -> None:
    def rank(_: int) -> list[str]:
        with messages() as said:
            the_trainer = claiming()
            for _ in range(2):
                the_trainer.predict(Echo(), stream(5, num_workers=2))
        return said

    said, silent = run_ranks(rank, 2, deadline_s=20)
    assert len(said) == 2  # one for each run
    assert all("num_workers=2" in text and "one worker" in text for text in said)
    assert silent == []


def test_lease_that_has_no_effect_on_a_stream_is_named() -> None:
    def rank(_: int) -> list[str]:
        callback = HybridBalanceCallback(iterable="claim", config=HybridConfig(lease_s=5.0))
        with messages() as said:
            assert flat(trainer(2, callback).predict(Echo(), stream(5))) == [0, 1, 2, 3, 4]
        return said

    (said,), silent = run_ranks(rank, 2, deadline_s=20)
    assert "lease_s has no effect on loader 0 of predict" in said
    assert silent == []


def test_stock_names_both_cures_and_one_device_is_silent() -> None:
    def rank(_: int) -> list[str]:
        with messages() as said:
            out = trainer(2).predict(Echo(), stream(5))
        assert flat(out) == [0, 1, 2, 3, 4]
        return said

    (said,), silent = run_ranks(rank, 2, deadline_s=20)
    assert "iterable='claim'" in said
    assert "iterable='sharded'" in said
    assert silent == []
    with messages() as alone:
        assert flat(claiming(1).predict(Echo(), stream(5))) == [0, 1, 2, 3, 4]
    assert alone == []


class Bar(TQDMProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.total: Any = None

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_predict_batch_end(*args, **kwargs)
        self.counts.append(self.predict_progress_bar.n)

    def on_predict_end(self, *args: Any) -> None:
        self.counts.append(self.predict_progress_bar.n)
        self.total = self.predict_progress_bar.total
        super().on_predict_end(*args)


def test_progress_bar_counts_the_batches_of_all_ranks_to_an_end_that_it_does_not_know() -> None:
    def rank(r: int) -> Any:
        bar = Bar()
        claiming(2, bar, enable_progress_bar=True).predict(Late(), stream(120, 2))
        limited = Bar()
        claiming(2, limited, enable_progress_bar=True, limit_predict_batches=10).predict(Late(), stream(120, 2))
        return (bar.counts, bar.total), (limited.counts[-1], limited.total)

    (counts, total), limited = run_ranks(rank, 2, deadline_s=30)[0]
    assert counts == sorted(counts)
    assert counts[-1] == 60
    assert total is None
    assert limited == (20, 20)


def test_statistics_and_plan_are_those_of_the_whole_stream() -> None:
    def rank(_: int) -> Any:
        the_trainer = claiming()
        the_trainer.predict(Late(), stream(25, 2))
        balance = balance_of(the_trainer)
        balance.plan.validate(25)
        return balance.statistics.samples_total, balance.statistics.samples_done, balance.plan.cells

    zero, one = run_ranks(rank, 2, deadline_s=20)
    assert zero == one
    assert zero[:2] == (25, 25)


# --- streams that are not the same -----------------------------------------------------------------------------------


class OfThisRank(IterableDataset[float]):
    """Has another length on every rank."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[float]:
        return iter(map(float, range(self.lengths[dist.get_rank()])))


@pytest.mark.parametrize("lengths", [(4, 6), (1, 2), (6, 4), (0, 1), (3, 0)])
@pytest.mark.parametrize("kind", ["none", "collective"])
def test_ranks_that_read_different_numbers_of_batches_get_an_error_that_names_both(
    lengths: tuple[int, int], kind: str
) -> None:
    def rank(_: int) -> Any:
        loader: Any = DataLoader(OfThisRank(lengths), batch_size=1)
        return claiming().predict(Steps(kind, step_s=0.001), loader)

    texts = run_ranks(rank, 2, deadline_s=20, expect_failure=True)
    assert any("PlanError: ranks disagree about the stream" in str(text) for text in texts), texts
    if kind == "none":
        _assert_all_raised(texts, f"replica 0 read {lengths[0]}", f"replica 1 read {lengths[1]}")
    else:  # a rank may be inside the collective that the other never issues
        _assert_all_raised([t for t in texts if "PlanError" in str(t)], "replica 0 read", "replica 1 read")


def test_ranks_that_read_different_batches_of_equal_number_get_an_error() -> None:
    def rank(_: int) -> Any:
        loader: Any = DataLoader(OfThisRank((5, 6)), batch_size=2)
        return claiming().predict(Echo(), loader)

    _assert_all_raised(run_ranks(rank, 2, deadline_s=20, expect_failure=True), "5 samples in 3", "6 in 3")


def test_ranks_whose_streams_begin_differently_are_told() -> None:
    class Shuffled(Stream):
        def __iter__(self) -> Iterator[float]:
            order = torch.randperm(self.n, generator=torch.Generator().manual_seed(dist.get_rank()))
            return iter(order.float().tolist())

    def rank(_: int) -> list[str]:
        with messages() as said:
            the_trainer = claiming()
            for num_workers in (0, 1):
                the_trainer.predict(Echo(), stream(50, 5, Shuffled, num_workers=num_workers))
                the_trainer.predict(Echo(), stream(50, 5, num_workers=num_workers))
        return said

    said, silent = run_ranks(rank, 2, deadline_s=20)
    assert len(said) == 2
    assert all("does not look alike on all ranks" in text for text in said)
    assert silent == []


class Breaks(IterableDataset[float]):
    """Raises on rank 1, at once or in the middle."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def __iter__(self) -> Iterator[float]:
        mine = dist.is_initialized() and dist.get_rank() == 1
        if mine and self.at is None:
            raise OSError("no such shard")
        return self._samples(mine)

    def _samples(self, mine: bool) -> Iterator[float]:
        for i in range(40):
            if mine and i == self.at:
                raise OSError("no such shard")
            yield float(i)


@pytest.mark.parametrize("at", [None, 0, 1, 9])
@pytest.mark.parametrize("kind", ["none", "collective"])
def test_dataset_that_raises_on_one_rank_ends_all(at: int | None, kind: str) -> None:
    def rank(_: int) -> Any:
        loader: Any = DataLoader(Breaks(at), batch_size=1)
        return claiming().predict(Steps(kind, step_s=0.001), loader)

    zero, one = run_ranks(rank, 2, deadline_s=20, expect_failure=True)
    assert "OSError: no such shard" in one
    if kind == "none":
        assert "PeerFailed: replica 1 failed with OSError: no such shard" in zero
    assert "Traceback" in zero


@pytest.mark.parametrize("mode", ["auto", "queue"])
def test_collective_that_comes_late_ends_the_run_everywhere(mode: str) -> None:
    class LateCollective(Echo):
        steps = 0

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.steps += 1
            if self.steps == 3:
                self.all_gather(torch.ones(1))
            return batch

    def rank(_: int) -> Any:
        return claiming(mode=mode).predict(LateCollective(), stream(30, 1))

    _assert_all_raised(run_ranks(rank, 2, deadline_s=20, expect_failure=True), "CollectiveInQueueMode")


def test_both_packages() -> None:
    import pytorch_lightning

    class Plain(pytorch_lightning.LightningModule):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    def rank(_: int) -> list[float]:
        return flat(claiming(package=pytorch_lightning).predict(Plain(), stream(5)))

    assert issubclass(Echo, pl.LightningModule)
    assert run_ranks(rank, 2, deadline_s=20) == [[0, 1, 2, 3, 4]] * 2
