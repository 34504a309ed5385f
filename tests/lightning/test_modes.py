"""Which mode a step gets, and that no mode makes ranks wait for each other in vain."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridBalanceCallback, HybridConfig
from tests.lightning.scenes import Echo, Ids, balance_of, flat, ids, trainer
from tests.ranks import run_ranks

# Lightning's `all_gather` calls what torch wants to end
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")

KINDS = {"none": "queue", "epoch": "queue", "step": "lockstep", "collective": "lockstep"}
"""What the step does, and the mode that ``mode="auto"`` must find for it."""


class Steps(pl.LightningModule):
    """A step of every kind; rank 1 is five times slower."""

    def __init__(self, kind: str, step_s: float = 0.003) -> None:
        super().__init__()
        self.kind, self.step_s = kind, step_s
        self.mean, self.count = torchmetrics.MeanMetric(), torchmetrics.SumMetric()
        self.seen: list[float] = []

    def _run(self, batch: torch.Tensor) -> None:
        time.sleep(self.step_s * (5 if self.global_rank == 1 else 1))  # the emulated device
        if self.kind == "collective":
            everyone = self.all_gather(torch.tensor(float(self.global_rank)))
            assert everyone.flatten().tolist() == list(range(self.trainer.world_size))
        self.seen += batch.tolist()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._run(batch)
        return batch

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._run(batch)
        self.mean.update(batch)
        self.count.update(torch.ones_like(batch))
        self.log("metric", self.mean)
        self.log("count", self.count)
        if self.kind in ("epoch", "step"):
            self.log("logged", batch.mean(), on_step=self.kind == "step", on_epoch=True, sync_dist=True)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


SCENES = [(11, 2, 0), (2, 1, 0), (3, 1, 0), (11, 2, 2), (3, 1, 2)]
"""Samples, batch size and workers."""


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_finishes_with_every_sample_once_in_the_mode_that_the_step_needs(kind: str) -> None:
    def rank(_: int) -> list[Any]:
        found = []
        for n, batch_size, num_workers in SCENES:
            the_trainer, model = trainer(2), Steps(kind)
            for run in (the_trainer.validate, the_trainer.test):
                model.seen = []
                (values,) = run(model, ids(n, batch_size, num_workers=num_workers), verbose=False)
                names = ("count", "metric", "logged_epoch" if kind == "step" else "logged")
                numbers = [values[name] for name in names if name in values]
                found.append((numbers, balance_of(the_trainer).statistics.mode, model.seen))
        return found

    zero, one = run_ranks(rank, 2, deadline_s=45)
    for i, (n, _, _) in enumerate(SCENES):
        for mine, other in zip(zero[2 * i : 2 * i + 2], one[2 * i : 2 * i + 2], strict=True):
            assert mine[:2] == other[:2]
            numbers, mode, seen = mine
            mean = (n - 1) / 2
            assert numbers == pytest.approx([n, mean, mean][: len(numbers)], rel=1e-5)
            assert len(numbers) == (3 if kind in ("epoch", "step") else 2)
            assert mode == KINDS[kind]
            assert sorted(seen + other[2]) == list(map(float, range(n)))


@pytest.mark.parametrize("kind", ["none", "collective"])
def test_predict_finishes_with_every_sample_once_in_the_mode_that_the_step_needs(kind: str) -> None:
    def rank(_: int) -> list[Any]:
        found = []
        for n, batch_size, num_workers in SCENES:
            the_trainer, model = trainer(2), Steps(kind)
            out = the_trainer.predict(model, ids(n, batch_size, num_workers=num_workers))
            found.append((out, balance_of(the_trainer).statistics.mode, model.seen))
        return found

    zero, one = run_ranks(rank, 2, deadline_s=45)
    for (n, batch_size, _), mine, other in zip(SCENES, zero, one, strict=True):
        want = torch.arange(float(n)).split(batch_size)
        for out, mode, _ in (mine, other):
            assert [batch.tolist() for batch in out] == [batch.tolist() for batch in want]
            assert mode == KINDS[kind]
        assert sorted(mine[2] + other[2]) == list(map(float, range(n)))


def test_three_ranks_and_fewer_samples_than_ranks_with_a_collective_in_the_step() -> None:
    def rank(_: int) -> list[float]:
        return [trainer(3).validate(Steps("collective"), ids(n, 1), verbose=False)[0]["count"] for n in (1, 2, 4)]

    assert run_ranks(rank, 3, deadline_s=20) == [[1, 2, 4]] * 3


def test_collective_in_fits_validation_step_is_found() -> None:
    class Fits(Steps):
        def __init__(self) -> None:
            super().__init__("step")
            self.layer = torch.nn.Linear(1, 1)
            self.counts: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch.float().unsqueeze(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

        def on_validation_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.counts += [self.trainer.callback_metrics[key].item() for key in ("count", "logged_epoch")]

    def rank(_: int) -> tuple[list[float], str]:
        model, the_trainer = Fits(), trainer(2, max_epochs=2, num_sanity_val_steps=2)
        the_trainer.fit(model, ids(4), ids(7, 1))
        return model.counts, balance_of(the_trainer).statistics.mode

    assert run_ranks(rank, 2, deadline_s=20) == [([7, 3, 7, 3], "lockstep")] * 2


# --- a collective where there must be none ---------------------------------------------------------------------------


class Late(Echo):
    """Issues a collective in its step number ``at``, or for sample ``sample`` alone."""

    def __init__(self, at: int | None = None, sample: float | None = None) -> None:
        super().__init__()
        self.at, self.sample, self.steps = at, sample, 0

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.steps += 1
        time.sleep(0.01)  # the emulated device: both ranks get work
        if self.steps == self.at or self.sample in batch.tolist():
            self.all_gather(torch.ones(1))
        return batch

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.predict_step(batch, batch_idx)


def _assert_all_named_the_cure(texts: list[Any]) -> None:
    for text in texts:
        assert "CollectiveInQueueMode" in str(text)
        assert 'mode="lockstep"' in str(text)


@pytest.mark.parametrize("mode", ["auto", "queue"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_collective_that_first_comes_in_step_five_ends_the_run_everywhere(mode: str, num_workers: int) -> None:
    def rank(_: int) -> Any:
        loader = ids(60, 1, num_workers=num_workers)
        return trainer(2, HybridBalanceCallback(mode=mode)).predict(Late(at=5), loader)

    _assert_all_named_the_cure(run_ranks(rank, 2, expect_failure=True, deadline_s=20))


def test_collective_of_one_rank_alone_ends_the_run_everywhere() -> None:
    def rank(_: int) -> Any:
        return trainer(2).predict(Late(sample=20.0), ids(60, 1))

    _assert_all_named_the_cure(run_ranks(rank, 2, expect_failure=True, deadline_s=20))


def test_collective_in_the_very_last_step_ends_the_run_everywhere() -> None:
    def rank(_: int) -> Any:
        return trainer(2).validate(Late(sample=20.0), ids(21, 1), verbose=False)

    _assert_all_named_the_cure(run_ranks(rank, 2, expect_failure=True, deadline_s=20))


@pytest.mark.parametrize("stage", ["predict", "validate"])
def test_forced_queue_with_a_collective_in_the_first_step_ends_the_run_everywhere(stage: str) -> None:
    def rank(_: int) -> Any:
        the_trainer = trainer(2, HybridBalanceCallback(mode="queue"))
        return getattr(the_trainer, stage)(Late(at=1), ids(20, 1))

    _assert_all_named_the_cure(run_ranks(rank, 2, expect_failure=True, deadline_s=20))


def test_forced_lockstep_takes_a_late_collective_as_it_comes() -> None:
    def rank(_: int) -> list[float]:
        return flat(trainer(2, HybridBalanceCallback(mode="lockstep")).predict(Late(at=5), ids(40, 1)))

    assert run_ranks(rank, 2, deadline_s=20) == [list(map(float, range(40)))] * 2


# --- whose batches lockstep keeps ------------------------------------------------------------------------------------


class Slow(Echo):
    """Rank 1 is three times slower."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        time.sleep(0.002 * len(batch) * (3 if self.global_rank == 1 else 1))  # the emulated device
        self.all_gather(torch.ones(1))
        return batch


class NormInTraining(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.norm.train()  # as in test-time adaptation
        return super().predict_step(batch, batch_idx)


class NormInEvaluation(NormInTraining):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return Slow.predict_step(self, batch, batch_idx)


class PerBatch(Slow):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().predict_step(batch, batch_idx).mean()


class PerBatchOfItems(Slow):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"rows": super().predict_step(batch, batch_idx), "mean": batch.mean()}


def _spans(model: type[Slow], loader: DataLoader[float], **settings: Any) -> tuple[list[tuple[int, int]], str]:
    callback = HybridBalanceCallback(**settings)
    out = trainer(2, callback).predict(model(), loader)
    return [(start, stop) for _, start, stop in callback.plan.cells], repr(out)


FOURS = [(start, start + 4) for start in range(0, 80, 4)]

KEPT: dict[str, tuple[type[Slow], dict[str, Any]]] = {
    "a norm in training": (NormInTraining, {}),
    "batch_dependent": (Slow, {"batch_dependent": True}),
    "one scalar per batch": (PerBatch, {}),
    "a scalar beside rows": (PerBatchOfItems, {}),
}


@pytest.mark.parametrize("kind", KEPT)
def test_lockstep_keeps_the_users_batches(kind: str) -> None:
    model, settings = KEPT[kind]

    def rank(_: int) -> tuple[list[tuple[int, int]], str]:
        return _spans(model, ids(80, 4), **settings)

    class Alone(model):  # type: ignore[valid-type,misc]
        def all_gather(self, *_: Any, **__: Any) -> Any:
            return None

    alone = repr(trainer(1, HybridBalanceCallback(enabled=False)).predict(Alone(), ids(80, 4)))
    for spans, out in run_ranks(rank, 2, deadline_s=20):
        assert spans == FOURS
        assert out == alone


def test_lockstep_keeps_the_batches_of_the_users_own_batch_sampler() -> None:
    batches = [list(range(start, stop)) for start, stop in FOURS]

    def rank(_: int) -> tuple[list[tuple[int, int]], str]:
        return _spans(Slow, DataLoader(Ids(80), batch_sampler=batches))

    assert [spans for spans, _ in run_ranks(rank, 2, deadline_s=20)] == [FOURS] * 2


@pytest.mark.parametrize("model", [Slow, NormInEvaluation])
def test_lockstep_cuts_batches_anew_where_nothing_forbids_it(model: type[Slow]) -> None:
    def rank(_: int) -> tuple[list[tuple[int, int]], str]:
        return _spans(model, ids(80, 4))

    for spans, out in run_ranks(rank, 2, deadline_s=20):
        assert spans != FOURS
        assert min(stop - start for start, stop in spans) < 4
        assert max(stop - start for start, stop in spans) == 4
        assert out == repr(list(torch.arange(80.0, dtype=torch.float64).split(4)))


class Equal(Slow):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        time.sleep(0.002 * len(batch))  # the emulated device
        self.all_gather(torch.ones(1))
        return batch


@pytest.mark.parametrize(("model", "size"), [(Slow, 1), (Slow, 2), (Slow, 3), (Equal, 8)])
def test_max_micro_batch_size_bounds_the_batches_that_lockstep_cuts(model: type[Slow], size: int) -> None:
    def rank(_: int) -> list[tuple[list[tuple[int, int]], str]]:
        by_argument = _spans(model, ids(80, 4), max_micro_batch_size=size)
        return [by_argument, _spans(model, ids(80, 4), config=HybridConfig(max_micro_batch_size=size))]

    for runs in run_ranks(rank, 2, deadline_s=20):
        for spans, out in runs:
            assert out == repr(list(torch.arange(80.0, dtype=torch.float64).split(4)))
            assert spans[:2] == FOURS[:2]  # the first steps are the user's own
            sizes = [stop - start for start, stop in spans[2:]]
            assert max(sizes) <= size
            assert max(sizes) > 4 or size < 4


def test_smaller_micro_batches_lose_no_sample_in_evaluation() -> None:
    def rank(_: int) -> list[float]:
        the_trainer = trainer(2, HybridBalanceCallback(mode="lockstep", max_micro_batch_size=1))
        runs = (the_trainer.validate, the_trainer.test)
        return [run(Steps("step", step_s=0.001), ids(40, 4), verbose=False)[0]["count"] for run in runs]

    assert run_ranks(rank, 2, deadline_s=20) == [[40, 40]] * 2


# --- sharded strategies ----------------------------------------------------------------------------------------------


class Parallel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def configure_model(self) -> None:
        from torch.distributed._composable.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh: Any = self.device_mesh
        parallelize_module(self, mesh["tensor_parallel"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(self, mesh=mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.log("mean", batch[0][:, 0].mean(), sync_dist=True)
        self.log("out", out.mean(), sync_dist=True)
        self.log("count", torch.tensor(float(len(batch[0]))), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


class Alone(Parallel):
    def configure_model(self) -> None:
        pass


def _rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(88.0).reshape(11, 8)), batch_size=2)


def _parallel_trainer(**settings: Any) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    return trainer(4, HybridBalanceCallback(**settings), strategy=strategy)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*experimental")
def test_model_parallel_validates_and_predicts_in_lockstep_like_one_device() -> None:
    def rank(_: int) -> Any:
        the_trainer = _parallel_trainer()
        (values,) = the_trainer.validate(Parallel(), _rows(), verbose=False)
        statistics = balance_of(the_trainer).statistics
        out = torch.cat(the_trainer.predict(Parallel(), _rows()))
        return values, statistics.mode, len(statistics.replicas), out.tolist()

    alone = trainer(1, HybridBalanceCallback(enabled=False))
    (want,) = alone.validate(Alone(), _rows(), verbose=False)
    rows = torch.cat(alone.predict(Alone(), _rows())).tolist()
    for values, mode, replicas, out in run_ranks(rank, 4, deadline_s=60):
        assert values["count"] == 11
        assert values == pytest.approx(want, rel=1e-5)
        assert mode == "lockstep"
        assert replicas == 2
        assert torch.allclose(torch.tensor(out), torch.tensor(rows), rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*experimental")
def test_forced_queue_with_model_parallel_is_a_config_error() -> None:
    def rank(_: int) -> Any:
        return _parallel_trainer(mode="queue").validate(Parallel(), _rows(), verbose=False)

    for text in run_ranks(rank, 4, deadline_s=60, expect_failure=True):
        assert "ConfigError: mode must be 'auto' or 'lockstep' with ModelParallelStrategy" in str(text)
        assert "got 'queue'" in str(text)
