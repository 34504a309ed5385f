"""When the links between ranks are measured under a Trainer, and what comes of it; with real ranks."""

from __future__ import annotations

import csv
import datetime
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_hybrid import HybridBalanceCallback, HybridConfig
from tests.lightning.scenes import Echo, Logs, Stream, balance_of, flat, ids, trainer
from tests.ranks import run_ranks


def found(a_trainer: Any) -> Any:
    return balance_of(a_trainer).communication


def test_every_rank_holds_the_same_and_a_trainer_measures_once() -> None:
    def rank(_: int) -> list[str]:
        one, other = trainer(2), trainer(2)
        one.predict(Echo(), ids(6))
        first = found(one)
        one.validate(Logs(), ids(6, num_workers=2), verbose=False)
        one.test(Logs(), [ids(6), ids(4)], verbose=False)
        assert found(one) is first
        other.predict(Echo(), ids(6))
        assert found(other) is not first
        return [first.to_json(), found(other).to_json()]

    zero, one = run_ranks(rank, 2, deadline_s=30)

    assert zero == one
    assert '"depth":"quick","backend":"gloo"' in zero[0]


def test_all_pairs_are_measured_when_asked_for() -> None:
    def rank(_: int) -> Any:
        the_trainer = trainer(4, HybridBalanceCallback(comm_probe="full"))
        assert flat(the_trainer.predict(Echo(), ids(8))) == list(map(float, range(8)))
        return found(the_trainer)

    states = run_ranks(rank, 4, deadline_s=30)

    assert all(state == states[0] for state in states)
    assert sorted((link.first, link.second) for link in states[0].pairs) == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3),
    ]  # fmt: skip


def test_nothing_is_measured_where_nothing_is_shared() -> None:
    def rank(_: int) -> list[Any]:
        states = []
        for callback, options in (
            (HybridBalanceCallback(comm_probe="off"), {}),
            (HybridBalanceCallback(), {"fast_dev_run": 2}),
            (HybridBalanceCallback(), {"use_distributed_sampler": False}),
        ):
            the_trainer = trainer(2, callback, **options)
            the_trainer.predict(Echo(), ids(6))
            states.append(found(the_trainer))
        return states

    assert run_ranks(rank, 2, deadline_s=30) == [[None] * 3] * 2


def test_one_device_has_no_links() -> None:
    the_trainer = trainer(1)
    the_trainer.predict(Echo(), ids(6))

    assert found(the_trainer) is None


def test_claimed_streams_are_shared_too() -> None:
    def rank(_: int) -> bool:
        the_trainer = trainer(2, HybridBalanceCallback(iterable="claim"))
        the_trainer.predict(Echo(), torch.utils.data.DataLoader(Stream(6), batch_size=2))
        return found(the_trainer) is not None

    assert run_ranks(rank, 2, deadline_s=30) == [True, True]


def test_in_fit_it_waits_for_the_first_validation_after_the_sanity_check() -> None:
    class Fits(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.known: list[bool] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.known.append(found(self.trainer) is not None)
            return self.layer(batch.float().unsqueeze(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def rank(_: int) -> list[bool]:
        model = Fits()
        trainer(2, max_epochs=2, num_sanity_val_steps=1).fit(model, ids(4), ids(6))
        return model.known

    assert run_ranks(rank, 2, deadline_s=30) == [[False, True]] * 2


class Late(pl.Callback):
    """Rank 1 comes to the measuring only after rank 0 has left it."""

    KEY = "rank 0 has left"

    def __init__(self, rank: int, *, is_before: bool) -> None:
        self.rank, self.is_before = rank, is_before

    def on_predict_start(self, *_: Any) -> None:
        store = dist.distributed_c10d._get_default_store()
        if self.rank == 0 and not self.is_before:
            store.set(self.KEY, "")
        if self.rank == 1 and self.is_before:
            store.wait([self.KEY], datetime.timedelta(seconds=20))


def test_nobody_measures_where_one_rank_is_not_ready_in_time() -> None:
    def rank(rank: int) -> tuple[Any, list[float]]:
        callback = HybridBalanceCallback(config=HybridConfig(comm_probe_patience_s=0.05))
        the_trainer = trainer(2, Late(rank, is_before=True), callback, Late(rank, is_before=False))
        out = the_trainer.predict(Echo(), ids(6))
        return found(the_trainer), flat(out)

    assert run_ranks(rank, 2, deadline_s=40) == [(None, [0, 1, 2, 3, 4, 5])] * 2


@pytest.mark.parametrize(("of_zero", "of_one", "is_known"), [("quick", "off", True), ("off", "full", False)])
def test_ranks_of_different_options_follow_rank_zero(of_zero: str, of_one: str, is_known: bool) -> None:
    def rank(rank: int) -> bool:
        os.environ["LIGHTNING_HYBRID_COMM_PROBE"] = (of_zero, of_one)[rank]
        the_trainer = trainer(2)
        the_trainer.predict(Echo(), ids(6))
        return found(the_trainer) is not None

    assert run_ranks(rank, 2, deadline_s=30) == [is_known] * 2


class Talks(Echo):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        dist.all_reduce(torch.ones(1))
        return batch


@pytest.mark.parametrize(("model", "mode"), [(Talks, "lockstep"), (Echo, "queue")])
def test_links_are_logged_once_and_collectives_where_steps_have_them(model: Any, mode: str, tmp_path: Path) -> None:
    def rank(_: int) -> list[float | None]:
        the_trainer = trainer(2, logger=CSVLogger(tmp_path, name="csv", version="run"), log_every_n_steps=1)
        the_trainer.predict(model(), ids(12))
        the_trainer.predict(model(), ids(12))
        statistics = balance_of(the_trainer).statistics
        assert statistics.mode == mode
        return [record.collective_frac for record in statistics.replicas]

    fracs = run_ranks(rank, 2, deadline_s=30)
    rows = list(csv.DictReader((tmp_path / "csv" / "run" / "metrics.csv").read_text().splitlines()))
    links = [row["performance/predict/all_reduce_latency_us"] for row in rows]

    assert fracs[0] == fracs[1]
    assert [float(value) > 0 for value in links if value] == [True]
    key = "performance/predict/communication_frac/replica1"
    if mode == "lockstep":
        assert all(0 < frac < 1 for frac in fracs[0])
        assert any(row[key] for row in rows)
    else:
        assert fracs[0] == [None, None]
        assert key not in rows[0]
