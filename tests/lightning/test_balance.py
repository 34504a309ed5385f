"""Shares follow the speeds, and equal ranks keep equal shares."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from lightning_hybrid import HybridBalanceCallback
from tests.lightning.scenes import Echo, Logs, flat, ids, trainer
from tests.ranks import run_ranks

# Lightning's `all_gather` calls what torch wants to end
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")


class Emulated(Echo):
    """Each sample takes ``sample_s``, times the factor of the rank, times the cost of the sample."""

    def __init__(self, factors: dict[int, float], sample_s: float = 0.05, *, collective: bool = False) -> None:
        super().__init__()
        self.factors, self.sample_s, self.collective = factors, sample_s, collective
        self.loop_s = 0.0

    def cost(self, sample: float) -> float:
        return 1.0

    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        cost = sum(self.cost(sample) for sample in batch.tolist())
        time.sleep(self.sample_s * cost * self.factors.get(self.global_rank, 1.0))  # the emulated device
        if self.collective:
            self.all_gather(torch.ones(1))
        return batch

    def on_predict_start(self) -> None:
        self.start_s = time.perf_counter()

    def on_predict_epoch_end(self) -> None:
        self.loop_s = time.perf_counter() - self.start_s


def _run(model: Emulated, n: int = 40, batch_size: int = 1, **settings: Any) -> tuple[list[float], Any]:
    """The predictions and the replicas' records."""
    loader_settings = {"num_workers": settings.pop("num_workers", 0)}
    callback = HybridBalanceCallback(**settings)
    out = trainer(2, callback).predict(model, ids(n, batch_size, **loader_settings))
    return flat(out), callback.statistics.replicas if callback.statistics else None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rank_that_is_three_times_slower_gets_a_quarter(num_workers: int) -> None:
    def rank(_: int) -> Any:
        return _run(Emulated({1: 3.0}), num_workers=num_workers)

    for out, replicas in run_ranks(rank, 2, deadline_s=20):
        assert out == list(map(float, range(40)))
        assert 26 <= replicas[0].samples <= 34
        assert 6 <= replicas[1].samples <= 14


@pytest.mark.parametrize("num_workers", [0, 2])
def test_equal_ranks_keep_equal_shares(num_workers: int) -> None:
    def rank(_: int) -> Any:
        return _run(Emulated({}, sample_s=0.03), num_workers=num_workers)

    for out, replicas in run_ranks(rank, 2, deadline_s=20):
        assert out == list(map(float, range(40)))
        assert [abs(replica.samples - 20) <= 2 for replica in replicas] == [True, True]


def test_slow_rank_makes_the_loop_shorter_than_stocks_by_a_quarter_at_least() -> None:
    def rank(_: int) -> tuple[float, float]:
        stock, balanced = Emulated({1: 3.0}, 0.03), Emulated({1: 3.0}, 0.03)
        _run(stock, enabled=False)
        _run(balanced)
        return stock.loop_s, balanced.loop_s

    loops = run_ranks(rank, 2, deadline_s=45)
    assert max(ours for _, ours in loops) < 0.77 * max(stock for stock, _ in loops)


def test_slow_rank_is_the_one_that_is_named_though_a_collective_makes_the_other_wait() -> None:
    def rank(_: int) -> Any:
        callback = HybridBalanceCallback()
        out = trainer(2, callback).predict(Emulated({1: 3.0}, 0.005, collective=True), ids(160, 8))
        found = callback.statistics
        speeds = [replica.speed_per_s for replica in found.replicas]
        samples = [replica.samples for replica in found.replicas]
        return flat(out), found.mode, speeds, samples, [r.id for r in callback.recommendations]

    zero, one = run_ranks(rank, 2, deadline_s=20)
    for out, mode, speeds, samples, _ in (zero, one):
        assert out == list(map(float, range(160)))
        assert mode == "lockstep"
        assert 0.2 < speeds[1] / speeds[0] < 0.6
        assert samples[1] < 0.5 * samples[0]
    assert zero[4] == ["straggler/predict/replica1"]
    assert one[4] == []


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_equal_ranks_name_nobody(mode: str) -> None:
    def rank(_: int) -> Any:
        callback = HybridBalanceCallback(mode=mode)
        trainer(2, callback).predict(Emulated({}, 0.01), ids(60, 2))
        return callback.recommendations

    assert run_ranks(rank, 2, deadline_s=20) == [(), ()]


def test_rank_that_only_warmed_up_is_not_called_a_straggler() -> None:
    class WarmsUp(Emulated):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            time.sleep(0.4 if self.global_rank == 0 and batch_idx == 0 else 0.0)  # as compilation does
            return super().predict_step(batch, batch_idx)

    def rank(_: int) -> Any:
        callback = HybridBalanceCallback()
        trainer(2, callback).predict(WarmsUp({}, 0.003), ids(60, 2))
        return [found.id for found in callback.recommendations]

    assert run_ranks(rank, 2, deadline_s=20) == [[], []]


def test_samples_that_cost_ten_times_as_much_are_not_all_on_one_rank() -> None:
    class Costly(Emulated):
        def cost(self, sample: float) -> float:
            return 10.0 if sample < 10 else 1.0

    def rank(_: int) -> Any:
        callback = HybridBalanceCallback()
        model = Costly({}, sample_s=0.01)
        out = trainer(2, callback).predict(model, ids(40, 1))
        costly = [sum(1 for r, start, _ in callback.plan.cells if r == replica and start < 10) for replica in (0, 1)]
        return flat(out), costly, [replica.busy_s for replica in callback.statistics.replicas]

    for out, costly, busy_s in run_ranks(rank, 2, deadline_s=20):
        assert out == list(map(float, range(40)))
        assert sum(costly) == 10
        assert min(costly) >= 3
        assert min(busy_s) > 0.5 * max(busy_s)


def test_share_follows_a_rank_that_slows_down_during_the_run() -> None:
    class Tires(Emulated):
        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            if batch_idx == 8:
                self.factors = {1: 6.0}
            return super().predict_step(batch, batch_idx)

    def rank(_: int) -> Any:
        return _run(Tires({}, 0.01), 80)

    for out, replicas in run_ranks(rank, 2, deadline_s=20):
        assert out == list(map(float, range(80)))
        assert 8 < replicas[1].samples <= 26  # 8 + a seventh of the other 64 is 17; half would be 40


def test_short_pass_costs_little_more_than_stocks() -> None:
    def rank(_: int, enabled: bool) -> float:
        the_trainer, seconds = trainer(2, HybridBalanceCallback(enabled=enabled)), []
        for _pass in range(7):
            start_s = time.perf_counter()
            the_trainer.validate(Logs(), ids(7), verbose=False)
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds)

    stock_s = max(run_ranks(rank, 2, False, deadline_s=20))
    ours_s = max(run_ranks(rank, 2, True, deadline_s=20))
    assert ours_s - stock_s < 0.1
