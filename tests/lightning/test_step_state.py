"""What a step changes beside its output, kept and given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics

from lightning_hybrid.lightning import step_state
from lightning_hybrid.lightning.step_state import StepState


class Kept(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.all = torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.seen: list[float] = []
        self.counts: dict[str, int] = {"a": 1}
        self.names: set[str] = {"x"}
        self.number, self.text = 3, "before"

    def change(self) -> None:
        self.total.update(5.0)
        self.all.update(torch.tensor([1.0, 2.0]))
        self.seen += [7.0]
        self.counts["b"] = 2
        self.names.discard("x")
        self.number, self.text = 4, "after"


def _state(module: Any) -> StepState:
    trainer: Any = SimpleNamespace(lightning_module=module, _results=None)
    return StepState(trainer)


def _facts(module: Kept) -> Any:
    return (
        float(module.total.compute()),
        torch.as_tensor(module.all.compute()).tolist() if module.all.value else [],
        module.total._update_count,
        list(module.seen),
        dict(module.counts),
        set(module.names),
        module.number,
        module.text,
    )


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("is_inference", [False, True])
def test_everything_is_as_it_was(is_inference: bool) -> None:
    module = Kept()
    with torch.inference_mode(is_inference):
        module.change()
        state = _state(module)
        state.keep()
        before = _facts(module)
        seen = module.seen
        module.change()
        module.total.reset()

        assert state.give_back()
        assert _facts(module) == before
        assert module.seen is seen


def test_it_can_be_kept_again_and_again() -> None:
    module = Kept()
    state = _state(module)
    for number in range(5):
        state.keep()
        module.change()
        if number % 2:
            assert state.give_back()

    assert module.seen == [7.0, 7.0, 7.0]
    assert float(module.total.compute()) == 15.0


def test_a_metric_that_failed_while_it_was_updated_is_mended() -> None:
    class Fails(torchmetrics.SumMetric):
        def update(self, value: Any, weight: Any = 1.0) -> None:
            super().update(value)
            if float(value) < 0:
                raise torch.OutOfMemoryError

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.metric = Fails()

    module = Module()
    module.metric(torch.tensor(2.0))
    state = _state(module)
    state.keep()
    with pytest.raises(torch.OutOfMemoryError):
        module.metric(torch.tensor(-1.0))  # a forward resets the metric, and puts it back only in the end
    assert state.give_back()

    module.metric(torch.tensor(3.0))
    assert float(module.metric.compute()) == 5.0


class Large(torchmetrics.Metric):
    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(step_state._SMALL_ELEMENTS + 1), dist_reduce_fx="sum")

    def update(self) -> None:
        self.counts += 1

    def compute(self) -> torch.Tensor:
        return self.counts.sum()


class WithLarge(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.large = Large()


def test_a_large_state_that_was_changed_in_place_cannot_be_given_back_before_the_first_failure() -> None:
    module = WithLarge()
    state = _state(module)
    state.keep()
    assert state.give_back()
    module.large.update()
    assert not state.give_back()


def test_afterwards_it_is_copied() -> None:
    module = WithLarge()
    state = _state(module)
    state.keeps_large = True
    state.keep()
    module.large.update()

    assert state.give_back()
    assert float(module.large.counts.sum()) == 0


def test_what_is_kept_is_let_go() -> None:
    module = Kept()
    module.change()
    state = _state(module)
    state.keep()
    state.forget()
    state.keep()
    module.change()

    assert state.give_back()
    assert module.seen == [7.0]
