"""Every private name of Lightning, torch and torchmetrics that the package uses is where it is used.

A failure here says what moved: mend ``lightning_hybrid/lightning/_compat/``, then this table.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
import torchmetrics
from torch.utils.data import DataLoader

import lightning_hybrid
from lightning_hybrid.lightning import _compat
from tests.lightning.scenes import Ids, ids
from tests.ranks import run_ranks

PACKAGES = {"lightning.pytorch": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
BY_PACKAGE = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES.keys())

TRAINER = (
    "_data_connector._prepare_dataloader",
    "_accelerator_connector.use_distributed_sampler",
    "_logger_connector.on_batch_start",
    "_logger_connector.epoch_end_reached",
    "_results",
    "predict_loop.max_batches",
    "predict_loop.epoch_batch_indices",
    "predict_loop.current_batch_indices",
    "predict_loop.return_predictions",
    "predict_loop._predictions",
    "fit_loop.epoch_loop.val_loop",
    "precision_plugin.convert_input",
    "strategy.predict_step",
    "strategy.validation_step",
    "strategy.test_step",
    "strategy.root_device",
    "limit_predict_batches",
    "limit_val_batches",
    "limit_test_batches",
    "log_every_n_steps",
    "fast_dev_run",
    "sanity_checking",
    "state.fn",
    "progress_bar_callback",
)
EVALUATION_LOOP = ("_max_batches", "_store_dataloader_outputs")
EVERY_LOOP = (
    "reset",
    "num_dataloaders",
    "_data_source.dataloader",
    "_build_kwargs",
    "_build_step_args_from_hook_kwargs",
)
META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "add_dataloader_idx",
    "dataloader_idx",
    "sync",
    "sync.rank_zero_only",
    "is_mean_reduction",
    "is_sum_reduction",
    "is_max_reduction",
    "is_min_reduction",
)
RESULT_METRIC = ("meta", "is_tensor", "value", "_computed", "_update_count", "_forward_cache", "_defaults")
RESULTS = ("valid_items", "batch", "batch_size", "dataloader_idx", "pop", "update_metrics")
TORCHMETRICS = ("_defaults", "_update_count", "_computed", "_forward_cache")
OTHERS = {
    "_IndexBatchSamplerWrapper": "overrides.distributed",
    "_Metadata": "trainer.connectors.logger_connector.result",
    "_Sync": "trainer.connectors.logger_connector.result",
    "_ResultMetric": "trainer.connectors.logger_connector.result",
    "is_param_in_hook_signature": "utilities.signature_utils",
    "_call_strategy_hook": "trainer.call",
    "_TunerExitException": "utilities.exceptions",
    "MisconfigurationException": "utilities.exceptions",
}
"""Names that are looked up in a module, below the package."""


def _require(owner: Any, path: str, what: str) -> Any:
    for name in path.split("."):
        assert hasattr(owner, name), f"{what} has no {path!r} any more: {type(owner).__name__}.{name} has moved"
        owner = getattr(owner, name)
    return owner


def _model(package: Any) -> Any:
    class Model(package.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metric.update(batch)
            self.log("metric", self.metric)
            self.log("mean", batch.mean())
            self.log("sum", batch.sum(), reduce_fx="sum")

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    return Model()


def _trainer(package: Any, *callbacks: Any) -> Any:
    quiet = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary", "logger"), False)
    return package.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **quiet)


# --- names -----------------------------------------------------------------------------------------------------------


@BY_PACKAGE
@pytest.mark.parametrize("name", OTHERS)
def test_names_of_modules(package: Any, name: str) -> None:
    module = importlib.import_module(f"{package.__name__}.{OTHERS[name]}")
    _require(module, name, module.__name__)


def _look(trainer: Any, stage: Any) -> None:
    """Called while a step of ``stage`` runs."""
    what = f"a {type(trainer).__module__.split('.trainer')[0]}.Trainer"
    for path in TRAINER:
        _require(trainer, path, what)
    loop = _compat.loop_of(trainer, stage)
    for path in (*EVERY_LOOP, *(EVALUATION_LOOP if stage != "predict" else ())):
        _require(loop, path, f"the {stage} loop of {what}")
    limits = loop.max_batches if stage == "predict" else loop._max_batches
    assert isinstance(limits, list), "the limits of a loop are no list any more, so they cannot be raised"
    _require(trainer.lightning_module, "_on_before_batch_transfer", "a LightningModule")
    if stage != "predict":
        _look_at_results(trainer._results, "validation_step" if stage == "validate" else "test_step", what)


def _look_at_results(results: Any, hook: str, what: str) -> None:
    for path in RESULTS:
        _require(results, path, f"the results of {what}")
    for key, kind in (("mean", "is_mean_reduction"), ("sum", "is_sum_reduction")):
        metric = results[f"{hook}.{key}"]
        for path in META:
            _require(metric.meta, path, f"a logged number of {what}")
        for path in RESULT_METRIC:
            _require(metric, path, f"a logged number of {what}")
        assert metric.meta.fx == hook
        assert getattr(metric.meta, kind) is True
    assert results[f"{hook}.metric"].is_tensor is False
    _require(results[f"{hook}.mean"], "cumulated_batch_size", f"a logged mean of {what}")


@BY_PACKAGE
def test_names_of_a_trainer_that_runs(package: Any) -> None:
    looked = []

    class Looks(package.Callback):  # type: ignore[misc,name-defined]
        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            _look(trainer, "validate")
            looked.append("validate")

        def on_test_batch_end(self, trainer: Any, *_: Any) -> None:
            _look(trainer, "test")
            looked.append("test")

        def on_predict_batch_end(self, trainer: Any, *_: Any) -> None:
            _look(trainer, "predict")
            looked.append("predict")

    the_trainer, model = _trainer(package, Looks()), _model(package)
    for run in (the_trainer.validate, the_trainer.test):
        run(model, ids(2), verbose=False)
    the_trainer.predict(model, ids(2))
    assert looked == ["validate", "test", "predict"]


@BY_PACKAGE
def test_loader_preparation_is_called_with_shuffle_and_mode(package: Any) -> None:
    prepare = _trainer(package)._data_connector._prepare_dataloader
    assert list(inspect.signature(prepare).parameters) == ["dataloader", "shuffle", "mode"]


@BY_PACKAGE
def test_prediction_loop_reads_indices_from_the_wrapper_by_batch_number(package: Any) -> None:
    loop = importlib.import_module(f"{package.__name__}.loops.prediction_loop")
    source = inspect.getsource(loop._PredictionLoop)
    assert "isinstance(batch_sampler, _IndexBatchSamplerWrapper)" in source
    assert "batch_sampler.seen_batch_indices" in source
    assert "batch_indices[batch_idx]" in source


@BY_PACKAGE
def test_epoch_end_is_reached_through_the_connector(package: Any) -> None:
    loop = importlib.import_module(f"{package.__name__}.loops.evaluation_loop")
    source = inspect.getsource(loop._EvaluationLoop._store_dataloader_outputs)
    assert "trainer._logger_connector.epoch_end_reached()" in source


@BY_PACKAGE
@pytest.mark.parametrize(
    ("value", "stage"),
    [("predict", "predict"), ("validate", "validate"), ("test", "test"), ("sanity_check", "validate"), ("train", None)],
)
def test_stages_have_their_values(package: Any, value: str, stage: str | None) -> None:
    states = importlib.import_module(f"{package.__name__}.trainer.states")
    assert _compat.stage_of(states.RunningStage(value)) == stage


@BY_PACKAGE
@pytest.mark.parametrize("mode", ["sequential", "min_size", "max_size", "max_size_cycle"])
def test_mode_of_a_combined_loader_is_known(package: Any, mode: Any) -> None:
    combined = importlib.import_module(f"{package.__name__}.utilities").CombinedLoader
    assert _compat.combined_mode(combined([ids(2), ids(2)], mode)) == mode
    assert _compat.combined_mode([ids(2)]) == "sequential"
    assert _compat.combined_mode(ids(2)) == "sequential"


@BY_PACKAGE
def test_package_of_a_trainer_is_known_also_of_a_subclass(package: Any) -> None:
    class Own(package.Trainer):  # type: ignore[misc,name-defined]
        pass

    assert _compat.package_of(_trainer(package)) is package
    assert _compat.package_of(Own(accelerator="cpu", logger=False)) is package


def test_what_is_no_trainer_is_named() -> None:
    with pytest.raises(TypeError, match=r"trainer must be a Trainer of lightning\.pytorch or pytorch_lightning"):
        _compat.package_of(object())  # type: ignore[arg-type]


@BY_PACKAGE
def test_a_module_that_chooses_its_mode_itself_is_known(package: Any) -> None:
    class Stays(package.LightningModule):  # type: ignore[misc]  # the package is known only at run time
        def on_test_model_eval(self) -> None:
            pass

    a_trainer = package.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    a_trainer.strategy.connect(Stays())
    chosen = [_compat.chooses_mode_itself(a_trainer, stage) for stage in ("predict", "validate", "test")]
    assert chosen == [False, False, True]


@pytest.mark.parametrize("name", TORCHMETRICS)
def test_names_of_torchmetrics(name: str) -> None:
    metric = torchmetrics.MeanMetric()
    metric(torch.ones(2))
    _require(metric, name, "a torchmetrics Metric")


def test_names_of_the_loader() -> None:
    for batch_size in (2, None):
        loader = DataLoader(Ids(4), batch_size=batch_size)
        for name in ("_index_sampler", "_iterator", "in_order", "prefetch_factor", "batch_sampler", "sampler"):
            _require(loader, name, "a DataLoader")
        for name in ("_get_iterator", "collate_fn", "num_workers"):
            _require(loader, name, "a DataLoader")
        object.__setattr__(loader, "_index_sampler_is_read_late", True)
        sampler = loader.sampler if batch_size is None else loader.batch_sampler
        assert loader._index_sampler is sampler, "a DataLoader does not read its indices from its samplers any more"
    with pytest.raises(ValueError, match="batch_sampler"):
        loader.batch_sampler = [[0]]  # type: ignore[assignment]  # the guard that the live copy goes past
    assert hasattr(torch.nn.modules.batchnorm, "_NormBase")


def test_groups_count_their_collectives() -> None:
    def rank(_: int) -> int:
        dist.init_process_group("gloo")
        groups: Any = dist.distributed_c10d._world.pg_map
        (group,) = groups
        before = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1))
        assert dist.distributed_c10d._get_default_store().add("key", 0) == 0
        moved = group._get_sequence_number_for_group() - before
        dist.barrier()  # rank 0 holds the store
        return moved

    assert run_ranks(rank, 2, deadline_s=20) == [1, 1]


@pytest.mark.parametrize("is_inference", [False, True])
def test_torch_copies_lists_of_tensors_and_tells_whether_one_was_changed(is_inference: bool) -> None:
    state, buffer = torch.zeros(3), torch.zeros(3)
    with torch.inference_mode(is_inference):
        before = state._version
        state += 1
        torch._foreach_copy_([buffer], [state])

    assert state._version > before
    assert buffer.tolist() == [1, 1, 1]


# --- the table is whole ----------------------------------------------------------------------------------------------


def _private_names(file: Path) -> Iterator[str]:
    """Private attributes of anything but ``self``, ``cls`` and ``type(self)`` that a file reads or writes."""
    tree = ast.parse(file.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_self = ast.unparse(node.value) in {"self", "cls", "type(self)"}
            if not is_self and node.attr not in own:
                yield node.attr


PATHS = (*TRAINER, *EVALUATION_LOOP, *EVERY_LOOP, *RESULT_METRIC, *TORCHMETRICS)
LIGHTNINGS = {part for path in PATHS for part in path.split(".")} | {*OTHERS, "_mode", "_on_before_batch_transfer"}
TORCHS = {
    "_NormBase",
    "_foreach_copy_",
    "_get_default_store",
    "_get_iterator",
    "_get_sequence_number_for_group",
    "_index_sampler",
    "_version",
    "_world",
}


def test_every_private_name_that_the_package_uses_is_in_the_table() -> None:
    package = Path(lightning_hybrid.__file__).parent
    used = {
        f"{file.name}: {name}"
        for folder in ("lightning", "runtime")
        for file in (package / folder).rglob("*.py")
        for name in _private_names(file)
        if name not in LIGHTNINGS | TORCHS
    }
    assert used == set()


def test_private_names_of_lightning_are_used_in_one_file_only() -> None:
    edge = Path(lightning_hybrid.__file__).parent / "lightning"
    used = {f"{file.name}: {name}" for file in edge.glob("*.py") for name in _private_names(file) if name in LIGHTNINGS}
    assert used == set()


def test_random_numbers_are_isolated() -> None:
    trainer = lightning.pytorch.Trainer(logger=False, enable_checkpointing=False)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    with _compat.isolated_rng(trainer):
        torch.rand(5)

    assert torch.equal(torch.rand(2), expected)
