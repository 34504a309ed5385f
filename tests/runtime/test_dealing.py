from __future__ import annotations

import pytest

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.state import DeviceState, Mode, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.claimer import QueueDealer
from lightning_hybrid.runtime.dealing import EpochSpec, new_dealer, prior_from, probe_works
from lightning_hybrid.runtime.lockstep import LockstepDealer
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.store import InProcessStore
from lightning_hybrid.runtime.work import Work


def spec_of(num_samples: int, *, probe_rounds: int = 1) -> EpochSpec:
    grid = Grid.sequential(num_samples, 4)
    return EpochSpec(stage="predict", loader_idx=0, epoch=1, grid=grid, probe_rounds=probe_rounds)


def test_every_replica_begins_with_a_cell_of_its_own() -> None:
    works = [probe_works(spec_of(22), replica, 3) for replica in range(3)]

    assert works == [[Work(0, 4, 0)], [Work(4, 8, 1)], [Work(8, 12, 2)]]


def test_two_rounds_are_dealt_out_in_turn() -> None:
    works = [probe_works(spec_of(22, probe_rounds=2), replica, 2) for replica in range(2)]

    assert works == [[Work(0, 4, 0), Work(8, 12, 2)], [Work(4, 8, 1), Work(12, 16, 3)]]


def test_a_replica_without_a_cell_begins_with_a_ghost() -> None:
    ghost = Work(0, 4, 0, ghost=True)

    assert probe_works(spec_of(6), 2, 3) == [ghost]
    assert probe_works(spec_of(6, probe_rounds=2), 1, 2) == [Work(4, 6, 1), ghost]


def test_an_empty_grid_has_no_first_steps() -> None:
    assert probe_works(spec_of(0), 0, 3) == []


@pytest.mark.parametrize(("mode", "kind"), [("queue", QueueDealer), ("lockstep", LockstepDealer)])
def test_the_dealer_fits_the_mode(mode: Mode, kind: type) -> None:
    spec, config = spec_of(22), HybridConfig()
    queue = SharedQueue(InProcessStore(), 1, 3, 3, 6)
    dealer = new_dealer(mode, spec, Board(queue, 1, config), queue, config, [1.0] * 3, released=lambda: True)

    assert type(dealer) is kind
    assert dealer.mode == mode


def test_before_any_measurement_speeds_follow_the_load_of_the_devices() -> None:
    config = HybridConfig(memory_weight=1, compute_weight=1)
    idle = DeviceState(kind="cuda", memory_used_bytes=0, memory_total_bytes=100, utilization_frac=0.0)
    loaded = DeviceState(kind="cuda", memory_used_bytes=50, memory_total_bytes=100, utilization_frac=1.0)

    records = [ReplicaRecord(replica=2, device=loaded), ReplicaRecord(replica=0, device=idle)]
    assert prior_from(records, 3, config) == [1.0, 0.625, 0.25]
    assert prior_from([], 3, config) == [1.0, 1.0, 1.0]
