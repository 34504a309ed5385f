"""The callback that balances predict, validate and test of the Trainer that it is given to."""

from __future__ import annotations

import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal

from lightning_hybrid.core.config import (
    CommProbeOption,
    ErrorOption,
    GatherOption,
    HybridConfig,
    IterableOption,
    ModeOption,
    OrderOption,
)
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.policies import Policy, is_policy_name, policy_named
from lightning_hybrid.core.recommend import Recommendation
from lightning_hybrid.core.selector import AUTO
from lightning_hybrid.core.statistics import History, Statistics
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning.attachment import Attachment
from lightning_hybrid.lightning.last_run import LastRun
from lightning_hybrid.lightning.reporting import Reporter
from lightning_hybrid.probes.model import model_info
from lightning_hybrid.runtime.costs import CostOption
from lightning_hybrid.runtime.keys import KeyOption
from lightning_hybrid.runtime.microbatch import MergeFunction, SplitFunction
from lightning_hybrid.runtime.steering import Steering

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = _compat.imported_package().Callback

_log = logging.getLogger(__name__)

_ATTACHED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Which callback works in which Trainer; a second one in the same Trainer stands aside."""


class HybridBalanceCallback(LastRun, Callback):
    """Shares the batches of predict, validate and test between the devices by their measured speed.

    Every sample is counted once, results come back in loader order, and epoch values of metrics are those of one
    device. Training is left alone. With ``cost`` samples are run heavy first and like ones together, which saves
    padding on a single device too, and results are put back into the loader's batches. Arguments that are ``None`` take
    their value from ``config``, from ``LIGHTNING_HYBRID_<FIELD>`` in the environment, or the default of `HybridConfig`,
    in this order.

    Logged to the trainer's loggers every ``log_every_n_steps`` and at the end (``<s>``: predict, validate or test):

    ================================================  ==============================================================
    key                                               meaning
    ================================================  ==============================================================
    ``balance/<s>/share_frac/replica<r>``             share of the finished samples, 0..1
    ``balance/<s>/speed_samples_per_s/replica<r>``    samples per second inside the step, newest estimate
    ``balance/<s>/busy_frac/replica<r>``              share of the wall time inside the step, 0..1
    ``balance/<s>/load_imbalance``                    (max - min) / (max + min) of the replicas' busy time
    ``balance/<s>/throughput_samples_per_s``          samples per second of all replicas
    ``balance/<s>/reused_samples``                    samples that were not run, because an equal one was (``reuse``)
    ``balance/<s>/overhead_us_per_step``              this package's own time on the loop's thread
    ``balance/<s>/micro_batch_size/replica<r>``       mean samples of its newest steps, or of their parts
    ``balance/<s>/memory_failures/replica<r>``        its steps that ran out of memory, once there are some
    ``balance/<s>/failed_samples``                    samples that were left out, once there are some (``on_error``)
    ``devices/<s>/<field>/replica<r>``                memory, utilisation and host readings that are known
    ``performance/<s>/error_frac``                    share of the finished samples that were left out, 0..1
    ``performance/<s>/communication_frac/replica<r>`` share of the step time in collectives, in lockstep mode
    ``performance/<s>/<link>``                        what the links between ranks carry (``comm_probe``)
    ================================================  ==============================================================

    Args:
        enabled: ``False`` leaves the Trainer exactly as it is; so does ``LIGHTNING_HYBRID=0``.
        mode: ``"queue"``: replicas claim batches as they go, so their step counts differ. ``"lockstep"``: equal step
            counts, sizes in proportion to speed. ``"auto"``: queue, unless the step issues collectives.
        order: Order of `rows`: ``"loader"`` or ``"dataset"`` (by dataset index).
        gather: Which ranks get the whole list from ``trainer.predict``: ``"all"``, ``"rank_zero"`` or ``"none"``.
        iterable: How an ``IterableDataset`` is shared. ``"claim"``: every rank reads the whole stream, and each of its
            batches is run by one of them. ``"sharded"`` says that it shards itself by rank. ``"stock"``: every rank
            runs the whole stream, and a message says so.
        policy: Scheduling policy: ``"load_balanced"``, ``"performance_optimized"``, ``"memory_aware"``, ``"hybrid"``, a
            name given to `register_policy`, or an object with a ``name`` and ``propose``. ``"auto"`` begins with
            ``"hybrid"`` and switches while the loop runs.
        target_throughput_per_s: Samples per second that all replicas together should reach.
        cost: What samples cost, in any unit: one number per dataset index, the name of a column or attribute (of sized
            values the length counts), a function of one sample, or a mapping of ``"compute"``, ``"memory"`` and
            ``"io"`` to such. A function or a name of a part of the samples reads every sample once more.
        reuse: In predict, which samples are equal, so that one is run and its row is given to all: one hashable key per
            dataset index, the name of a column or attribute, or a function of one sample. Prediction writers see the
            samples that are run.
        micro_batch_size: Samples of one step, whatever the loader's batches; outputs come back as the loader's batches.
            ``"auto"``: each device runs as many as it runs fastest, up to ``max_micro_batch_size``, found while the
            loop runs.
        max_micro_batch_size: Most samples of one step where batches are cut anew.
        on_error: ``"skip"``: a sample that cannot be read, or whose step raises, is left out, told in `failures`, and
            the run goes on.
        max_errors: Most samples that may be left out before the run ends.
        split_fn: Samples ``start`` to ``stop`` of a batch, ``split_fn(batch, start, stop)``, where this package cannot
            tell what belongs to each sample of a batch that has to be run in parts.
        merge_fn: One output of those of the parts, ``merge_fn(outputs, sizes)``, where these have no rows.
        batch_dependent: ``True`` says that results depend on the whole batch, so that batches are never cut anew, for
            ``cost`` and ``reuse`` neither.
        comm_probe: What is measured of the links between ranks before the first step, once for a Trainer:
            ``"quick"`` (neighbours in a ring, 0.2 s at most), ``"full"`` (all pairs, 2 s at most) or ``"off"``.
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
        policy: str | Policy | None = None,
        target_throughput_per_s: float | None = None,
        cost: CostOption | None = None,
        reuse: KeyOption | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        max_micro_batch_size: int | None = None,
        on_error: ErrorOption | None = None,
        max_errors: int | None = None,
        split_fn: SplitFunction | None = None,
        merge_fn: MergeFunction | None = None,
        batch_dependent: bool | None = None,
        comm_probe: CommProbeOption | None = None,
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
            "policy": policy if policy is None or isinstance(policy, str) else _name_of(policy),
            "target_throughput_per_s": target_throughput_per_s,
            "micro_batch_size": micro_batch_size,
            "max_micro_batch_size": max_micro_batch_size,
            "on_error": on_error,
            "max_errors": max_errors,
            "batch_dependent": batch_dependent,
            "comm_probe": comm_probe,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        self.config = HybridConfig.from_environment(os.environ, **given) if config is None else config.but(**given)
        self._policy = None if policy is None or isinstance(policy, str) else policy
        if self._policy is None and self.config.policy != AUTO:
            policy_named(self.config.policy)  # an unknown name is an error now, not in the run
        self._history = History(self.config)
        self._cost, self._reuse = _checked("cost", cost), _checked("reuse", reuse)
        for name, function in (("split_fn", split_fn), ("merge_fn", merge_fn)):
            if function is not None and not callable(function):
                raise ConfigError(name, function, "be a function")
        self._split_fn, self._merge_fn = split_fn, merge_fn
        self._attachment: Attachment | None = None
        self._reporter: Reporter | None = None
        self._reporter_trainer: weakref.ref[Trainer] | None = None

    # --- what runs left, beside `LastRun` ------------------------------------------------------------------------

    @property
    def policies(self) -> Statistics:
        """Which policies were in force in all runs so far, and what switching did; on rank zero, empty elsewhere."""
        return self._history.statistics

    @property
    def recommendations(self) -> tuple[Recommendation, ...]:
        """What was found to slow the last run down; on rank zero only, empty elsewhere."""
        return () if self._reporter is None else self._reporter.recommendations

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
        steering = Steering(self.config, self._policy, history=self._history)
        self._attachment = Attachment(
            trainer,
            self.config,
            cost=self._cost,
            reuse=self._reuse,
            steering=steering,
            split_fn=self._split_fn,
            merge_fn=self._merge_fn,
        )
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

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that the model is in evaluation."""
        self._begin()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that the model is in evaluation."""
        self._begin()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that the model is in evaluation."""
        self._begin()

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Lets no writer see another loader's indices."""
        if self._attachment is not None and dataloader_idx not in self._attachment.loaders.indexed:
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

    def _begin(self) -> None:
        if self._attachment is not None:
            self._attachment.arranger.has_begun = True
            self._communication = self._attachment.links.measure() or self._communication

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
            self._attachment.arranger.has_begun = False
            if not quiet:
                self._end()

    def _end(self) -> None:
        assert self._attachment is not None
        epochs = self._attachment.engine.epochs
        flops, num_samples = self._attachment.counted or (None, 0)
        self._keep(epochs, model_info(self._attachment.trainer.lightning_module, flops, num_samples))
        if self._reporter is not None:
            self._reporter.end(epochs, self.policies, self.communication)

    def _detach(self) -> None:
        if self._attachment is not None:
            _ATTACHED.pop(self._attachment.trainer, None)
            self._attachment.detach()
            self._attachment = None


def _name_of(policy: object) -> str:
    name = getattr(policy, "name", None)
    if not (callable(getattr(policy, "propose", None)) and is_policy_name(name)):
        raise ConfigError("policy", policy, "be a name, or an object with a name and a method propose(cells, replicas)")
    return str(name)


def _checked(name: str, option: Any) -> Any:
    is_one = option is None or callable(option) or hasattr(option, "__getitem__")
    if not is_one:
        raise ConfigError(name, option, "be a function of a sample, a name, or one value per dataset index")
    return option
