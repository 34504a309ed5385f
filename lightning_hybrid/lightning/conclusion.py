"""The end of a pass: what all ranks exchange once none of them runs a step any more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.failures import SampleFailure
from lightning_hybrid.core.plan import Arrangement
from lightning_hybrid.core.recording import KeptSteps
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning._compat import Logged
from lightning_hybrid.runtime.assembly import Outputs, assembled
from lightning_hybrid.runtime.reading import are_alike
from lightning_hybrid.runtime.results import Chunk, Parcel, Piece, plain
from lightning_hybrid.runtime.spec import EpochSpec

_log = logging.getLogger(__name__)


def conclude(epoch: EpochRun, logs: dict[str, Logged], pack: Pack | None = None) -> list[dict[str, Logged]]:
    """Exchanges final records, works and logged numbers, and the first of the outputs; each replica counts once."""
    record, stream = epoch.figures.own_record(), epoch.spec.stream
    read = None if stream is None else stream.summary()
    works = [(work.start, work.stop) for work in (*epoch.done, *epoch.losses.works)]
    head, failures = None if pack is None else pack.head, epoch.losses.failures
    mine = (record.to_json(), works, logs, read, epoch.recorder.kept(), head, failures)
    everyone: list[Any] = [mine]
    if epoch.is_balanced:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    by_replica: dict[int, tuple[ReplicaRecord, Any, Any, KeptSteps, list[SampleFailure]]] = {}
    if read is not None and not are_alike([entry[3] for entry in everyone]) and dist.get_rank() == 0:
        _log.warning(
            "the first batch of the stream of loader %d does not look alike on all ranks; with iterable='claim' each"
            " batch is run by one of them, so all must read the same samples in the same order",
            epoch.spec.loader_idx,
        )
    for rank, (text, theirs, numbers, _, kept, _, lost) in enumerate(everyone):
        other = ReplicaRecord.from_json(text)
        if other.replica not in by_replica:
            by_replica[other.replica] = other, theirs, numbers, kept, lost
            epoch.figures.leaders.append(rank)
    if pack is not None:
        pack.heads = [entry[5] for entry in everyone]
    ordered = [by_replica[replica] for replica in sorted(by_replica)]
    plan = epoch.figures.conclude([entry[0] for entry in ordered], [entry[1] for entry in ordered])
    epoch.figures.failures = [failure for entry in ordered for failure in entry[4]]
    epoch.take_stock()
    if epoch.is_balanced:
        plan.validate(epoch.spec.grid.num_samples)
        epoch.figures.recording = epoch.recording_of({entry[0].replica: entry[3] for entry in ordered})
    return [entry[2] for entry in ordered]


class Pack:
    """This rank's outputs of one loader of predict, before and after they are exchanged.

    Args:
        epoch: The pass, which no rank runs any more.
        predictions: This rank's outputs in step order.
        config: Says which ranks get all outputs.
    """

    def __init__(self, epoch: EpochRun, predictions: list[Any], config: HybridConfig) -> None:
        self._epoch, self._predictions = epoch, predictions
        losses = epoch.losses
        run = [(work, plain(output)) for work, output in zip(epoch.done, predictions, strict=True)]
        lost = [(work, None) for work in losses.works]
        self._mine = [Piece(work.start, work.stop, output, losses.absent(work)) for work, output in (*run, *lost)]
        if lost and not epoch.is_balanced:
            self._mine.sort(key=lambda piece: piece.start)
        self._parcel: Parcel | None = None
        self.heads: list[tuple[int, Chunk]] = []
        """What every rank has sent first."""
        if epoch.is_balanced and config.gather != "none":
            self._parcel = Parcel(self._mine, to_all=config.gather == "all", chunk_bytes=config.gather_chunk_bytes)

    @property
    def head(self) -> tuple[int, Chunk] | None:
        """What travels with the final records; ``None`` where nothing is gathered."""
        return None if self._parcel is None else self._parcel.head

    def gather(self, say: Callable[[str], None]) -> Outputs:
        """Puts what the user gets of the loader into the predictions, in place.

        Args:
            say: Tells the user something, once.
        """
        spec, held = self._epoch.spec, None
        arrangement = spec.arrangement or Arrangement(batches=spec.grid)
        if self._parcel is not None:
            held = self._parcel.exchange(self.heads, self._epoch.figures.leaders)
        elif not self._epoch.is_balanced and arrangement.is_cut_anew(spec.grid):
            held = self._mine
        if held is None:
            outputs = Outputs(grid=spec.grid, pieces=self._mine, arrangement=arrangement)
        else:
            outputs = assembled(spec.grid, arrangement, held)
            _explain(outputs, spec, say)
        self._predictions[:] = [piece.output for piece in outputs.pieces]
        return outputs


def _explain(outputs: Outputs, spec: EpochSpec, say: Callable[[str], None]) -> None:
    which = f"loader {spec.loader_idx}"
    if outputs.form == "cells":
        left_out = "; samples that reuse= found equal to an earlier one are left out" if spec.samples_reused else ""
        say(
            f"trainer.predict gives one entry per step of {which}, heavy samples first, because the outputs have not"
            " one row per sample; HybridBalanceCallback.indices() tells the dataset indices of each entry"
            f"{left_out}. Return one row per sample, or keep the loader's batches with batch_dependent=True"
        )
    elif outputs.ragged:
        say(
            f"trainer.predict gives a list of rows for {len(outputs.ragged)} batches of {which}, the first is number"
            f" {min(outputs.ragged)}, because these rows come from several steps and differ in shape or type; pad"
            " outputs to one length, or keep the loader's batches with batch_dependent=True"
        )
