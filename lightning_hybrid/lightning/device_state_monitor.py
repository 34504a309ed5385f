"""The callback that logs the state of every rank's device, in every stage."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning.shared import MakeProbe, shared_in
from lightning_hybrid.lightning.watch import Watch
from lightning_hybrid.runtime.batch_size import num_samples

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = _compat.imported_package().Callback

_log = logging.getLogger(__name__)

_STAGES = ("fit", "validate", "test", "predict")


class DeviceStateMonitor(Callback):
    """Logs the state of every rank's device while the Trainer fits, validates, tests or predicts.

    Devices are read on a thread of their own, ranks tell rank zero what they read through the process group's store,
    and rank zero logs it to every logger of the Trainer. A driver that hangs and a rank that falls silent delay nobody:
    what is not known is not logged. It works with `HybridBalanceCallback` and without it; together they share one
    sampler, and devices are logged once, under the names below.

    Logged every ``log_every_n_steps`` if there is a new reading, and at the end of each stage. ``<s>`` is ``fit``,
    ``validate``, ``test`` or ``predict``; inside ``fit`` the x axis is ``trainer.global_step``, and validation is
    logged at its end; elsewhere it is the number of samples done in that stage over the Trainer's life: those of rank
    zero times the number of replicas, or what `HybridBalanceCallback` has counted.

    ================================  ==============================================================================
    key                               meaning
    ================================  ==============================================================================
    ``devices/<s>/<name>/rank<r>``    ``utilization_frac``, ``memory_used_gib``, ``power_w``, ``temperature_celsius``,
                                      ``sm_clock_mhz`` and all other readings that are known; their names and meaning
                                      are in ``docs/telemetry.md``
    ================================  ==============================================================================

    ``LIGHTNING_HYBRID=0`` turns it off.

    Args:
        device_period_s: Seconds from one reading to the next; by default `HybridConfig.device_period_s`, 1 s, which
            ``LIGHTNING_HYBRID_DEVICE_PERIOD_S`` in the environment sets.
        most_overhead_frac: Largest share of the loop's time that logging may take, above 0 and up to 1. With many ranks
            or a slow logger readings are left out.
        probe: Makes what reads a rank's device, given the device; by default whatever NVML, torch and psutil tell. With
            launchers that spawn it must be picklable.

    Raises:
        ConfigError: ``device_period_s`` is not a positive number of seconds, ``most_overhead_frac`` is not above 0 and
            up to 1, or ``probe`` cannot be called.

    Example:
        >>> from lightning_hybrid import DeviceStateMonitor
        >>> DeviceStateMonitor(device_period_s=0.5).device_period_s
        0.5
    """

    def __init__(
        self,
        *,
        device_period_s: float | None = None,
        most_overhead_frac: float = 0.005,
        probe: MakeProbe | None = None,
    ) -> None:
        super().__init__()
        given = {} if device_period_s is None else {"device_period_s": device_period_s}
        self._config = HybridConfig.from_environment(os.environ, **given)
        if not 0 < most_overhead_frac <= 1:
            raise ConfigError("most_overhead_frac", most_overhead_frac, "be above 0 and up to 1")
        self._most_overhead_frac = most_overhead_frac
        if probe is not None and not callable(probe):
            raise ConfigError("probe", probe, "be a function that makes a probe for a torch.device")
        self.make_probe = probe
        """Makes what reads a rank's device; ``None``: whatever there is to read."""
        self._watch: Watch | None = None
        self._states: dict[int, DeviceState] = {}
        self._batches, self._done = Counter[str](), Counter[str]()
        # in memory that processes share: with launchers that fork or spawn, every run counts on in a process of its own
        self._samples = torch.zeros(len(_STAGES), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def device_period_s(self) -> float:
        """Seconds from one reading to the next."""
        return self._config.device_period_s

    @property
    def states(self) -> dict[int, DeviceState]:
        """The newest state by rank: on rank zero of every rank, elsewhere of this one; kept when a run has ended.

        The state of a rank that has been silent for a while has only who its device is, and ``error``.
        """
        return dict(self._states) if self._watch is None else self._watch.states()

    def __getstate__(self) -> dict[str, Any]:
        self._share()
        # `log` and `log_dict` are Lightning's, which gives every callback those of the model
        kept = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        return kept | {"_watch": None}

    # --- hooks --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts to read."""
        self._stop()
        if not self._config.enabled or os.environ.get("LIGHTNING_HYBRID") == "0":
            return
        shared = shared_in(trainer)
        if shared.log_devices is not None:
            if trainer.is_global_zero:
                _log.warning("a second DeviceStateMonitor in the same Trainer has no effect")
            return
        self._done = Counter(dict(zip(_STAGES, self._samples.tolist(), strict=True)))
        self._watch = Watch(trainer, shared, self.device_period_s, self._most_overhead_frac)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the reading."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the reading; `teardown` is not called after an exception."""
        self._stop()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has every rank tell its state."""
        self._begin("fit")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has every rank tell its state."""
        self._begin("validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has every rank tell its state."""
        self._begin("test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has every rank tell its state."""
        self._begin("predict")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Logs."""
        self._step("fit", trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Logs."""
        self._step("validate", trainer, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Logs."""
        self._step("test", trainer, batch)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Logs."""
        self._step("predict", trainer, batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs."""
        self._end("fit", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs."""
        self._end("validate", trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs."""
        self._end("test", trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs."""
        self._end("predict", trainer)

    # --- parts --------------------------------------------------------------------------------------------------

    def _begin(self, stage: str) -> None:
        self._batches[stage] = 0
        if self._watch is not None:
            self._watch.wake()

    def _step(self, stage: str, trainer: Trainer, batch: Any = None) -> None:
        watch = self._watch
        if watch is None or not watch.logs or trainer.sanity_checking:
            return
        in_fit = _compat.in_fit(trainer)
        self._batches[stage] += 1
        if not in_fit:
            self._done[stage] += num_samples(batch) * watch.num_replicas
        every = _compat.log_every_n_steps(trainer)
        is_due = every > 0 and self._batches[stage] % every == 0
        if is_due and (stage == "fit" or not in_fit):
            self._log(stage, trainer)

    def _end(self, stage: str, trainer: Trainer) -> None:
        if not trainer.sanity_checking:
            self._log(stage, trainer, is_last=True)

    def _log(self, stage: str, trainer: Trainer, *, is_last: bool = False) -> None:
        watch = self._watch
        if watch is None or (watch.is_led and stage != "fit"):
            return
        if _compat.in_fit(trainer):
            watch.log(stage, trainer.global_step, is_last)
            # the axis of a later run of the stage goes on from here
            self._done[stage] = max(trainer.global_step, self._done[stage])
        else:
            watch.log(stage, self._done[stage], is_last)

    def _stop(self) -> None:
        if self._watch is not None:
            self._states = self._watch.states()
            self._share()
            self._watch.stop()
            self._watch = None

    def _share(self) -> None:
        """Lets processes that this one has come from know how far the axes are."""
        if self._watch is not None and self._watch.logs:
            with torch.inference_mode():  # a copy that was unpickled in a prediction step is of that mode
                self._samples.copy_(torch.tensor([self._done[stage] for stage in _STAGES]))
