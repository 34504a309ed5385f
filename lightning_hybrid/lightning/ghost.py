"""A real step of a rank without work, so that its collectives match the others', whose traces are then removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_hybrid.lightning import _compat
from lightning_hybrid.runtime.dealing import Stage

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
    with _compat.metrics_taken_back(trainer.lightning_module), _compat.logs_taken_back(trainer):
        _compat.call_step(trainer, stage, batch, loader_idx)
