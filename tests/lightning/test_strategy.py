"""The package's own strategy, an elastic world, and the two Lightning packages side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
from torch.utils.data import DataLoader

import lightning_hybrid
from lightning_hybrid import HybridBalanceCallback, HybridDDPStrategy
from lightning_hybrid.lightning.strategy import hybrid_ddp_class
from tests.lightning.scenes import Echo, Ids, Logs, flat, ids, messages, trainer
from tests.ranks import run_ranks

PACKAGES = {"lightning.pytorch": pl, "pytorch_lightning": pytorch_lightning}
OTHER = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning.pytorch"}


def _balancers(a_trainer: Any) -> list[HybridBalanceCallback]:
    return [callback for callback in a_trainer.callbacks if isinstance(callback, HybridBalanceCallback)]


def _trainer(package: Any = pl, **settings: Any) -> Any:
    """A Trainer of two ranks with no callback of ours."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return package.Trainer(**(defaults | settings))


# --- the strategy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: "hybrid_ddp", lambda: HybridDDPStrategy()], ids=["by name", "as object"])
def test_strategy_adds_the_callback_once(make: Any) -> None:
    def rank(_: int) -> tuple[int, list[float], list[float], float, int]:
        the_trainer = _trainer(strategy=make())
        first, second = (flat(the_trainer.predict(Echo(), ids(n))) for n in (7, 9))
        (values,) = the_trainer.validate(Logs(), ids(7), verbose=False)
        (balancer,) = _balancers(the_trainer)
        return len(_balancers(the_trainer)), first, second, values["count"], len(balancer.statistics.replicas)

    want = (1, list(map(float, range(7))), list(map(float, range(9))), 7.0, 2)
    assert run_ranks(rank, 2, deadline_s=20) == [want] * 2


@pytest.mark.parametrize("make", [lambda: "hybrid_ddp", lambda: HybridDDPStrategy()], ids=["by name", "as object"])
def test_strategy_leaves_the_users_callback_alone(make: Any) -> None:
    def rank(_: int) -> tuple[bool, list[float]]:
        users = HybridBalanceCallback(mode="lockstep")
        with messages() as said:
            the_trainer = trainer(2, users, strategy=make())
            out = flat(the_trainer.predict(Echo(), ids(7)))
        assert said == []
        assert users.statistics.mode == "lockstep"
        return _balancers(the_trainer) == [users], out

    assert run_ranks(rank, 2, deadline_s=20) == [(True, list(map(float, range(7))))] * 2


def test_strategy_takes_ddps_arguments_and_trains() -> None:
    import torch

    class Fits(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.unused = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch.float().unsqueeze(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def rank(_: int) -> tuple[float, bool]:
        strategy = HybridDDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
        the_trainer = _trainer(strategy=strategy, max_epochs=1)
        the_trainer.fit(Fits(), ids(8), ids(7))
        return the_trainer.callback_metrics["count"].item(), isinstance(strategy, pl.strategies.DDPStrategy)

    assert run_ranks(rank, 2, deadline_s=20) == [(7.0, True)] * 2


def test_strategy_does_nothing_where_everything_is_switched_off() -> None:
    def rank(_: int) -> list[float]:
        return flat(_trainer(strategy="hybrid_ddp").predict(Echo(), ids(7)))

    assert run_ranks(rank, 2, deadline_s=20, env={"LIGHTNING_HYBRID": "0"}) == [[0, 2, 4, 6], [1, 3, 5]]


def test_registered_strategy_says_what_it_is() -> None:
    assert "hybrid_ddp" in pl.strategies.StrategyRegistry
    lightning_hybrid.HybridDDPStrategy  # noqa: B018 - a use after the import of the second package registers there too
    assert "hybrid_ddp" in pytorch_lightning.strategies.StrategyRegistry


# --- elastic worlds --------------------------------------------------------------------------------------------------

ELASTIC = {"TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}


@pytest.mark.parametrize("devices", [1, 4])
def test_elastic_job_goes_on_with_another_number_of_ranks_than_devices(devices: int) -> None:
    def stock(_: int) -> Any:
        return _trainer(devices=devices, strategy="ddp").predict(Echo(), ids(7))

    def rank(_: int) -> tuple[list[float], int, int, float]:
        the_trainer = _trainer(devices=devices, strategy="hybrid_ddp")
        out = flat(the_trainer.predict(Echo(), ids(7)))
        (values,) = the_trainer.validate(Logs(), ids(7), verbose=False)
        (balancer,) = _balancers(the_trainer)
        return out, the_trainer.world_size, len(balancer.statistics.replicas), values["count"]

    if devices == 4:
        for text in run_ranks(stock, 2, env=ELASTIC, deadline_s=20, expect_failure=True):
            assert "does not match the world size (2)" in str(text)
    assert run_ranks(rank, 2, env=ELASTIC, deadline_s=12) == [(list(map(float, range(7))), 2, 2, 7.0)] * 2


def test_elastic_job_with_the_right_number_of_devices_is_as_ever() -> None:
    def rank(_: int) -> list[float]:
        return flat(_trainer(devices=2, strategy="hybrid_ddp").predict(Echo(), ids(7)))

    assert run_ranks(rank, 2, env=ELASTIC, deadline_s=20) == [list(map(float, range(7)))] * 2


# --- two packages ----------------------------------------------------------------------------------------------------


class Foreign(pytorch_lightning.LightningModule):
    """A module of the other package."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch.mean(), sync_dist=True)
        self.log("count", float(len(batch)), reduce_fx="sum", sync_dist=True)


class Counting(HybridBalanceCallback):
    """Counts its hooks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self._count("setup")
        super().setup(*args, **kwargs)

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._count("batch")
        super().on_predict_batch_end(*args, **kwargs)

    def on_predict_end(self, *args: Any, **kwargs: Any) -> None:
        self._count("end")
        super().on_predict_end(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._count("teardown")
        super().teardown(*args, **kwargs)


@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_callback_works_in_a_trainer_of_the_other_package(mode: str) -> None:
    def rank(_: int) -> tuple[list[list[float]], dict[str, int], list[dict[str, float]]]:
        callback = Counting(mode=mode)
        the_trainer = trainer(2, callback, package=pytorch_lightning)
        batches = [the_trainer.predict(Foreign(), ids(n)) for n in (1, 2, 7, 8)]
        values = the_trainer.validate(Foreign(), ids(7), verbose=False)
        return [flat(b) for b in batches], callback.calls, values

    outcomes = run_ranks(rank, 2, deadline_s=20)
    for found, calls, values in outcomes:
        assert found == [list(map(float, range(n))) for n in (1, 2, 7, 8)]
        assert calls["end"] == 4
        assert calls["setup"] == calls["teardown"] == 5  # validate too
        assert values == [{"mean": 3.0, "count": 7.0}]
    assert sum(calls["batch"] for _, calls, _ in outcomes) >= 1 + 1 + 4 + 4


def test_writer_of_the_other_package_gets_indices_in_its_own_trainer() -> None:
    class Writer(pytorch_lightning.callbacks.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch")
            self.pairs: list[tuple[int, float]] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
        ) -> None:
            self.pairs += zip(indices, prediction.tolist(), strict=True)

    class Squares(Ids):
        def __getitem__(self, i: int) -> float:
            return float(i * i)

    def rank(_: int) -> list[tuple[int, float]]:
        writer = Writer()
        the_trainer = trainer(2, writer, package=pytorch_lightning)
        the_trainer.predict(Foreign(), DataLoader(Squares(7), batch_size=2, shuffle=True))
        return writer.pairs

    pairs = [pair for rank in run_ranks(rank, 2, deadline_s=20) for pair in rank]
    assert sorted(pairs) == [(i, float(i * i)) for i in range(7)]


@pytest.mark.parametrize("package", PACKAGES)
def test_strategy_class_of_a_package_works_in_its_trainer(package: str) -> None:
    def rank(_: int) -> tuple[list[float], int]:
        the_trainer = _trainer(PACKAGES[package], strategy=hybrid_ddp_class(package)())
        model: Any = Echo() if package == "lightning.pytorch" else Foreign()
        return flat(the_trainer.predict(model, ids(7))), len(_balancers(the_trainer))

    assert run_ranks(rank, 2, deadline_s=20) == [(list(map(float, range(7))), 1)] * 2


@pytest.mark.parametrize("package", PACKAGES)
def test_strategy_of_one_package_in_the_others_trainer_raises_an_error_that_names_both(package: str) -> None:
    foreign = hybrid_ddp_class(OTHER[package])()
    with pytest.raises(Exception, match="strategy") as caught:
        _trainer(PACKAGES[package], strategy=foreign)
    assert "lightning.pytorch" in str(caught.value)
    assert "pytorch_lightning" in str(caught.value)


def test_strategy_is_known_by_name_in_the_other_package_too() -> None:
    def rank(_: int) -> list[float]:
        return flat(_trainer(pytorch_lightning, strategy="hybrid_ddp").predict(Foreign(), ids(7)))

    lightning_hybrid.HybridBalanceCallback  # noqa: B018 - registers for every package that is imported
    assert run_ranks(rank, 2, deadline_s=20) == [list(map(float, range(7)))] * 2


def test_users_subclass_of_trainer_is_recognised() -> None:
    class Own(pytorch_lightning.Trainer):
        pass

    class Module:
        Trainer = Own

    assert flat(trainer(1, package=Module).predict(Foreign(), ids(5))) == [0, 1, 2, 3, 4]


ALONE = """
import sys
import pytorch_lightning
from lightning_hybrid import HybridBalanceCallback, HybridDDPStrategy
assert issubclass(HybridBalanceCallback, pytorch_lightning.Callback), HybridBalanceCallback.__mro__
assert issubclass(HybridDDPStrategy, pytorch_lightning.strategies.DDPStrategy), HybridDDPStrategy.__mro__
class Echo(pytorch_lightning.LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch
trainer = pytorch_lightning.Trainer(accelerator="cpu", devices=1, strategy="hybrid_ddp", logger=False,
    enable_progress_bar=False, enable_checkpointing=False)
out = trainer.predict(Echo(), __import__("torch").utils.data.DataLoader(range(5), batch_size=2))
assert [b.tolist() for b in out] == [[0, 1], [2, 3], [4]], out
print("lightning" in sys.modules)
"""


def test_package_that_the_user_does_not_use_is_never_imported(tmp_path: Path) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(Path(lightning_hybrid.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "False"
