"""Policies in real Trainers: fixed, of the user's own, and switched while the loop runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_hybrid import ConfigError, HybridBalanceCallback, HybridConfig, PlanError, register_policy
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.policies import Proposal, ReplicaView
from tests.lightning.scenes import Echo, Logs, flat, ids, trainer
from tests.lightning.test_balance import Emulated
from tests.ranks import run_ranks

# the memory of every machine is in use: this threshold calls for ``memory_aware`` as soon as the speeds are known
SWITCHES = HybridConfig(
    memory_pressure_threshold_frac=0.0,
    switch_hysteresis_frac=0.0,
    switch_dwell_s=0.0,
    switch_settle_s=0.0,
    switch_trial_s=0.05,
    switch_trial_steps=0,
    publish_period_s=0.02,
    device_period_s=0.02,
    self_check_s=60.0,
)
COSTS = [float(1 + (7 * i) % 5) for i in range(60)]


class Backwards:
    """Lightest cells first."""

    name = "backwards"

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        nothing = (None,) * len(replicas)
        order = np.argsort(cells.compute, kind="stable")
        return Proposal(order=order, ends=("head",) * len(replicas), max_claim_costs=nothing, memory_bounds=nothing)


class Forgetful(Backwards):
    """Drops the last cell and repeats the first."""

    name = "forgetful"

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        proposal = super().propose(cells, replicas)
        order = proposal.order.copy()
        order[-1] = order[0]
        return Proposal(
            order=order,
            ends=proposal.ends,
            max_claim_costs=proposal.max_claim_costs,
            memory_bounds=proposal.memory_bounds,
        )


def run(model: Echo, callback: HybridBalanceCallback, n: int = 60, **loader: Any) -> list[float]:
    return flat(trainer(2, callback).predict(model, ids(n, **loader)))


@pytest.mark.parametrize("policy", ["load_balanced", "performance_optimized", "memory_aware", "hybrid", Backwards()])
@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_every_policy_gives_what_one_device_gives(policy: Any, mode: Any) -> None:
    def rank(_: int) -> Any:
        callback = HybridBalanceCallback(policy=policy, mode=mode, cost=COSTS)
        return run(Emulated({1: 2.0}, 0.002), callback), list(callback.policies.distribution)

    (out, policies), (other, _) = run_ranks(rank, 2, deadline_s=60)
    assert out == other == list(map(float, range(60)))
    assert policies == [policy if isinstance(policy, str) else "backwards"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", ["queue", "lockstep"])
@pytest.mark.parametrize("cost", [None, COSTS], ids=["unknown costs", "costs"])
def test_a_policy_is_switched_while_the_loop_runs(mode: Any, cost: Any, num_workers: int) -> None:
    def rank(_: int) -> Any:
        callback = HybridBalanceCallback(mode=mode, cost=cost, config=SWITCHES)
        out = run(Emulated({1: 2.0}, 0.01), callback, num_workers=num_workers)
        return out, callback.policies

    (out, policies), (other, _) = run_ranks(rank, 2, deadline_s=60)
    assert out == other == list(map(float, range(60)))
    assert [switch.policy for switch in policies.switches][:1] == ["memory_aware"]
    assert policies.switches[0].reason.startswith("memory pressure")
    assert policies.num_samples == 60


def test_metrics_are_exact_over_a_switch() -> None:
    def rank(_: int) -> Any:
        class Slow(Logs):
            def test_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
                time.sleep(0.01 * (1 + self.global_rank))  # the emulated device
                super().test_step(batch, batch_idx)

        callback = HybridBalanceCallback(cost=COSTS, config=SWITCHES)
        (values,) = trainer(2, callback).test(Slow(), ids(60), verbose=False)
        return values, len(callback.policies.switches)

    (values, switches), _ = run_ranks(rank, 2, deadline_s=60)
    assert switches >= 1
    assert (values["count"], values["metric"]) == (60.0, pytest.approx(29.5))


def test_balancing_is_turned_off_when_it_costs_more_than_it_gains() -> None:
    def rank(_: int) -> Any:
        config = SWITCHES.but(memory_pressure_threshold_frac=1.0, overhead_tolerated_frac=0.0, self_check_s=0.05)
        callback = HybridBalanceCallback(config=config)
        return run(Emulated({}, 0.01), callback, n=100), callback.policies.switches

    (out, switches), _ = run_ranks(rank, 2, deadline_s=60)
    assert out == list(map(float, range(100)))
    # whether so equal devices show a gain at all is chance; off, if it came to that, is the last word
    assert [switch.kind for switch in switches] in ([], ["off"])


def test_a_policy_can_be_registered_and_named() -> None:
    register_policy("backwards_by_name", replace=True)(Backwards)

    def rank(_: int) -> list[float]:
        return run(Echo(), HybridBalanceCallback(policy="backwards_by_name", cost=COSTS))

    assert run_ranks(rank, 2, deadline_s=40) == [list(map(float, range(60)))] * 2


def test_a_policy_that_is_not_exactly_once_is_refused_before_anything_runs() -> None:
    ran: list[int] = []

    class Counting(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            ran.append(batch_idx)
            return batch

    def rank(_: int) -> tuple[str, list[int]]:
        with pytest.raises(PlanError) as error:
            run(Counting(), HybridBalanceCallback(policy=Forgetful(), cost=COSTS))
        return str(error.value), ran

    for text, steps in run_ranks(rank, 2, deadline_s=40):
        assert "policy 'forgetful'" in text
        assert "left out" in text
        assert "repeated" in text
        assert steps == []


@pytest.mark.parametrize(
    ("policy", "says"),
    [("fastest", "policy must be one of 'load_balanced'"), (3, "be a name, or an object"), (object(), "be a name")],
)
def test_what_is_no_policy_is_an_error_at_construction(policy: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        HybridBalanceCallback(policy=policy)


def test_the_policies_are_told_to_tensorboard(tmp_path: Any) -> None:
    def rank(_: int) -> None:
        logger = pl.loggers.TensorBoardLogger(tmp_path, name="", version="")
        callback = HybridBalanceCallback(cost=COSTS, config=SWITCHES)
        trainer(2, callback, logger=logger).predict(Emulated({1: 2.0}, 0.01), ids(60))

    run_ranks(rank, 2, deadline_s=60)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("balance/predict/policy/num_switches")[-1].value >= 1
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("policies/predict")]
    assert b"memory_aware" in events.Tensors(tag)[-1].tensor_proto.string_val[0]


def test_ten_costly_samples_do_not_all_fall_to_one_rank() -> None:
    """B31: samples 0 to 9 cost ten times as much."""

    class Uneven(Emulated):
        def cost(self, sample: float) -> float:
            return 10.0 if sample < 10 else 1.0

    def rank(_: int) -> Any:
        callback = HybridBalanceCallback(cost=[10.0] * 10 + [1.0] * 30)
        out = flat(trainer(2, callback).predict(Uneven({}, 0.005), ids(40, 1)))
        costly = [cell.replica for cell in callback.plan.cells if callback.grid.indices(cell.start, cell.stop)[0] < 10]
        return out, sorted(costly)

    for out, costly in run_ranks(rank, 2, deadline_s=30):
        assert out == list(map(float, range(40)))
        assert 2 <= costly.count(0) <= 8
