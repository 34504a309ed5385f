"""Sizes of steps, and how much memory cost one may have."""

from __future__ import annotations

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.runtime.losses import Losses
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.step_facts import StepFacts
from lightning_hybrid.runtime.step_sizes import StepSizes
from lightning_hybrid.runtime.work import Work


def _facts(memory: list[float] | None = None) -> tuple[StepFacts, StepSizes]:
    grid = Grid.sequential(12, 4)
    costs = None if memory is None else Costs(compute=np.ones(3), memory=np.asarray(memory))
    spec = EpochSpec(stage="predict", loader_idx=0, epoch=1, grid=grid, costs=costs)
    sizes = StepSizes(None, HybridConfig())
    return StepFacts(spec, sizes, Losses(0, 0, HybridConfig())), sizes


def _told(facts: StepFacts) -> ReplicaRecord:
    return facts.told_in(ReplicaRecord(replica=0))


def test_nothing_is_known_before_a_step() -> None:
    record = _told(_facts()[0])

    assert (record.micro_batch_size, record.memory_bound, record.memory_failures) == (None, None, 0)


def test_the_mean_size_is_that_of_the_parts() -> None:
    facts, _ = _facts()
    facts.note(Work(0, 4, 0), [4], is_short=False)
    facts.note(Work(4, 8, 1), [2, 2], is_short=True)

    assert _told(facts).micro_batch_size == 8 / 3


def test_failures_of_this_epoch_alone_count() -> None:
    _, sizes = _facts()
    sizes.failed(4, None)
    facts = StepFacts(EpochSpec(stage="test", loader_idx=0, epoch=2, grid=Grid.sequential(4, 4)), sizes, _losses())
    sizes.failed(4, None)

    assert _told(facts).memory_failures == 1


def test_what_had_to_be_cut_bounds_the_memory_cost_of_cells() -> None:
    facts, _ = _facts([8.0, 4.0, 2.0])
    facts.note(Work(8, 12, 2), [4], is_short=False)
    assert _told(facts).memory_bound is None
    facts.note(Work(0, 4, 0), [2, 2], is_short=True)
    assert _told(facts).memory_bound == 4.0
    facts.note(Work(0, 4, 0), [4], is_short=False)

    assert _told(facts).memory_bound == 8.0


def _losses() -> Losses:
    return Losses(0, 0, HybridConfig())
