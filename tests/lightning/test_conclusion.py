"""The end of a pass: what all ranks exchange, of which each replica counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.plan import Grid, arrange
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.lightning._compat import Logged
from lightning_hybrid.lightning.conclusion import Pack, conclude
from lightning_hybrid.runtime.metrics import Partial
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.store import open_stores
from lightning_hybrid.runtime.work import Work
from tests.ranks import run_ranks
from tests.test_engine import QUICK, engine_of, run_batches, spec_of

pytestmark = pytest.mark.timeout(90)


def ran(epoch: EpochRun) -> list[Any]:
    """The outputs of a pass whose steps give back the positions of their samples, in step order."""
    outputs: list[Any] = []
    run_batches(epoch, lambda work: outputs.append(torch.arange(work.start, work.stop)))
    return outputs


def balanced(rank: int, *, replica: int, num_replicas: int, spec: EpochSpec, config: HybridConfig = QUICK) -> EpochRun:
    engine = engine_of(replica=replica, num_replicas=num_replicas, config=config)
    store = open_stores(f"test/{rank if num_replicas == 1 else 'shared'}")("pass")
    return engine.balanced(spec, store)


def logs_of(value: float) -> dict[str, Logged]:
    return {"loss": Logged(Partial("mean", value, 1.0), {"name": "loss"})}


def lists(entries: Any) -> list[list[int]]:
    return [entry.tolist() for entry in entries]


def say_nothing(text: str) -> None:
    raise AssertionError(f"there is nothing to say: {text}")


# --- without other ranks --------------------------------------------------------------------------------------------


def test_a_pass_without_redistribution_exchanges_nothing() -> None:
    engine = engine_of()
    epoch = engine.static(spec_of(9), [Work(0, 4), Work(4, 8), Work(8, 9)])
    predictions = ran(epoch)
    pack, logs = Pack(epoch, predictions, QUICK), logs_of(0.5)

    # there is no process group that could be asked
    assert conclude(epoch, logs, pack) == [logs]
    assert pack.head is None
    assert epoch.figures.plan is not None
    assert epoch.figures.plan.format() == "0 0 4\n0 4 8\n0 8 9"
    assert epoch.figures.recording is None
    assert [record.samples for record in epoch.figures.records or ()] == [9]
    outputs = pack.gather(say_nothing)
    assert lists(predictions) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert (outputs.form, outputs.indices()) == ("cells", lists(predictions))


def test_a_pass_of_some_batches_alone_is_no_error_where_nothing_is_shared() -> None:
    epoch = engine_of().static(spec_of(9), [Work(4, 8)])
    ran(epoch)

    assert conclude(epoch, {}) == [{}]
    assert epoch.figures.plan is not None
    assert epoch.figures.plan.format() == "0 4 8"


def test_samples_that_were_ordered_go_back_to_the_users_batches() -> None:
    batches = Grid.sequential(5, 2)
    grid, arrangement = arrange(batches, 2, costs=np.array([1.0, 5.0, 2.0, 4.0, 3.0]))
    spec = replace(spec_of(5, 2), grid=grid, arrangement=arrangement)
    epoch = engine_of().static(spec, [Work(0, 2), Work(2, 4), Work(4, 5)])
    predictions: list[Any] = []
    run_batches(epoch, lambda work: predictions.append(torch.tensor(grid.indices(work.start, work.stop))))
    assert lists(predictions) == [[1, 3], [4, 2], [0]]
    pack = Pack(epoch, predictions, QUICK)
    conclude(epoch, {}, pack)

    outputs = pack.gather(say_nothing)
    assert lists(predictions) == [[0, 1], [2, 3], [4]]
    assert outputs.form == "batches"


def test_outputs_are_made_plain_before_they_are_kept() -> None:
    epoch = engine_of().static(spec_of(4), [Work(0, 4)])
    with torch.inference_mode():
        large = torch.arange(100.0)
        predictions: list[Any] = []
        run_batches(epoch, lambda work: predictions.append(large[work.start : work.stop]))
    pack = Pack(epoch, predictions, QUICK)
    conclude(epoch, {}, pack)
    pack.gather(say_nothing)

    assert not predictions[0].is_inference()
    assert predictions[0].untyped_storage().nbytes() == predictions[0].nbytes


def test_there_must_be_one_output_per_step() -> None:
    epoch = engine_of().static(spec_of(8), [Work(0, 4), Work(4, 8)])
    predictions = ran(epoch)

    with pytest.raises(ValueError, match="zip"):
        Pack(epoch, predictions[:1], QUICK)


# --- several ranks of one replica -----------------------------------------------------------------------------------


def one_replica_of_two_ranks(rank: int) -> Any:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    epoch = balanced(rank, replica=0, num_replicas=1, spec=spec_of(10))
    predictions = ran(epoch)
    pack = Pack(epoch, predictions, QUICK)
    logs = conclude(epoch, logs_of(float(rank)), pack)
    pack.gather(say_nothing)
    records, plan, recording = epoch.figures.records, epoch.figures.plan, epoch.figures.recording
    assert records is not None
    assert plan is not None
    assert recording is not None
    told = [record.samples for record in records], epoch.figures.leaders, plan.format(), len(recording.steps)
    return told, [replica["loss"].part.value for replica in logs], lists(predictions)


def test_two_ranks_of_a_replica_count_once() -> None:
    for told, losses, predictions in run_ranks(one_replica_of_two_ranks, 2):
        assert told == ([10], [0], "0 0 4\n0 4 8\n0 8 10", 3)
        assert losses == [0.0]  # the first rank's word counts
        assert predictions == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# --- several replicas -----------------------------------------------------------------------------------------------


def replicas_in_another_order(rank: int) -> Any:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    epoch = balanced(rank, replica=1 - rank, num_replicas=2, spec=spec_of(40))
    predictions = ran(epoch)
    pack = Pack(epoch, predictions, QUICK)
    logs = conclude(epoch, logs_of(float(rank)), pack)
    pack.gather(say_nothing)
    records, recording = epoch.figures.records, epoch.figures.recording
    assert records is not None
    assert recording is not None
    spans = [(step.start, step.stop) for step in recording.steps]
    told = [record.replica for record in records], sum(record.samples for record in records), spans
    return told, [replica["loss"].part.value for replica in logs], lists(predictions)


def test_records_and_logs_come_in_the_order_of_the_replicas_and_outputs_in_that_of_the_loader() -> None:
    found = run_ranks(replicas_in_another_order, 2)
    for told, losses, predictions in found:
        assert told == ([0, 1], 40, [(at, at + 4) for at in range(0, 40, 4)])
        assert losses == [1.0, 0.0]
        assert predictions == [list(range(at, at + 4)) for at in range(0, 40, 4)]


def gathered(rank: int, gather: Any) -> Any:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    # about one output per chunk
    config = QUICK.but(gather=gather, gather_chunk_bytes=1)
    epoch = balanced(rank, replica=rank, num_replicas=2, spec=spec_of(40), config=config)
    predictions = ran(epoch)
    mine = lists(predictions)
    pack = Pack(epoch, predictions, config)
    conclude(epoch, {}, pack)
    outputs = pack.gather(say_nothing)
    return mine, lists(predictions), outputs.form, None if pack.head is None else len(pack.head[1])


@pytest.mark.parametrize("gather", ["all", "rank_zero", "none"])
def test_outputs_go_where_they_are_to_be_gathered_and_stay_elsewhere(gather: str) -> None:
    whole = [list(range(at, at + 4)) for at in range(0, 40, 4)]
    for rank, (mine, predictions, form, num_first) in enumerate(run_ranks(gathered, 2, gather)):
        gets_all = gather == "all" or (gather == "rank_zero" and rank == 0)
        assert (predictions, form) == ((whole, "batches") if gets_all else (mine, "cells"))
        # with the final records travels what is for all, and no more than a chunk of it
        assert num_first == {"all": 1, "rank_zero": 0, "none": None}[gather]


def with_a_lost_step(rank: int) -> str:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    epoch = balanced(rank, replica=rank, num_replicas=2, spec=spec_of(40))
    ran(epoch)
    if rank == 1:
        lost = epoch.done.pop()
        assert lost.size == 4
    try:
        conclude(epoch, {})
    except PlanError as error:
        return str(error)
    return "no error"


def test_a_step_that_nobody_speaks_of_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(with_a_lost_step, 2)

    assert first == second
    assert first.startswith(("nobody ran position ", "the plan ends at position 36, the loader has 40"))


def with_a_repeated_step(rank: int) -> str:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    epoch = balanced(rank, replica=rank, num_replicas=2, spec=spec_of(40))
    ran(epoch)
    if rank == 0:
        epoch.done.append(epoch.done[0])
    try:
        conclude(epoch, {})
    except PlanError as error:
        return str(error)
    return "no error"


def test_a_step_that_is_told_twice_is_an_error_on_every_rank() -> None:
    # whoever was dealt the first cell tells of it twice
    assert run_ranks(with_a_repeated_step, 2) == ["two cells hold position 0 (next cell (0, 0, 4))"] * 2
