"""Before a pass: finds the costs of its samples and which of them repeat, and lays out the grid to run by that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs, FloatArray
from lightning_hybrid.core.plan import Arrangement, Grid, Offsets, arrange, first_positions
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning import loader as live
from lightning_hybrid.lightning.agreement import Exchange
from lightning_hybrid.runtime.costs import CostOption, sample_costs
from lightning_hybrid.runtime.keys import KeyOption, sample_keys
from lightning_hybrid.runtime.spec import Stage

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_NO_CELLS: Offsets = np.zeros(1, dtype=np.int64)
_CELLS_PER_BATCH = 4
_NORMS = (torch.nn.modules.batchnorm._NormBase,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Arranged:
    """The grid to run, how the user's batches lie in it, and what its cells cost as far as that is known."""

    grid: Grid
    arrangement: Arrangement
    costs: Costs | None = None

    @property
    def digest(self) -> str:
        """Hash of all of it; equal on every rank that runs the same."""
        costs = "unknown costs" if self.costs is None else f"costs {self.costs.digest}"
        return f"samples {self.grid.digest}, laid out as {self.arrangement.digest}, {costs}"

    @classmethod
    def as_it_is(cls, batches: Grid) -> Arranged:
        """The user's batches, unchanged."""
        return cls(grid=batches, arrangement=Arrangement(batches=batches))


class Arranger:
    """Lays out passes over loaders.

    Args:
        trainer: The Trainer.
        cost: What samples cost, ``None`` when the user did not say.
        reuse: Which samples are equal, ``None`` when the user did not say.
        config: Says whether samples are ordered by cost, and whether results depend on the whole batch.
        say: Tells the user something, once.
    """

    def __init__(
        self,
        trainer: Trainer,
        cost: CostOption | None,
        reuse: KeyOption | None,
        config: HybridConfig,
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._cost, self._reuse, self._config, self._say = trainer, cost, reuse, config, say
        self.has_begun = False
        """Whether the present loop has put the model into evaluation."""
        self._found: dict[tuple[Stage, int], tuple[Any, str, Costs]] = {}

    def reads_samples(self, stage: Stage) -> bool:
        """Whether samples are looked at before the pass."""
        return self._cost is not None or (self._reuse is not None and stage == "predict")

    def pass_over(self, stage: Stage, loader_idx: int) -> None:
        """Tells that a loader is run in its own order, because this package does not give out its batches."""
        for name, option in (("cost", self._cost), ("reuse", self._reuse)):
            if option is not None:
                self._say(f"{name}= has no effect on loader {loader_idx} of {stage}, whose samples are not known ahead")

    def arrange(
        self,
        loader: DataLoader[Any],
        batches: Grid,
        exchange: Exchange,
        *,
        stage: Stage,
        loader_idx: int,
    ) -> Arranged:
        """The grid of a pass, the same on every rank of ``exchange``.

        Args:
            loader: The user's loader.
            batches: The batches that it deals out now.
            exchange: Between the ranks that share the pass.
            stage: Whose pass it is.
            loader_idx: Index of the loader.

        Raises:
            CostError: a cost is not what a cost can be; names the index.
            ConfigError: a key cannot be had; names the index.
            PlanError: ranks hold different costs or keys.
        """
        is_plain = self._cost is None and self._reuse is None and self._config.micro_batch_size is None
        if is_plain or not batches.num_samples:
            return Arranged.as_it_is(batches)
        which = f"loader {loader_idx} of {stage}"
        kept_because = self._reason_to_keep(loader, stage)
        size = cell_size(loader, self._config)
        if size is not None and kept_because is not None:
            self._say(f"{which} is run in its own batches although micro_batch_size= is given, because {kept_because}")
            size = None
        firsts = self._firsts(loader.dataset, batches, exchange, which, stage=stage, kept_because=kept_because)
        distinct = None if firsts is None else np.unique(firsts)
        order = batches.order if distinct is None else batches.order_at(distinct)
        costs = self._costs(loader.dataset, order, exchange, (stage, loader_idx))
        by = self._to_order_by(costs, which, kept_because)
        if firsts is None and by is None and size is None:
            arranged = Arranged.as_it_is(batches)
        else:
            grid, arrangement = arrange(batches, size or loader.batch_size, firsts=firsts, costs=by)
            arranged = Arranged(grid=grid, arrangement=arrangement)
        arranged = replace(arranged, costs=None if costs is None else _of_cells(costs, arranged, distinct))
        exchange.compare("arrangement", arranged.digest)
        return arranged

    def check(self, epoch: EpochRun) -> None:
        """Tells at the first step of a pass where its batches should not have been cut anew."""
        arrangement = epoch.spec.arrangement
        is_cut_anew = arrangement is not None and arrangement.is_cut_anew(epoch.spec.grid)
        if is_cut_anew and has_training_norm(self._trainer.lightning_module):
            self._say(
                f"loader {epoch.spec.loader_idx} of {epoch.spec.stage} is run in batches cut anew although a norm layer"
                " is in training mode now; use HybridBalanceCallback(batch_dependent=True)"
            )

    def _reason_to_keep(self, loader: DataLoader[Any], stage: Stage) -> str | None:
        reason = reason_to_keep(loader, batch_dependent=self._config.batch_dependent)
        # a loader with workers asks for its first batches before the loop has put the model into evaluation
        is_final = self.has_begun or _compat.chooses_mode_itself(self._trainer, stage)
        if reason is None and is_final and has_training_norm(self._trainer.lightning_module):
            return "a norm layer is in training mode"
        return reason

    def _to_order_by(self, costs: Costs | None, which: str, kept_because: str | None) -> FloatArray | None:
        if costs is None or not self._config.order_by_cost:
            return None
        if kept_because is not None:
            self._say(f"{which} is run in its own batches although cost= is given, because {kept_because}")
            return None
        return costs.compute

    def _firsts(
        self,
        dataset: Any,
        batches: Grid,
        exchange: Exchange,
        which: str,
        *,
        stage: Stage,
        kept_because: str | None,
    ) -> Offsets | None:
        """For every position the first with an equal sample, ``None`` where each is run."""
        reuse = self._reuse
        if reuse is None:
            return None
        if stage != "predict":
            self._say(
                f"{which} runs equal samples each for itself although reuse= is given: its metrics count them all"
            )
            return None
        if kept_because is not None:
            self._say(f"{which} runs equal samples each for itself although reuse= is given, because {kept_because}")
            return None
        firsts: Offsets = exchange.once("repeats", lambda: first_positions(sample_keys(reuse, dataset, batches.order)))
        return None if len(np.unique(firsts)) == batches.num_samples else firsts

    def _costs(self, dataset: Any, order: Any, exchange: Exchange, key: tuple[Stage, int]) -> Costs | None:
        """Costs of the samples with these dataset indices, in this order."""
        cost = self._cost
        if cost is None:
            return None
        if not _reads_data(cost):
            return sample_costs(cost, dataset, order)
        parts = exchange.divided("costs", len(order), lambda a, b: self._part(dataset, order[a:b], key))
        return _joined(parts)

    def _part(self, dataset: Any, order: Any, key: tuple[Stage, int]) -> Costs:
        """The costs of this rank's part, kept for the next pass over the same samples."""
        digest = Grid(order=order, offsets=_NO_CELLS).digest
        known = self._found.get(key)
        if known is not None and known[0] is dataset and known[1] == digest:
            return known[2]
        assert self._cost is not None
        costs = sample_costs(self._cost, dataset, order) if len(order) else Costs.equal(0)
        self._found[key] = dataset, digest, costs
        return costs


def _reads_data(cost: CostOption) -> bool:
    """Whether costs may have to be read from the samples, so that ranks had better divide the reading."""
    if isinstance(cost, Mapping):
        return any(map(_reads_data, cost.values()))
    return callable(cost) or isinstance(cost, str)


def _joined(parts: Sequence[Costs]) -> Costs:
    parts = [part for part in parts if len(part)]  # there may be more ranks than samples
    kinds = {name: [getattr(part, name) for part in parts] for name in ("compute", "memory", "io")}
    costs = Costs(**{name: np.concatenate(arrays) for name, arrays in kinds.items() if arrays[0] is not None})
    return costs if costs.compute.any() else replace(costs, compute=np.ones(len(costs)))


def _of_cells(costs: Costs, arranged: Arranged, distinct: Offsets | None) -> Costs:
    """Costs of the cells, from those of the samples that are run, in loader order."""
    slots = arranged.arrangement.slots
    if slots is not None:
        costs = costs.take(np.argsort(slots if distinct is None else slots[distinct]))
    return costs.of_cells(arranged.grid.offsets)


def cell_size(loader: DataLoader[Any], config: HybridConfig) -> int | None:
    """Samples of a cell where ``micro_batch_size`` says so; ``None``: as many as a batch of the loader's.

    With ``auto`` cells are small, and every replica finds out how many of them to run in one step.
    """
    if config.micro_batch_size == "auto":
        return max(1, (loader.batch_size or 1) // _CELLS_PER_BATCH)
    return config.micro_batch_size


def reason_to_keep(loader: DataLoader[Any], *, batch_dependent: bool | None) -> str | None:
    """Why the batches of a loader must stay what they are, as far as the loader tells."""
    if live.batches_itself(loader):
        return "its dataset gives whole batches (batch_size=None)"
    if live.has_own_batch_sampler(loader):
        return "a batch sampler of its own makes the batches"
    return "batch_dependent=True says that results depend on the whole batch" if batch_dependent else None


def has_training_norm(module: torch.nn.Module) -> bool:
    """Whether a norm layer takes its statistics from the batch."""
    return any(isinstance(child, _NORMS) and child.training for child in module.modules())
