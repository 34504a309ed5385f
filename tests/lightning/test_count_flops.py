"""The step that is run once more for its operations leaves no trace; with real Trainers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics import MeanMetric

from lightning_hybrid import HybridBalanceCallback, HybridConfig
from tests.lightning.scenes import balance_of, trainer
from tests.ranks import run_ranks


class Traced(pl.LightningModule):
    """Multiplies, draws, logs and counts, so that a step that runs twice shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 5)
        self.mean = MeanMetric()
        self.calls = 0
        self.num_steps = 0

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        result: torch.Tensor = self.layer(batch).sum(1) + torch.rand(len(batch))
        return result

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        values = self.predict_step(batch, batch_idx)
        self.mean(values)
        self.log("metric", self.mean, on_epoch=True)
        self.log("sum", values.sum(), on_epoch=True, reduce_fx="sum")


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.arange(21.0).view(7, 3), batch_size=2)  # type: ignore[arg-type]


def run(devices: int, count: bool, stage: str) -> tuple[Any, Any, int]:
    callback = HybridBalanceCallback(config=HybridConfig(count_flops=count))
    the_trainer, model = trainer(devices, callback), Traced()
    torch.manual_seed(1)
    found = getattr(the_trainer, stage)(model, loader(), **({} if stage == "predict" else {"verbose": False}))
    state = balance_of(the_trainer).system_state
    assert state is not None
    return found, state, model.num_steps


def of_one_device(rank: int, stage: str) -> list[Any]:
    return [run(1, count, stage) for count in (False, True)]


@pytest.mark.parametrize("stage", ["predict", "validate", "test"])
def test_results_steps_and_metrics_are_those_of_a_run_without(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traced, "test_step", Traced.validation_step, raising=False)
    [[(plain, without, steps), (counted, state, steps_counted)]] = run_ranks(of_one_device, 1, stage)

    assert steps == steps_counted == 4
    assert str(plain) == str(counted)
    assert without.model.flops_per_sample is None
    assert without.model.unknown["flops_per_sample"] == "the operations of a sample were not counted"
    assert state.model.flops_per_sample == 2 * 3 * 5
    assert state.performance.flops_per_s == pytest.approx(30 * state.performance.samples_per_s)
    assert state.performance.model_flop_utilization_frac is None
    assert "cpu" in state.performance.unknown["model_flop_utilization_frac"]


def test_every_rank_counts_its_first_step() -> None:
    def rank(_: int) -> tuple[Any, float]:
        _, state, steps = run(2, True, "validate")
        return steps, state.model.flops_per_sample

    counts = run_ranks(rank, 2, deadline_s=30)

    assert [flops for _, flops in counts] == [30.0, 30.0]
    assert sum(steps for steps, _ in counts) == 4


def test_an_error_in_the_counted_step_is_the_users_own() -> None:
    class Broken(Traced):
        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise KeyError("column")

    def rank(_: int) -> None:
        callback = HybridBalanceCallback(config=HybridConfig(count_flops=True))
        trainer(1, callback).predict(Broken(), loader())

    [text] = run_ranks(rank, 1, expect_failure=True)

    assert "KeyError: 'column'" in text
