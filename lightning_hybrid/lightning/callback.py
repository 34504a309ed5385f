"""The callback that balances predict, validate and test of the Trainer that it is given to."""

from __future__ import annotations

import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

from lightning_hybrid.core.config import GatherOption, HybridConfig, IterableOption, ModeOption, OrderOption
from lightning_hybrid.core.errors import ConfigError, ResultsError
from lightning_hybrid.core.plan import Plan
from lightning_hybrid.core.recommend import Recommendation
from lightning_hybrid.core.state import BalanceSnapshot, DeviceState
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning.attachment import Attachment
from lightning_hybrid.lightning.reporting import Reporter
from lightning_hybrid.runtime.results import into_rows

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = _compat.imported_package().Callback

_log = logging.getLogger(__name__)

_ATTACHED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Which callback works in which Trainer; a second one in the same Trainer stands aside."""


class HybridBalanceCallback(Callback):
    """Shares the batches of predict, validate and test between the devices by their measured speed.

    Every sample is counted once, results come back in loader order, and epoch values of metrics are those of one
    device. Training is left alone. Arguments that are ``None`` take their value from ``config``, from
    ``LIGHTNING_HYBRID_<FIELD>`` in the environment, or the default of `HybridConfig`, in this order.

    Logged to the trainer's loggers every ``log_every_n_steps`` and at the end (``<s>``: predict, validate or test):

    ================================================  ==============================================================
    key                                               meaning
    ================================================  ==============================================================
    ``balance/<s>/share_frac/replica<r>``             share of the finished samples, 0..1
    ``balance/<s>/speed_samples_per_s/replica<r>``    samples per second inside the step, newest estimate
    ``balance/<s>/busy_frac/replica<r>``              share of the wall time inside the step, 0..1
    ``balance/<s>/load_imbalance``                    (max - min) / (max + min) of the replicas' busy time
    ``balance/<s>/throughput_samples_per_s``          samples per second of all replicas
    ``balance/<s>/overhead_us_per_step``              this package's own time on the loop's thread
    ``devices/<s>/<field>/replica<r>``                memory, utilisation and host readings that are known
    ================================================  ==============================================================

    Args:
        enabled: ``False`` leaves the Trainer exactly as it is; so does ``LIGHTNING_HYBRID=0``.
        mode: ``"queue"``: replicas claim batches as they go, so their step counts differ. ``"lockstep"``: equal step
            counts, sizes in proportion to speed. ``"auto"``: queue, unless the step issues collectives.
        order: Order of `rows`: ``"loader"`` or ``"dataset"`` (by dataset index).
        gather: Which ranks get the whole list from ``trainer.predict``: ``"all"``, ``"rank_zero"`` or ``"none"``.
        iterable: ``"sharded"`` says that an ``IterableDataset`` shards itself; ``"stock"`` warns that it does not.
        max_micro_batch_size: Most samples of one step where lockstep cuts batches anew.
        batch_dependent: ``True`` says that results depend on the whole batch, so that batches are never cut anew.
        config: All other settings.

    Raises:
        ConfigError: an argument has a wrong type or value.

    Example:
        >>> from lightning_hybrid import HybridBalanceCallback
        >>> HybridBalanceCallback(mode="lockstep").config.mode
        'lockstep'
    """

    def __init__(
        self,
        *,
        enabled: bool | None = None,
        mode: ModeOption | None = None,
        order: OrderOption | None = None,
        gather: GatherOption | None = None,
        iterable: IterableOption | None = None,
        max_micro_batch_size: int | None = None,
        batch_dependent: bool | None = None,
        config: HybridConfig | None = None,
    ) -> None:
        super().__init__()
        if config is not None and not isinstance(config, HybridConfig):
            raise ConfigError("config", config, "be a HybridConfig")
        arguments = {
            "enabled": enabled,
            "mode": mode,
            "order": order,
            "gather": gather,
            "iterable": iterable,
            "max_micro_batch_size": max_micro_batch_size,
            "batch_dependent": batch_dependent,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        self.config = HybridConfig.from_environment(os.environ, **given) if config is None else config.but(**given)
        self._attachment: Attachment | None = None
        self._reporter: Reporter | None = None
        self._reporter_trainer: weakref.ref[Trainer] | None = None
        self._outputs: dict[int, Any] = {}
        self._snapshots: list[BalanceSnapshot] = []
        self._plans: list[Plan] = []

    # --- what a run left ----------------------------------------------------------------------------------------

    @property
    def statistics(self) -> BalanceSnapshot | None:
        """Final records of all replicas for the last loader that was run, ``None`` before the first run."""
        return self._snapshots[-1] if self._snapshots else None

    @property
    def plan(self) -> Plan | None:
        """Who ran which samples of the last loader that was run, ``None`` before the first run."""
        return self._plans[-1] if self._plans else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Who ran which samples, one plan for each loader of the last run."""
        return tuple(self._plans)

    @property
    def recommendations(self) -> tuple[Recommendation, ...]:
        """What was found to slow the last run down; on rank zero only, empty elsewhere."""
        return () if self._reporter is None else self._reporter.recommendations

    @property
    def system_state(self) -> tuple[DeviceState | None, ...]:
        """The last reading of every replica's device; ``None`` where there is none."""
        return () if self.statistics is None else tuple(record.device for record in self.statistics.replicas)

    def rows(self, dataloader_idx: int = 0) -> list[Any]:
        """One result per sample of the last `trainer.predict`, in the order that ``order`` names.

        With ``gather="rank_zero"`` or ``"none"`` the other ranks hold only the samples that they ran themselves.

        Raises:
            ResultsError: no predictions were kept, or they do not have the samples as first dimension.
        """
        if dataloader_idx not in self._outputs:
            raise ResultsError(
                f"rows() has no predictions of loader {dataloader_idx}: none was run in this process with"
                " return_predictions (launchers that fork or spawn return none)"
            )
        grid, pieces = self._outputs[dataloader_idx]
        rows = into_rows(pieces)
        if self.config.order == "loader":
            return rows
        indices = [i for piece in sorted(pieces, key=lambda p: p.start) for i in grid.indices(piece.start, piece.stop)]
        return [row for _, row in sorted(zip(indices, rows, strict=True), key=lambda pair: pair[0])]

    # --- hooks --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Attaches to the Trainer."""
        if not self.config.enabled or os.environ.get("LIGHTNING_HYBRID") == "0":
            return
        owner = _ATTACHED.get(trainer, lambda: None)()
        if owner is not None and owner is not self:
            if trainer.is_global_zero:
                _log.warning("a second HybridBalanceCallback in the same Trainer has no effect")
            return
        self._detach()
        self._attachment = Attachment(trainer, self.config)
        _ATTACHED[trainer] = weakref.ref(self)
        if trainer.is_global_zero:
            if self._reporter is None or self._reporter_trainer is None or self._reporter_trainer() is not trainer:
                self._reporter = Reporter(trainer, self.config)
                self._reporter_trainer = weakref.ref(trainer)
            engine = self._attachment.engine
            self._reporter.hook_progress_bar(self._attachment.patches, lambda: engine.current)
            engine.when_finished = self._reporter.fill_progress_bar

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detaches from the Trainer."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tells the other ranks and detaches from the Trainer; `teardown` is not called after an exception."""
        if self._attachment is not None:
            self._attachment.engine.fail(exception)
        self._detach()

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Lets no writer see another loader's indices."""
        if self._attachment is not None and dataloader_idx not in self._attachment.indexed:
            trainer.predict_loop.current_batch_indices = []

    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Logs."""
        self._step()

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Logs."""
        self._step()

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Logs."""
        self._step()

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until no replica runs a step any more."""
        if self._attachment is not None:
            self._attachment.end_predict_epoch()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the results and reports."""
        if self._attachment is not None:
            self._attachment.end_predict()
            self._outputs = self._attachment.outputs
            self._end()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports."""
        self._end_evaluation(quiet=trainer.sanity_checking)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports."""
        self._end_evaluation()

    # --- parts --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        attachment, reporter = self._attachment, self._reporter
        if attachment is None or reporter is None or attachment.trainer.sanity_checking:
            return
        epoch = attachment.engine.current
        if epoch is None:
            return
        start_s = time.perf_counter()
        reporter.step(epoch, attachment.engine.epochs)
        epoch.recorder.add_overhead(time.perf_counter() - start_s)

    def _end_evaluation(self, *, quiet: bool = False) -> None:
        if self._attachment is not None:
            self._attachment.end_evaluation()
            if not quiet:
                self._end()

    def _end(self) -> None:
        assert self._attachment is not None
        epochs = self._attachment.engine.epochs
        self._snapshots = [epoch.snapshot() for epoch in epochs] or self._snapshots
        self._plans = [epoch.figures.plan for epoch in epochs if epoch.figures.plan is not None] or self._plans
        if self._reporter is not None:
            self._reporter.end(epochs)

    def _detach(self) -> None:
        if self._attachment is not None:
            _ATTACHED.pop(self._attachment.trainer, None)
            self._attachment.detach()
            self._attachment = None
