from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.policies import policy_named
from lightning_hybrid.core.state import DeviceState, Mode, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.claimer import QueueDealer
from lightning_hybrid.runtime.dealing import (
    first_cells,
    first_version,
    later_cells,
    new_dealer,
    prior_from,
    probe_works,
)
from lightning_hybrid.runtime.lockstep import LockstepDealer
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.steering import Steering
from lightning_hybrid.runtime.store import InProcessStore
from lightning_hybrid.runtime.work import Dealer, Work
from tests.core.claimants import costs_of

HYBRID = policy_named("hybrid")


class FixedBounds:
    def __init__(self, *bounds: float | None) -> None:
        self._bounds = bounds

    def bound(self, replica: int) -> float | None:
        return self._bounds[replica]


def spec_of(
    num_samples: int,
    *,
    probe_rounds: int = 1,
    read_ahead: int = 0,
    costs: Costs | None = None,
    prime_calls: int = 0,
    max_size: int | None = None,
) -> EpochSpec:
    return EpochSpec(
        stage="predict",
        loader_idx=0,
        epoch=1,
        grid=Grid.sequential(num_samples, 4),
        probe_rounds=probe_rounds,
        read_ahead=read_ahead,
        costs=costs,
        prime_calls=prime_calls,
        max_size=max_size,
    )


def dealer_of(mode: Mode, spec: EpochSpec, *, world: int = 3, steering: Steering | None = None) -> Dealer:
    config = HybridConfig()
    queue = SharedQueue(InProcessStore(), 1, world)
    board = Board(queue, 1, world, config)
    return new_dealer(mode, spec, board, queue, config, steering or Steering(config), released=lambda: True)


# --- the first steps ------------------------------------------------------------------------------------------------


def test_every_replica_begins_with_a_cell_of_its_own() -> None:
    works = [probe_works(spec_of(22), replica, 3) for replica in range(3)]

    assert works == [[Work(0, 4, 0)], [Work(4, 8, 1)], [Work(8, 12, 2)]]


@pytest.mark.parametrize(("probe_rounds", "read_ahead"), [(2, 0), (1, 1)])
def test_two_rounds_are_dealt_out_in_turn(probe_rounds: int, read_ahead: int) -> None:
    spec = spec_of(22, probe_rounds=probe_rounds, read_ahead=read_ahead)
    works = [probe_works(spec, replica, 2) for replica in range(2)]

    assert works == [[Work(0, 4, 0), Work(8, 12, 2)], [Work(4, 8, 1), Work(12, 16, 3)]]


def test_a_replica_without_a_cell_begins_with_a_ghost() -> None:
    ghost = Work(0, 4, 0, ghost=True)

    assert probe_works(spec_of(6), 2, 3) == [ghost]
    assert probe_works(spec_of(6, probe_rounds=2), 1, 2) == [Work(4, 6, 1), ghost]


def test_an_empty_grid_has_no_first_steps() -> None:
    assert probe_works(spec_of(0), 0, 3) == []


def test_where_the_lightest_cells_come_last_they_are_run_first() -> None:
    spec = spec_of(22, costs=costs_of([9, 7, 5, 4, 3, 1]))

    assert (first_cells(spec, 2), later_cells(spec, 2)) == ((4, 6), (0, 4))
    assert [probe_works(spec, replica, 2) for replica in range(2)] == [[Work(16, 20, 4)], [Work(20, 22, 5)]]


def test_where_costs_are_in_no_order_the_first_cells_are_run_first() -> None:
    spec = spec_of(22, costs=costs_of([9, 7, 8, 4, 3, 1]))

    assert (first_cells(spec, 2), later_cells(spec, 2)) == ((0, 2), (2, 6))


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 3), st.integers(0, 2), st.booleans())
@settings(deadline=None)
def test_first_steps_and_the_later_cells_are_every_cell_once(
    num_samples: int, world: int, probe_rounds: int, read_ahead: int, heavy_first: bool
) -> None:
    num_cells = Grid.sequential(num_samples, 4).num_cells
    costs = costs_of(list(range(num_cells))[::-1]) if heavy_first else None
    spec = spec_of(num_samples, probe_rounds=probe_rounds, read_ahead=read_ahead, costs=costs)
    works = [probe_works(spec, replica, world) for replica in range(world)]
    first = [work.cell for own in works for work in own if not work.ghost]

    assert sorted([*first, *range(*later_cells(spec, world))]) == list(range(num_cells))
    assert len({len(own) for own in works}) == 1


# --- the first plan version -----------------------------------------------------------------------------------------


def test_without_costs_the_cells_stand_in_loader_order_for_everybody_to_claim() -> None:
    version = first_version(spec_of(22), HYBRID, 2)

    assert version.cells.tolist() == [2, 3, 4, 5]
    assert version.costs.compute.tolist() == [4, 4, 4, 2]
    assert (version.number, version.policy, version.ends) == (0, "hybrid", ("head", "head"))
    assert (version.max_claim_costs, version.memory_bounds, version.shares) == ((None, None), (None, None), None)
    assert version.is_uniform


def test_with_costs_the_policy_orders_the_later_cells() -> None:
    spec = spec_of(22, costs=costs_of([2, 1, 3, 9, 7, 8]))
    version = first_version(spec, policy_named("load_balanced"), 2)

    assert version.cells.tolist() == [3, 5, 4, 2]
    assert version.costs.compute.tolist() == [9, 8, 7, 3]
    assert version.policy == "load_balanced"


def test_every_replica_begins_with_the_same_version() -> None:
    spec = spec_of(90, costs=costs_of(list(np.random.default_rng(0).uniform(0, 5, 23))))
    digests = {first_version(spec, policy_named("hybrid"), 4).digest for _ in range(4)}

    assert len(digests) == 1


def test_a_grid_that_the_first_steps_use_up_leaves_an_empty_version() -> None:
    for costs in (None, costs_of([3, 2])):
        version = first_version(spec_of(6, costs=costs), HYBRID, 2)
        assert (len(version), version.num_to_claim) == (0, 0)


class Forgetful:
    name = "forgetful"

    def propose(self, cells: Costs, replicas: Sequence[object]) -> object:
        proposal = HYBRID.propose(cells, ())
        return type(proposal)(
            order=proposal.order[1:],
            ends=("head",) * len(replicas),
            max_claim_costs=(None,) * len(replicas),
            memory_bounds=(None,) * len(replicas),
        )


def test_a_policy_that_forgets_a_cell_is_told_which_before_anything_runs() -> None:
    spec = spec_of(22, costs=costs_of([2, 1, 3, 9, 7, 8]))

    with pytest.raises(PlanError, match="policy 'forgetful' must order each of the 4 cells once: left out: 3"):
        first_version(spec, Forgetful(), 2)  # type: ignore[arg-type]


# --- the dealer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "kind"), [("queue", QueueDealer), ("lockstep", LockstepDealer)])
def test_the_dealer_fits_the_mode(mode: Mode, kind: type) -> None:
    dealer = dealer_of(mode, spec_of(22))

    assert type(dealer) is kind
    assert dealer.mode == mode


def test_a_queue_begins_with_the_policy_of_the_settings() -> None:
    spec = spec_of(22, costs=costs_of([2, 1, 3, 9, 7, 8]))
    dealer = dealer_of("queue", spec, world=2, steering=Steering(HybridConfig(policy="memory_aware")))

    assert isinstance(dealer, QueueDealer)
    assert dealer.claimant.version.policy == "memory_aware"
    assert sorted(dealer.claimant.version.cells.tolist()) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("memory", "bounds", "sizes"),
    [
        # eight units per sample in the heaviest cell: two samples fit into twenty
        ([4, 4, 32, 4, 4, 2], (None, 20.0), [2, 2]),
        ([4, 4, 32, 4, 4, 2], (None, None), [4, 4]),
        (None, (None, 20.0), [4, 4]),
        ([4, 4, 32, 4, 4, 2], (None, 1.0), [3, 1]),
    ],
)
def test_rounds_keep_within_what_fits_into_memory(
    memory: list[float] | None, bounds: tuple[float | None, ...], sizes: list[int]
) -> None:
    spec = spec_of(22, costs=costs_of([4, 4, 4, 4, 4, 2], memory), max_size=4)
    config = HybridConfig()
    queue = SharedQueue(InProcessStore(), 1, 2)
    board = Board(queue, 1, 2, config)
    record = {"speed_per_s": 4.0, "step_s": 1.0}
    board.policy = "memory_aware"
    for replica in range(2):
        told = Board(queue if replica else SharedQueue(queue.store, 0, 2), replica, 2, config)
        told.policy, told.recut = "memory_aware", True
        told.view.record = ReplicaRecord(replica=replica, **record)
        told.publish()
    board.look()
    steering = Steering(config, bounds=FixedBounds(*bounds))
    dealer = new_dealer("lockstep", spec, board, queue, config, steering, released=lambda: True)
    work = dealer.take(may_wait=False)

    assert work is not None
    assert work.size == sizes[1]
    assert work.start - 4 * later_cells(spec, 2).start == sizes[0]


# --- speeds before the first step -----------------------------------------------------------------------------------


def test_before_any_measurement_speeds_follow_the_load_of_the_devices() -> None:
    config = HybridConfig(memory_weight=1, compute_weight=1)
    idle = DeviceState(kind="cuda", memory_used_bytes=0, memory_total_bytes=100, utilization_frac=0.0)
    loaded = DeviceState(kind="cuda", memory_used_bytes=50, memory_total_bytes=100, utilization_frac=1.0)

    records = [ReplicaRecord(replica=2, device=loaded), ReplicaRecord(replica=0, device=idle)]
    assert prior_from(records, 3, config) == [1.0, 0.625, 0.25]
    assert prior_from([], 3, config) == [1.0, 1.0, 1.0]
