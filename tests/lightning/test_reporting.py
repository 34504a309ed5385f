"""What the user sees in loggers, progress bar and console."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_hybrid import HybridBalanceCallback
from tests.lightning.scenes import Echo, Logs, balance_of, flat, ids, messages, trainer
from tests.ranks import run_ranks

STAGES = ("predict", "validate", "test")


class Slow(Logs, Echo):
    """Rank 1 is three times slower."""

    def wait(self) -> None:
        time.sleep(0.005 * (3 if self.global_rank == 1 else 1))  # the emulated device

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.wait()
        return batch

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.wait()
        self.log("val", batch.mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.wait()

    def on_validation_batch_end(self, *_: Any) -> None:
        pass


class Fits(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch.float().unsqueeze(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def _csv(path: Path) -> CSVLogger:
    return CSVLogger(path, name="csv", version="run")


def _tensorboard(path: Path) -> TensorBoardLogger:
    return TensorBoardLogger(path, name="tensorboard", version="run")


def _csv_rows(path: Path) -> list[dict[str, str]]:
    file = path / "csv" / "run" / "metrics.csv"
    return list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []


def _csv_columns(path: Path) -> dict[str, list[tuple[int, float]]]:
    """For each key its steps and values."""
    columns: dict[str, list[tuple[int, float]]] = {}
    for row in _csv_rows(path):
        for key, value in row.items():
            if key != "step" and value:
                columns.setdefault(key, []).append((int(row["step"]), float(value)))
    return columns


def _events(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard" / "run"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def _tensorboard_columns(path: Path) -> dict[str, list[tuple[int, float]]]:
    events = _events(path)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


LOGGERS: dict[str, Callable[[Path], Any]] = {
    "none": lambda path: False,
    "CSV": _csv,
    "TensorBoard": _tensorboard,
    "CSV and TensorBoard": lambda path: [_csv(path), _tensorboard(path)],
}


def _keys(stage: str, world: int = 2) -> set[str]:
    """What must be there in any run on CPU ranks."""
    shared = {f"balance/{stage}/{name}" for name in ("load_imbalance", "throughput_samples_per_s")}
    names = ("share_frac", "speed_samples_per_s", "busy_frac")
    return (
        shared
        | {f"balance/{stage}/overhead_us_per_step"}
        | {f"balance/{stage}/{name}/replica{replica}" for name in names for replica in range(world)}
        | {f"devices/{stage}/process_memory_gib/replica{replica}" for replica in range(world)}
    )


# --- loggers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOGGERS)
def test_every_stage_is_logged_by_any_loggers(kind: str, tmp_path: Path) -> None:
    def rank(_: int) -> list[Any]:
        the_trainer = trainer(2, logger=LOGGERS[kind](tmp_path), log_every_n_steps=1)
        return [bool(getattr(the_trainer, stage)(Slow(), ids(40)) or stage == "test") for stage in STAGES]

    assert run_ranks(rank, 2, deadline_s=20) == [[True] * 3] * 2
    logged = []
    if "CSV" in kind:
        logged.append(_csv_columns(tmp_path))
    if "TensorBoard" in kind:
        logged.append(_tensorboard_columns(tmp_path))
    for columns in logged:
        for stage in STAGES:
            assert _keys(stage) <= columns.keys()
            shares = [columns[f"balance/{stage}/share_frac/replica{replica}"][-1] for replica in (0, 1)]
            assert sum(share for _, share in shares) == pytest.approx(1.0)
            assert [step for step, _ in shares] == [40, 40]
            slow, fast = (columns[f"balance/{stage}/speed_samples_per_s/replica{r}"][-1][1] for r in (1, 0))
            assert slow < fast
    if not logged:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("every", [1, 2])
def test_two_batches_per_stage_are_logged_in_every_stage(every: int, tmp_path: Path) -> None:
    def rank(_: int) -> None:
        the_trainer = trainer(2, logger=_csv(tmp_path), log_every_n_steps=every)
        for stage in STAGES:
            getattr(the_trainer, stage)(Echoing(), ids(4))

    class Echoing(Slow):
        def wait(self) -> None:
            pass

    run_ranks(rank, 2, deadline_s=20)
    columns = _csv_columns(tmp_path)
    for stage in STAGES:
        steps = [step for step, _ in columns[f"balance/{stage}/throughput_samples_per_s"]]
        assert steps
        assert steps == sorted(steps)
        assert steps[-1] == 4


def test_long_interval_still_logs_once_at_the_end(tmp_path: Path) -> None:
    def rank(_: int) -> None:
        trainer(2, logger=_csv(tmp_path), log_every_n_steps=50).predict(Slow(), ids(9))

    run_ranks(rank, 2, deadline_s=20)
    assert [step for step, _ in _csv_columns(tmp_path)["balance/predict/share_frac/replica1"]] == [9]


def test_interval_is_the_trainers(tmp_path: Path) -> None:
    def rank(_: int) -> int:
        the_trainer = trainer(2, logger=_csv(tmp_path), log_every_n_steps=5)
        the_trainer.predict(Slow(), ids(60, 1))
        return balance_of(the_trainer).statistics.replicas[0].steps

    steps, _ = run_ranks(rank, 2, deadline_s=20)
    rows = len(_csv_columns(tmp_path)["balance/predict/throughput_samples_per_s"])  # rank 0 alone writes them
    assert rows in (steps // 5, steps // 5 + 1)  # the last one may be written in place of an equal step's


@pytest.mark.parametrize("kind", ["CSV", "TensorBoard"])
def test_steps_of_a_tag_never_decrease_over_two_runs_on_one_trainer(kind: str, tmp_path: Path) -> None:
    def rank(_: int) -> None:
        the_trainer = trainer(2, logger=LOGGERS[kind](tmp_path), log_every_n_steps=1)
        the_trainer.predict(Slow(), ids(30))
        the_trainer.validate(Slow(), ids(6), verbose=False)
        the_trainer.predict(Slow(), ids(12))

    run_ranks(rank, 2, deadline_s=20)
    columns = _csv_columns(tmp_path) if kind == "CSV" else _tensorboard_columns(tmp_path)
    for key, points in columns.items():
        steps = [step for step, _ in points]
        assert steps == sorted(steps), key
    steps = [step for step, _ in columns["balance/predict/throughput_samples_per_s"]]
    assert {30, 42} <= set(steps)
    assert any(30 < step < 42 for step in steps)
    assert steps[-1] == 42
    assert columns["balance/validate/throughput_samples_per_s"][-1][0] == 6


def test_x_axis_goes_on_counting_from_loader_to_loader(tmp_path: Path) -> None:
    def rank(_: int) -> None:
        trainer(2, logger=_csv(tmp_path), log_every_n_steps=1).predict(Slow(), [ids(20), ids(20)])

    run_ranks(rank, 2, deadline_s=20)
    steps = [step for step, _ in _csv_columns(tmp_path)["balance/predict/throughput_samples_per_s"]]
    assert steps[-1] == 40
    assert any(step < 20 for step in steps)
    assert any(20 < step < 40 for step in steps)


@pytest.mark.parametrize("kind", ["CSV", "TensorBoard"])
def test_x_axis_inside_fit_is_the_global_step(kind: str, tmp_path: Path) -> None:
    def rank(_: int) -> None:
        the_trainer = trainer(2, logger=LOGGERS[kind](tmp_path), log_every_n_steps=2, max_epochs=3)
        the_trainer.fit(Fits(), ids(8), ids(10))

    run_ranks(rank, 2, deadline_s=20)
    columns = _csv_columns(tmp_path) if kind == "CSV" else _tensorboard_columns(tmp_path)
    steps = [step for step, _ in columns["balance/validate/throughput_samples_per_s"]]
    assert set(steps) == {2, 4, 6}  # two training steps an epoch; the sanity check is left out
    assert steps == sorted(steps)


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    class Recorder(CSVLogger):
        calls = 0

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            type(self).calls += any(key.startswith(("balance/", "devices/")) for key in metrics)

    def rank(_: int) -> int:
        logger = Recorder(tmp_path)
        trainer(2, logger=logger, log_every_n_steps=1).predict(Slow(), ids(12))
        return logger.calls

    zero, one = run_ranks(rank, 2, deadline_s=20)
    assert zero > 1
    assert one == 0


def test_logger_that_raises_is_named_once_and_does_not_end_the_run(tmp_path: Path) -> None:
    class Broken(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise ConnectionError("the server is away")

    def rank(_: int) -> tuple[list[float], list[str], list[str]]:
        with messages() as said:
            the_trainer = trainer(2, logger=[Broken(tmp_path / "broken"), _csv(tmp_path)], log_every_n_steps=1)
            out = flat(the_trainer.predict(Slow(), ids(20)))
        return out, said, list(_csv_columns(tmp_path))

    (out, said, columns), (other, silent, _) = run_ranks(rank, 2, deadline_s=20)
    assert out == other == list(map(float, range(20)))
    assert len(said) == 1
    assert "Broken" in said[0]
    assert "the server is away" in said[0]
    assert _keys("predict") <= set(columns)
    assert silent == []


def test_fast_dev_run_writes_nothing_and_does_not_raise(tmp_path: Path) -> None:
    def rank(_: int) -> list[float]:
        the_trainer = trainer(2, logger=[_csv(tmp_path), _tensorboard(tmp_path)], fast_dev_run=True)
        the_trainer.fit(Fits(), ids(8), ids(8))
        the_trainer.validate(Slow(), ids(8), verbose=False)
        return flat(the_trainer.predict(Slow(), ids(8)))

    assert run_ranks(rank, 2, deadline_s=20) == [[0, 1], [2, 3]]
    assert list(tmp_path.iterdir()) == []


def test_one_device_is_logged_too(tmp_path: Path) -> None:
    trainer(1, logger=_csv(tmp_path), log_every_n_steps=1).predict(Slow(), ids(5))
    columns = _csv_columns(tmp_path)
    assert columns["balance/predict/share_frac/replica0"][-1] == (5, 1.0)
    assert "balance/predict/load_imbalance" not in columns


def test_users_own_values_are_logged_beside_ours(tmp_path: Path) -> None:
    def rank(_: int) -> None:
        trainer(2, logger=_csv(tmp_path)).validate(Slow(), ids(7), verbose=False)

    run_ranks(rank, 2, deadline_s=20)
    columns = _csv_columns(tmp_path)
    assert [value for _, value in columns["val"]] == [3.0]
    assert _keys("validate") <= columns.keys()


# --- recommendations -------------------------------------------------------------------------------------------------


def test_straggler_is_told_as_text_in_tensorboard_and_in_a_file_beside_the_csv(tmp_path: Path) -> None:
    def rank(_: int) -> None:
        the_trainer = trainer(2, logger=[_csv(tmp_path), _tensorboard(tmp_path)])
        the_trainer.predict(Slow(), ids(60))
        the_trainer.validate(Slow(), ids(60), verbose=False)

    run_ranks(rank, 2, deadline_s=20)
    events = _events(tmp_path)
    file = (tmp_path / "csv" / "run" / "recommendations.md").read_text()
    for stage in ("predict", "validate"):
        (event,) = events.Tensors(f"recommendations/{stage}/text_summary")
        text = event.tensor_proto.string_val[0].decode()
        assert "Find out what slows replica 1 down" in text
        assert f"## {stage}, step 60" in file
    assert file.count("Find out what slows replica 1 down") == 2


def test_equal_ranks_get_no_text(tmp_path: Path) -> None:
    class Equal(Slow):
        def wait(self) -> None:
            time.sleep(0.005)  # the emulated device

    def rank(_: int) -> None:
        trainer(2, logger=[_csv(tmp_path), _tensorboard(tmp_path)]).predict(Equal(), ids(60))

    run_ranks(rank, 2, deadline_s=20)
    assert [tag for tag in _events(tmp_path).Tags()["tensors"] if "recommendations" in tag] == []
    assert not (tmp_path / "csv" / "run" / "recommendations.md").exists()


# --- console ---------------------------------------------------------------------------------------------------------


def _printed(run: Callable[[], Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run()
    return out.getvalue()


def test_table_is_printed_once_on_rank_zero_with_the_recommendation() -> None:
    def rank(_: int) -> list[str]:
        the_trainer = trainer(2)
        return [
            _printed(lambda: the_trainer.predict(Slow(), ids(60))),
            _printed(lambda: the_trainer.validate(Slow(), ids(30), verbose=False)),
            _printed(lambda: the_trainer.test(Slow(), [ids(20), ids(10)], verbose=False)),
        ]

    zero, one = run_ranks(rank, 2, deadline_s=20)
    assert [text.count("lightning_hybrid, ") for text in zero] == [1, 1, 2]
    assert "lightning_hybrid, predict, queue mode: 60 of 60 samples in" in zero[0]
    assert "lightning_hybrid, validate, queue mode: 30 of 30 samples in" in zero[1]
    assert "lightning_hybrid, test, queue mode: 20 of 20 samples in" in zero[2]
    assert "10 of 10 samples of loader 1 in" in zero[2]
    assert zero[0].count("Recommendation (") == 1
    assert "Find out what slows replica 1 down" in zero[0]
    assert one == ["", "", ""]


def test_nothing_is_printed_in_fit_nor_on_one_device() -> None:
    def rank(_: int) -> str:
        return _printed(lambda: trainer(2, max_epochs=2).fit(Fits(), ids(8), ids(10)))

    assert ["lightning_hybrid" in text for text in run_ranks(rank, 2, deadline_s=20)] == [False, False]
    assert "lightning_hybrid" not in _printed(lambda: trainer(1).predict(Slow(), ids(5)))


# --- progress bar ----------------------------------------------------------------------------------------------------


class Watcher(Callback):
    """Looks at the bar of each stage right before the run ends."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look = look
        self.found: list[Any] = []

    def _see(self, trainer: Any, *_: Any) -> None:
        self.found.append(self.look(trainer.progress_bar_callback))

    on_predict_end = on_validation_end = on_test_end = _see


def _tqdm_state(bar: Any) -> tuple[int, int]:
    shown = next(b for b in (bar._predict_progress_bar, bar._val_progress_bar, bar._test_progress_bar) if b is not None)
    return shown.n, shown.total


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_tqdm_bar_ends_at_the_global_number_of_batches(stage: str, mode: str) -> None:
    def rank(_: int) -> list[Any]:
        watcher = Watcher(_tqdm_state)
        callbacks = [watcher, TQDMProgressBar(), HybridBalanceCallback(mode=mode)]
        the_trainer = trainer(2, *callbacks, enable_progress_bar=True)
        getattr(the_trainer, stage)(Slow(), ids(41))
        return watcher.found

    zero, _ = run_ranks(rank, 2, deadline_s=20)
    assert zero == [(21, 21)]


def test_tqdm_bar_counts_up_with_all_ranks_and_never_back() -> None:
    class Steps(TQDMProgressBar):
        def __init__(self) -> None:
            super().__init__()
            self.counts: list[float] = []

        def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_predict_batch_end(*args, **kwargs)
            self.counts.append(self.predict_progress_bar.n)

        def on_predict_end(self, *args: Any) -> None:
            self.counts.append(self.predict_progress_bar.n)
            super().on_predict_end(*args)

    def rank(_: int) -> list[float]:
        bar = Steps()
        trainer(2, bar, enable_progress_bar=True).predict(Slow(), ids(300, 2))
        return bar.counts

    counts, _ = run_ranks(rank, 2, deadline_s=20)
    assert counts == sorted(counts)
    assert counts[-1] == 150
    # the middle of this rank's steps is the middle of the run, though it runs three quarters of the batches
    assert counts[len(counts) // 2] > 1.15 * len(counts) // 2


def test_tqdm_bar_of_several_loaders_ends_at_each_loaders_own_number() -> None:
    class Totals(TQDMProgressBar):
        def __init__(self) -> None:
            super().__init__()
            self.ends: dict[int, tuple[float, float]] = {}

            self.loader = 0

        def on_predict_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            if dataloader_idx != self.loader:
                self._note_end()
                self.loader = dataloader_idx
            super().on_predict_batch_start(trainer, module, batch, batch_idx, dataloader_idx)

        def on_predict_end(self, *args: Any) -> None:
            self._note_end()
            super().on_predict_end(*args)

        def _note_end(self) -> None:
            self.ends[self.loader] = (self.predict_progress_bar.n, self.predict_progress_bar.total)

    def rank(_: int) -> dict[int, tuple[float, float]]:
        bar = Totals()
        trainer(2, bar, enable_progress_bar=True).predict(Slow(), [ids(20), ids(41), ids(6)])
        return bar.ends

    zero, _ = run_ranks(rank, 2, deadline_s=20)
    assert zero[2] == (3, 3)
    assert {loader: total for loader, (_, total) in zero.items()} == {0: 10, 1: 21, 2: 3}
    assert {loader: n for loader, (n, _) in zero.items()} == {0: 10, 1: 21, 2: 3}


def _rich_state(bar: Any) -> tuple[float, float]:
    task = bar.progress.tasks[-1]
    return task.completed, task.total


@pytest.mark.parametrize("stage", STAGES)
def test_rich_bar_ends_at_the_global_number_of_batches(stage: str) -> None:
    def rank(r: int) -> list[Any]:
        watcher = Watcher(_rich_state if r == 0 else lambda bar: None)
        bar = RichProgressBar(console_kwargs={"file": io.StringIO()})
        getattr(trainer(2, watcher, bar, enable_progress_bar=True), stage)(Slow(), ids(41))
        return watcher.found

    zero, _ = run_ranks(rank, 2, deadline_s=20)
    assert zero == [(21, 21)]


def test_bar_of_the_users_own_that_needs_the_batch_still_gets_it() -> None:
    class Own(TQDMProgressBar):
        def on_predict_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            assert outputs.tolist() == batch.tolist()
            super().on_predict_batch_end(trainer, module, outputs, batch, batch_idx, dataloader_idx)

    def rank(_: int) -> list[float]:
        return flat(trainer(2, Own(), enable_progress_bar=True).predict(Slow(), ids(20)))

    assert run_ranks(rank, 2, deadline_s=20) == [list(map(float, range(20)))] * 2


# --- the Trainer's other settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"profiler": "simple"},
        {"profiler": "advanced"},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"inference_mode": False},
        {"overfit_batches": 2},
        {"detect_anomaly": True},
        {"barebones": True},
        {"num_nodes": 1, "sync_batchnorm": True},
    ],
    ids=str,
)
def test_other_settings_of_the_trainer_change_nothing(settings: dict[str, Any]) -> None:
    class Model(Slow):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch + 0

    if settings.get("barebones"):  # refuses even the default of what the scene's Trainer switches off
        settings = settings | {"logger": None, "enable_progress_bar": None, "enable_checkpointing": None}
        settings |= {"enable_model_summary": None}

    def rank(_: int) -> list[float]:
        return flat(trainer(2, **settings).predict(Model(), ids(9)))

    assert run_ranks(rank, 2, deadline_s=20) == [list(map(float, range(9)))] * 2
