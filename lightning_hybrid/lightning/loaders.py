"""How each of the user's loaders is dealt out, and the loader that the loop gets in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.engine import Engine
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning import loader as live
from lightning_hybrid.lightning.links import Links
from lightning_hybrid.lightning.ordering import Arranger, cell_size, reason_to_keep
from lightning_hybrid.lightning.passes import Deal, LivePass, LoaderPlan, steps_at_most
from lightning_hybrid.lightning.streams import Streams
from lightning_hybrid.runtime.guarded import can_guard
from lightning_hybrid.runtime.spec import SizeRange, Stage

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_AUTO_GROWTH = 16
"""How many of the loader's batches a step may hold at most with ``micro_batch_size="auto"``."""


class Loaders:
    """The loaders of one Trainer, as it asks the user for them and makes them ready.

    Args:
        trainer: The Trainer.
        engine: Deals out their batches.
        arranger: Lays out their passes.
        streams: Those whose dataset is a stream.
        links: Is told whether any work is shared.
        say_once: Tells the user something, unless it was told before.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        arranger: Arranger,
        streams: Streams,
        links: Links,
        say_once: Callable[[str], None],
    ) -> None:
        self._trainer, self._engine, self._say_once = trainer, engine, say_once
        self._config: HybridConfig = engine.config
        self._package = _compat.package_of(trainer)
        self._arranger, self._streams, self._links = arranger, streams, links
        self.are_told = False
        """Whether the loop tells the step which loader a batch comes from."""
        self.indexed: set[int] = set()
        """The loaders of the present stage whose batches have known dataset indices."""
        self.collated: set[int] = set()
        """Those whose batches torch's own collate function makes."""
        self._next_idx = 0
        self._combined_mode = "sequential"
        self._read_ahead = 0

    def noting_request(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """Stands in for what asks the user for the loaders of a stage."""

        def request() -> Any:
            loaders = original()
            self._next_idx = 0
            self._combined_mode = _compat.combined_mode(loaders)
            flat = _compat.flat_loaders(loaders)
            self.are_told = len(flat) > 1 and self._combined_mode == "sequential"
            # the loop reads one batch ahead where it cannot tell from a length which one is the last
            have_length = all(self._streams.claims(loader) or live.will_have_length(loader) for loader in flat)
            self._read_ahead = 0 if have_length else 1
            self._streams.forget()
            self._links.are_used = False
            self.indexed = set()
            self.collated = set()
            return loaders

        return request

    def preparing(self, original: Callable[..., object]) -> Callable[..., object]:
        """Stands in for what makes one of them ready for the loop."""

        def prepare(dataloader: object, shuffle: bool, mode: Any) -> object:
            stage = _compat.stage_of(mode)
            if stage is None:
                return original(dataloader, shuffle=shuffle, mode=mode)
            loader_idx = self._next_idx
            self._next_idx += 1
            if not isinstance(dataloader, DataLoader):
                self._say(f"loader {loader_idx} of {stage} is a {type(dataloader).__name__}, not a DataLoader")
                self._arranger.pass_over(stage, loader_idx)
                return original(dataloader, shuffle=shuffle, mode=mode)
            deal = self._deal(dataloader, stage, loader_idx)
            self._links.are_used |= deal in ("balance", "claim")
            if deal in ("stock", "as it is", "claim"):
                self._arranger.pass_over(stage, loader_idx)
            if deal == "claim":
                return self._streams.live(dataloader, stage, loader_idx, self._read_ahead)
            if deal == "stock":
                return original(dataloader, shuffle=shuffle, mode=mode)
            return dataloader if deal == "as it is" else self._live(dataloader, stage, loader_idx, deal)

        return prepare

    def _deal(
        self, loader: DataLoader[Any], stage: Stage, loader_idx: int
    ) -> Deal | Literal["stock", "as it is", "claim"]:
        """How a loader is dealt out; says why where it is not re-distributed."""
        which = f"loader {loader_idx} of {stage}"
        alone = self._engine.num_replicas == 1
        if self._combined_mode != "sequential":
            self._say(f"CombinedLoader(mode={self._combined_mode!r}) draws from several loaders at a time in {stage}")
            return "stock"
        if _compat.takes_dataloader_iter(self._trainer, self._package, stage):
            self._say(f"the {stage} step pulls its own batches from dataloader_iter")
            return "stock"
        if isinstance(loader.dataset, IterableDataset):
            if self._config.iterable == "stock":
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
        if not _compat.uses_distributed_sampler(self._trainer):
            self._say("the Trainer has use_distributed_sampler=False, so every rank runs all batches of its own loader")
            return "own"
        if _compat.is_fast_dev_run(self._trainer):
            self._say("fast_dev_run runs too few batches to share by speed")
            return "rotate"
        return "balance"

    def _live(self, loader: DataLoader[Any], stage: Stage, loader_idx: int, deal: Deal) -> object:
        keeps_batches = reason_to_keep(loader, batch_dependent=self._config.batch_dependent) is not None
        size = cell_size(loader, self._config)
        is_auto = self._config.micro_batch_size == "auto"
        most = self._config.max_micro_batch_size or (loader.batch_size if is_auto or size is None else size)
        plan = LoaderPlan(
            stage=stage,
            loader_idx=loader_idx,
            deal=deal,
            max_size=None if keeps_batches else most,
            cell_size=None if keeps_batches else size,
            auto=None if keeps_batches or not is_auto else self._size_range(loader.batch_size, size),
            arrange=lambda batches, exchange: self._arranger.arrange(
                loader, batches, exchange, stage=stage, loader_idx=loader_idx
            ),
            read_ahead=self._read_ahead,
            opens_at_once=self._arranger.reads_samples(stage) and bool(loader.num_workers),
        )
        if not live.batches_itself(loader):
            self.indexed.add(loader_idx)
            if loader.collate_fn is default_collate:
                self.collated.add(loader_idx)
        length = live.num_batches(loader)
        limit = _compat.limit_of(self._trainer, stage)
        if length is None and (isinstance(limit, int) or limit == 1.0):
            length = live.UNKNOWN_LENGTH  # known once the pass begins
        elif length is not None:
            length = steps_at_most(length, plan, loader, self._engine.num_replicas)
        copy, sampler = live.live_copy(
            loader,
            self._package,
            length,
            lambda make: LivePass(self._trainer, self._engine, loader, plan, sampler).batches(make),
            guards=self._guards(loader, f"loader {loader_idx} of {stage}"),
        )
        return copy

    def _guards(self, loader: DataLoader[Any], which: str) -> bool:
        """Whether samples that cannot be loaded are left out."""
        if self._config.on_error != "skip":
            return False
        if can_guard(loader):
            return True
        self._say_once(
            f"on_error='skip' has no effect on what {which} raises while it loads, because"
            f" {type(loader).__name__} has an __iter__ of its own"
        )
        return False

    def _size_range(self, batch_size: int | None, unit: int | None) -> SizeRange | None:
        """Between which sizes of a step the fastest is searched, in cells of ``unit`` samples."""
        if unit is None or batch_size is None:
            return None
        most = self._config.max_micro_batch_size or _AUTO_GROWTH * batch_size
        return SizeRange(unit, max(unit, min(most, batch_size)), max(unit, most))

    def _say(self, why: str) -> None:
        """Says once, on rank zero, why something runs without re-distribution."""
        if self._engine.num_replicas > 1:
            self._say_once(f"runs without re-distribution: {why}")
