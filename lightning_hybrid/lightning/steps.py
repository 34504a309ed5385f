"""The user's steps, run so that neither a lack of memory nor a bad sample need end the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import BatchError
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning.ordering import has_training_norm
from lightning_hybrid.lightning.step_state import StepState
from lightning_hybrid.runtime import microbatch
from lightning_hybrid.runtime.microbatch import MergeFunction, SplitFunction
from lightning_hybrid.runtime.recovery import Cut, Ran, Recovery, Sizes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Steps:
    """Runs the steps of one Trainer.

    Args:
        trainer: The Trainer.
        config: Says whether bad samples are left out, and whether batches may be cut.
        sizes: How many samples a step may have.
        is_collated: Whether torch's own collate function makes the batches of a loader.
        split_fn: Cuts batches, in place of what this package knows of them.
        merge_fn: Makes one output of those of the parts.
        say_once: Tells the user something, unless it was told before.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: HybridConfig,
        sizes: Sizes,
        *,
        is_collated: Callable[[int], bool] = lambda loader_idx: False,
        split_fn: SplitFunction | None = None,
        merge_fn: MergeFunction | None = None,
        say_once: Callable[[str], None],
    ) -> None:
        self._trainer, self._config, self._sizes = trainer, config, sizes
        self._is_collated = is_collated
        self._split_fn, self._merge_fn, self._say = split_fn, merge_fn, say_once
        self._epoch: EpochRun | None = None
        self._recovery: Recovery | None = None
        self._state: StepState | None = None

    def run(
        self,
        epoch: EpochRun,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        elements: int | None,
    ) -> Any:
        """The output of the step that is due, as if the whole batch had been run once.

        Args:
            epoch: Whose step it is.
            original: The strategy's own step.
            args: Its arguments, the batch first.
            kwargs: Its other arguments.
            elements: Elements of the batch, where they were counted already.

        Raises:
            SampleTooLarge: a single sample does not fit into memory.
            TooManyErrors: more samples than ``max_errors`` could not be run.
        """
        if not _compat.has_callbacks(self._trainer):
            return original(*args, **kwargs)  # a trial of a BatchSizeFinder, which must see what does not fit
        task = _Task(self, epoch, original, args, kwargs, elements)
        try:
            ran = self._recovery_for(epoch).run(task)
        finally:
            if task.part_logs is not None:
                task.part_logs.close()
        if ran.outputs:
            epoch.losses.has_run = True
        epoch.note_sizes(ran.sizes, is_short=ran.is_short)
        for place, error in ran.bad.items():
            epoch.leave_out(task.positions[place], "step", error)
        return self._merged(ran, epoch)

    def new_logs(self) -> _compat.PartLogs:
        """What stands in for the logs of the batch that is run now."""
        return _compat.PartLogs(self._trainer)

    def cut(self, epoch: EpochRun, batch: Any, size: int) -> Cut:
        """The function that cuts a batch of ``size`` samples.

        Raises:
            BatchError: it must not be cut.
        """
        if self._config.batch_dependent:
            raise BatchError("batch_dependent=True says that results depend on the whole batch")
        if has_training_norm(self._trainer.lightning_module):
            raise BatchError("a norm layer is in training mode, so that results depend on the whole batch")
        if epoch.steps_have_collectives:
            raise BatchError("the steps issue collectives, in which all ranks would have to take part")
        if self._split_fn is not None:
            split = self._split_fn
            return lambda start, stop: split(batch, start, stop)
        return microbatch.cutter(batch, size, is_collated=self._is_collated(epoch.spec.loader_idx))

    def forget(self) -> None:
        """Lets go of what was kept of the last step."""
        self._epoch = self._recovery = None
        if self._state is not None:
            self._state.forget()

    def _recovery_for(self, epoch: EpochRun) -> Recovery:
        if epoch is not self._epoch or self._recovery is None:
            self._state = StepState(self._trainer)
            self._recovery = Recovery(
                self._sizes,
                self._state,
                skips=self._config.on_error == "skip",
                ends_run=lambda error: _compat.ends_run(self._trainer, error),
                say=self._say,
            )
            self._epoch = epoch
        return self._recovery

    def _merged(self, ran: Ran, epoch: EpochRun) -> Any:
        if len(ran.outputs) < 2:
            return ran.outputs[0] if ran.outputs else None
        if self._merge_fn is not None:
            return self._merge_fn(ran.outputs, ran.sizes)
        try:
            return microbatch.merge(ran.outputs, ran.sizes)
        except BatchError as why:
            mean = _mean(ran.outputs, ran.sizes)
            if mean is None and epoch.spec.stage == "predict":
                raise
            what = "the list of the parts' outputs" if mean is None else "the mean of the parts, weighted by samples"
            self._say(f"{why}; until then it is {what}")
            return ran.outputs if mean is None else mean


class _Task:
    """The step that is due; see `lightning_hybrid.runtime.recovery.Task`."""

    def __init__(
        self,
        steps: Steps,
        epoch: EpochRun,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        elements: int | None,
    ) -> None:
        self._steps, self._epoch, self._original, self._args, self._kwargs = steps, epoch, original, args, kwargs
        self.batch, self.elements, self.positions = args[0], elements, epoch.positions_due
        self.size = len(self.positions)
        self.part_logs: _compat.PartLogs | None = None

    def step(self, batch: Any) -> Any:
        return self._original(batch, *self._args[1:], **self._kwargs)

    def cut(self) -> Cut:
        return self._steps.cut(self._epoch, self.batch, self.size)

    def name(self, place: int) -> str:
        return self._epoch.name_of(self.positions[place])

    def logs(self) -> _compat.PartLogs:
        self.part_logs = self._steps.new_logs()
        return self.part_logs

    def is_torn(self) -> bool:
        return self._epoch.has_issued_collective()


def _mean(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Mean of single numbers, weighted by samples; ``None`` where the outputs are something else."""
    if not all(isinstance(output, float) or _is_number(output) for output in outputs):
        return None
    return sum(output * (size / sum(sizes)) for output, size in zip(outputs, sizes, strict=True))


def _is_number(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.dim() == 0 and output.is_floating_point()
