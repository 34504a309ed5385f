"""Every private name of Lightning that this package touches, in one place.

Checked with lightning and pytorch_lightning 2.4.0 and 2.6.6. ``tests/lightning/test_compat.py`` fails when one moves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves

from lightning_hybrid.lightning._compat.logs import (
    Logged,
    PartLogs,
    forget,
    hook_epoch_end,
    logged,
    logged_now,
    logs_taken_back,
    metric_states,
    metrics_taken_back,
    results_of,
    set_epoch_values,
)
from lightning_hybrid.lightning._compat.packages import PACKAGES, imported_package, package_of
from lightning_hybrid.lightning.patches import Patches
from lightning_hybrid.runtime.spec import Stage

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy

__all__ = [
    "PACKAGES",
    "Logged",
    "PartLogs",
    "forget",
    "hook_epoch_end",
    "imported_package",
    "logged",
    "logged_now",
    "logs_taken_back",
    "metric_states",
    "metrics_taken_back",
    "package_of",
    "results_of",
    "set_epoch_values",
]
"""What comes from the files beside this one; its own functions are public too."""

_STAGES: dict[str, Stage] = {"predict": "predict", "validate": "validate", "test": "test"}
STEP_NAMES: dict[Stage, str] = {"predict": "predict_step", "validate": "validation_step", "test": "test_step"}
_LIMITS: dict[Stage, str] = {
    "predict": "limit_predict_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
}


def isolated_rng(trainer: Trainer) -> AbstractContextManager[None]:
    """Gives all random number generators back the states that they had before."""
    seed = importlib.import_module(f"{package_of(trainer).__name__}.utilities.seed")
    isolated: AbstractContextManager[None] = seed.isolate_rng()
    return isolated


def index_wrapper(package: ModuleType) -> type[Any]:
    """The batch sampler class that the package's prediction loop reads batch indices from."""
    module = importlib.import_module(f"{package.__name__}.overrides.distributed")
    wrapper: type[Any] = module._IndexBatchSamplerWrapper
    return wrapper


# --- loops and loaders -----------------------------------------------------------------------------------------------


def stage_of(mode: Any) -> Stage | None:
    """The stage of a ``RunningStage``; ``None`` for training. The sanity check counts as ``validate``."""
    return "validate" if mode.value == "sanity_check" else _STAGES.get(mode.value)


def in_fit(trainer: Trainer) -> bool:
    """Whether the Trainer runs `fit`; its validation then stands inside training."""
    return trainer.state.fn is not None and trainer.state.fn.value == "fit"


def loop_of(trainer: Trainer, stage: Stage) -> Any:
    """The loop that runs ``stage`` now, inside `fit` too."""
    if stage == "predict":
        return trainer.predict_loop
    if stage == "test":
        return trainer.test_loop
    return trainer.fit_loop.epoch_loop.val_loop if in_fit(trainer) else trainer.validate_loop


def hook_loader_preparation(patches: Patches, trainer: Trainer, make: Callable[[Any], Any]) -> None:
    """Replaces what makes a user's loader ready: called as ``(loader, shuffle=..., mode=RunningStage)``."""
    patches.replace(trainer._data_connector, "_prepare_dataloader", make)


def hook_loader_requests(patches: Patches, trainer: Trainer, make: Callable[[Any], Any]) -> None:
    """Replaces what asks the user for the loaders of validate, test and predict."""
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in loops:
        patches.replace(loop._data_source, "dataloader", make)


def hook_loop_start(patches: Patches, trainer: Trainer, make: Callable[[Any], Any]) -> None:
    """Replaces what begins a loop's pass over its loaders, once they are ready: their lengths are asked there."""
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in loops:
        patches.replace(loop, "reset", make)


def combined_mode(loaders: Any) -> str:
    """How several loaders are combined; a plain loader or list is ``sequential`` in the loops of ours."""
    return getattr(loaders, "_mode", "sequential") if type(loaders).__name__ == "CombinedLoader" else "sequential"


def flat_loaders(loaders: Any) -> list[Any]:
    """The loaders in any collection that the user may return."""
    if type(loaders).__name__ == "CombinedLoader":
        return list(loaders.flattened)
    leaves: list[Any] = tree_leaves(loaders)
    return leaves


def raise_limit(trainer: Trainer, stage: Stage, loader_idx: int, num_batches: int) -> None:
    """Lets this rank run up to ``num_batches`` batches of a loader, and the progress bar count to there."""
    _limits(trainer, stage)[loader_idx] = num_batches


def limit_of(trainer: Trainer, stage: Stage) -> int | float:
    """The Trainer's ``limit_<stage>_batches``."""
    limit: int | float = getattr(trainer, _LIMITS[stage])
    return limit


def log_every_n_steps(trainer: Any) -> int:
    """The Trainer's ``log_every_n_steps``, which its connector sets."""
    return int(trainer.log_every_n_steps)


def is_fast_dev_run(trainer: Any) -> bool:
    """Whether the Trainer has ``fast_dev_run``, which its connector sets."""
    return bool(trainer.fast_dev_run)


def profiled(trainer: Any, action: str) -> AbstractContextManager[None]:
    """Shows an action of ours in the Trainer's profiler, which its connector sets."""
    context: AbstractContextManager[None] = trainer.profiler.profile(f"[lightning_hybrid].{action}")
    return context


def uses_distributed_sampler(trainer: Trainer) -> bool:
    """The Trainer's ``use_distributed_sampler``."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def takes_dataloader_iter(trainer: Trainer, package: ModuleType, stage: Stage) -> bool:
    """Whether the user's step pulls its batches itself."""
    module = importlib.import_module(f"{package.__name__}.utilities.signature_utils")
    step = getattr(trainer.lightning_module, STEP_NAMES[stage])
    return bool(module.is_param_in_hook_signature(step, "dataloader_iter", explicit=True))


_EVAL_HOOKS: dict[Stage, str] = {
    "predict": "on_predict_model_eval",
    "validate": "on_validation_model_eval",
    "test": "on_test_model_eval",
}


def chooses_mode_itself(trainer: Trainer, stage: Stage) -> bool:
    """Whether the user's module decides which of its layers the loop of ``stage`` puts into evaluation."""
    hook = _EVAL_HOOKS[stage]
    return getattr(type(trainer.lightning_module), hook) is not getattr(package_of(trainer).LightningModule, hook)


def predictions_of(trainer: Trainer) -> list[list[Any]]:
    """The prediction loop's own outputs: for each loader, those of this rank in the order of its steps."""
    return trainer.predict_loop._predictions


# --- steps -----------------------------------------------------------------------------------------------------------


def hook_step(patches: Patches, strategy: Strategy, stage: Stage, make: Callable[[Any], Any]) -> None:
    """Replaces the strategy's step of ``stage``."""
    patches.replace(strategy, STEP_NAMES[stage], make)


def ends_run(trainer: Trainer, error: Exception) -> bool:
    """Whether an error is about the program, or is how Lightning ends a run, so that it has nothing to do with data."""
    module = importlib.import_module(f"{package_of(trainer).__name__}.utilities.exceptions")
    return isinstance(error, module.MisconfigurationException | module._TunerExitException)


def has_callbacks(trainer: Any) -> bool:
    """Whether the Trainer calls any callback now."""
    return bool(trainer.callbacks)


def move_batch(trainer: Trainer, batch: Any, loader_idx: int) -> Any:
    """A loaded batch, converted and moved to the device as the loops do it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=loader_idx)
    return _call_module(trainer)._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=loader_idx)


def call_step(trainer: Trainer, stage: Stage, batch: Any, loader_idx: int) -> None:
    """Runs the user's step of ``stage`` on a batch, outside of all hooks; logs are recorded as in the loop."""
    loop = loop_of(trainer, stage)
    several = loop.num_dataloaders > 1
    kwargs = loop._build_kwargs(batch, 0, loader_idx if several else None)
    args = loop._build_step_args_from_hook_kwargs(kwargs, STEP_NAMES[stage])
    if stage == "predict":
        _call_module(trainer)._call_strategy_hook(trainer, STEP_NAMES[stage], *args)
        return
    trainer._logger_connector.on_batch_start(batch, loader_idx if several else None)
    try:
        _call_module(trainer)._call_strategy_hook(trainer, STEP_NAMES[stage], *args)
    finally:
        results = trainer._results
        assert results is not None
        results.batch = results.batch_size = None


def ended_loader(trainer: Trainer) -> int:
    """Index of the loader whose epoch values are about to be computed."""
    results = trainer._results
    return 0 if results is None else results.dataloader_idx or 0


def limit_of_loader(trainer: Trainer, stage: Stage, loader_idx: int) -> int | float:
    """How many batches of a loader this rank may run, and its progress bar counts to."""
    return _limits(trainer, stage)[loader_idx]


def _limits(trainer: Trainer, stage: Stage) -> list[int | float]:
    loop = loop_of(trainer, stage)
    limits: list[int | float] = loop.max_batches if stage == "predict" else loop._max_batches
    return limits


def leave_loader(trainer: Trainer, stage: Stage) -> None:
    """Stores the epoch values of the loader before, as the loop does when a batch of the next loader arrives."""
    loop_of(trainer, stage)._store_dataloader_outputs()


def _call_module(trainer: Trainer) -> Any:
    return importlib.import_module(f"{package_of(trainer).__name__}.trainer.call")
