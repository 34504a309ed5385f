"""The end of a pass: what all ranks exchange once none of them runs a step any more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.plan import Arrangement
from lightning_hybrid.core.recording import KeptSteps
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning._compat import Logged
from lightning_hybrid.runtime.assembly import Outputs, assembled
from lightning_hybrid.runtime.reading import are_alike
from lightning_hybrid.runtime.results import Piece, gather_pieces, plain
from lightning_hybrid.runtime.spec import EpochSpec

_log = logging.getLogger(__name__)


def conclude(epoch: EpochRun, logs: dict[str, Logged]) -> list[dict[str, Logged]]:
    """Exchanges final records, works and logged numbers; each replica counts once."""
    record, stream = epoch.figures.own_record(), epoch.spec.stream
    read = None if stream is None else stream.summary()
    mine = (record.to_json(), [(work.start, work.stop) for work in epoch.done], logs, read, epoch.recorder.kept())
    everyone: list[Any] = [mine]
    if epoch.is_balanced:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    by_replica: dict[int, tuple[ReplicaRecord, Any, Any, KeptSteps]] = {}
    if read is not None and not are_alike([entry[3] for entry in everyone]) and dist.get_rank() == 0:
        _log.warning(
            "the first batch of the stream of loader %d does not look alike on all ranks; with iterable='claim' each"
            " batch is run by one of them, so all must read the same samples in the same order",
            epoch.spec.loader_idx,
        )
    for rank, (text, works, theirs, _, kept) in enumerate(everyone):
        other = ReplicaRecord.from_json(text)
        if other.replica not in by_replica:
            by_replica[other.replica] = other, works, theirs, kept
            epoch.figures.leaders.append(rank)
    ordered = [by_replica[replica] for replica in sorted(by_replica)]
    plan = epoch.figures.conclude([entry[0] for entry in ordered], [entry[1] for entry in ordered])
    if epoch.is_balanced:
        plan.validate(epoch.spec.grid.num_samples)
        epoch.figures.recording = epoch.recording_of({entry[0].replica: entry[3] for entry in ordered})
    return [entry[2] for entry in ordered]


def gather(epoch: EpochRun, predictions: list[Any], config: HybridConfig, say: Callable[[str], None]) -> Outputs:
    """Puts what the user gets of a loader into ``predictions``, which holds this rank's outputs in step order.

    Args:
        epoch: The pass, concluded.
        predictions: Changed in place.
        config: Says which ranks get all outputs.
        say: Tells the user something, once.
    """
    spec = epoch.spec
    arrangement = spec.arrangement or Arrangement(batches=spec.grid)
    mine = [Piece(work.start, work.stop, plain(output)) for work, output in zip(epoch.done, predictions, strict=True)]
    held: list[Piece] | None = None
    if epoch.is_balanced and config.gather != "none":
        held = gather_pieces(
            mine if dist.get_rank() in epoch.figures.leaders else [],
            to_all=config.gather == "all",
            chunk_bytes=config.gather_chunk_bytes,
        )
    elif not epoch.is_balanced and arrangement.slots is not None:
        held = mine
    if held is None:
        outputs = Outputs(grid=spec.grid, pieces=mine, arrangement=arrangement)
    else:
        outputs = assembled(spec.grid, arrangement, held)
        _explain(outputs, spec, say)
    predictions[:] = [piece.output for piece in outputs.pieces]
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
