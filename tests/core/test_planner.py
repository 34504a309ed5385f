from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import CoordinationTimeout
from lightning_hybrid.core.planner import QueuePlanner
from lightning_hybrid.core.policies import NoMemoryBounds, Policy, Proposal, ReplicaView, policy_named, policy_names
from lightning_hybrid.core.selector import OFF
from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.core.versions import QueueVersion
from tests.core.claimants import Epoch, StandIn, costs_of, version_of

CONFIG = HybridConfig(publish_period_s=0.01)
HYBRID, BALANCED = policy_named("hybrid"), policy_named("load_balanced")


class Bounds:
    """Memory bounds that a test changes."""

    def __init__(self, *bounds: float | None) -> None:
        self.bounds = list(bounds)

    def bound(self, replica: int) -> float | None:
        return self.bounds[replica]


class Noted:
    """A policy that notes what it is asked, and makes of the order what it is told to."""

    name = "noted"

    def __init__(self, order: Callable[[Costs], Sequence[int]] = lambda cells: range(len(cells))) -> None:
        self._order = order
        self.cells: list[Costs] = []
        self.replicas: list[list[ReplicaView]] = []

    def propose(self, cells: Costs, replicas: Sequence[ReplicaView]) -> Proposal:
        self.cells.append(cells)
        self.replicas.append(list(replicas))
        return Proposal(
            order=np.array(list(self._order(cells)), dtype=np.int64),
            ends=("head",) * len(replicas),
            max_claim_costs=(None,) * len(replicas),
            memory_bounds=tuple(view.memory_bound for view in replicas),
        )


def epoch_of(
    compute: Sequence[float],
    world: int = 2,
    *,
    memory: Sequence[float] | None = None,
    config: HybridConfig = CONFIG,
    prefetch: bool = False,
) -> Epoch:
    costs = costs_of(compute, memory)
    return Epoch(version_of(range(len(compute)), costs, world), costs, config, prefetch=prefetch)


def planner_of(epoch: Epoch, bounds: Bounds | None = None) -> QueuePlanner:
    """The planner of replica 0."""
    leader = epoch[0]
    return QueuePlanner(leader.claimant, leader, epoch.keys, epoch.costs, epoch.config, bounds or NoMemoryBounds())


def newest(epoch: Epoch) -> QueueVersion:
    """The newest version as it was published."""
    data = epoch.keys.values[f"version/{epoch.keys.values['version'].decode()}"]
    return QueueVersion.from_bytes(data, epoch.costs)


# --- switching ------------------------------------------------------------------------------------------------------


def test_a_switch_orders_what_nobody_has_reserved() -> None:
    epoch = epoch_of([1, 1, 5, 1, 7, 2, 1, 3, 1, 1, 1, 1]).measure(1.0, 1.0)
    assert [epoch[0].want(), epoch[1].want()] == [0, 2]
    epoch.exchange()
    planner_of(epoch).enforce(BALANCED, off=False)

    version = newest(epoch)
    assert (version.number, version.policy) == (1, "load_balanced")
    assert sorted(version.cells.tolist()) == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert version.shares is not None
    for share in version.shares:  # heaviest first
        costs = version.costs.compute[share.start : share.stop].tolist()
        assert costs == sorted(costs, reverse=True)
    assert epoch.run_out() == list(range(12))


def test_the_version_is_written_before_it_is_told_of() -> None:
    epoch = epoch_of([1, 2, 3, 4]).measure(1.0, 1.0)
    del epoch.keys.asked[:]
    planner_of(epoch).enforce(HYBRID, off=False)

    asked = [(what, key) for what, key in epoch.keys.asked if str(key).startswith("version")]
    assert asked == [("create", "version/1/owner"), ("put", "version/1"), ("add", "version")]
    assert epoch[0].claimant.version.digest == newest(epoch).digest
    assert epoch.published[0].version == 1


def test_everybody_follows_within_a_look() -> None:
    epoch = epoch_of([3, 2, 2, 1, 1, 1], 3).measure(1.0, 1.0, 1.0)
    planner_of(epoch).enforce(HYBRID, off=False)
    epoch.exchange()
    for replica in epoch.replicas:
        replica.claimant.turn()

    assert {replica.claimant.version.digest for replica in epoch.replicas} == {newest(epoch).digest}


def test_what_is_reserved_runs_on_in_the_old_order() -> None:
    epoch = epoch_of([1] * 40 + [3]).measure(10.0, 10.0)
    epoch[1].settle()
    reserved = epoch[1].claimant.ranges.num_reserved
    assert reserved > 1
    kept = [item.cell_at(at) for item in epoch[1].claimant.ranges._ranges for at in range(item.begun, item.reserved)]
    epoch.exchange()
    planner_of(epoch).enforce(BALANCED, off=False)
    epoch.exchange()

    assert not set(kept) & set(newest(epoch).cells.tolist())
    assert [epoch[1].want() for _ in range(reserved)] == kept
    assert epoch.run_out() == list(range(41))


def test_a_switch_with_nothing_left_changes_nothing() -> None:
    epoch = epoch_of([1, 1]).measure(1.0, 1.0)
    assert epoch.run_out() == [0, 1]
    planner_of(epoch).enforce(HYBRID, off=False)

    assert "version" not in epoch.keys.values
    assert epoch[0].claimant.version.number == 0


def test_what_another_replica_plans_is_not_planned_twice() -> None:
    epoch = epoch_of([3, 2, 1]).measure(1.0, 1.0)
    epoch.keys.create("version/1/owner", b"1")
    planner_of(epoch).enforce(HYBRID, off=False)

    assert epoch[0].claimant.version.number == 0
    assert epoch.run_out() == [0, 1, 2]


def test_a_share_that_its_owner_has_not_heard_of_is_planned_anew() -> None:
    epoch = epoch_of([5, 4, 3, 2, 1, 1]).measure(1.0, 1.0)
    planner = planner_of(epoch)
    planner.enforce(BALANCED, off=False)
    planner.enforce(HYBRID, off=False)

    assert newest(epoch).number == 2
    assert sorted(newest(epoch).cells.tolist()) == list(range(6))
    assert epoch.run_out() == list(range(6))
    assert epoch[1].claimant.versions.keys() == {0, 2}


def test_equal_cells_are_left_to_be_claimed() -> None:
    epoch = epoch_of([1] * 20).measure(1.0, 1.0)
    planner_of(epoch).enforce(BALANCED, off=False)

    assert newest(epoch).shares is None
    assert newest(epoch).num_to_claim == 20
    assert epoch.run_out() == list(range(20))


def test_cells_are_given_out_by_speed_and_by_what_is_still_to_be_run() -> None:
    epoch = epoch_of([2.0] + [1.0] * 39 + [3.0]).measure(1.0, 3.0)
    epoch[1]._note(cost=0.0)
    epoch[1].claimant.reserved_cost = 12.0  # it has four seconds of work before it
    epoch.exchange()
    planner_of(epoch).enforce(BALANCED, off=False)

    version = newest(epoch)
    assert version.shares is not None
    mine, theirs = (version.cost(*share) for share in version.shares)
    assert abs(mine / 1.0 - (4.0 + theirs / 3.0)) <= 1.0


# --- policies that are wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        (lambda cells: range(len(cells) - 1), "left out: 5"),
        (lambda cells: [0, *range(len(cells))], "repeated: 2"),
        (lambda cells: [*range(len(cells)), 77], "not there: 77"),
    ],
)
def test_a_policy_that_loses_or_repeats_cells_in_mid_run_is_refused_by_name_and_no_cell_is_lost(
    order: Callable[[Costs], Sequence[int]], fault: str
) -> None:
    epoch = epoch_of([3, 2, 2, 1, 1, 3]).measure(1.0, 1.0)
    assert [epoch[0].want(), epoch[1].want()] == [0, 1]
    epoch.exchange()

    complaint = planner_of(epoch).enforce(Noted(order), off=False)

    assert complaint is not None
    assert complaint.startswith(f"PlanError: policy 'noted' must order each of the 4 cells once: {fault}")
    assert newest(epoch).policy == "load_balanced"
    assert sorted(newest(epoch).cells) == [2, 3, 4, 5]


def test_a_policy_that_raises_in_mid_run_is_replaced() -> None:
    def broken(cells: Costs) -> Sequence[int]:
        raise RuntimeError("no idea")

    epoch = epoch_of([3, 2, 2, 1, 1, 3]).measure(1.0, 1.0)
    epoch.exchange()

    assert planner_of(epoch).enforce(Noted(broken), off=False) == "RuntimeError: no idea"
    assert sorted(newest(epoch).cells) == [0, 1, 2, 3, 4, 5]


def test_off_deals_heavy_cells_in_turn() -> None:
    epoch = epoch_of([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]).measure(1.0, 1.0)
    epoch.exchange()
    planner_of(epoch).enforce(BALANCED, off=True)

    version = newest(epoch)
    assert version.shares is not None
    assert [version.cost(*share) for share in version.shares] == [20.0, 16.0]


def test_nothing_is_turned_off_while_a_memory_bound_is_known() -> None:
    epoch = epoch_of([8.0, 7.0, 6.0, 5.0], memory=[4, 3, 2, 1]).measure(1.0, 1.0)
    epoch.exchange()
    planner_of(epoch, Bounds(2.0, None)).enforce(BALANCED, off=True)

    assert not newest(epoch).is_dealt


# --- what a policy is told ------------------------------------------------------------------------------------------


def test_a_policy_is_told_of_all_replicas_what_is_known() -> None:
    config = CONFIG.but(memory_weight=1, compute_weight=1, network_weight=0)
    epoch = epoch_of([3, 2, 1, 1], 3, config=config)
    epoch[0].measured(2.0)
    epoch[1].measured(4.0)
    device = DeviceState(kind="cuda", memory_used_bytes=30, memory_total_bytes=40, utilization_frac=0.25)
    epoch[1].view.record = replace(epoch[1].view.record, device=device)
    for replica in epoch.replicas[:2]:
        replica.publish()
    policy = Noted()
    planner_of(epoch, Bounds(None, 6.0, 7.0)).enforce(policy, off=True)

    assert policy.replicas == [
        [
            ReplicaView(replica=0, speed_per_s=2.0),
            ReplicaView(replica=1, speed_per_s=4.0, memory_bound=6.0, load_score=0.5, memory_free_frac=0.25),
            ReplicaView(replica=2, speed_per_s=1.0, memory_bound=7.0),
        ]
    ]


def test_a_policy_is_told_the_costs_of_what_is_left_in_the_order_of_the_loader() -> None:
    epoch = epoch_of([1, 9, 3, 4, 2, 5], memory=[6, 5, 4, 3, 2, 1]).measure(1.0, 1.0)
    assert epoch[0].want() == 0
    epoch.exchange()
    policy = Noted(lambda cells: reversed(range(len(cells))))
    planner = planner_of(epoch)
    planner.enforce(policy, off=False)
    planner.enforce(policy, off=False)

    for cells in policy.cells:
        assert cells.compute.tolist() == [9, 3, 4, 2, 5]
        assert cells.memory is not None
        assert cells.memory.tolist() == [5, 4, 3, 2, 1]


# --- turned off -----------------------------------------------------------------------------------------------------


def test_off_deals_equal_shares_for_good() -> None:
    epoch = epoch_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).measure(1.0, 9.0)
    planner_of(epoch).enforce(HYBRID, off=True)
    version = newest(epoch)
    assert version.is_dealt
    assert version.policy == OFF
    assert version.shares is not None
    assert [share.size for share in version.shares] == [5, 5]
    # the first runs by the new version before the second, which is much faster, can steal from it
    epoch.exchange()
    for replica in epoch.replicas:
        replica.settle()

    assert epoch.run_out() == list(range(10))
    assert [len(replica.ran) for replica in epoch.replicas] == [5, 5]
    assert [replica.claimant.cells_stolen for replica in epoch.replicas] == [0, 0]


@pytest.mark.parametrize(("num", "world", "sizes"), [(7, 3, {2, 3}), (2, 3, {0, 1}), (9, 3, {3})])
def test_shares_of_equal_numbers_differ_by_one_at_most(num: int, world: int, sizes: set[int]) -> None:
    epoch = epoch_of([2.0] + [1.0] * (num - 1), world).measure(*[1.0] * world)
    planner_of(epoch).enforce(HYBRID, off=True)
    shares = newest(epoch).shares

    assert shares is not None
    assert {share.size for share in shares} == sizes
    assert epoch.run_out() == list(range(num))


def test_off_among_very_many_leaves_the_cells_to_be_claimed() -> None:
    # who has stopped already would never hear of a share
    epoch = epoch_of([1.0] * 30, 8, config=CONFIG.but(look_replicas=2)).measure(*[1.0] * 8)
    planner_of(epoch).enforce(HYBRID, off=True)

    assert newest(epoch).policy == OFF
    assert newest(epoch).num_to_claim == 30
    assert epoch.run_out() == list(range(30))


# --- revising -------------------------------------------------------------------------------------------------------


def test_once_the_speeds_are_known_cells_are_given_out_and_then_left_alone() -> None:
    epoch = epoch_of([5, 4, 3, 2, 1, 1]).measure(1.0, 1.0)
    planner = planner_of(epoch)
    for _ in range(3):
        planner.revise(BALANCED)
        epoch.exchange()

    assert epoch.keys.values["version"] == b"1"
    assert newest(epoch).shares is not None
    assert epoch.run_out() == list(range(6))


@pytest.mark.parametrize(
    ("compute", "world", "look_replicas"),
    [([1.0] * 20, 2, 64), ([3.0, 2.0], 2, 64), ([3.0, 2.0, 1.0], 3, 64), ([5.0, 4.0] + [1.0] * 30, 6, 2)],
    ids=["equal cells", "no more than replicas", "as many as replicas", "very many replicas"],
)
def test_what_need_not_be_given_out_anew_is_not(compute: list[float], world: int, look_replicas: int) -> None:
    epoch = epoch_of(compute, world, config=CONFIG.but(look_replicas=look_replicas)).measure(*[1.0] * world)
    planner_of(epoch).revise(BALANCED)

    assert "version" not in epoch.keys.values


@pytest.mark.parametrize(
    ("then", "now", "is_anew"),
    [
        ((5.0, None), (5.0, None), False),
        ((5.0, None), (5.4, None), False),
        ((5.0, None), (6.0, None), True),
        ((5.0, None), (4.0, None), True),
        ((5.0, None), (5.0, 8.0), True),
        ((5.0, None), (None, None), True),
        ((None, None), (None, None), False),
    ],
)
def test_other_memory_bounds_are_a_reason_to_give_cells_out_anew(
    then: tuple[float | None, ...], now: tuple[float | None, ...], is_anew: bool
) -> None:
    epoch = epoch_of([5, 4, 3, 2, 1, 1, 1, 1], memory=[8, 7, 6, 5, 4, 3, 2, 1]).measure(1.0, 1.0)
    bounds = Bounds(*then)
    planner = planner_of(epoch, bounds)
    planner.revise(policy_named("memory_aware"))
    assert newest(epoch).number == 1
    bounds.bounds = list(now)
    planner.revise(policy_named("memory_aware"))

    assert newest(epoch).number == 1 + is_anew
    assert newest(epoch).memory_bounds[0] == (now if is_anew else then)[0]


def test_bounds_of_a_policy_that_minds_none_are_no_reason() -> None:
    epoch = epoch_of([5, 4, 3, 2, 1, 1], memory=[8, 7, 6, 5, 4, 3]).measure(1.0, 1.0)
    bounds = Bounds(5.0, None)
    planner = planner_of(epoch, bounds)
    planner.revise(BALANCED)
    bounds.bounds = [1.0, None]
    planner.revise(BALANCED)

    assert newest(epoch).number == 1


def test_after_other_bounds_each_cell_is_run_where_it_fits_now() -> None:
    memory = [9.0, 8.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    epoch = epoch_of([5, 5, 4, 4, 2, 2, 1, 1], memory=memory).measure(1.0, 1.0)
    bounds = Bounds(None, None)
    planner = planner_of(epoch, bounds)
    planner.revise(policy_named("memory_aware"))
    bounds.bounds = [3.0, None]
    planner.enforce(policy_named("memory_aware"), off=False)
    epoch.exchange()

    assert epoch.run_out() == list(range(8))
    assert {0, 1} <= set(epoch[1].ran)


# --- what may go wrong ----------------------------------------------------------------------------------------------


def test_cells_in_the_hands_of_a_planner_that_dies_are_swept() -> None:
    epoch = epoch_of([5, 4, 3, 2, 1, 1], config=CONFIG.but(lease_s=10.0)).measure(1.0, 1.0)
    planner = planner_of(epoch)

    def gone(key: str, value: bytes) -> None:
        raise CoordinationTimeout(f"{key} was not written")

    epoch.keys.put = gone  # type: ignore[method-assign]
    with pytest.raises(CoordinationTimeout, match="version/1 was not written"):
        planner.enforce(HYBRID, off=False)
    alive = epoch[1]
    for _ in range(100):
        while alive.want() is not None:
            pass
        alive.publish()
        alive.look()
        epoch.clock.now_s += 1.0

    assert sorted(alive.ran) == list(range(6))
    assert alive.is_exhausted()


# --- every cell once ------------------------------------------------------------------------------------------------

MOVES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["turn", "turn", "take", "take", "begin", "tell", "look", "wait", "switch", "revise", "off"]),
        st.booleans(),
    ),
    max_size=200,
)
"""Of which replica, what, and whether it comes in between the requests of the move before."""


class Run:
    """An epoch whose replica 0 switches policies; checks that no cell is in two versions at once."""

    def __init__(self, epoch: Epoch, bounds: Bounds) -> None:
        self.epoch, self.bounds = epoch, bounds
        self.planner = planner_of(epoch, bounds)
        self.is_off = False
        self._moves: deque[tuple[int, str, bool]] = deque()
        self._busy: set[int] = set()  # replicas whose background thread is in a move

    def make(self, moves: Iterable[tuple[int, str, bool]]) -> None:
        """Makes the moves in this order; some begin before the one before them has ended."""
        self._moves += moves
        self.epoch.keys.before = self._come_in_between
        while self._moves:
            self._make_next()
        self.epoch.keys.before = lambda: None

    def _come_in_between(self) -> None:
        assert not any(self.epoch[r].changed.is_held for r in self._busy), "a lock is held during a request"
        while self._moves and self._moves[0][2] and self._may_begin(*self._moves[0][:2]):
            self._make_next()

    def _may_begin(self, which: int, move: str) -> bool:
        return move in ("take", "begin", "wait") or self._acting(which, move) not in self._busy

    def _acting(self, which: int, move: str) -> int:
        return 0 if move in ("switch", "revise", "off") else which % len(self.epoch.replicas)

    def _make_next(self) -> None:
        which, move, _ = self._moves.popleft()
        replica = self.epoch[self._acting(which, move)]
        if move == "take":
            replica.starve()
            replica.take()
        elif move == "begin":
            replica.begin()
        elif move == "wait":
            self.epoch.clock.now_s += 0.3
        else:
            self._busy.add(replica.me)
            self._in_background(replica, which, move)
            self._busy.remove(replica.me)

    def _in_background(self, replica: StandIn, which: int, move: str) -> None:
        if move == "turn":
            replica.claimant.turn()
        elif move == "tell":
            replica.publish()
        elif move == "look":
            replica.look()
        else:
            self.plan(which, move)

    def plan(self, which: int, move: str) -> None:
        if self.is_off or not self.epoch[0].view.knows_all_speeds():
            return
        policy: Policy = policy_named(policy_names()[which])
        before = self.epoch[0].claimant.version.number
        self.bounds.bounds = [None, *(4.0 - which if r == which else None for r in range(1, len(self.bounds.bounds)))]
        if move == "revise":
            self.planner.revise(policy)
        else:
            self.is_off = move == "off"
            self.planner.enforce(policy, off=self.is_off)
        if self.epoch[0].claimant.version.number > before:
            self.check()

    def check(self) -> None:
        cells = newest(self.epoch).cells.tolist()
        assert len(set(cells)) == len(cells)
        kept = {
            item.cell_at(at)
            for replica in self.epoch.replicas
            for item in replica.claimant.ranges._ranges
            if item.version is not None and item.version.number < newest(self.epoch).number
            for at in range(item.begun, item.reserved)
        }
        assert not set(cells) & (kept | set(self.epoch.ran))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    num, world = draw(st.integers(0, 25)), draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 5).map(float), min_size=num, max_size=num)
    compute: list[float] = draw(st.just([1.0] * num) | numbers)
    options: dict[str, Any] = {"lease_s": draw(st.sampled_from([None, 1000.0]))}
    if options["lease_s"] is None:
        options["look_replicas"] = draw(st.sampled_from([64, 2]))
    epoch = epoch_of(
        compute if any(compute) else [1.0] * num,
        world,
        memory=draw(st.none() | numbers),
        config=CONFIG.but(claim_frac=draw(st.sampled_from([0.1, 0.5, 1.0])), **options),
        prefetch=draw(st.booleans()),
    )
    epoch.measure(*draw(st.lists(st.sampled_from([0.1, 1.0, 3.0]), min_size=world, max_size=world)))
    return Run(epoch, Bounds(*[None] * world))


@given(runs(), MOVES)
@settings(deadline=None, max_examples=200)
def test_every_cell_is_run_once_whatever_is_switched_when(run: Run, moves: list[tuple[int, str, bool]]) -> None:
    run.make(moves)
    assert len(run.epoch.ran) == len(set(run.epoch.ran))

    assert run.epoch.run_out() == list(range(len(run.epoch.costs)))
