"""With costs samples are run heavy first and like ones together, and everything comes back as if they were not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import HybridBalanceCallback, HybridConfig, ResultsError
from lightning_hybrid.core.errors import CostError
from tests.lightning.scenes import Logs, Stream, balance_of, flat, messages, trainer
from tests.ranks import run_ranks

LENGTHS = [3, 9, 1, 7, 5, 2, 8, 4, 6, 1, 9]
"""Lengths of the samples of `Texts`, heavy ones last in no batch."""
HEAVY_FIRST = [1, 10, 6, 3, 8, 4, 7, 0, 5, 2, 9]


class Texts(Dataset[torch.Tensor]):
    """Sample i is ``lengths[i]`` times the number i."""

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.lengths = list(lengths)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> torch.Tensor:
        self.reads.append(i)
        return torch.full((self.lengths[i],), float(i))


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1.0)


def texts(lengths: Sequence[int] = LENGTHS, batch_size: int = 3, **kwargs: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Texts(lengths), batch_size=batch_size, collate_fn=pad, **kwargs)


class Numbers(pl.LightningModule):
    """Predicts the number of each sample, and keeps the shapes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.ran: list[int] = []

    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.shapes.append(tuple(batch.shape))
        self.ran += [int(i) for i in batch[:, 0]]
        return batch[:, 0].clone()


def by_length(**kwargs: Any) -> HybridBalanceCallback:
    return HybridBalanceCallback(cost="lengths", **kwargs)


def lists(batches: Any) -> Any:
    return [batch.tolist() for batch in batches or []]


BATCHES = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0]]


# --- one device -----------------------------------------------------------------------------------------------------


def test_one_device_runs_heavy_samples_first_and_returns_the_loaders_batches() -> None:
    model, callback = Numbers(), by_length()
    out = trainer(1, callback).predict(model, texts())

    assert model.ran == HEAVY_FIRST
    assert model.shapes == [(3, 9), (3, 7), (3, 4), (2, 1)]
    assert lists(out) == BATCHES
    assert not any(batch.is_inference() for batch in out)
    assert [float(row) for row in callback.rows()] == [float(i) for i in range(11)]
    assert callback.indices() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert callback.grid.indices(0, 11) == HEAVY_FIRST
    assert callback.plan.format() == "0 0 3\n0 3 6\n0 6 9\n0 9 11"


@pytest.mark.parametrize(
    "cost",
    [
        len,
        LENGTHS,
        np.array(LENGTHS),
        torch.tensor(LENGTHS),
        {"compute": "lengths", "memory": lambda sample: len(sample) ** 2},
    ],
    ids=["callable", "list", "array", "tensor", "mapping"],
)
def test_every_kind_of_cost_orders(cost: Any) -> None:
    model = Numbers()
    out = trainer(1, HybridBalanceCallback(cost=cost)).predict(model, texts())

    assert (model.ran, lists(out)) == (HEAVY_FIRST, BATCHES)


def test_equal_costs_leave_the_loaders_batches_alone() -> None:
    model, callback = Numbers(), HybridBalanceCallback(cost=[2.0] * 11)
    trainer(1, callback).predict(model, texts())

    assert model.ran == list(range(11))


def test_a_shuffled_loader_keeps_the_order_that_it_would_have_drawn() -> None:
    def shuffled(callback: HybridBalanceCallback) -> tuple[Any, Any, list[int]]:
        torch.manual_seed(3)
        model = Numbers()
        out = trainer(1, callback).predict(model, texts(shuffle=True))
        return lists(out), [float(row) for row in callback.rows()], [LENGTHS[i] for i in model.ran]

    ordered, rows, lengths = shuffled(by_length(order="dataset"))
    assert ordered == shuffled(HybridBalanceCallback())[0] != BATCHES
    assert rows == [float(i) for i in range(11)]
    assert lengths == sorted(LENGTHS, reverse=True)


@pytest.mark.parametrize(("limit", "num"), [(2, 6), (0.5, 6), (100, 11)])
def test_limited_samples_are_those_of_the_loaders_first_batches(limit: float, num: int) -> None:
    model = Numbers()
    out = trainer(1, by_length(), limit_predict_batches=limit).predict(model, texts())

    assert flat(out) == [float(i) for i in range(num)]
    assert [LENGTHS[i] for i in model.ran] == sorted(LENGTHS[:num], reverse=True)


def test_drop_last_drops_what_the_loader_drops() -> None:
    out = trainer(1, by_length()).predict(Numbers(), texts(drop_last=True))

    assert lists(out) == BATCHES[:3]


def test_several_loaders_are_ordered_each() -> None:
    lengths = [[1, 2, 3, 4, 5], [4, 4], LENGTHS]
    model, callback = Numbers(), HybridBalanceCallback(cost=len)
    out = trainer(1, callback).predict(model, [texts(of, batch_size=2) for of in lengths])

    assert [flat(batches) for batches in out] == [[float(i) for i in range(len(of))] for of in lengths]
    assert model.ran == [4, 3, 2, 1, 0, 0, 1, *HEAVY_FIRST]
    assert [grid.num_samples for grid in callback.grids] == [5, 2, 11]
    assert callback.indices(1) == [[0, 1]]


def test_samples_that_workers_load_are_ordered_and_inherit_what_was_read_for_the_costs() -> None:
    class Kept(Texts):
        """Counts how often this process and its workers had to make a sample."""

        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[int, torch.Tensor] = {}

        def __getitem__(self, i: int) -> torch.Tensor:
            fresh = i not in self.kept
            sample = self.kept.setdefault(i, torch.full((LENGTHS[i] + 1,), float(i)))
            sample[-1] = float(fresh)
            return sample

    class Fresh(Numbers):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            super().predict_step(batch, batch_idx)
            return torch.stack([row[row >= 0][-1] for row in batch])

    model = Fresh()
    loader = DataLoader(Kept(), batch_size=3, collate_fn=pad, num_workers=2)
    fresh = trainer(1, HybridBalanceCallback(cost=len)).predict(model, loader)

    assert model.ran == HEAVY_FIRST
    assert flat(fresh) == [0.0] * 11


# --- several ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", ["auto", "queue", "lockstep"])
def test_every_rank_gets_the_loaders_batches(mode: str, num_workers: int) -> None:
    def rank(_: int) -> tuple[Any, Any, list[int]]:
        model, callback = Numbers(), by_length(mode=mode)
        loader = texts(LENGTHS * 6, batch_size=4, num_workers=num_workers)
        loader.dataset.lengths = LENGTHS * 6
        out = trainer(2, callback).predict(model, loader)
        return lists(out), [float(row) for row in callback.rows()], model.ran

    (out, rows, ran), (other, _, other_ran) = run_ranks(rank, 2)
    assert out == other == [[float(i) for i in range(at, min(at + 4, 66))] for at in range(0, 66, 4)]
    assert rows == [float(i) for i in range(66)]
    assert sorted(ran + other_ran) == list(range(66))


def test_ranks_divide_the_reading_for_a_function_of_a_sample() -> None:
    def rank(_: int) -> list[int]:
        loader = texts()
        trainer(2, HybridBalanceCallback(cost=len, mode="queue")).predict(Numbers(), loader)
        return loader.dataset.reads

    zero, one = run_ranks(rank, 2)
    assert (zero[:5], one[:6]) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10])
    assert len(zero + one) == 22


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_more_ranks_than_samples(n: int) -> None:
    def rank(_: int) -> Any:
        return lists(trainer(3, HybridBalanceCallback(cost=len)).predict(Numbers(), texts(LENGTHS[:n], batch_size=1)))

    assert run_ranks(rank, 3) == [[[float(i)] for i in range(n)]] * 3


def test_gather_says_who_gets_the_list_and_indices_say_whose_rows_it_holds() -> None:
    def rank(_: int) -> Any:
        callback = by_length(gather="none", mode="queue")
        out = trainer(2, callback).predict(Numbers(), texts())
        rows = [int(row) for row in callback.rows()]
        return [[int(i) for i in batch] for batch in out], callback.indices(), rows

    (zero, zero_indices, zero_rows), (one, one_indices, one_rows) = run_ranks(rank, 2)
    assert (zero, one) == (zero_indices, one_indices)
    assert sorted(i for batch in zero + one for i in batch) == list(range(11))
    assert zero_rows == sorted(i for batch in zero for i in batch)
    assert one_rows == sorted(i for batch in one for i in batch)


def test_a_rank_that_has_its_own_samples_orders_those() -> None:
    def rank(_: int) -> tuple[Any, list[int]]:
        model = Numbers()
        out = trainer(2, by_length(), use_distributed_sampler=False).predict(model, texts())
        return lists(out), model.ran

    assert run_ranks(rank, 2) == [(BATCHES, HEAVY_FIRST)] * 2


def test_a_shuffled_loader_is_ordered_by_what_rank_zero_drew() -> None:
    def rank(r: int) -> tuple[Any, Any]:
        torch.manual_seed(r)
        callback = by_length(order="dataset")
        out = trainer(2, callback).predict(Numbers(), texts(shuffle=True))
        return lists(out), [float(row) for row in callback.rows()]

    def alone() -> Any:
        torch.manual_seed(0)
        return lists(trainer(1).predict(Numbers(), texts(shuffle=True)))

    (out, rows), (other, _) = run_ranks(rank, 2)
    assert out == other == alone()
    assert rows == [float(i) for i in range(11)]


def test_limits_of_several_ranks() -> None:
    def rank(_: int) -> list[float]:
        return flat(trainer(2, by_length(), limit_predict_batches=1).predict(Numbers(), texts()))

    assert run_ranks(rank, 2) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2


def test_ranks_with_other_costs_are_told() -> None:
    def rank(r: int) -> Any:
        trainer(2, HybridBalanceCallback(cost=LENGTHS if r else LENGTHS[::-1])).predict(Numbers(), texts())

    assert any("ranks disagree" in text for text in run_ranks(rank, 2, expect_failure=True))


# --- forms of outputs -----------------------------------------------------------------------------------------------


class Padded(Numbers):
    """Predicts as many numbers per sample as its batch is wide."""

    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"padded": batch, "number": batch[:, 0]}


def test_rows_of_several_widths_become_a_list_in_their_batch_which_is_said_once() -> None:
    with messages() as said:
        out = trainer(1, by_length()).predict(Padded(), texts([1, 9, 9, 4, 4, 4], batch_size=3))

    assert [row["padded"].shape[0] for row in out[0]] == [4, 9, 9]
    assert [int(row["number"]) for row in out[0]] == [0, 1, 2]
    # the cell of the first batch of the run has two of this batch and one of the other
    assert [row["padded"].shape[0] for row in out[1]] == [9, 4, 4]
    assert [text for text in said if "list of rows" in text] == [
        "trainer.predict gives a list of rows for 2 batches of loader 0, the first is number 0, because these rows come"
        " from several steps and differ in shape or type; pad outputs to one length, or keep the loader's batches with"
        " batch_dependent=True"
    ]


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_rows_of_several_widths_come_to_every_rank(mode: str) -> None:
    def rank(_: int) -> tuple[list[int], list[int]]:
        callback = by_length(mode=mode)
        out = trainer(2, callback).predict(Padded(), texts(LENGTHS * 3, batch_size=4))
        rows = [int(row["number"]) for row in callback.rows()]
        in_batches = [row["number"] if isinstance(batch, list) else row for batch in out for row in _rows(batch)]
        return [int(row) for row in in_batches], rows

    def _rows(batch: Any) -> list[Any]:
        return batch if isinstance(batch, list) else list(batch["number"])

    assert run_ranks(rank, 2) == [(list(range(33)), list(range(33)))] * 2


def test_batches_whose_rows_are_equally_wide_are_tensors() -> None:
    out = trainer(1, by_length()).predict(Padded(), texts([2, 2, 9, 9], batch_size=2))

    assert [batch["padded"].shape for batch in out] == [(2, 2), (2, 9)]


class Whole(Numbers):
    """Predicts one number per batch."""

    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return float(batch.shape[1])


def test_outputs_without_rows_come_per_step_with_their_indices_which_is_said_once() -> None:
    def rank(_: int) -> Any:
        callback = by_length()
        with messages() as said:
            out = trainer(2, callback).predict(Whole(), texts())
        with pytest.raises(ResultsError, match="one row per sample"):
            callback.rows()
        return out, callback.indices(), [text for text in said if "one entry per step" in text]

    zero, one = run_ranks(rank, 2)
    assert zero[:2] == one[:2] == ([9.0, 7.0, 4.0, 1.0], [[1, 10, 6], [3, 8, 4], [7, 0, 5], [2, 9]])
    assert (len(zero[2]), len(one[2])) == (1, 0)
    assert "batch_dependent=True" in zero[2][0]


def test_a_step_without_an_output_gives_none_per_batch() -> None:
    class Nothing(Numbers):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return None

    callback = by_length()
    assert trainer(1, callback).predict(Nothing(), texts()) == [None] * 4
    assert callback.rows() == [None] * 11


def test_names_and_pairs_go_back_to_their_batches() -> None:
    class Kinds(Numbers):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"x": batch[:, 0], "names": [f"s{int(i)}" for i in batch[:, 0]]}, batch[:, :1]

    def predicted(callback: HybridBalanceCallback) -> str:
        return repr(trainer(1, callback).predict(Kinds(), texts()))

    assert predicted(by_length()) == predicted(HybridBalanceCallback())


# --- writers --------------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.pairs: list[tuple[int, float]] = []
        self.by_epoch: list[tuple[int, float]] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        self.pairs += zip(indices, prediction.tolist(), strict=True)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        for of_batch, numbers in zip(indices[0], predictions, strict=True):
            self.by_epoch += zip(of_batch, numbers.tolist(), strict=True)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_a_writer_gets_the_indices_of_the_rows_that_it_is_given(world: int, num_workers: int) -> None:
    def rank(_: int) -> tuple[list[Any], list[Any]]:
        writer = Writer()
        trainer(world, by_length(), writer).predict(Numbers(), texts(shuffle=True, num_workers=num_workers))
        return writer.pairs, writer.by_epoch

    found = run_ranks(rank, world)
    assert sorted(pair for pairs, _ in found for pair in pairs) == [(i, float(i)) for i in range(11)]
    assert all(pairs == by_epoch for pairs, by_epoch in found)


# --- metrics --------------------------------------------------------------------------------------------------------


class Measures(Logs):
    """What `Logs` logs, of the mean of each sample."""

    def _step(self, batch: torch.Tensor) -> None:
        super()._step(batch[:, 0])


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_metrics_are_those_of_one_device_on_the_same_grid(stage: str, mode: str) -> None:
    def values(world: int) -> dict[str, float]:
        the_trainer = trainer(world, by_length(mode=mode))
        loader = texts([*LENGTHS, *LENGTHS], batch_size=4)
        return getattr(the_trainer, stage)(Measures(), loader, verbose=False)[0]  # type: ignore[no-any-return]

    alone = values(1)
    assert alone["mean"] == pytest.approx(10.5, rel=1e-6)
    for found in run_ranks(lambda _: values(2), 2):
        assert found.keys() == alone.keys()
        for key in alone.keys() - ({"by_two", "hook"} if mode == "lockstep" else set()):  # these depend on the cells
            assert found[key] == pytest.approx(alone[key], rel=1e-6), key


def test_validation_inside_fit_finds_the_costs_once() -> None:
    class Fitted(Measures):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.weight * batch.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Fitted()
    model.weight = torch.nn.Parameter(torch.ones(()))
    asked: list[int] = []

    def cost(sample: torch.Tensor) -> float:
        asked.append(int(sample[0]))
        return len(sample)

    the_trainer = trainer(1, HybridBalanceCallback(cost=cost), max_epochs=3, num_sanity_val_steps=1)
    the_trainer.fit(model, texts(), texts())

    assert asked == list(range(11))
    assert model.seen[:3] == [0.0, 1.0, 2.0]  # the sanity check
    assert model.seen[3:] == [float(i) for i in HEAVY_FIRST] * 3


# --- where batches stay ---------------------------------------------------------------------------------------------


def _kept(
    callback: HybridBalanceCallback, loader: Any, model: Any = None, **kwargs: Any
) -> tuple[list[int], list[str]]:
    model = model or Numbers()
    with messages() as said:
        trainer(1, callback, **kwargs).predict(model, loader)
    return model.ran, [text for text in said if "cost=" in text]


def test_batches_of_an_own_batch_sampler_stay() -> None:
    batches = [[3, 4], [1, 2, 0], [5]]
    loader = DataLoader(Texts(), batch_sampler=batches, collate_fn=pad)

    assert _kept(by_length(), loader) == (
        [3, 4, 1, 2, 0, 5],
        [
            "loader 0 of predict is run in its own batches although cost= is given, because a batch sampler of its own"
            " makes the batches"
        ],
    )


def test_batches_that_the_dataset_makes_stay() -> None:
    class Made(Texts):
        def __getitem__(self, i: int) -> torch.Tensor:
            return super().__getitem__(i)[None]

    ran, said = _kept(by_length(), DataLoader(Made(), batch_size=None))
    assert ran == list(range(11))
    assert len(said) == 1
    assert "batch_size=None" in said[0]


def test_batches_stay_where_results_depend_on_the_whole_batch() -> None:
    ran, said = _kept(by_length(batch_dependent=True), texts())
    assert ran == list(range(11))
    assert len(said) == 1
    assert "batch_dependent=True" in said[0]


def test_batches_stay_without_a_word_where_ordering_is_off() -> None:
    assert _kept(by_length(config=HybridConfig(order_by_cost=False)), texts()) == (list(range(11)), [])


class Normed(Numbers):
    """Has a norm layer, in training mode where ``trains``."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.norm, self.trains = torch.nn.BatchNorm1d(1), trains

    def on_predict_start(self) -> None:
        self.norm.train(self.trains)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_norm_layer_in_evaluation_does_not_matter(num_workers: int) -> None:
    assert _kept(by_length(), texts(num_workers=num_workers), Normed(False)) == (HEAVY_FIRST, [])


def test_batches_stay_where_a_norm_layer_is_in_training_mode() -> None:
    ran, said = _kept(by_length(), texts(), Normed(True))
    assert ran == list(range(11))
    assert len(said) == 1
    assert "norm layer" in said[0]


def test_a_norm_layer_that_trains_only_after_workers_began_is_said() -> None:
    with messages() as said:
        trainer(1, by_length()).predict(Normed(True), texts(num_workers=1))
    assert sum("although a norm layer is in training mode now" in text for text in said) == 1


def test_a_module_that_leaves_its_norm_layers_in_training_mode_keeps_its_batches_with_workers() -> None:
    class Leaves(Normed):
        def on_predict_model_eval(self) -> None:
            pass

    ran, said = _kept(by_length(), texts(num_workers=1), Leaves(True))
    assert ran == list(range(11))
    assert len(said) == 1


def test_a_stream_cannot_be_ordered_which_is_said() -> None:
    model = Numbers()
    model.predict_step = lambda batch, batch_idx: batch  # type: ignore[method-assign]
    with messages() as said:
        out = trainer(1, HybridBalanceCallback(cost=len)).predict(model, DataLoader(Stream(3), batch_size=2))
    assert flat(out) == [0.0, 1.0, 2.0]
    assert said == ["cost= has no effect on loader 0 of predict, whose samples are not known ahead"]


def test_fast_dev_run_is_left_alone() -> None:
    model = Numbers()
    trainer(1, by_length(), fast_dev_run=2).predict(model, texts())
    assert model.ran == [0, 1, 2, 3, 4, 5]


# --- bad costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ([1.0] * 10, "11"),
        ([1.0, 2.0, -3.0] + [1.0] * 8, "sample 2"),
        ([float("nan")] * 11, "sample 0"),
        (lambda sample: 1 / (sample[0] - 4).item(), "sample 4"),
        ("weights", "weights"),
    ],
    ids=["too few", "negative", "not a number", "raises", "unknown name"],
)
def test_a_bad_cost_ends_the_run_before_it_begins(cost: Any, message: str) -> None:
    model = Numbers()
    if cost is not None and callable(cost):
        original = cost

        def cost(sample: Any) -> float:
            return abs(original(sample))

    with pytest.raises(CostError, match=message):
        trainer(1, HybridBalanceCallback(cost=cost)).predict(model, texts())
    assert model.ran == []


def test_a_cost_that_raises_on_one_rank_ends_all() -> None:
    def cost(sample: torch.Tensor) -> float:
        if sample[0] == 9:
            raise RuntimeError("no length")
        return len(sample)

    def rank(_: int) -> None:
        trainer(2, HybridBalanceCallback(cost=cost)).predict(Numbers(), texts())

    zero, one = run_ranks(rank, 2, expect_failure=True)
    assert "CostError: cost of sample 9" in one
    assert "PeerFailed" in zero
    assert "cost of sample 9" in zero


def test_cells_have_costs_for_the_sharing() -> None:
    def rank(_: int) -> Any:
        callback = by_length(mode="queue")
        the_trainer = trainer(2, callback)
        seen: list[Any] = []

        class Sees(Numbers):
            def on_predict_epoch_end(self) -> None:
                seen.append(callback._attachment.engine.epochs[0].spec)

        the_trainer.predict(Sees(), texts())
        assert balance_of(the_trainer) is callback
        return seen[0].costs.compute.tolist(), [len(c) for c in (seen[0].grid.order, seen[0].arrangement.slots)]

    assert run_ranks(rank, 2) == [([26.0, 18.0, 9.0, 2.0], [11, 11])] * 2
