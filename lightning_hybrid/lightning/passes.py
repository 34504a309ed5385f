"""One pass of the loop over one of the user's loaders: opens the epoch, deals out the works, hands out the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch.utils.data import DataLoader

from lightning_hybrid.core.plan import Grid
from lightning_hybrid.engine import Engine
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning import loader as live
from lightning_hybrid.lightning.agreement import Exchange, NoExchange, StoreExchange, agree_on_grid, tell_the_others
from lightning_hybrid.lightning.ghost import run_ghost
from lightning_hybrid.lightning.ordering import Arranged
from lightning_hybrid.runtime.loader import NOTHING, WorkFeed, WorkIterator
from lightning_hybrid.runtime.lockstep import ghost_work
from lightning_hybrid.runtime.spec import EpochSpec, SizeRange, Stage
from lightning_hybrid.runtime.work import Work

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Deal = Literal["balance", "own", "rotate"]
"""``balance``: replicas share the work by speed. ``own``: each rank runs all batches of its own sampler. ``rotate``:
rank r runs batches r, r + world, ..."""

Arrange = Callable[[Grid, Exchange], Arranged]
"""Lays out the user's batches as they are to be run."""


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """How one of the user's loaders is treated."""

    stage: Stage
    loader_idx: int
    deal: Deal
    max_size: int | None
    """Most samples of a re-cut step, ``None`` where the user's batches stay as they are."""
    cell_size: int | None
    """Samples of a cell where the grid is cut anew, ``None`` where the user's batches are its cells."""
    auto: SizeRange | None
    """Between which sizes of a step the fastest is searched, ``None``: each cell is a step."""
    arrange: Arrange
    read_ahead: int = 0
    """How many batches the loop asks for before it runs the step of the first."""
    opens_at_once: bool = False
    """Whether samples are read before the loader makes its workers, so that these inherit what the dataset keeps."""


class LivePass:
    """The source of works of one pass; the epoch is opened when the loader first asks, as its own sampler would be."""

    def __init__(
        self, trainer: Trainer, engine: Engine, loader: DataLoader[Any], plan: LoaderPlan, sampler: Any
    ) -> None:
        self._trainer, self._engine, self._loader, self._plan, self._sampler = trainer, engine, loader, plan, sampler
        self._epoch: EpochRun | None = None
        self._prime_calls = live.prime_calls(loader)
        self._has_run = False
        self._cells = cells_to_run(trainer, engine, loader, plan)
        # a random order is drawn as late as the loader would draw it, so that it is the same order
        if self._cells is None or (plan.opens_at_once and live.is_deterministic(loader)):
            self._epoch = self._open()
        else:
            self._limit(self._cells)

    def batches(self, make_inner: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches that this rank runs."""
        feed = WorkFeed(self, self._prime_calls, type(self._loader).__name__)
        self._sampler.seen_batch_indices = live.BatchIndices()
        self._sampler.next_indices = lambda: self._indices(feed.next_work())
        return WorkIterator(make_inner, feed, self, self._ghost)

    def take(self, *, may_wait: bool) -> Work | None:
        """The next work to load."""
        if self._epoch is None:
            self._epoch = self._open()
        return self._epoch.take(may_wait=may_wait)

    def begin(self, work: Work) -> bool:
        """Whether a loaded work may be run; its indices become those of the rank's next batch."""
        if not self._opened.begin(work):
            return False
        self._has_run = self._has_run or not work.ghost
        return True

    def unpack(self, work: Work, loaded: Any) -> Any:
        """The batch of a work that is about to be run; `NOTHING` where none of its samples could be loaded."""
        epoch = self._opened
        batch = epoch.unpack(work, loaded)
        if not work.ghost and batch is not NOTHING:
            kept = epoch.losses.kept(work)
            indices = self._grid.indices(work.start, work.stop)
            if len(kept) < work.size:
                indices = [indices[position - work.start] for position in kept]
            self._sampler.seen_batch_indices.append(indices)
        return batch

    def note_wait(self, seconds: float) -> None:
        """The loop waited this long for a batch."""
        if self._epoch is not None:
            self._epoch.note_wait(seconds)

    def finish(self) -> None:
        """The loader has run out."""
        if self._epoch is not None:
            self._epoch.finish()

    @property
    def _opened(self) -> EpochRun:
        assert self._epoch is not None
        return self._epoch

    @property
    def _grid(self) -> Grid:
        return self._opened.spec.grid

    def _indices(self, work: Work) -> Any:
        indices = self._grid.indices(work.start, work.stop)
        return indices[0] if live.batches_itself(self._loader) else indices

    def _ghost(self, batch: Any) -> None:
        run_ghost(self._trainer, self._plan.stage, batch, self._plan.loader_idx, is_first=not self._has_run)
        self._has_run = True

    def _open(self) -> EpochRun:
        epoch = self._new_epoch()
        self._limit(epoch.spec.grid.num_cells)
        return epoch

    def _limit(self, num_cells: int) -> None:
        if not self._trainer.sanity_checking:
            plan = self._plan
            num_steps = steps_at_most(num_cells, plan, self._loader, self._engine.num_replicas)
            _compat.raise_limit(self._trainer, plan.stage, plan.loader_idx, num_steps)

    def _new_epoch(self) -> EpochRun:
        plan = self._plan
        balanced = plan.deal == "balance" and not self._trainer.sanity_checking
        if not balanced:
            arranged = self._arranged(live.read_grid(self._loader, self._cells), NoExchange())
            return self._engine.static(self._spec(arranged, 0), self._static_works(arranged.grid))
        store, number = self._engine.open_store(plan.stage, plan.loader_idx)
        exchange = StoreExchange(store, self._engine)
        try:
            arranged = self._arranged(agree_on_grid(self._loader, self._cells, exchange), exchange)
        except Exception as error:
            tell_the_others(store, self._engine.replica, error)
            raise
        return self._engine.balanced(self._spec(arranged, number), store)

    def _arranged(self, batches: Grid, exchange: Exchange) -> Arranged:
        if self._plan.deal == "rotate" or self._trainer.sanity_checking or _compat.is_fast_dev_run(self._trainer):
            return Arranged.as_it_is(batches)
        return self._plan.arrange(batches, exchange)

    def _spec(self, arranged: Arranged, number: int) -> EpochSpec:
        # in fit the step goes through DDP's forward, which broadcasts buffers once before it is like any other step
        return EpochSpec(
            stage=self._plan.stage,
            loader_idx=self._plan.loader_idx,
            epoch=number,
            grid=arranged.grid,
            arrangement=arranged.arrangement,
            costs=arranged.costs,
            prime_calls=self._prime_calls,
            max_size=self._plan.max_size,
            probe_rounds=2 if _compat.in_fit(self._trainer) else 1,
            read_ahead=self._plan.read_ahead,
            auto=self._auto(arranged.grid),
        )

    def _auto(self, grid: Grid) -> SizeRange | None:
        auto = self._plan.auto
        is_cut = auto is not None and grid.num_cells > 0 and int(np.diff(grid.offsets).max()) <= auto.unit
        return auto if is_cut and not self._trainer.sanity_checking and self._plan.deal != "rotate" else None

    def _static_works(self, grid: Grid) -> list[Work]:
        if self._plan.deal == "own":
            return [Work(*grid.span(cell), cell) for cell in range(grid.num_cells)]
        replica, world = self._engine.replica, self._engine.num_replicas
        rounds = -(-grid.num_cells // world)
        cells = range(replica, rounds * world, world)
        if self._trainer.sanity_checking:
            # nothing of the sanity check is reported, and equal counts keep any collective of the step matched
            return [Work(*grid.span(cell % grid.num_cells), cell % grid.num_cells) for cell in cells]
        works = [Work(*grid.span(cell), cell) for cell in cells if cell < grid.num_cells]
        if self._plan.stage == "predict":
            return works
        return works + [ghost_work(grid, "static")] * (rounds - len(works))  # their epoch-end collectives must match


def steps_at_most(cells: int, plan: LoaderPlan, loader: DataLoader[Any], num_replicas: int) -> int:
    """The most steps that one rank may take for ``cells`` batches of all ranks."""
    if plan.deal == "rotate":
        return -(-cells // num_replicas)
    batch_size, is_balanced = loader.batch_size, plan.deal == "balance"
    if is_balanced and plan.max_size and batch_size and plan.max_size < batch_size:
        return cells * batch_size  # batches cut into single samples
    if plan.cell_size is not None and batch_size and plan.cell_size < batch_size:
        return cells * -(-batch_size // plan.cell_size)
    return cells


def cells_to_run(trainer: Trainer, engine: Engine, loader: DataLoader[Any], plan: LoaderPlan) -> int | None:
    """How many cells of the loader all ranks run together (each rank, for ``own``); ``None``: to its end, unknown."""
    total = live.num_batches(loader)
    limit = _compat.limit_of(trainer, plan.stage)
    ranks = 1 if plan.deal == "own" else engine.num_replicas
    if isinstance(limit, int):
        return limit * ranks if total is None else min(total, limit * ranks)
    return None if total is None else int(total * limit)
