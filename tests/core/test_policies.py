from __future__ import annotations

import doctest
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core import policies
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import ConfigError, PlanError
from lightning_hybrid.core.policies import (
    Proposal,
    ReplicaView,
    policy_named,
    policy_names,
    register_policy,
    validate,
)

NAMES = ["load_balanced", "performance_optimized", "memory_aware", "hybrid"]


def costs(compute: Sequence[float], memory: Sequence[float] | None = None, io: Sequence[float] | None = None) -> Costs:
    return Costs(
        compute=np.array(compute, dtype=np.float64),
        memory=None if memory is None else np.array(memory, dtype=np.float64),
        io=None if io is None else np.array(io, dtype=np.float64),
    )


def replicas(*speeds: float, **others: Sequence[Any]) -> list[ReplicaView]:
    return [
        ReplicaView(replica=r, speed_per_s=speed, **{name: values[r] for name, values in others.items()})
        for r, speed in enumerate(speeds)
    ]


def proposed(name: str, cells: Costs, views: list[ReplicaView], **config: Any) -> Proposal:
    proposal = policy_named(name, HybridConfig(**config)).propose(cells, views)
    validate(proposal, cells, len(views), policy=name)
    return proposal


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(policies._REGISTRY)
    yield
    policies._REGISTRY.clear()
    policies._REGISTRY.update(before)


# --- what holds for all four ------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Costs, list[ReplicaView]]:
    num = draw(st.integers(0, 40))
    kind = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]) | st.floats(0, 1e308), min_size=num, max_size=num)
    cells = costs(draw(kind), draw(st.none() | kind), draw(st.none() | kind))
    maybe = st.none() | st.floats(0, 1e6)
    views = draw(
        st.lists(
            st.builds(
                ReplicaView,
                replica=st.just(0),
                speed_per_s=st.floats(0.01, 100),
                memory_bound=maybe,
                peak_cost=maybe,
                memory_free_frac=st.none() | st.floats(0, 1),
            ),
            max_size=6,
        )
    )
    return cells, views


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
@settings(deadline=None)
def test_every_cell_is_ordered_once_whatever_the_costs_and_replicas(
    name: str, case: tuple[Costs, list[ReplicaView]]
) -> None:
    cells, views = case
    proposed(name, cells, views)


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
@settings(deadline=None)
def test_every_cell_may_be_run_by_somebody(name: str, case: tuple[Costs, list[ReplicaView]]) -> None:
    cells, views = case
    bounds = proposed(name, cells, views).memory_bounds

    if views and cells.memory is not None and len(cells):
        assert max(np.inf if bound is None else bound for bound in bounds) >= cells.memory.max()


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
@settings(deadline=None)
def test_cells_that_cost_the_same_keep_their_order(name: str, case: tuple[Costs, list[ReplicaView]]) -> None:
    cells, _ = case
    order = proposed(name, cells, replicas(1.0, 1.0)).order.tolist()
    kinds = [values for values in (cells.compute, cells.memory, cells.io) if values is not None]
    last: dict[tuple[float, ...], int] = {}
    for cell in order:
        key = tuple(float(values[cell]) for values in kinds)
        assert last.get(key, -1) < cell
        last[key] = cell


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "cells",
    [
        Costs.equal(5),
        costs([2, 2, 2, 2, 1]),
        costs([0, 0, 0, 0, 0]),
        costs([2, 2, 2], [3, 3, 3], [4, 4, 4]),
        costs([2, 2, 1], [3, 3, 2]),
        costs([0.1 + 0.2, 0.3, 0.1 * 3]),
    ],
)
def test_equal_cells_keep_the_loaders_order_and_everybody_takes_the_head(name: str, cells: Costs) -> None:
    proposal = proposed(name, cells, replicas(1.0, 9.0, memory_bound=[1.0, 5.0], memory_free_frac=[0.1, 0.9]))

    assert proposal.order.tolist() == list(range(len(cells)))
    assert proposal.ends == ("head", "head")


@pytest.mark.parametrize("name", ["load_balanced", "memory_aware", "hybrid"])
def test_with_compute_costs_alone_the_longest_come_first_and_everybody_takes_the_head(name: str) -> None:
    proposal = proposed(name, costs([1, 5, 2, 5, 4]), replicas(1.0, 3.0))

    assert proposal.order.tolist() == [1, 3, 4, 2, 0]
    assert proposal.ends == ("head", "head")


@pytest.mark.parametrize("name", NAMES)
def test_no_cells_and_no_replicas_are_no_error(name: str) -> None:
    assert proposed(name, costs([]), []).ends == ()
    assert proposed(name, costs([], [], []), replicas(1.0)).ends == ("head",)
    assert proposed(name, costs([1, 2], [2, 1]), []).order.shape == (2,)


# --- load_balanced ----------------------------------------------------------------------------------------------------


def test_load_balanced_limits_nothing_and_looks_at_compute_only() -> None:
    views = replicas(1.0, 9.0, memory_bound=[1.0, 5.0], peak_cost=[3.0, 4.0])
    proposal = proposed("load_balanced", costs([1, 2, 3], [9, 1, 1]), views)

    assert proposal.order.tolist() == [2, 1, 0]
    assert proposal.max_claim_costs == (None, None)
    assert proposal.memory_bounds == (None, None)


# --- performance_optimized --------------------------------------------------------------------------------------------


def test_fast_replicas_find_compute_at_the_head_and_slow_ones_memory_at_the_tail() -> None:
    cells = costs([8, 1, 6, 1, 4, 1], [1, 8, 1, 6, 1, 4])
    proposal = proposed("performance_optimized", cells, replicas(4.0, 1.0))

    assert proposal.order.tolist() == [0, 2, 4, 5, 3, 1]
    assert proposal.ends == ("head", "tail")


def test_somebody_takes_memory_heavy_cells_from_the_tail_where_all_are_equally_fast() -> None:
    cells = costs([8, 1, 6, 1, 4, 1], [1, 8, 1, 6, 1, 4])

    assert proposed("performance_optimized", cells, replicas(2.0, 2.0, 2.0)).ends == ("head", "head", "tail")


def test_with_compute_alone_slow_replicas_take_the_middle_weights_and_the_lightest_are_between() -> None:
    cells = costs([8, 7, 6, 5, 4, 3, 2, 1])
    proposal = proposed("performance_optimized", cells, replicas(3.0, 2.0), middle_frac=0.1)

    assert proposal.order.tolist() == [0, 1, 2, 6, 7, 5, 4, 3]
    assert proposal.ends == ("head", "tail")


def test_replicas_of_about_the_same_speed_all_take_the_head() -> None:
    proposal = proposed("performance_optimized", costs([3, 1, 2]), replicas(1.0, 0.95))

    assert proposal.order.tolist() == [0, 2, 1]
    assert proposal.ends == ("head", "head")


def test_io_bound_cells_are_spread_evenly() -> None:
    io = [0.1, 9, 0.1, 9, 0.1, 0.1, 0.1, 0.1]
    proposal = proposed("performance_optimized", costs([8, 1, 6, 1, 4, 3, 2, 7], None, io), replicas(1.0, 1.0))

    assert proposal.order.tolist() == [0, 7, 1, 2, 4, 5, 3, 6]


def test_claims_are_as_large_as_was_measured_best() -> None:
    proposal = proposed("performance_optimized", costs([1, 2]), replicas(1.0, 1.0, peak_cost=[12.5, None]))

    assert proposal.max_claim_costs == (12.5, None)
    assert proposal.memory_bounds == (None, None)


# --- memory_aware -----------------------------------------------------------------------------------------------------


def test_cells_that_do_not_fit_everywhere_come_first_to_the_replica_that_they_fit_on() -> None:
    cells = costs([1, 9, 2, 3, 1, 4], [9, 1, 8, 1, 1, 1])
    proposal = proposed("memory_aware", cells, replicas(1.0, 1.0, memory_bound=[4.0, 10.0]), middle_frac=0.0)

    assert proposal.order[:2].tolist() == [0, 2]
    assert proposal.ends == ("tail", "head")
    assert proposal.memory_bounds == (4.0, 10.0)
    assert proposal.max_claim_costs == (None, None)


def test_what_fits_everywhere_stands_by_compute() -> None:
    cells = costs([1, 9, 2, 3], [3, 1, 2, 4])

    assert proposed("memory_aware", cells, replicas(1.0, memory_bound=[4.0])).order.tolist() == [1, 3, 2, 0]


def test_without_bounds_memory_heavy_cells_go_to_the_replicas_with_most_free_memory() -> None:
    cells = costs([1, 9, 2, 3], [9, 1, 8, 1])
    proposal = proposed("memory_aware", cells, replicas(1.0, 1.0, 1.0, memory_free_frac=[0.9, 0.1, None]))

    assert proposal.order[:2].tolist() == [0, 2]
    assert proposal.ends == ("head", "tail", "head")
    assert proposal.memory_bounds == (None, None, None)


def test_without_bounds_and_free_memory_the_heavy_come_first_and_everybody_takes_the_head() -> None:
    proposal = proposed("memory_aware", costs([1, 9, 2, 3], [9, 1, 8, 1]), replicas(1.0, 5.0))

    assert proposal.order.tolist() == [0, 2, 1, 3]
    assert proposal.ends == ("head", "head")


def test_bounds_mean_nothing_without_memory_costs() -> None:
    proposal = proposed("memory_aware", costs([1, 9, 2]), replicas(1.0, 1.0, memory_bound=[1.0, 5.0]))

    assert proposal.order.tolist() == [1, 2, 0]
    assert proposal.memory_bounds == (None, None)
    assert proposal.ends == ("head", "head")


def test_what_fits_on_no_replica_is_left_to_the_largest() -> None:
    proposal = proposed("memory_aware", costs([1, 2, 3], [20, 1, 1]), replicas(1.0, 1.0, memory_bound=[4.0, 10.0]))

    assert proposal.memory_bounds == (4.0, None)
    assert proposal.order[0] == 0


# --- hybrid -----------------------------------------------------------------------------------------------------------


def test_hybrid_has_the_lowest_of_the_three_limits() -> None:
    views = replicas(1.0, 2.0, memory_bound=[4.0, 10.0], peak_cost=[3.0, None])
    proposal = proposed("hybrid", costs([1, 2, 3], [9, 1, 1]), views)

    assert proposal.max_claim_costs == (3.0, None)
    assert proposal.memory_bounds == (4.0, 10.0)


def test_hybrid_puts_cells_first_that_fit_on_fewest() -> None:
    cells = costs([1, 9, 2, 3, 5], [9, 1, 6, 20, 1])
    proposal = proposed("hybrid", cells, replicas(1.0, 1.0, 1.0, memory_bound=[4.0, 8.0, 30.0]), middle_frac=0.0)

    assert proposal.order[:3].tolist() == [3, 0, 2]
    assert proposal.ends == ("tail", "tail", "head")


@pytest.mark.parametrize(
    ("weight", "name"),
    [
        ("hybrid_balance_weight", "load_balanced"),
        ("hybrid_performance_weight", "performance_optimized"),
        ("hybrid_memory_weight", "memory_aware"),
    ],
)
def test_hybrid_with_one_weight_orders_as_that_policy(weight: str, name: str) -> None:
    weights = {"hybrid_balance_weight": 0.0, "hybrid_performance_weight": 0.0, "hybrid_memory_weight": 0.0}
    cells = costs([5, 1, 4, 2, 3, 1], [1, 6, 2, 2, 9, 1], [1, 1, 9, 1, 1, 1])
    alone = policy_named(name).propose(cells, ())

    assert proposed("hybrid", cells, replicas(1.0, 1.0), **(weights | {weight: 2.0})).order.tolist() == (
        alone.order.tolist()
    )


def test_hybrid_weighs_memory_against_compute() -> None:
    cells = costs([4, 3, 2, 1], [1, 1, 1, 9])
    by_compute = proposed("hybrid", cells, replicas(1.0), hybrid_memory_weight=0.0).order.tolist()
    by_memory = proposed("hybrid", cells, replicas(1.0), hybrid_memory_weight=20.0).order.tolist()

    assert by_compute == [0, 1, 2, 3]
    assert by_memory == [3, 0, 1, 2]


# --- the registry -----------------------------------------------------------------------------------------------------


class Backwards:
    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        return Proposal(
            order=np.arange(len(cells))[::-1],
            ends=("tail",) * len(replicas),
            max_claim_costs=(None,) * len(replicas),
            memory_bounds=(None,) * len(replicas),
        )


def test_the_packages_own_policies_have_names() -> None:
    assert policy_names() == tuple(NAMES)
    assert [policy_named(name).name for name in NAMES] == NAMES


def test_a_registered_policy_is_found_by_its_name_and_made_anew_for_each_run() -> None:
    assert register_policy("backwards")(Backwards) is Backwards

    assert policy_named("backwards").name == "backwards"
    assert policy_named("backwards") is not policy_named("backwards")
    assert policy_named("backwards").propose(Costs.equal(3), ()).order.tolist() == [2, 1, 0]
    assert policy_names()[-1] == "backwards"


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    rule = "be one of 'load_balanced', 'performance_optimized', 'memory_aware', 'hybrid'"
    with pytest.raises(ConfigError) as caught:
        policy_named("fastest")

    assert str(caught.value) == f"policy must {rule}, got 'fastest'"


@pytest.mark.parametrize("name", ["hybrid", "auto", "off", "", "my policy", "a/b", 3, None])
def test_a_name_that_is_taken_or_no_identifier_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="policy name must be "):
        register_policy(name)


def test_a_name_is_registered_once_unless_it_is_replaced_on_purpose() -> None:
    register_policy("backwards")(Backwards)
    with pytest.raises(ConfigError, match=r"^policy name must be new, or be given with replace=True, got 'backwards'"):
        register_policy("backwards")

    class Other(Backwards):
        pass

    register_policy("backwards", replace=True)(Other)
    assert type(policy_named("backwards")) is Other


def test_a_class_without_propose_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^policy must have a method propose\(cells, replicas\), got <class 'int'>"):
        register_policy("number")(int)
    assert "number" not in policy_names()


def test_a_policy_that_drops_cells_is_rejected_by_name() -> None:
    class Forgetful(Backwards):
        def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
            return super().propose(costs([1] * (len(cells) - 1)), replicas)

    register_policy("forgetful")(Forgetful)
    cells = Costs.equal(4)
    with pytest.raises(PlanError, match=r"^policy 'forgetful' must order each of the 4 cells once: left out: 3$"):
        validate(policy_named("forgetful").propose(cells, ()), cells, 0, policy="forgetful")


def test_the_examples_in_the_documentation_hold() -> None:
    assert doctest.testmod(policies).failed == 0
