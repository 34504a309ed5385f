"""What is hooked into a Trainer for the length of one run, and taken out again."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_hybrid.core.config import HybridConfig, ModeOption
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.engine import Engine
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning import loader as live
from lightning_hybrid.lightning.conclusion import Pack, conclude
from lightning_hybrid.lightning.ghost import count_step
from lightning_hybrid.lightning.links import Links
from lightning_hybrid.lightning.ordering import Arranger, cell_size, has_training_norm, reason_to_keep
from lightning_hybrid.lightning.passes import Deal, LivePass, LoaderPlan, steps_at_most
from lightning_hybrid.lightning.patches import Patches
from lightning_hybrid.lightning.shared import shared_in
from lightning_hybrid.lightning.steps import Steps
from lightning_hybrid.lightning.streams import Streams
from lightning_hybrid.probes.flops import FlopCount
from lightning_hybrid.probes.step_memory import NoMeter, meter_for
from lightning_hybrid.runtime import results
from lightning_hybrid.runtime.assembly import Outputs
from lightning_hybrid.runtime.costs import CostOption, batch_elements
from lightning_hybrid.runtime.guarded import can_guard
from lightning_hybrid.runtime.keys import KeyOption
from lightning_hybrid.runtime.metrics import combine
from lightning_hybrid.runtime.microbatch import MergeFunction, SplitFunction
from lightning_hybrid.runtime.spec import SizeRange, Stage
from lightning_hybrid.runtime.steering import Steering
from lightning_hybrid.runtime.step_sizes import StepSizes
from lightning_hybrid.runtime.store import open_stores
from lightning_hybrid.runtime.timing import timer_for

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_log = logging.getLogger(__name__)

_AUTO_GROWTH = 16
"""How many of the loader's batches a step may hold at most with ``micro_batch_size="auto"``."""
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
        self.package = _compat.package_of(trainer)
        kwargs: dict[str, int] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        token, depth = trainer.strategy.broadcast((uuid.uuid4().hex[:12], config.comm_probe))
        device = trainer.strategy.root_device
        self._shared = shared_in(trainer)
        self._sampler = self._shared.hold_sampler(trainer, config.device_period_s)
        meter = meter_for(device, config.memory_limit_bytes)
        self.sizes = StepSizes(None if isinstance(meter, NoMeter) else meter, config)
        self.engine = Engine(
            config,
            replica=kwargs.get("rank", 0),
            num_replicas=kwargs.get("num_replicas", 1),
            store=open_stores(f"lightning_hybrid/{token}"),
            probe=self._sampler,
            new_timer=lambda: timer_for(device, config.in_flight_steps),
            mode=mode,
            sizes=self.sizes,
            steering=steering,
        )
        self.outputs: dict[int, Outputs] = {}
        """What this rank holds of the outputs of each loader of predict."""
        self.arranger = Arranger(trainer, cost, reuse, config, self._say_once)
        self.steps = Steps(trainer, config, self.sizes, split_fn=split_fn, merge_fn=merge_fn, say_once=self._say_once)
        self._streams = Streams(trainer, self.engine, self._say_once)
        self.links = Links(trainer, self.engine, depth)
        self.patches = Patches()
        self._said: set[str] = set()
        self._adopted: list[str] = []
        self._next_loader_idx = 0
        self._combined_mode = "sequential"
        self._read_ahead = 0
        self._is_told_the_loader = self._is_detached = False
        self.counted: tuple[FlopCount, int] | None = None
        """The operations of one step and how many samples it had, where they are counted."""
        self.indexed: set[int] = set()
        """The loaders of the present stage whose batches have known dataset indices."""
        self._attach()
        self._shared.has_epochs = lambda: bool(self.engine.epochs)
        self._sampler.start()

    def detach(self) -> None:
        """Takes every hook out and ends the background threads; safe to call twice."""
        self.patches.undo()
        self.engine.close()
        self.steps.forget()
        self._shared.has_epochs = lambda: False
        if not self._is_detached:
            self._is_detached = True
            self._shared.release_sampler(self.config.device_period_s)

    # --- hooks --------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        _compat.hook_loader_requests(self.patches, self.trainer, self._noting_request)
        _compat.hook_loader_preparation(self.patches, self.trainer, self._preparing)
        _compat.hook_epoch_end(self.patches, self.trainer, self._ending)
        _compat.hook_loop_start(self.patches, self.trainer, self._streams.starting)
        for stage in _STAGES:
            _compat.hook_step(self.patches, self.trainer.strategy, stage, self._stepping)

    def _noting_request(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def request() -> Any:
            loaders = original()
            self._next_loader_idx = 0
            self._combined_mode = _compat.combined_mode(loaders)
            flat = _compat.flat_loaders(loaders)
            self._is_told_the_loader = len(flat) > 1 and self._combined_mode == "sequential"
            # the loop reads one batch ahead where it cannot tell from a length which one is the last
            have_length = all(self._streams.claims(loader) or live.will_have_length(loader) for loader in flat)
            self._read_ahead = 0 if have_length else 1
            self._streams.forget()
            self.links.are_used = False
            self.indexed = set()
            self.steps.collated = set()
            return loaders

        return request

    def _preparing(self, original: Callable[..., object]) -> Callable[..., object]:
        def prepare(dataloader: object, shuffle: bool, mode: Any) -> object:
            stage = _compat.stage_of(mode)
            if stage is None:
                return original(dataloader, shuffle=shuffle, mode=mode)
            loader_idx = self._next_loader_idx
            self._next_loader_idx += 1
            if not isinstance(dataloader, DataLoader):
                self._say(f"loader {loader_idx} of {stage} is a {type(dataloader).__name__}, not a DataLoader")
                self.arranger.pass_over(stage, loader_idx)
                return original(dataloader, shuffle=shuffle, mode=mode)
            deal = self._deal(dataloader, stage, loader_idx)
            self.links.are_used |= deal in ("balance", "claim")
            if deal in ("stock", "as it is", "claim"):
                self.arranger.pass_over(stage, loader_idx)
            if deal == "claim":
                return self._streams.live(dataloader, stage, loader_idx, self._read_ahead)
            if deal == "stock":
                return original(dataloader, shuffle=shuffle, mode=mode)
            return dataloader if deal == "as it is" else self._live(dataloader, stage, loader_idx, deal)

        return prepare

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            epoch = self.engine.epoch_of(args[-1] if self._is_told_the_loader else 0)
            if epoch is None or not epoch.has_batch:
                self.engine.current = None
                return original(*args, **kwargs)
            if len(epoch.done) == 1:
                self.arranger.check(epoch)
            elements = batch_elements(args) if epoch.counts_elements else None
            if self.config.count_flops and self.counted is None and not self.trainer.sanity_checking:
                self.counted = count_step(self.trainer, lambda: original(*args, **kwargs)), epoch.next_size
            return epoch.run_step(lambda: self.steps.run(epoch, original, args, kwargs), self._may_recut, elements)

        return step

    def _ending(self, original: Callable[[], None]) -> Callable[[], None]:
        def ended() -> None:
            original()
            self._end_loader()

        return ended

    # --- loaders ------------------------------------------------------------------------------------------------

    def _deal(
        self, loader: DataLoader[Any], stage: Stage, loader_idx: int
    ) -> Deal | Literal["stock", "as it is", "claim"]:
        """How a loader is dealt out; says why where it is not re-distributed."""
        which = f"loader {loader_idx} of {stage}"
        alone = self.engine.num_replicas == 1
        if self._combined_mode != "sequential":
            self._say(f"CombinedLoader(mode={self._combined_mode!r}) draws from several loaders at a time in {stage}")
            return "stock"
        if _compat.takes_dataloader_iter(self.trainer, self.package, stage):
            self._say(f"the {stage} step pulls its own batches from dataloader_iter")
            return "stock"
        if isinstance(loader.dataset, IterableDataset):
            if self.config.iterable == "stock":
                self._say(
                    f"{which} has an IterableDataset, of which every rank sees the whole stream; pass"
                    " HybridBalanceCallback(iterable='claim') to have each of its batches run by one rank, or shard"
                    " the dataset by rank and pass iterable='sharded' to say so"
                )
            return "claim" if self._streams.claims(loader) else "as it is"
        if alone:
            return "own"
        if live.shards_itself(loader):
            self._say(f"{which} has a DistributedSampler of its own")
            return "own"
        if not _compat.uses_distributed_sampler(self.trainer):
            self._say("the Trainer has use_distributed_sampler=False, so every rank runs all batches of its own loader")
            return "own"
        if _compat.is_fast_dev_run(self.trainer):
            self._say("fast_dev_run runs too few batches to share by speed")
            return "rotate"
        return "balance"

    def _live(self, loader: DataLoader[Any], stage: Stage, loader_idx: int, deal: Deal) -> object:
        keeps_batches = reason_to_keep(loader, batch_dependent=self.config.batch_dependent) is not None
        size = cell_size(loader, self.config)
        is_auto = self.config.micro_batch_size == "auto"
        most = self.config.max_micro_batch_size or (loader.batch_size if is_auto or size is None else size)
        plan = LoaderPlan(
            stage=stage,
            loader_idx=loader_idx,
            deal=deal,
            max_size=None if keeps_batches else most,
            cell_size=None if keeps_batches else size,
            auto=None if keeps_batches else self._size_range(loader),
            arrange=lambda batches, exchange: self.arranger.arrange(
                loader, batches, exchange, stage=stage, loader_idx=loader_idx
            ),
            read_ahead=self._read_ahead,
            opens_at_once=self.arranger.reads_samples(stage) and bool(loader.num_workers),
        )
        if not live.batches_itself(loader):
            self.indexed.add(loader_idx)
            if loader.collate_fn is default_collate:
                self.steps.collated.add(loader_idx)
        length = live.num_batches(loader)
        limit = _compat.limit_of(self.trainer, stage)
        if length is None and (isinstance(limit, int) or limit == 1.0):
            length = live.UNKNOWN_LENGTH  # known once the pass begins
        elif length is not None:
            length = steps_at_most(length, plan, loader, self.engine.num_replicas)
        copy, sampler = live.live_copy(
            loader,
            self.package,
            length,
            lambda make: LivePass(self.trainer, self.engine, loader, plan, sampler).batches(make),
            guards=self._guards(loader, f"loader {loader_idx} of {stage}"),
        )
        return copy

    def _guards(self, loader: DataLoader[Any], which: str) -> bool:
        """Whether samples that cannot be loaded are left out."""
        if self.config.on_error != "skip":
            return False
        if not can_guard(loader):
            self._say_once(
                f"on_error='skip' has no effect on what {which} raises while it loads, because"
                f" {type(loader).__name__} has an __iter__ of its own"
            )
        return can_guard(loader)

    def _size_range(self, loader: DataLoader[Any]) -> SizeRange | None:
        unit = cell_size(loader, self.config) if self.config.micro_batch_size == "auto" else None
        if unit is None or loader.batch_size is None:
            return None
        most = self.config.max_micro_batch_size or _AUTO_GROWTH * loader.batch_size
        return SizeRange(unit, max(unit, min(most, loader.batch_size)), max(unit, most))

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

    def _say(self, why: str) -> None:
        """Says once, on rank zero, why something runs without re-distribution."""
        if self.engine.num_replicas > 1:
            self._say_once(f"runs without re-distribution: {why}")

    def _say_once(self, text: str) -> None:
        if self.trainer.is_global_zero and text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)
