"""What is hooked into a Trainer for the length of one run, and taken out again."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_hybrid.core.config import HybridConfig, ModeOption
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.engine import Engine
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning.conclusion import Pack, conclude
from lightning_hybrid.lightning.ghost import count_step
from lightning_hybrid.lightning.links import Links
from lightning_hybrid.lightning.loaders import Loaders
from lightning_hybrid.lightning.ordering import Arranger, has_training_norm
from lightning_hybrid.lightning.patches import Patches
from lightning_hybrid.lightning.shared import shared_in
from lightning_hybrid.lightning.steps import Steps
from lightning_hybrid.lightning.streams import Streams
from lightning_hybrid.probes.flops import FlopCount
from lightning_hybrid.probes.step_memory import NoMeter, meter_for
from lightning_hybrid.runtime import results
from lightning_hybrid.runtime.assembly import Outputs
from lightning_hybrid.runtime.costs import CostOption, batch_elements
from lightning_hybrid.runtime.keys import KeyOption
from lightning_hybrid.runtime.metrics import combine
from lightning_hybrid.runtime.microbatch import MergeFunction, SplitFunction
from lightning_hybrid.runtime.spec import Stage
from lightning_hybrid.runtime.steering import Steering
from lightning_hybrid.runtime.step_sizes import StepSizes
from lightning_hybrid.runtime.store import open_stores
from lightning_hybrid.runtime.timing import timer_for

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_log = logging.getLogger(__name__)

_SHARDED = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}
_STAGES: tuple[Stage, ...] = ("predict", "validate", "test")


class Attachment:
    """The hooks in one Trainer, from its `setup` to its `teardown` or exception.

    Args:
        trainer: The Trainer, with its process group set up.
        config: All settings.
        cost: What samples cost, ``None`` when the user did not say.
        reuse: Which samples are equal, ``None`` when the user did not say.
        steering: The policies; by ``config`` alone where it is left out.
        split_fn: Cuts batches, in place of what this package knows of them.
        merge_fn: Makes one output of those of a batch's parts.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: HybridConfig,
        *,
        cost: CostOption | None = None,
        reuse: KeyOption | None = None,
        steering: Steering | None = None,
        split_fn: SplitFunction | None = None,
        merge_fn: MergeFunction | None = None,
    ) -> None:
        self.trainer, self.config = trainer, config
        mode = self._mode()  # may raise, on all ranks alike, so it comes before the first exchange
        kwargs: dict[str, int] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        token, depth = trainer.strategy.broadcast((uuid.uuid4().hex[:12], config.comm_probe))
        device = trainer.strategy.root_device
        stores = open_stores(f"lightning_hybrid/{token}")  # may raise, so it comes before anything is held
        self._shared = shared_in(trainer)
        self._sampler = self._shared.hold_sampler(trainer, config.device_period_s)
        meter = meter_for(device, config.memory_limit_bytes)
        self.engine = Engine(
            config,
            replica=kwargs.get("rank", 0),
            num_replicas=kwargs.get("num_replicas", 1),
            store=stores,
            probe=self._sampler,
            new_timer=lambda: timer_for(device, config.in_flight_steps),
            mode=mode,
            sizes=StepSizes(None if isinstance(meter, NoMeter) else meter, config),
            steering=steering,
        )
        self.outputs: dict[int, Outputs] = {}
        """What this rank holds of the outputs of each loader of predict."""
        self.arranger = Arranger(trainer, cost, reuse, config, self._say_once)
        self._streams = Streams(trainer, self.engine, self._say_once)
        self.links = Links(trainer, self.engine, depth)
        self.loaders = Loaders(trainer, self.engine, self.arranger, self._streams, self.links, self._say_once)
        self._steps = Steps(
            trainer,
            config,
            self.engine.sizes,
            is_collated=lambda loader_idx: loader_idx in self.loaders.collated,
            split_fn=split_fn,
            merge_fn=merge_fn,
            say_once=self._say_once,
        )
        self.patches = Patches()
        self._said: set[str] = set()
        self._adopted: list[str] = []
        self._is_detached = False
        self.counted: tuple[FlopCount, int] | None = None
        """The operations of one step and how many samples it had, where they are counted."""
        self._attach()
        self._shared.has_epochs = lambda: self.engine.current is not None
        self._sampler.start()

    def detach(self) -> None:
        """Takes every hook out and ends the background threads; safe to call twice."""
        self.patches.undo()
        self.engine.close()
        self._steps.forget()
        self._shared.has_epochs = lambda: False
        if not self._is_detached:
            self._is_detached = True
            self._shared.release_sampler(self.config.device_period_s)

    # --- hooks --------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        _compat.hook_loader_requests(self.patches, self.trainer, self.loaders.noting_request)
        _compat.hook_loader_preparation(self.patches, self.trainer, self.loaders.preparing)
        _compat.hook_epoch_end(self.patches, self.trainer, self._ending)
        _compat.hook_loop_start(self.patches, self.trainer, self._streams.starting)
        for stage in _STAGES:
            _compat.hook_step(self.patches, self.trainer.strategy, stage, self._stepping)

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            epoch = self.engine.epoch_of(args[-1] if self.loaders.are_told else 0)
            if epoch is None or not epoch.has_batch:
                self.engine.current = None
                return original(*args, **kwargs)
            if len(epoch.done) == 1:
                self.arranger.check(epoch)
            elements = batch_elements(args) if epoch.counts_elements else None
            if self.config.count_flops and self.counted is None and not self.trainer.sanity_checking:
                self.counted = count_step(self.trainer, lambda: original(*args, **kwargs)), epoch.next_size
            run = functools.partial(self._steps.run, epoch, original, args, kwargs, elements)
            return epoch.run_step(run, self._may_recut, elements)

        return step

    def _ending(self, original: Callable[[], None]) -> Callable[[], None]:
        def ended() -> None:
            original()
            self._end_loader()

        return ended

    def _may_recut(self, epoch: EpochRun, output: Any, size: int) -> bool:
        """Whether batches may be cut anew as far as this rank can tell from the model and its first output."""
        if has_training_norm(self.trainer.lightning_module):
            return False
        return epoch.spec.stage != "predict" or results.has_rows(output, size)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _end_loader(self) -> None:
        """Makes the epoch values of a loader exact, with one exchange of all ranks."""
        epoch = self.engine.epoch_of(_compat.ended_loader(self.trainer))
        if epoch is None or epoch.figures.records is not None or epoch.spec.stage == "predict":
            return
        with _compat.profiled(self.trainer, "end_of_loader"):
            self._end_epoch(epoch)

    def _end_epoch(self, epoch: EpochRun) -> None:
        epoch.finish()
        stage = epoch.spec.stage
        mine = _compat.logged(self.trainer, stage) if epoch.is_balanced else {}
        everyone = conclude(epoch, mine)
        if epoch.is_balanced:
            logs = {key: log for replica in everyone for key, log in replica.items()}
            parts = [{key: log.part for key, log in replica.items()} for replica in everyone]
            self._adopted += _compat.set_epoch_values(self.trainer, stage, combine(parts), logs)

    def end_evaluation(self) -> None:
        """Clears up after validate and test, once all values were reported."""
        _compat.forget(self.trainer, self._adopted)
        self._adopted = []

    def end_predict_epoch(self) -> None:
        """Waits until no replica runs a step of predict any more."""
        for epoch in self.engine.epochs:
            epoch.finish()

    def end_predict(self) -> None:
        """Exchanges the outputs and puts the whole list into what `trainer.predict` returns."""
        self.outputs = {}
        with _compat.profiled(self.trainer, "gather"):
            for epoch in self.engine.epochs:
                loader_idx, pack = epoch.spec.loader_idx, None
                if self.trainer.predict_loop.return_predictions:
                    pack = Pack(epoch, _compat.predictions_of(self.trainer)[loader_idx], self.config)
                conclude(epoch, {}, pack)
                if pack is not None:
                    self.outputs[loader_idx] = pack.gather(self._say_once)

    # --- set-up -------------------------------------------------------------------------------------------------

    def _mode(self) -> ModeOption:
        names = {cls.__name__ for cls in type(self.trainer.strategy).__mro__}
        sharded = sorted(names & _SHARDED)
        if sharded and self.config.mode == "queue":
            raise ConfigError("mode", "queue", f"be 'auto' or 'lockstep' with {sharded[0]}, whose steps synchronise")
        return "lockstep" if sharded else self.config.mode

    def _say_once(self, text: str) -> None:
        if self.trainer.is_global_zero and text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)
