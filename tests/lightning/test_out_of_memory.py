"""Steps that run out of memory: only the failing rank splits, and everything is as if nothing had happened."""

from __future__ import annotations

import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics

from lightning_hybrid import HybridBalanceCallback
from tests.lightning.scenes import Echo, Logs, ids, trainer
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


class Fits:
    """A device that at most ``most`` samples fit into; notes the size of each attempt."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []

    def take(self, batch: torch.Tensor) -> None:
        self.tried.append(len(batch))
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class SmallEcho(Echo):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._memory = Fits(most)
        self.hooks: list[tuple[int, list[float]]] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self._memory.take(batch)
        return batch

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hooks.append((batch_idx, outputs.tolist()))


class SmallLogs(Logs):
    """Runs out of memory before anything else, or after metrics were updated and numbers logged."""

    def __init__(self, most: int, *, late: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._memory, self.late = Fits(most), late
        self.kept: list[torch.Tensor] = []

    def _step(self, batch: torch.Tensor) -> None:
        self.kept.append(batch)
        if not self.late:
            self._memory.take(batch)
        super()._step(batch)
        self.log("on_step", batch.float().mean(), on_step=True, on_epoch=False)
        if self.late:
            self._memory.take(batch)


def test_batches_are_run_in_parts_and_hooks_see_whole_ones() -> None:
    model = SmallEcho(2)
    out = trainer(1, HybridBalanceCallback()).predict(model, ids(8, 4))

    assert [batch.tolist() for batch in out] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert model.hooks == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])]
    assert model._memory.tried == [4, 2, 2, 2, 2]  # the second batch begins at the learnt size


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_metrics_and_logs_are_as_if_the_step_had_run_once(late: bool, most: int) -> None:
    whole = SmallLogs(99, late=late)
    expected = trainer(1, HybridBalanceCallback()).validate(whole, ids(10, 4), verbose=False)
    model = SmallLogs(most, late=late)
    found = trainer(1, HybridBalanceCallback()).validate(model, ids(10, 4), verbose=False)

    assert max(model._memory.tried) > most
    if most > 1:  # a batch_size=2 of the user's cannot be told from the size of a part
        found[0].pop("by_two")
        expected[0].pop("by_two")
    assert found[0] == pytest.approx(expected[0])
    assert model.seen == whole.seen
    assert model.hooks == whole.hooks
    assert torch.cat(model.kept).tolist() == torch.cat(whole.kept).tolist()


# --- ranks -----------------------------------------------------------------------------------------------------------


class OneIsSmall(SmallLogs):
    """Only rank 1 runs out of memory."""

    def _step(self, batch: torch.Tensor) -> None:
        self._memory.most = 1 if self.global_rank == 1 else 99
        super()._step(batch)


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_one_rank_that_runs_out_of_memory_splits_alone(mode: Any) -> None:
    def rank(_: int) -> Any:
        model = OneIsSmall(1, late=True, sync_dist=False)
        found = trainer(2, HybridBalanceCallback(mode=mode)).validate(model, ids(24, 4), verbose=False)[0]
        wasted = sum(model._memory.tried) - len(model.seen)
        return {name: found[name] for name in ("metric", "count", "mean", "sum", "max", "min")}, wasted

    (first, wasted_first), (second, wasted_second) = run_ranks(rank, 2, deadline_s=30)
    assert first == second
    assert first == pytest.approx({"metric": 11.5, "count": 24, "mean": 11.5, "sum": 276, "max": 23, "min": 0})
    assert wasted_first == 0
    assert wasted_second > 0


def test_a_sample_that_does_not_fit_ends_all_ranks_and_is_named() -> None:
    def rank(_: int) -> Any:
        model = SmallEcho(99)

        def take(batch: torch.Tensor) -> None:
            if 5 in batch.tolist():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

        model._memory.take = take  # type: ignore[method-assign]
        try:
            trainer(2, HybridBalanceCallback()).predict(model, ids(12, 2))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "ended well"

    errors = sorted(run_ranks(rank, 2, deadline_s=20))
    assert errors[0].startswith("PeerFailed")
    assert "SampleTooLarge" in errors[0]
    assert errors[1].startswith("SampleTooLarge: sample 5 of loader 0 of predict, on replica")
    assert "shapes (1,)" in errors[1]


# --- what cannot be cut ----------------------------------------------------------------------------------------------


class WithNorm(SmallEcho):
    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.norm = torch.nn.BatchNorm1d(1)

    def on_predict_model_eval(self) -> None:
        self.train()


@pytest.mark.parametrize("model", [WithNorm(2), SmallEcho(2)])
def test_batches_whose_samples_depend_on_each_other_are_never_cut(model: Any) -> None:
    callback = HybridBalanceCallback(batch_dependent=None if isinstance(model, WithNorm) else True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(1, callback).predict(model, ids(8, 4))

    assert model._memory.tried == [4]
    assert "depend on the whole batch" in caught.value.__notes__[0]


def test_functions_of_the_users_cut_and_merge() -> None:
    class Batch:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

        def __len__(self) -> int:
            return len(self.values)

    class Sums(SmallEcho):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return Batch(batch)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self._memory.take(batch)
            return batch.values.sum()

        def on_predict_batch_end(self, *_: Any) -> None:
            pass

    callback = HybridBalanceCallback(
        split_fn=lambda batch, start, stop: Batch(batch.values[start:stop]), merge_fn=lambda outputs, _: sum(outputs)
    )
    assert list(map(float, trainer(1, callback).predict(Sums(1), ids(6, 3)))) == [3, 12]


def test_memory_of_the_failed_attempt_is_free_when_the_retry_starts() -> None:
    class Heavy(SmallEcho):
        def __init__(self) -> None:
            super().__init__(2)
            self._refs: list[Any] = []
            self._alive: list[int] = []

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self._alive.append(sum(ref() is not None for ref in self._refs))
            activations = batch.double() * 2
            self._refs.append(weakref.ref(activations))
            cycle: list[Any] = [activations]
            cycle.append(cycle)
            self._memory.take(batch)
            return batch

    model = Heavy()
    trainer(1, HybridBalanceCallback()).predict(model, ids(4, 4))
    assert model._memory.tried == [4, 2, 2]
    assert model._alive[:2] == [0, 0]


def test_a_large_metric_is_kept_from_the_first_failure_on() -> None:
    class Large(torchmetrics.Metric):
        counts: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.add_state("counts", torch.zeros(10_000), dist_reduce_fx="sum")

        def update(self, batch: torch.Tensor) -> None:
            self.counts += torch.bincount(batch.long(), minlength=10_000)

        def compute(self) -> torch.Tensor:
            return self.counts.sum()

    class Counts(pl.LightningModule):
        def __init__(self, fails: dict[int, str]) -> None:
            super().__init__()
            self.large, self.fails = Large(), fails

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            when = self.fails.get(batch_idx) if len(batch) > 2 else None
            if when == "early":
                raise torch.OutOfMemoryError
            self.large.update(batch)
            self.log("count", self.large)
            if when == "late":
                raise torch.OutOfMemoryError

    model = Counts({0: "early", 2: "late"})
    assert trainer(1, HybridBalanceCallback()).validate(model, ids(12, 4), verbose=False) == [{"count": 12.0}]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(1, HybridBalanceCallback()).validate(Counts({0: "late"}), ids(12, 4), verbose=False)
    assert "large metric" in caught.value.__notes__[0]


# --- outputs ---------------------------------------------------------------------------------------------------------


class Shaped(Echo):
    """Gives outputs of one kind; runs out of memory above ``most`` samples."""

    def __init__(self, kind: str, most: int) -> None:
        super().__init__()
        self.kind, self._memory = kind, Fits(most)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self._memory.take(batch)
        if self.kind == "none for some":
            return None if batch_idx % 2 else batch
        if self.kind == "dictionary":
            return {"double": batch * 2, "texts": [f"{value:.0f}" for value in batch.tolist()]}
        if self.kind == "tuple":
            return batch, batch.unsqueeze(1).expand(-1, 3)
        if self.kind == "texts":
            return [f"{value:.0f}" for value in batch.tolist()]
        return batch.float().mean()


def _plain(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.tolist()
    if isinstance(output, dict):
        return {key: _plain(value) for key, value in output.items()}
    return [_plain(item) for item in output] if isinstance(output, list | tuple) else output


@pytest.mark.parametrize("kind", ["none for some", "dictionary", "tuple", "texts", "one number"])
def test_outputs_keep_structure_and_order(kind: str) -> None:
    expected = trainer(1, HybridBalanceCallback()).predict(Shaped(kind, 99), ids(14, 6))
    found = trainer(1, HybridBalanceCallback()).predict(Shaped(kind, 4), ids(14, 6))

    assert (
        _plain(found) == pytest.approx(_plain(expected)) if kind == "one number" else _plain(found) == _plain(expected)
    )
    assert list(map(type, found)) == list(map(type, expected))


def test_outputs_of_different_widths_become_rows() -> None:
    class Padded(SmallEcho):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self._memory.take(batch)
            return torch.ones(len(batch), int(batch.max()) + 1)

        def on_predict_batch_end(self, *_: Any) -> None:
            pass

    callback = HybridBalanceCallback()
    (out,) = trainer(1, callback).predict(Padded(2), ids(4, 4))
    assert [len(row) for row in out] == [2, 2, 4, 4]


def test_in_evaluation_a_norm_layer_gives_the_same_for_any_parts() -> None:
    class Normed(SmallEcho):
        def __init__(self, most: int) -> None:
            super().__init__(most)
            torch.manual_seed(0)
            self.norm = torch.nn.BatchNorm1d(4)
            self.norm.running_mean = torch.randn(4)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self._memory.take(batch)
            return self.norm(batch.float().unsqueeze(1).expand(-1, 4))

        def on_predict_batch_end(self, *_: Any) -> None:
            pass

    whole = trainer(1, HybridBalanceCallback()).predict(Normed(99), ids(16, 8))
    for most in (4, 1):
        parts = trainer(1, HybridBalanceCallback()).predict(Normed(most), ids(16, 8))
        assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")
def test_a_step_that_issues_collectives_is_not_run_in_parts_and_no_rank_hangs() -> None:
    class Gathering(SmallEcho):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self._memory.most = 1 if self.global_rank == 1 and batch_idx == 2 else 99
            self._memory.take(batch)
            self.all_gather(torch.ones(1))
            return batch

    def rank(_: int) -> Any:
        try:
            trainer(2, HybridBalanceCallback()).predict(Gathering(99), ids(24, 2))
        except Exception as error:
            return type(error).__name__, getattr(error, "__notes__", [])
        return "ended well", []

    (first, _), (second, notes) = run_ranks(rank, 2, deadline_s=30)
    assert second == "OutOfMemoryError"
    assert "collectives" in notes[0]
    assert first != "ended well"
