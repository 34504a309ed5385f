"""Every loader of the user's is kept as it is, and its samples are run once."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, get_worker_info

from lightning_hybrid import HybridBalanceCallback
from tests.lightning.scenes import Echo, Ids, Logs, Stream, balance_of, flat, ids, messages, trainer
from tests.ranks import run_ranks

GROUPS = [[0, 1, 2], [3], [4, 5], [6]]
IN_ORDER = [[0.0, 1.0, 2.0], [3.0], [4.0, 5.0], [6.0]]


class WithoutDropLast(BatchSampler):
    def __init__(self, sampler: Any, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        yield from GROUPS

    def __len__(self) -> int:
        return len(GROUPS)


class WithoutSampler(BatchSampler):
    def __init__(self, batch_size: int, drop_last: bool) -> None:
        self.batch_size, self.drop_last = batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        yield from GROUPS

    def __len__(self) -> int:
        return len(GROUPS)


class Groups:
    """Nothing but an iterable."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from GROUPS


class WithAnExtraArgument(BatchSampler):
    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, groups: list[list[int]]) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.groups = groups

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.groups

    def __len__(self) -> int:
        return len(self.groups)


class Slotted:
    __slots__ = ("groups",)

    def __init__(self) -> None:
        self.groups = GROUPS

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.groups

    def __len__(self) -> int:
        return len(self.groups)


BATCH_SAMPLERS: dict[str, Callable[[], Iterable[list[int]]]] = {
    "without drop_last": lambda: WithoutDropLast(range(7), 3),
    "without sampler": lambda: WithoutSampler(3, False),
    "a list of lists": lambda: GROUPS,
    "an iterable without length": Groups,
    "a generator": lambda: (group for group in GROUPS),
    "with an extra required argument": lambda: WithAnExtraArgument(range(7), 3, False, GROUPS),
    "with slots": Slotted,
}


class EchoHook(Echo):
    """Gives its loaders itself."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def predict_dataloader(self) -> Any:
        return self.make()


def _lists(batches: Any) -> list[list[float]]:
    return [batch.tolist() for batch in batches]


def _predicted_both_ways(the_trainer: Any, make: Callable[[], Any]) -> tuple[Any, Any]:
    return the_trainer.predict(Echo(), make()), the_trainer.predict(EchoHook(make))


# --- batch samplers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BATCH_SAMPLERS)
def test_own_batch_sampler_keeps_its_groups(kind: str) -> None:
    def make() -> DataLoader[float]:
        return DataLoader(Ids(7), batch_sampler=BATCH_SAMPLERS[kind]())

    def rank(_: int) -> tuple[list[list[float]], list[list[float]], float, float]:
        the_trainer = trainer(2)
        passed, from_hook = _predicted_both_ways(the_trainer, make)
        (values,) = the_trainer.validate(Logs(), make(), verbose=False)
        return _lists(passed), _lists(from_hook), values["count"], values["mean"]

    assert run_ranks(rank, 2, deadline_s=20) == [(IN_ORDER, IN_ORDER, 7.0, 3.0)] * 2


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_loader_without_a_length_is_measured_to_its_last_batch(mode: str) -> None:
    def rank(_: int) -> list[Any]:
        found: list[Any] = []
        for num_workers in (0, 2):
            callback = HybridBalanceCallback(mode=mode)
            loader = DataLoader(Ids(7), batch_sampler=Groups(), num_workers=num_workers)
            found.append(_lists(trainer(2, callback).predict(Echo(), loader)))
            found.append(sum(replica.samples for replica in callback.statistics.replicas))
        return found

    assert run_ranks(rank, 2, deadline_s=20) == [[IN_ORDER, 7, IN_ORDER, 7]] * 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_own_batch_sampler_keeps_its_groups_in_lockstep(num_workers: int) -> None:
    def rank(_: int) -> list[list[float]]:
        loader = DataLoader(Ids(7), batch_sampler=WithoutSampler(3, False), num_workers=num_workers)
        return _lists(trainer(3, HybridBalanceCallback(mode="lockstep")).predict(Echo(), loader))

    assert run_ranks(rank, 3, deadline_s=20) == [IN_ORDER] * 3


class OwnDistributed(DistributedSampler):
    """A DistributedSampler that deals out batches of two."""

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        for i in range(0, len(indices), 2):
            yield indices[i : i + 2]

    def __len__(self) -> int:
        return -(-super().__len__() // 2)


def _own_sampler(rank: int) -> DataLoader[float]:
    sampler: Any = DistributedSampler(range(7), num_replicas=2, rank=rank, shuffle=False)
    return DataLoader(Ids(7), sampler=sampler, batch_size=2)


def _own_batch_sampler(rank: int) -> DataLoader[float]:
    return DataLoader(Ids(7), batch_sampler=OwnDistributed(range(7), num_replicas=2, rank=rank, shuffle=False))


def _sampler_in_batch_sampler(rank: int) -> DataLoader[float]:
    sampler: Any = DistributedSampler(range(7), num_replicas=2, rank=rank, shuffle=False)
    return DataLoader(Ids(7), batch_sampler=BatchSampler(sampler, 2, drop_last=False))


@pytest.mark.parametrize("use_distributed_sampler", [True, False])
@pytest.mark.parametrize("make", [_own_sampler, _own_batch_sampler, _sampler_in_batch_sampler])
def test_own_distributed_sampler_is_not_sharded_twice(
    make: Callable[[int], DataLoader[float]], use_distributed_sampler: bool
) -> None:
    def rank(r: int) -> tuple[list[list[float]], list[list[float]], float]:
        the_trainer = trainer(2, use_distributed_sampler=use_distributed_sampler)
        passed, from_hook = _predicted_both_ways(the_trainer, lambda: make(r))
        (values,) = the_trainer.validate(Logs(), make(r), verbose=False)
        return _lists(passed), _lists(from_hook), values["count"]

    zero, one = [[0.0, 2.0], [4.0, 6.0]], [[1.0, 3.0], [5.0, 0.0]]
    assert run_ranks(rank, 2, deadline_s=20) == [(zero, zero, 8.0), (one, one, 8.0)]


def test_without_distributed_sampler_every_rank_runs_its_whole_loader_and_is_told_once() -> None:
    def rank(_: int) -> tuple[list[float], list[str]]:
        with messages() as said:
            out = flat(trainer(2, use_distributed_sampler=False).predict(Echo(), ids(5)))
        return out, said

    (zero, said), (one, silent) = run_ranks(rank, 2, deadline_s=20)
    assert zero == one == [0, 1, 2, 3, 4]
    assert len(said) == 1
    assert "use_distributed_sampler=False" in said[0]
    assert silent == []


def test_endless_batch_sampler_ends_at_the_limit() -> None:
    class Endless(Sampler[Any]):
        def __iter__(self) -> Iterator[list[int]]:
            return ([i % 7] for i in itertools.count())

    def rank(_: int) -> list[float]:
        loader = DataLoader(Ids(7), batch_sampler=Endless())
        return flat(trainer(2, limit_predict_batches=5).predict(Echo(), loader))

    assert run_ranks(rank, 2, deadline_s=20) == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2]] * 2


# --- samplers and datasets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [[6, 5, 4, 3, 2, 1, 0], [2, 2, 2, 0, 5], [4]], ids=["backwards", "with repetitions", "one sample"]
)
def test_order_of_an_own_sampler_is_kept(order: list[int]) -> None:
    def rank(_: int) -> tuple[list[float], float]:
        the_trainer = trainer(2)
        out = flat(the_trainer.predict(Echo(), ids(7, sampler=order)))
        (values,) = the_trainer.validate(Logs(), ids(7, sampler=order), verbose=False)
        return out, values["count"]

    assert run_ranks(rank, 2, deadline_s=20) == [(list(map(float, order)), len(order))] * 2


class Keyed(torch.utils.data.Dataset[float]):
    """A dataset whose indices are the keys of a dict."""

    def __init__(self, values: dict[Any, float]) -> None:
        self.values = values

    def __getitem__(self, key: Any) -> float:
        return self.values[key]

    def __len__(self) -> int:
        return len(self.values)


@pytest.mark.parametrize(
    "keys",
    [
        ["ant", "bee", "cat", "dog", "elk"],
        [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)],
        [(0, (1, "x")), (0, (2, "y")), (1, (1, "x")), (1, (2, "y")), (2, (0, "z"))],
        [0.5, 1.5, 2.5, 3.5, 4.5],
        [False, True, None, "x", 7],
    ],
    ids=["strings", "tuples", "nested tuples", "floats", "mixed"],
)
def test_sampler_may_yield_keys_that_are_no_numbers(keys: list[Any]) -> None:
    dataset = Keyed({key: float(i) for i, key in enumerate(keys)})

    def rank(_: int) -> list[list[float]]:
        return _lists(trainer(2).predict(Echo(), DataLoader(dataset, batch_size=2, sampler=keys)))

    assert run_ranks(rank, 2, deadline_s=20) == [[[0.0, 1.0], [2.0, 3.0], [4.0]]] * 2


def test_keys_that_cannot_be_sent_give_an_error_before_the_first_batch() -> None:
    keys = [lambda i=i: i for i in range(4)]  # a function without a name cannot be pickled
    dataset = Keyed({key: float(i) for i, key in enumerate(keys)})

    class Counts(Echo):
        steps = 0

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            type(self).steps += 1
            return batch

    def rank(_: int) -> Any:
        try:
            trainer(2).predict(Counts(), DataLoader(dataset, batch_size=2, sampler=keys))
        except Exception as error:
            return type(error).__name__, Counts.steps
        return "no error", Counts.steps

    names = run_ranks(rank, 2, deadline_s=20)
    assert [steps for _, steps in names] == [0, 0]
    assert "no error" not in [name for name, _ in names]


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_with_different_datasets_get_an_error(shuffle: bool) -> None:
    def rank(r: int) -> Any:
        return trainer(2).predict(Echo(), ids(7 + 2 * r, shuffle=shuffle))

    texts = [str(text) for text in run_ranks(rank, 2, deadline_s=20, expect_failure=True)]
    assert any("PlanError" in text for text in texts), texts


def test_batches_that_the_dataset_makes_keep_their_sampler_and_are_counted_once() -> None:
    class Batches(Ids):
        def __getitem__(self, i: int) -> Any:
            return torch.full((2,), float(i))

    def rank(_: int) -> tuple[list[float], float]:
        the_trainer = trainer(2)
        out = the_trainer.predict(Echo(), DataLoader(Batches(5), batch_size=None, sampler=[4, 3, 2, 1, 0]))
        (values,) = the_trainer.validate(Logs(), DataLoader(Batches(5), batch_size=None), verbose=False)
        return flat(out), values["count"]

    assert run_ranks(rank, 2, deadline_s=20) == [([4, 4, 3, 3, 2, 2, 1, 1, 0, 0], 10)] * 2


# --- the loader's own parts ------------------------------------------------------------------------------------------


class Tagged(DataLoader[float]):
    """A loader with a required argument, attributes and an iterator of its own."""

    def __init__(self, dataset: Any, tag: str, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.tag = tag
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for batch in super().__iter__():
            yield self.tag, batch


class SeesItsLoader(Echo):
    """Keeps the loader that the loop iterates over."""

    def on_predict_start(self) -> None:
        self.live = self.trainer.predict_dataloaders


def test_subclass_keeps_its_arguments_attributes_and_iterator() -> None:
    def make() -> Tagged:
        return Tagged(Ids(5), "x", batch_size=2)

    def rank(_: int) -> tuple[Any, Any, bool, str]:
        the_trainer, model = trainer(2), SeesItsLoader()
        passed = the_trainer.predict(model, make())
        from_hook = the_trainer.predict(EchoHook(make))
        return repr(passed), repr(from_hook), isinstance(model.live, Tagged), model.live.tag

    want = repr(trainer(1).predict(Echo(), make()))
    assert "'x'" in want
    assert run_ranks(rank, 2, deadline_s=20) == [(want, want, True, "x")] * 2


@pytest.mark.parametrize("loader", [lambda: ids(5), lambda: Tagged(Ids(5), "x", batch_sampler=GROUPS[:2])])
def test_users_loader_is_untouched_after_the_run(loader: Callable[[], DataLoader[float]]) -> None:
    def rank(_: int) -> None:
        users = loader()
        cls, before = type(users), dict(vars(users))
        the_trainer = trainer(2)
        for run in (the_trainer.predict, the_trainer.validate, the_trainer.test):
            run(LogsAndEchoes(), users)
            assert type(users) is cls
            assert vars(users).keys() == before.keys()
            assert all(vars(users)[name] is value for name, value in before.items())

    run_ranks(rank, 2, deadline_s=20)


class LogsAndEchoes(Logs, Echo):
    def _step(self, batch: Any) -> None:
        super()._step(batch[1] if isinstance(batch, (tuple, list)) else batch)

    def on_validation_batch_end(self, outputs: Any, batch: torch.Tensor, *_: Any) -> None:
        pass


def _doubled(samples: list[float]) -> torch.Tensor:
    return 2 * torch.tensor(samples)


def _init_worker(worker_id: int) -> None:
    pass


def test_collate_workers_generator_and_pinning_are_the_users() -> None:
    generator = torch.Generator()
    settings: dict[str, Any] = {
        "collate_fn": _doubled,
        "num_workers": 2,
        "prefetch_factor": 3,
        "worker_init_fn": _init_worker,
        "generator": generator,
        "pin_memory": True,
        "timeout": 20,
    }

    def rank(_: int) -> list[str]:
        model = SeesItsLoader()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*pin_memory")  # without an accelerator it has no effect
            out = flat(trainer(2).predict(model, ids(5, **settings)))
        assert out == [0, 2, 4, 6, 8]
        return [name for name, value in settings.items() if getattr(model.live, name) is not value]

    assert run_ranks(rank, 2, deadline_s=20) == [[], []]


def test_samples_are_loaded_in_the_users_worker_processes() -> None:
    class InWorkers(Ids):
        def __getitem__(self, i: int) -> float:
            info = get_worker_info()
            assert info is not None
            return 10.0 * info.num_workers + info.id

    def rank(_: int) -> set[float]:
        return set(flat(trainer(2).predict(Echo(), DataLoader(InWorkers(24), num_workers=2))))

    assert run_ranks(rank, 2, deadline_s=20) == [{20.0, 21.0}] * 2


def test_shuffle_follows_the_users_generator() -> None:
    def make() -> DataLoader[float]:
        return ids(9, shuffle=True, generator=torch.Generator().manual_seed(3))

    def rank(r: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(r)
        the_trainer, users = trainer(2), make()
        return flat(the_trainer.predict(Echo(), users)), flat(the_trainer.predict(Echo(), users))

    alone, users = trainer(1), make()
    want = flat(alone.predict(Echo(), users)), flat(alone.predict(Echo(), users))
    assert want[0] != want[1]
    assert run_ranks(rank, 2, deadline_s=20) == [want] * 2


@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`")
def test_spawned_workers() -> None:
    def rank(_: int) -> list[float]:
        loader: Any = DataLoader(range(9), batch_size=2, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
        return flat(trainer(2).predict(Echo(), loader))

    assert run_ranks(rank, 2, deadline_s=60) == [list(range(9))] * 2


def test_persistent_workers_over_two_runs_and_over_the_epochs_of_fit() -> None:
    class Fits(LogsAndEchoes):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.counts: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch.float().unsqueeze(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

        def on_validation_end(self) -> None:
            self.counts.append(self.trainer.callback_metrics["count"].item())

    def rank(_: int) -> tuple[list[float], list[float], list[float]]:
        loader = ids(9, num_workers=1, persistent_workers=True)
        the_trainer, model = trainer(2, max_epochs=2, num_sanity_val_steps=0), Fits()
        first, second = flat(the_trainer.predict(model, loader)), flat(the_trainer.predict(model, loader))
        the_trainer.fit(model, ids(4), loader)
        return first, second, model.counts

    want = list(map(float, range(9)))
    assert run_ranks(rank, 2, deadline_s=45) == [(want, want, [9, 9])] * 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_whose_iterator_reads_ahead(num_workers: int) -> None:
    class ReadsAhead(DataLoader[float]):
        def __iter__(self) -> Iterator[Any]:
            inner = super().__iter__()
            held = next(inner, None)
            while held is not None:
                ahead = next(inner, None)
                yield held
                held = ahead

    def rank(_: int) -> list[float]:
        return flat(trainer(2).predict(Echo(), ReadsAhead(Ids(9), batch_size=2, num_workers=num_workers)))

    assert run_ranks(rank, 2, deadline_s=20) == [list(map(float, range(9)))] * 2


def test_loader_that_gives_other_batches_than_its_sampler_names_gets_a_clear_error() -> None:
    class Halves(DataLoader[float]):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch[:1]
                yield batch[1:]

    def rank(_: int) -> Any:
        return trainer(2).predict(Echo(), Halves(Ids(8), batch_size=2))

    for text in run_ranks(rank, 2, deadline_s=20, expect_failure=True):
        assert "Halves" in str(text)
        assert "HybridError" in str(text) or "PlanError" in str(text) or "ConfigError" in str(text)


# --- several loaders -------------------------------------------------------------------------------------------------


class WithIdx(Echo):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"x": batch, "loader": torch.full_like(batch, dataloader_idx), "n": torch.ones_like(batch)}


def _two() -> list[DataLoader[float]]:
    return [ids(5), ids(3)]


@pytest.mark.parametrize(
    "make",
    [_two, lambda: {"a": ids(5), "b": ids(3)}, lambda: CombinedLoader(_two(), "sequential")],
    ids=["list", "dict", "CombinedLoader"],
)
@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_several_loaders_give_a_list_for_each_in_its_order(make: Callable[[], Any], mode: str) -> None:
    def rank(_: int) -> Any:
        the_trainer = trainer(2, HybridBalanceCallback(mode=mode))
        passed, from_hook = the_trainer.predict(WithIdx(), make()), None
        if not isinstance(make(), dict):
            from_hook = the_trainer.predict(_WithIdxHook(make))
        rows = [[row["x"].item() for row in balance_of(the_trainer).rows(i)] for i in range(2)]
        return repr(passed), repr(passed if from_hook is None else from_hook), rows

    want = trainer(1, HybridBalanceCallback(enabled=False)).predict(WithIdx(), make())
    assert [len(batches) for batches in want] == [3, 2]
    rows = [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert run_ranks(rank, 2, deadline_s=20) == [(repr(want), repr(want), rows)] * 2


class _WithIdxHook(WithIdx, EchoHook):
    pass


def test_each_loader_is_treated_by_its_own_kind() -> None:
    def make() -> list[Any]:
        return [ids(0), DataLoader(Ids(7), batch_sampler=GROUPS), ids(1), ids(6, shuffle=True), ids(40, num_workers=1)]

    def rank(r: int) -> tuple[list[list[float]], list[int]]:
        torch.manual_seed(r)
        the_trainer = trainer(2)
        batches = the_trainer.predict(WithIdx(), make())
        loaders = [{int(x) for b in loader for x in b["loader"]} for loader in batches]
        assert loaders == [set(), {1}, {2}, {3}, {4}]
        shown = [torch.cat([b["x"] for b in loader]).tolist() if loader else [] for loader in batches]
        shown[3].sort()
        return shown, [len(plan.cells) for plan in balance_of(the_trainer).plans]

    want = [list(map(float, range(n))) for n in (0, 7, 1, 6, 40)]
    for shown, cells in run_ranks(rank, 2, deadline_s=20):
        assert shown == want
        assert cells[-4:] == [4, 1, 3, 20]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_predict_with_other_combined_modes_raises_lightnings_error(mode: str) -> None:
    def rank(_: int) -> Any:
        return trainer(2).predict(Echo(), CombinedLoader(_two(), mode))

    for text in run_ranks(rank, 2, deadline_s=20, expect_failure=True):
        assert 'ValueError: `trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode' in str(text)


class Pairs(Logs):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        parts = [part for part in batch if part is not None]
        self.seen += torch.cat(parts).tolist()
        self.log("sum", torch.cat(parts).sum(), reduce_fx="sum", sync_dist=True, batch_size=1)

    def on_validation_batch_end(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_validate_with_other_combined_modes_runs_as_stock_with_one_message(mode: str) -> None:
    def rank(_: int, enabled: bool) -> tuple[list[float], float, list[str]]:
        model = Pairs()
        with messages() as said:
            the_trainer = trainer(2, HybridBalanceCallback(enabled=enabled))
            (values,) = the_trainer.validate(model, CombinedLoader([ids(8), ids(4)], mode), verbose=False)
        return model.seen, values["sum"], said

    stock = run_ranks(rank, 2, False, deadline_s=20)
    ours = run_ranks(rank, 2, True, deadline_s=20)
    assert [seen for seen, _, _ in ours] == [seen for seen, _, _ in stock]
    assert [total for _, total, _ in ours] == [total for _, total, _ in stock]
    (_, _, said), (_, _, silent) = ours
    assert len(said) == 1
    assert mode in said[0]
    assert silent == []


def test_several_loaders_and_a_step_without_dataloader_idx_raise_lightnings_error() -> None:
    class Without(Echo):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return batch

    def rank(_: int) -> Any:
        return trainer(2).predict(Without(), _two())

    for text in run_ranks(rank, 2, deadline_s=20, expect_failure=True):
        assert "RuntimeError: You provided only a single `dataloader_idx`" in str(text) or "dataloader_idx" in str(text)
        assert "RuntimeError" in str(text)


# --- streams ---------------------------------------------------------------------------------------------------------


class ShardedStream(Stream):
    """Gives this rank its part."""

    def __iter__(self) -> Iterator[float]:
        return itertools.islice(super().__iter__(), dist.get_rank(), None, dist.get_world_size())


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_stream_is_stocks_by_default_with_one_message_that_names_the_cure() -> None:
    def rank(_: int) -> tuple[list[float], list[float], float, list[str]]:
        with messages() as said:
            the_trainer = trainer(2)
            passed, from_hook = _predicted_both_ways(the_trainer, lambda: DataLoader(Stream(5), batch_size=2))
        (values,) = the_trainer.validate(Logs(), DataLoader(Stream(5), batch_size=2), verbose=False)
        return flat(passed), flat(from_hook), values["count"], said

    (zero, zero_hook, count, said), (one, one_hook, _, silent) = run_ranks(rank, 2, deadline_s=20)
    assert zero == one == zero_hook == one_hook == [0, 1, 2, 3, 4]
    assert count == 10
    assert len(said) == 2  # one for each run
    assert all("IterableDataset" in text and "iterable='sharded'" in text for text in said)
    assert silent == []


def test_stream_that_shards_itself_is_silent_and_not_sharded_twice() -> None:
    def rank(_: int) -> tuple[list[float], float, list[str]]:
        with messages() as said:
            the_trainer = trainer(2, HybridBalanceCallback(iterable="sharded"))
            out = the_trainer.predict(Echo(), DataLoader(ShardedStream(5), batch_size=2))
            (values,) = the_trainer.validate(Logs(), DataLoader(ShardedStream(5), batch_size=2), verbose=False)
        return flat(out), values["count"], said

    assert run_ranks(rank, 2, deadline_s=20) == [([0, 2, 4], 5, []), ([1, 3], 5, [])]


def test_stream_beside_a_map_style_loader() -> None:
    def rank(_: int) -> list[list[float]]:
        loaders = [ids(5), DataLoader(Stream(3), batch_size=2), ids(4)]
        return [flat(batches) for batches in trainer(2).predict(Echo(), loaders)]

    assert run_ranks(rank, 2, deadline_s=20) == [[[0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3]]] * 2


class Plain:
    """What can be iterated over, and is no DataLoader."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2)])


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_loader_that_is_no_dataloader_runs_as_stock_with_one_message() -> None:
    def rank(_: int) -> tuple[list[float], list[str]]:
        with messages() as said:
            out = trainer(2).predict(Echo(), Plain())
        return flat(out), said

    (zero, said), (one, silent) = run_ranks(rank, 2, deadline_s=20)
    assert zero == one == [1, 1]
    assert len(said) == 1
    assert "not a DataLoader" in said[0]
    assert silent == []
