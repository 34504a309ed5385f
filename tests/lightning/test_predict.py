"""Results are complete, in order, on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid import HybridBalanceCallback, ResultsError
from tests.lightning.scenes import Echo, Ids, balance_of, flat, ids, trainer
from tests.ranks import run_ranks

SIZES = (0, 1, 2, 7, 8, 101)


@pytest.mark.parametrize("mode", ["auto", "queue", "lockstep"])
def test_every_rank_gets_the_one_device_list(mode: str) -> None:
    def rank(_: int) -> list[Any]:
        the_trainer = trainer(2, HybridBalanceCallback(mode=mode))  # the second and later runs use it again
        return [the_trainer.predict(Echo(), ids(n)) for n in SIZES]

    for batches in run_ranks(rank, 2):
        for n, got in zip(SIZES, batches, strict=True):
            want = trainer(1).predict(Echo(), ids(n)) or []
            assert [b.tolist() for b in got or []] == [b.tolist() for b in want], n


@pytest.mark.parametrize("mode", ["auto", "queue", "lockstep"])
def test_workers_change_nothing(mode: str) -> None:
    def rank(_: int) -> list[float]:
        return flat(trainer(3, HybridBalanceCallback(mode=mode)).predict(Echo(), ids(61, num_workers=2)))

    assert run_ranks(rank, 3) == [list(map(float, range(61)))] * 3


def test_a_slow_rank_gets_fewer_batches_and_nothing_changes_in_the_result() -> None:
    class Slow(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            time.sleep(0.03 if self.global_rank == 1 else 0.005)  # the emulated device: its speed is the subject
            return batch

    def rank(_: int) -> tuple[list[float], list[int]]:
        the_trainer = trainer(2)
        out = flat(the_trainer.predict(Slow(), ids(80)))
        return out, [r.samples for r in balance_of(the_trainer).statistics.replicas]

    for out, shares in run_ranks(rank, 2):
        assert out == list(map(float, range(80)))
        assert shares[0] > 2 * shares[1] > 0


def test_shuffled_loader_returns_loader_order_and_rows_can_follow_the_dataset() -> None:
    def rank(r: int) -> tuple[list[float], list[float], list[int]]:
        torch.manual_seed(r)  # ranks whose generators differ, as without seed_everything
        callback = HybridBalanceCallback(order="dataset")
        out = trainer(2, callback).predict(Echo(), ids(9, shuffle=True))
        starts = [start for _, start, _ in callback.plan.cells]
        return flat(out), [float(row) for row in callback.rows()], starts

    (out, rows, starts), (other, _, _) = run_ranks(rank, 2)
    assert out == other
    assert sorted(out) == list(map(float, range(9)))
    assert out != sorted(out)
    assert rows == list(map(float, range(9)))
    assert starts == [0, 2, 4, 6, 8]


def test_shuffled_order_is_what_rank_zero_would_draw_alone() -> None:
    def alone() -> list[float]:
        torch.manual_seed(5)
        return flat(trainer(1).predict(Echo(), ids(9, shuffle=True)))

    def rank(r: int) -> list[float]:
        torch.manual_seed(5 + r)
        return flat(trainer(2).predict(Echo(), ids(9, shuffle=True)))

    assert run_ranks(rank, 2)[0] == alone()


def test_gather_says_who_gets_the_list() -> None:
    def rank(_: int) -> tuple[list[float], list[float]]:
        zero = flat(trainer(2, HybridBalanceCallback(gather="rank_zero")).predict(Echo(), ids(9)))
        none = flat(trainer(2, HybridBalanceCallback(gather="none")).predict(Echo(), ids(9)))
        return zero, none

    (zero0, none0), (zero1, none1) = run_ranks(rank, 2)
    assert zero0 == list(map(float, range(9)))
    assert zero1 != zero0
    assert sorted(none0 + none1) == list(map(float, range(9)))


def test_results_are_ordinary_tensors() -> None:
    out = trainer(1).predict(Echo(), ids(4))
    assert not any(t.is_inference() for t in out)
    out[0] += 1


@pytest.mark.parametrize(("limit", "want"), [(1, 4), (2, 8), (0.5, 4), (100, 9), (1.0, 9)])
def test_limits_count_batches_of_all_ranks(limit: float, want: int) -> None:
    def rank(_: int) -> list[float]:
        return flat(trainer(2, limit_predict_batches=limit).predict(Echo(), ids(9)))

    assert run_ranks(rank, 2) == [list(map(float, range(want)))] * 2


def test_drop_last_is_kept() -> None:
    def rank(_: int) -> list[float]:
        return flat(trainer(2).predict(Echo(), ids(9, drop_last=True)))

    assert run_ranks(rank, 2) == [list(map(float, range(8)))] * 2


def test_batches_that_the_dataset_makes_are_cells() -> None:
    class Batches(Ids):
        def __getitem__(self, i: int) -> Any:
            return torch.full((3,), float(i))

    def rank(_: int) -> list[float]:
        return flat(trainer(2).predict(Echo(), DataLoader(Batches(5), batch_size=None)))

    assert run_ranks(rank, 2) == [[float(i) for i in range(5) for _ in range(3)]] * 2


def test_outputs_of_other_kinds_stay_in_place() -> None:
    class Kinds(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            first = int(batch[0])
            if first == 0:
                return None
            if first == 2:
                return {"x": batch, "name": [f"s{int(i)}" for i in batch]}
            return [str(first)] if first == 4 else torch.ones(2 + first, 1)

    def rank(_: int) -> str:
        return repr(trainer(2).predict(Kinds(), ids(8)))

    alone = repr(trainer(1).predict(Kinds(), ids(8)))
    assert run_ranks(rank, 2) == [alone] * 2


def test_return_predictions_false_returns_none_and_rows_say_why_they_are_empty() -> None:
    callback = HybridBalanceCallback()
    assert trainer(1, callback).predict(Echo(), ids(4), return_predictions=False) is None
    with pytest.raises(ResultsError, match="return_predictions"):
        callback.rows()


def test_after_an_error_the_trainer_is_as_it_was_and_runs_again() -> None:
    class Boom(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            raise RuntimeError("boom")

    the_trainer = trainer(1)
    with pytest.raises(RuntimeError, match="boom"):
        the_trainer.predict(Boom(), ids(4))
    assert "predict_step" not in vars(the_trainer.strategy)
    assert "_prepare_dataloader" not in vars(the_trainer._data_connector)
    assert flat(the_trainer.predict(Echo(), ids(4))) == [0, 1, 2, 3]


def test_an_error_on_one_rank_is_the_first_error_shown() -> None:
    class Boom(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            if 6.0 in batch.tolist():
                raise ValueError("bad sample 6")
            return batch

    def rank(_: int) -> Any:
        return trainer(2).predict(Boom(), ids(20))

    texts = [str(out) for out in run_ranks(rank, 2, expect_failure=True, deadline_s=60)]
    assert any("bad sample 6" in text for text in texts)


def test_disabled_callback_leaves_stock_behaviour(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(_: int) -> list[float]:
        return flat(trainer(2, HybridBalanceCallback(enabled=False)).predict(Echo(), ids(7)))

    assert run_ranks(rank, 2) == [[0, 2, 4, 6], [1, 3, 5]]
    monkeypatch.setenv("LIGHTNING_HYBRID", "0")

    def switched_off(_: int) -> list[float]:
        return flat(trainer(2).predict(Echo(), ids(7)))

    assert run_ranks(switched_off, 2) == [[0, 2, 4, 6], [1, 3, 5]]


def test_fast_dev_run_runs_one_batch_per_rank_without_redistribution() -> None:
    def rank(_: int) -> list[float]:
        return flat(trainer(2, fast_dev_run=True).predict(Echo(), ids(9)))

    assert run_ranks(rank, 2) == [[0, 1], [2, 3]]
