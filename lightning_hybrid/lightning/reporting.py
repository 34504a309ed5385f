"""What the user sees of a run: the trainer's loggers, the progress bar, the table at the end."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.incidents import failed_samples, out_of_memory
from lightning_hybrid.core.recommend import Recommendation, straggler
from lightning_hybrid.core.state import BalanceSnapshot
from lightning_hybrid.core.statistics import Statistics
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning.patches import Patches
from lightning_hybrid.lightning.shared import shared_in
from lightning_hybrid.reports.console import print_table
from lightning_hybrid.runtime.spec import Stage

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_BAR_HOOKS: dict[Stage, str] = {
    "predict": "on_predict_batch_end",
    "validate": "on_validation_batch_end",
    "test": "on_test_batch_end",
}


class Reporter:
    """Reports on rank zero; kept for the Trainer's life, because the x axes of the logs go on from run to run."""

    def __init__(self, trainer: Trainer, config: HybridConfig) -> None:
        self._trainer, self._config = trainer, config
        self._shared = shared_in(trainer)
        self._samples_before = Counter[Stage]()
        self._logged: tuple[EpochRun, int] | None = None
        self._communication: CommunicationState | None = None
        self.recommendations: tuple[Recommendation, ...] = ()

    def step(self, epoch: EpochRun, epochs: Sequence[EpochRun]) -> None:
        """Logs every ``log_every_n_steps`` of this rank."""
        every = _compat.log_every_n_steps(self._trainer)
        if not self._trainer.loggers or every <= 0:
            return
        due = (epoch, epoch.recorder.steps // every)
        if due[1] > 0 and due != self._logged:
            self._logged = due
            snapshot = epoch.snapshot()
            earlier = sum(e.spec.grid.num_samples for e in epochs if e.spec.loader_idx < snapshot.loader_idx)
            self._log(snapshot, self._x(snapshot, earlier))

    def end(
        self, epochs: Sequence[EpochRun], policies: Statistics, communication: CommunicationState | None = None
    ) -> None:
        """Logs and prints the final figures of all loaders of a stage, and once what the links carry."""
        report = self._shared.report_to(self._trainer.loggers)
        in_fit = _compat.in_fit(self._trainer)
        snapshots = [epoch.snapshot() for epoch in epochs]
        self.recommendations = tuple(found for snapshot in snapshots for found in self._found(snapshot))
        x = 0
        for snapshot in snapshots:
            x = self._x(snapshot)
            self._log(snapshot, x, is_last=True)
            if len(snapshot.replicas) > 1 and not in_fit:
                print_table(snapshot, self.recommendations if snapshot is snapshots[-1] else ())
            before = self._samples_before[snapshot.stage]
            # a later run goes on from where the axis is now
            self._samples_before[snapshot.stage] = max(before, x) if in_fit else before + snapshot.samples_done
        if snapshots:
            stage = snapshots[-1].stage
            report.log_recommendations(self.recommendations, x, stage=stage)
            if any(epoch.is_balanced for epoch in epochs):
                report.log_policies(policies.of_stage(stage), x, stage=stage)
            if communication is not None and communication is not self._communication:
                self._communication = communication
                report.log_communication(communication, x, stage=stage)
        report.close()

    def _found(self, snapshot: BalanceSnapshot) -> Iterator[Recommendation]:
        threshold_frac = self._config.straggler_threshold_frac
        for found in (
            straggler(snapshot, threshold_frac=threshold_frac),
            out_of_memory(snapshot),
            failed_samples(snapshot),
        ):
            if found is not None:
                yield found

    def hook_progress_bar(self, patches: Patches, current: Any) -> None:
        """Makes the progress bar count the batches of all replicas; ``current()`` is the running epoch."""
        bar = self._trainer.progress_bar_callback
        if bar is None:
            return
        for stage, name in _BAR_HOOKS.items():

            def make(original: Any, stage: Stage = stage) -> Any:
                def counted(
                    trainer: Any, module: Any, outputs: Any, batch: Any, idx: int, *rest: Any, **kw: Any
                ) -> Any:
                    epoch: EpochRun | None = current()
                    if epoch is not None and epoch.spec.stage == stage and epoch.is_balanced:
                        idx = max(idx, self._batches_done(epoch) - 1)
                    return original(trainer, module, outputs, batch, idx, *rest, **kw)

                return counted

            patches.replace(bar, name, make)

    def fill_progress_bar(self, epoch: EpochRun) -> None:
        """Lets the progress bar arrive at its end, which other replicas may have reached."""
        bar: Any = self._trainer.progress_bar_callback
        has_run = epoch.spec.grid.num_samples and epoch.recorder.steps
        draw = None if bar is None else _drawing_hook(bar, _BAR_HOOKS[epoch.spec.stage])
        if draw is None or not epoch.is_balanced or not has_run:
            return
        total = self._bar_total(epoch)
        draw(self._trainer, self._trainer.lightning_module, None, None, total - 1, epoch.spec.loader_idx)

    def _bar_total(self, epoch: EpochRun) -> int:
        if epoch.spec.stream is not None:
            return epoch.spec.grid.num_cells
        return int(_compat.limit_of_loader(self._trainer, epoch.spec.stage, epoch.spec.loader_idx))

    def _batches_done(self, epoch: EpochRun) -> int:
        """How far the progress bar is: to its end when all samples are done, whatever steps they took."""
        frac = epoch.figures.frac_done()
        # the batches of a stream are never cut
        return epoch.figures.steps_done() if frac is None else int(self._bar_total(epoch) * frac)

    def _x(self, snapshot: BalanceSnapshot, earlier: int = 0) -> int:
        """Samples of this stage over the Trainer's life, ``earlier`` of them in earlier loaders of this run."""
        if _compat.in_fit(self._trainer):
            return self._trainer.global_step
        return self._samples_before[snapshot.stage] + earlier + snapshot.samples_done

    def _log(self, snapshot: BalanceSnapshot, x: int, *, is_last: bool = False) -> None:
        log_devices = self._shared.log_devices
        report = self._shared.report_to(self._trainer.loggers)
        report.log_snapshot(snapshot, x, devices=log_devices is None)
        if log_devices is not None and (is_last or not _compat.in_fit(self._trainer)):
            log_devices(snapshot.stage, x, is_last)


def _drawing_hook(bar: Any, name: str) -> Callable[..., None] | None:
    """Lightning's own hook of a progress bar, which takes no notice of the batch; a user's override is passed over."""
    for cls in type(bar).__mro__:
        if name in vars(cls) and cls.__name__ in {"TQDMProgressBar", "RichProgressBar"}:
            return functools.partial(vars(cls)[name], bar)
    return None
