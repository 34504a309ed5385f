"""What is said about failures that a run survived."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hybrid.core.incidents import failed_samples, out_of_memory
from lightning_hybrid.core.state import BalanceSnapshot, ReplicaRecord


def _snapshot(*records: dict[str, Any]) -> BalanceSnapshot:
    replicas = tuple(ReplicaRecord(replica=r, samples=1000, **record) for r, record in enumerate(records))
    return BalanceSnapshot(stage="predict", mode="queue", loader_idx=0, epoch=0, samples_total=2000, replicas=replicas)


def test_one_failure_for_want_of_memory_is_chance() -> None:
    assert out_of_memory(_snapshot({"memory_failures": 1}, {})) is None


def test_repeated_ones_name_the_worst_replica_and_the_size_that_fits() -> None:
    found = out_of_memory(_snapshot({"memory_failures": 2}, {"memory_failures": 5, "micro_batch_size": 12.0}))

    assert found is not None
    assert found.id == "out_of_memory/predict/replica1"
    assert found.evidence == {"memory_failures": 5.0, "micro_batch_size": 12.0}
    assert "5 steps of replica 1 ran out of memory" in found.description


def test_without_failed_samples_nothing_is_said() -> None:
    assert failed_samples(_snapshot({}, {})) is None


@pytest.mark.parametrize(("num_failed", "priority"), [(1, "medium"), (40, "high")])
def test_failed_samples_are_counted_over_all_replicas(num_failed: int, priority: str) -> None:
    found = failed_samples(_snapshot({"failed_samples": num_failed}, {"failed_samples": 2}))

    assert found is not None
    assert found.priority == priority
    assert found.evidence == {"samples_failed": num_failed + 2.0, "error_frac": (num_failed + 2) / 2000}
