from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import pytorch_lightning
from lightning.pytorch.loggers import CSVLogger

from lightning_hybrid import ConfigError, DeviceStateMonitor, HybridBalanceCallback
from tests.lightning.devices import (
    STAGES,
    Counting,
    Model,
    csv_columns,
    csv_logger,
    monitored,
    run,
    steps_of,
    tensorboard,
    tensorboard_columns,
    threads_of_ours,
    wait_until,
)
from tests.lightning.scenes import ids, messages

# the model validates in other runs
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

KNOWN = (("devices", "power_w"), ("device_health", "active"))
"""What the counting device tells."""


def fresh_reading(module: Any, _: int) -> None:
    """A step that lasts until the device has been read anew and the reading is there."""
    monitor = next(each for each in module.trainer.callbacks if isinstance(each, DeviceStateMonitor))
    seen = monitor.states[0].power_w or 0.0
    wait_until(lambda: (monitor.states[0].power_w or 0.0) > seen)


def fast() -> DeviceStateMonitor:
    return DeviceStateMonitor(device_period_s=0.002, most_overhead_frac=1.0, probe=Counting())


# --- what is logged, and where on the x axis -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["CSV", "TensorBoard"])
def test_every_stage_is_logged_at_its_own_steps(kind: str, tmp_path: Path) -> None:
    trainer = monitored(1, fast(), logger=(csv_logger if kind == "CSV" else tensorboard)(tmp_path))
    for stage in STAGES:
        run(trainer, stage, Model(fresh_reading), ids(4))

    columns = (csv_columns if kind == "CSV" else tensorboard_columns)(tmp_path)
    assert {stage: steps_of(columns, f"devices/{stage}/power_w/rank0") for stage in STAGES} == {
        "fit": [1, 2],
        "validate": [2, 4],
        "test": [2, 4],
        "predict": [2, 4],
    }
    tags = {f"{kind}/{stage}/{name}/rank0" for stage in STAGES for kind, name in KNOWN}
    assert {key for key in columns if key.startswith("device")} == tags


def test_batches_that_no_reading_falls_into_are_logged_once_at_the_end(tmp_path: Path) -> None:
    trainer = monitored(1, DeviceStateMonitor(device_period_s=1000.0, probe=Counting()), logger=csv_logger(tmp_path))
    run(trainer, "predict", Model(lambda module, _: wait_until(lambda: _has_read(module))), ids(20))

    assert csv_columns(tmp_path)["devices/predict/power_w/rank0"] == [(2, 1.0), (20, 1.0)]


def _has_read(module: Any) -> bool:
    return module.trainer.callbacks[0].states[0].power_w is not None


def test_a_run_shorter_than_the_first_reading_waits_a_moment_for_it(tmp_path: Path) -> None:
    trainer = monitored(1, DeviceStateMonitor(), logger=csv_logger(tmp_path), log_every_n_steps=50)
    run(trainer, "predict", Model(), ids(2))

    assert steps_of(csv_columns(tmp_path), "devices/predict/process_memory_gib/rank0") == [2]


def test_the_interval_is_the_trainers(tmp_path: Path) -> None:
    trainer = monitored(1, fast(), logger=csv_logger(tmp_path), log_every_n_steps=3)
    run(trainer, "validate", Model(fresh_reading), ids(14))
    run(trainer, "fit", Model(fresh_reading), ids(14))

    columns = csv_columns(tmp_path)
    assert steps_of(columns, "devices/validate/power_w/rank0") == [6, 12, 14]
    assert steps_of(columns, "devices/fit/power_w/rank0") == [3, 6, 7]


def test_the_axis_counts_on_over_runs_of_one_trainer(tmp_path: Path) -> None:
    trainer = monitored(1, fast(), logger=csv_logger(tmp_path))
    for stage in ("validate", "predict", "validate"):
        run(trainer, stage, Model(fresh_reading), ids(5))

    columns = csv_columns(tmp_path)
    assert steps_of(columns, "devices/validate/power_w/rank0") == [2, 4, 5, 7, 9, 10]
    assert steps_of(columns, "devices/predict/power_w/rank0") == [2, 4, 5]


def test_validation_inside_fit_is_logged_at_the_global_step_and_goes_on_from_there(tmp_path: Path) -> None:
    trainer = monitored(1, fast(), logger=csv_logger(tmp_path), max_epochs=3)
    run(trainer, "fit", Model(fresh_reading), ids(4), ids(6))
    run(trainer, "validate", Model(fresh_reading), ids(2))

    columns = csv_columns(tmp_path)
    assert steps_of(columns, "devices/fit/power_w/rank0") == [1, 2, 3, 4, 5, 6]
    assert steps_of(columns, "devices/validate/power_w/rank0") == [2, 4, 6, 8]


def test_accumulated_gradients_give_one_point_per_global_step(tmp_path: Path) -> None:
    trainer = monitored(1, fast(), logger=csv_logger(tmp_path), accumulate_grad_batches=2)
    run(trainer, "fit", Model(fresh_reading), ids(12))

    assert steps_of(csv_columns(tmp_path), "devices/fit/power_w/rank0") == [0, 1, 2, 3]


# --- loggers and Trainers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_logger_nothing_is_logged_and_the_state_is_there(stage: str, tmp_path: Path) -> None:
    monitor = fast()
    run(monitored(1, monitor, logger=False, default_root_dir=tmp_path), stage, Model(fresh_reading), ids(4))

    assert monitor.states[0].active is True
    assert list(tmp_path.iterdir()) == []


def test_all_loggers_get_the_same(tmp_path: Path) -> None:
    trainer = monitored(1, fast(), logger=[csv_logger(tmp_path), tensorboard(tmp_path)])
    run(trainer, "test", Model(fresh_reading), ids(6))

    columns = csv_columns(tmp_path)
    assert columns == tensorboard_columns(tmp_path)
    assert len(columns["devices/test/power_w/rank0"]) == 3


def test_a_logger_that_raises_ends_neither_the_run_nor_the_other_logger(tmp_path: Path) -> None:
    class Broken(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise ConnectionError("the server is away")

    with messages() as said:
        trainer = monitored(1, fast(), logger=[Broken(tmp_path / "broken"), csv_logger(tmp_path)])
        run(trainer, "predict", Model(fresh_reading), ids(6))

    assert [text.partition(":")[0] for text in said] == [
        "Broken gets no more figures and recommendations of this package"
    ]
    assert steps_of(csv_columns(tmp_path), "devices/predict/power_w/rank0") == [2, 4, 6]


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    trainer = monitored(1, fast(), logger=csv_logger(tmp_path), fast_dev_run=True)
    for stage in STAGES:
        run(trainer, stage, Model(fresh_reading), ids(4))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
def test_trainers_of_both_packages(package: Any, tmp_path: Path) -> None:
    class Plain(package.LightningModule):  # type: ignore[misc,name-defined]
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    logger = package.loggers.CSVLogger(tmp_path, name="csv", version="run")
    run(monitored(1, DeviceStateMonitor(), package=package, logger=logger), "predict", Plain(), ids(4))

    assert steps_of(csv_columns(tmp_path), "devices/predict/process_memory_gib/rank0")[-1] == 4


# --- beside the other callback ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False], ids=["monitor first", "balance first"])
@pytest.mark.parametrize("stage", STAGES)
def test_with_the_balance_callback_one_sampler_reads_and_devices_are_logged_once(
    stage: str, is_first: bool, tmp_path: Path
) -> None:
    running: list[list[str]] = []

    def during(module: Any, batch_idx: int) -> None:
        fresh_reading(module, batch_idx)
        running.append(threads_of_ours())

    callbacks = [fast(), HybridBalanceCallback()]
    trainer = monitored(1, None, *(callbacks if is_first else callbacks[::-1]), logger=csv_logger(tmp_path))
    run(trainer, stage, Model(during), ids(4))

    columns = csv_columns(tmp_path)
    assert running[-1].count("lightning_hybrid-sampler") == 1
    assert [key for key in columns if key.startswith("devices/") and "/rank" not in key] == []
    assert steps_of(columns, f"devices/{stage}/power_w/rank0")[-1] == (2 if stage == "fit" else 4)
    if stage != "fit":
        axis = steps_of(columns, f"balance/{stage}/throughput_samples_per_s")
        assert set(steps_of(columns, f"devices/{stage}/power_w/rank0")) <= set(axis)
    wait_until(lambda: threads_of_ours() == [])


def test_a_second_monitor_has_no_effect_and_says_so(tmp_path: Path) -> None:
    first, second = fast(), fast()
    with messages() as said:
        trainer = monitored(1, first, second, logger=csv_logger(tmp_path))
        run(trainer, "predict", Model(fresh_reading), ids(4))

    assert said == ["a second DeviceStateMonitor in the same Trainer has no effect"]
    assert (set(first.states), set(second.states)) == ({0}, set())
    assert steps_of(csv_columns(tmp_path), "devices/predict/power_w/rank0") == [2, 4]


# --- its own life ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_a_step_ends_its_threads_and_the_next_run_is_logged(stage: str, tmp_path: Path) -> None:
    def fails(module: Any, batch_idx: int) -> None:
        raise RuntimeError("the step fails")

    trainer = monitored(1, fast(), logger=csv_logger(tmp_path))
    with pytest.raises(RuntimeError, match="the step fails"):
        run(trainer, stage, Model(fails), ids(4))
    wait_until(lambda: threads_of_ours() == [])

    run(trainer, "predict", Model(fresh_reading), ids(4))
    assert steps_of(csv_columns(tmp_path), "devices/predict/power_w/rank0") == [2, 4]
    wait_until(lambda: threads_of_ours() == [])


def test_it_can_be_pickled_while_it_runs_and_its_axis_goes_with_it(tmp_path: Path) -> None:
    copies: list[DeviceStateMonitor] = []

    def during(module: Any, batch_idx: int) -> None:
        copies.append(pickle.loads(pickle.dumps(module.trainer.callbacks[0])))

    run(monitored(1, DeviceStateMonitor(), logger=csv_logger(tmp_path)), "predict", Model(during), ids(6))
    run(monitored(1, copies[-1], logger=csv_logger(tmp_path / "copy")), "predict", Model(), ids(2))

    assert steps_of(csv_columns(tmp_path / "copy"), "devices/predict/process_memory_gib/rank0")[-1] == 6


def test_it_is_off_where_the_package_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_HYBRID", "0")
    monitor = DeviceStateMonitor()
    run(monitored(1, monitor, logger=csv_logger(tmp_path)), "predict", Model(), ids(4))

    assert monitor.states == {}
    assert csv_columns(tmp_path) == {}


def test_the_period_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DeviceStateMonitor().device_period_s == 1.0
    monkeypatch.setenv("LIGHTNING_HYBRID_DEVICE_PERIOD_S", "0.25")
    assert DeviceStateMonitor().device_period_s == 0.25
    assert DeviceStateMonitor(device_period_s=4.0).device_period_s == 4.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "often"])
def test_a_period_that_makes_no_sense_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="device_period_s must be"):
        DeviceStateMonitor(device_period_s=value)


def test_a_slow_logger_is_given_fewer_points_and_the_last_one(tmp_path: Path) -> None:
    class Slow(CSVLogger):
        calls: ClassVar[list[int]] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            began_s = time.perf_counter()
            wait_until(lambda: time.perf_counter() > began_s + 0.01)
            self.calls.append(step or 0)

    monitor = DeviceStateMonitor(device_period_s=0.002, most_overhead_frac=1e-6, probe=Counting())
    run(monitored(1, monitor, logger=Slow(tmp_path)), "predict", Model(fresh_reading), ids(12))

    assert Slow.calls == [2, 12]


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, float("nan")])
def test_an_overhead_that_makes_no_sense_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match="most_overhead_frac must be above 0 and up to 1"):
        DeviceStateMonitor(most_overhead_frac=value)


def test_a_probe_that_cannot_be_called_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"probe must be a function that makes a probe for a torch\.device, got 3"):
        DeviceStateMonitor(probe=3)  # type: ignore[arg-type]
