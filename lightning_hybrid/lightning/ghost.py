"""Real steps without a trace: of a rank that has no work, so that its collectives match, and to count operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_hybrid.lightning import _compat
from lightning_hybrid.probes.flops import FlopCount, counting_flops
from lightning_hybrid.runtime.spec import Stage

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def run_ghost(trainer: Trainer, stage: Stage, batch: Any, loader_idx: int, *, is_first: bool) -> None:
    """Runs the user's step on ``batch`` outside of all hooks and takes back what it did to metrics and logs.

    The logged keys stay, with neutral values: every rank then computes the same metrics at the epoch's end.

    Args:
        trainer: The running Trainer.
        stage: Whose step to run.
        batch: As the loader gave it out.
        loader_idx: Index of the loader.
        is_first: Whether no step of this loader has run on this rank before; then the loader before it ends here.
    """
    if is_first and stage != "predict" and loader_idx > 0:
        _compat.leave_loader(trainer, stage)
    batch = _compat.move_batch(trainer, batch, loader_idx)
    with step_taken_back(trainer):
        _compat.call_step(trainer, stage, batch, loader_idx)


def count_step(trainer: Trainer, step: Callable[[], object]) -> FlopCount:
    """Runs ``step`` for its operations alone; metrics, logs, attributes and random numbers are as if it had not run."""
    with _compat.isolated_rng(trainer), step_taken_back(trainer), counting_flops(trainer.lightning_module) as count:
        step()
    return count


@contextmanager
def step_taken_back(trainer: Trainer) -> Iterator[None]:
    """Undoes what a step inside does to metrics, logs and the module's own attributes."""
    module = trainer.lightning_module
    with _compat.metrics_taken_back(module), _attributes_taken_back(module), _compat.logs_taken_back(trainer):
        yield


@contextmanager
def _attributes_taken_back(module: LightningModule) -> Iterator[None]:
    """Undoes what happens inside to the module's own lists, dictionaries, sets and numbers."""
    attributes = {name: (value, _copied(value)) for name, value in vars(module).items() if _is_plain(name, value)}
    yield
    for name, (value, copy) in attributes.items():
        setattr(module, name, _restored(value, copy))


def _is_plain(name: str, value: object) -> bool:
    return not name.startswith("_") and isinstance(value, bool | int | float | str | list | dict | set)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set) else value


def _restored(value: Any, copy: Any) -> Any:
    if isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict | set):
        value.clear()
        value.update(copy)
    return value
