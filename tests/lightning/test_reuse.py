"""In predict equal samples are run once, and each has its row."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import ConfigError, HybridBalanceCallback
from tests.lightning.scenes import Logs, flat, messages, trainer
from tests.lightning.test_ordering import Writer
from tests.ranks import run_ranks

VALUES = [5, 7, 5, 5, 2, 7, 9, 2, 5, 7]
FIRSTS = [0, 1, 4, 6]
"""Indices of the first samples of each value."""


class Values(Dataset[float]):
    """Sample i is ``values[i]``, and there are many alike."""

    def __init__(self) -> None:
        self.values = VALUES

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> float:
        return float(self.values[i])


class Squares(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[float] = []

    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.ran += batch.tolist()
        return batch.float() ** 2


def values(batch_size: int = 3, **kwargs: Any) -> DataLoader[float]:
    return DataLoader(Values(), batch_size=batch_size, **kwargs)


def lists(batches: Any) -> Any:
    return [batch.tolist() for batch in batches]


ALONE = [[25.0, 49.0, 25.0], [25.0, 4.0, 49.0], [81.0, 4.0, 25.0], [49.0]]


@pytest.mark.parametrize("reuse", ["values", VALUES, float], ids=["name", "sequence", "callable"])
def test_equal_samples_are_run_once_and_each_has_its_row(reuse: Any) -> None:
    model, callback = Squares(), HybridBalanceCallback(reuse=reuse)
    out = trainer(1, callback).predict(model, values())

    assert model.ran == [5.0, 7.0, 2.0, 9.0]
    assert lists(out) == ALONE
    assert [float(row) for row in callback.rows()] == [float(value**2) for value in VALUES]
    assert callback.indices() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert callback.statistics.samples_total == 4
    assert callback.statistics.samples_reused == 6


def test_a_change_in_one_place_changes_no_other() -> None:
    callback = HybridBalanceCallback(reuse="values")
    out = trainer(1, callback).predict(Squares(), values())
    out[0][0] += 1

    changed = [26.0 if i == 0 else float(value**2) for i, value in enumerate(VALUES)]
    assert [value for batch in out for value in batch.tolist()] == changed


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_ranks_share_the_samples_that_are_left(mode: str, num_workers: int) -> None:
    def rank(_: int) -> tuple[Any, list[float]]:
        model = Squares()
        callback = HybridBalanceCallback(reuse="values", mode=mode)
        return lists(trainer(2, callback).predict(model, values(2, num_workers=num_workers))), model.ran

    (zero, zero_ran), (one, one_ran) = run_ranks(rank, 2)
    assert zero == one == [[float(value**2) for value in VALUES[at : at + 2]] for at in range(0, 10, 2)]
    assert sorted(zero_ran + one_ran) == [2.0, 5.0, 7.0, 9.0]


def test_samples_that_are_left_are_ordered_by_cost_which_is_asked_of_them_alone() -> None:
    asked: list[float] = []

    def cost(sample: float) -> float:
        asked.append(sample)
        return sample

    model = Squares()
    out = trainer(1, HybridBalanceCallback(reuse="values", cost=cost)).predict(model, values())

    assert asked == [5.0, 7.0, 2.0, 9.0]
    assert model.ran == [9.0, 7.0, 5.0, 2.0]
    assert lists(out) == ALONE


def test_a_shuffled_loader_has_its_rows_in_the_order_that_it_drew() -> None:
    def predicted(**kwargs: Any) -> tuple[Any, list[float]]:
        torch.manual_seed(1)
        callback = HybridBalanceCallback(order="dataset", **kwargs)
        out = trainer(1, callback).predict(Squares(), values(shuffle=True))
        return lists(out), [float(row) for row in callback.rows()]

    assert predicted(reuse="values") == predicted()


def test_the_progress_bar_ends_where_the_run_does() -> None:
    the_trainer = trainer(1, HybridBalanceCallback(reuse="values"))
    the_trainer.predict(Squares(), values())

    assert the_trainer.num_predict_batches == [2]


def test_limits_are_the_first_batches() -> None:
    model = Squares()
    out = trainer(1, HybridBalanceCallback(reuse="values"), limit_predict_batches=1).predict(model, values())

    assert (lists(out), model.ran) == (ALONE[:1], [5.0, 7.0])


def test_a_writer_sees_the_samples_that_are_run() -> None:
    writer = Writer()
    trainer(1, HybridBalanceCallback(reuse="values"), writer).predict(Squares(), values())

    assert writer.pairs == writer.by_epoch == [(0, 25.0), (1, 49.0), (4, 4.0), (6, 81.0)]


def test_keys_that_are_all_different_change_nothing() -> None:
    model, callback = Squares(), HybridBalanceCallback(reuse=range(10))
    out = trainer(1, callback).predict(model, values())

    assert lists(out) == ALONE
    assert model.ran == [float(value) for value in VALUES]
    assert callback.statistics.samples_reused == 0


def test_outputs_without_rows_are_given_per_step_and_it_is_said_what_is_left_out() -> None:
    class Whole(Squares):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return float(batch.sum())

    callback = HybridBalanceCallback(reuse="values")
    with messages() as said:
        out = trainer(1, callback).predict(Whole(), values())
    assert out == [14.0, 9.0]
    assert callback.indices() == [[0, 1, 4], [6]]
    assert len(said) == 1
    assert "reuse= found equal" in said[0]


def test_the_number_of_samples_reused_is_logged() -> None:
    class Keeps(pl.loggers.logger.DummyLogger):
        found: dict[str, float] = {}  # noqa: RUF012  # one logger, one test

        def log_metrics(self, metrics: Any = None, step: Any = None) -> None:
            self.found.update(metrics)

    logger = Keeps()
    trainer(1, HybridBalanceCallback(reuse="values"), logger=logger).predict(Squares(), values())
    assert logger.found["balance/predict/reused_samples"] == 6.0


def test_metrics_count_every_sample_which_is_said_once() -> None:
    with messages() as said:
        the_trainer = trainer(1, HybridBalanceCallback(reuse="values"))
        found = the_trainer.test(Logs(), values(), verbose=False)[0]
    assert found["count"] == 10.0
    assert said == [
        "loader 0 of test runs equal samples each for itself although reuse= is given: its metrics count them all"
    ]


def test_batches_of_an_own_batch_sampler_are_run_whole_which_is_said() -> None:
    model = Squares()
    with messages() as said:
        trainer(1, HybridBalanceCallback(reuse="values")).predict(
            model, DataLoader(Values(), batch_sampler=[[0, 2], [3]])
        )
    assert model.ran == [5.0, 5.0, 5.0]
    assert len(said) == 1
    assert "batch sampler of its own" in said[0]


@pytest.mark.parametrize(
    ("reuse", "message"),
    [
        (lambda sample: [sample], "sample 0 is a list"),
        (lambda sample: 1 / (sample - 9), "sample 6 it raised ZeroDivisionError"),
        ([1, 2], "have one key per sample, 10, got 2"),
    ],
    ids=["not hashable", "raises", "too few"],
)
def test_a_bad_key_ends_the_run_before_it_begins(reuse: Any, message: str) -> None:
    model = Squares()
    with pytest.raises(ConfigError, match=message):
        trainer(1, HybridBalanceCallback(reuse=reuse)).predict(model, values())
    assert model.ran == []


def test_a_bad_key_ends_all_ranks() -> None:
    def rank(_: int) -> None:
        trainer(2, HybridBalanceCallback(reuse=lambda sample: [sample])).predict(Squares(), values())

    zero, one = run_ranks(rank, 2, expect_failure=True)
    assert "ConfigError: reuse must give keys" in zero
    assert "PeerFailed" in one or "CoordinationTimeout" in one  # rank zero takes the store with it


def test_ranks_with_samples_of_their_own_reuse_those() -> None:
    def rank(_: int) -> Any:
        model = Squares()
        callback = HybridBalanceCallback(reuse="values")
        out = trainer(2, callback, use_distributed_sampler=False).predict(model, values())
        return flat(out), model.ran

    assert run_ranks(rank, 2) == [([float(value**2) for value in VALUES], [5.0, 7.0, 2.0, 9.0])] * 2
