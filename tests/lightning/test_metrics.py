"""N ranks report what one device reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hybrid import HybridBalanceCallback
from tests.lightning.scenes import Logs, ids, trainer
from tests.ranks import run_ranks


def _values(run: Any) -> dict[str, float]:
    (values,) = run
    return values


@pytest.mark.parametrize("mode", ["auto", "queue", "lockstep"])
@pytest.mark.parametrize("sync_dist", [True, False])
def test_every_reduction_equals_one_device(mode: str, sync_dist: bool) -> None:
    sizes = (1, 2, 3, 7, 11)

    def rank(_: int) -> list[tuple[dict[str, float], dict[str, float]]]:
        the_trainer = trainer(2, HybridBalanceCallback(mode=mode))
        model = Logs(sync_dist)
        return [
            (
                _values(the_trainer.validate(model, ids(n, 2), verbose=False)),
                _values(the_trainer.test(model, ids(n, 2), verbose=False)),
            )
            for n in sizes
        ]

    alone = trainer(1)
    want = [
        (
            _values(alone.validate(Logs(), ids(n, 2), verbose=False)),
            _values(alone.test(Logs(), ids(n, 2), verbose=False)),
        )
        for n in sizes
    ]
    for got in run_ranks(rank, 2):
        for n, mine, one in zip(sizes, got, want, strict=True):
            for stage in (0, 1):
                if mode == "lockstep":  # another grid: batch-level statistics are those of the realised batches
                    names = {"metric", "count", "mean", "sum", "max", "min"}
                    assert {k: v for k, v in mine[stage].items() if k in names} == pytest.approx(
                        {k: v for k, v in one[stage].items() if k in names}, rel=1e-5
                    ), n
                else:
                    assert mine[stage] == pytest.approx(one[stage], rel=1e-5), n


@pytest.mark.parametrize("n", [3, 7])
def test_counts_are_not_padded(n: int) -> None:
    def rank(_: int) -> dict[str, float]:
        return _values(trainer(3).test(Logs(), ids(n, 2), verbose=False))

    for values in run_ranks(rank, 3):
        assert values["count"] == n
        assert values["metric"] == pytest.approx((n - 1) / 2)


def test_unequal_counts_do_not_inflate_a_synced_mean() -> None:
    class Ones(Logs):
        def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("ones", torch.ones(()), sync_dist=True, batch_size=len(batch))

    for n in (1, 5, 7):

        def rank(_: int, n: int = n) -> float:
            return _values(trainer(2).validate(Ones(), ids(n, 1), verbose=False))["ones"]

        assert run_ranks(rank, 2) == [1.0, 1.0]


def test_hooks_fire_once_per_batch_and_a_ghost_leaves_no_trace() -> None:
    def rank(_: int) -> tuple[list[float], list[float], float]:
        model = Logs()
        values = _values(trainer(3).validate(model, ids(2, 1), verbose=False))
        return model.seen, model.hooks, values["count"]

    outcomes = run_ranks(rank, 3)
    assert sorted(x for seen, _, _ in outcomes for x in seen) == [0, 1]
    assert sorted(x for _, hooks, _ in outcomes for x in hooks) == [0, 1]
    assert [count for _, _, count in outcomes] == [2, 2, 2]


def test_several_loaders_of_which_one_is_smaller_than_the_world() -> None:
    def rank(_: int) -> list[dict[str, float]]:
        return trainer(3).validate(Logs(), [ids(5, 2), ids(1, 2), ids(8, 2)], verbose=False)

    want = trainer(1).validate(Logs(), [ids(5, 2), ids(1, 2), ids(8, 2)], verbose=False)
    for got in run_ranks(rank, 3):
        assert len(got) == 3
        for mine, one in zip(got, want, strict=True):
            keys = {k for k in one if not k.startswith(("metric", "count"))}  # one Metric object over all loaders
            assert {k: mine[k] for k in keys} == pytest.approx({k: one[k] for k in keys}, rel=1e-5)


def test_validation_inside_fit_is_exact_in_every_epoch() -> None:
    class Fits(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
            self.counts: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch.float().unsqueeze(1)).sum()

        def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.layer(batch.float().unsqueeze(1))
            super().validation_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                values = self.trainer.callback_metrics
                self.counts += [values["count"].item(), values["mean"].item()]

    def rank(_: int) -> tuple[list[float], str]:
        model = Fits()
        callback = HybridBalanceCallback()
        the_trainer = trainer(2, callback, max_epochs=3, num_sanity_val_steps=2)
        the_trainer.fit(model, ids(16, 4), ids(7, 1))
        return model.counts, callback.statistics.mode

    assert run_ranks(rank, 2) == [([7.0, 3.0] * 3, "queue")] * 2


def test_empty_loader_is_as_on_one_device() -> None:
    def rank(_: int) -> Any:
        return trainer(2).validate(Logs(), ids(0), verbose=False)

    assert run_ranks(rank, 2) == [trainer(1).validate(Logs(), ids(0), verbose=False)] * 2


def test_fast_dev_run_with_fewer_batches_than_ranks_does_not_hang() -> None:
    def rank(_: int) -> float:
        return _values(trainer(2, fast_dev_run=True).validate(Logs(), ids(2, 2), verbose=False))["count"]

    assert run_ranks(rank, 2, deadline_s=20) == [2.0, 2.0]
