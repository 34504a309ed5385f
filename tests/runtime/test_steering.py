from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.learned import CostParameters
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.planner import QueuePlanner
from lightning_hybrid.core.policies import policy_named
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.selector import OFF
from lightning_hybrid.core.state import Mode, ReplicaRecord, StepShape
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.dealing import new_dealer
from lightning_hybrid.runtime.sharedqueue import SharedQueue
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.steering import (
    Lessons,
    LockstepExecutor,
    Steering,
    learnt_by_leader,
    parameters_of,
)
from lightning_hybrid.runtime.store import InProcessStore
from lightning_hybrid.runtime.work import StaticDealer
from tests.core.claimants import ScriptedClock, costs_of

CONFIG = HybridConfig()
HALF_PER_STEP = CostParameters(version=3, per_step=0.5, per_sample=0.125, samples_per_step=4.0)


def board_of(replica: int = 0) -> Board:
    return Board(SharedQueue(InProcessStore(), replica, 2), replica, 2, CONFIG)


def spec_of(*, has_costs: bool = False) -> EpochSpec:
    costs = costs_of([1.0] * 6) if has_costs else None
    return EpochSpec(stage="predict", loader_idx=0, epoch=1, grid=Grid.sequential(24, 4), costs=costs)


class Mine:
    name = "mine"


# --- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "first"), [("auto", "hybrid"), ("memory_aware", "memory_aware")])
def test_every_epoch_begins_with_the_policy_of_the_settings(policy: str, first: str) -> None:
    assert Steering(CONFIG.but(policy=policy)).first_policy.name == first


def test_a_policy_of_the_users_own_is_in_force_from_the_start() -> None:
    mine = Mine()

    assert Steering(CONFIG.but(policy="mine"), mine).first_policy is mine  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "kind"), [("queue", QueuePlanner), ("lockstep", LockstepExecutor)])
def test_policies_are_put_into_force_as_the_mode_needs_it(mode: Mode, kind: type) -> None:
    board, steering = board_of(), Steering(CONFIG)
    queue = SharedQueue(InProcessStore(), 0, 2)
    dealer = new_dealer(mode, spec_of(), board, queue, CONFIG, steering, released=lambda: True)
    conductor = steering.attend(board, dealer, spec_of(), None)

    assert conductor is not None
    assert type(conductor.executor) is kind
    assert board.policy == ("hybrid" if mode == "lockstep" else None)
    assert [schedule.kind for schedule in steering.statistics.schedules] == ["start"]


def test_fixed_works_are_steered_by_nobody() -> None:
    board, steering = board_of(), Steering(CONFIG)

    assert steering.attend(board, StaticDealer([]), spec_of(), None) is None
    assert board.after_exchange == []
    assert steering.statistics.schedules == ()


def test_who_decides_goes_on_when_the_mode_changes() -> None:
    board, steering, queue = board_of(), Steering(CONFIG), SharedQueue(InProcessStore(), 0, 2)
    before, after = (
        new_dealer(mode, spec_of(), board, queue, CONFIG, steering, released=lambda: True)
        for mode in ("queue", "lockstep")
    )
    conductor = steering.attend(board, before, spec_of(), None)
    calls = len(board.after_exchange)

    assert steering.attend(board, after, spec_of(), conductor) is conductor
    assert conductor is not None
    assert isinstance(conductor.executor, LockstepExecutor)
    assert len(board.after_exchange) == calls
    assert steering.statistics.num_schedules == 1


def test_in_lockstep_a_policy_is_told_by_its_name() -> None:
    board = board_of()
    executor = LockstepExecutor(board)
    executor.enforce(policy_named("memory_aware"), off=False)
    assert board.policy == "memory_aware"
    executor.revise(policy_named("hybrid"))
    assert board.policy == "memory_aware"
    executor.enforce(policy_named("hybrid"), off=True)

    assert board.policy == OFF


# --- what steps cost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_costs", "learns"), [(False, True), (True, False)])
def test_costs_are_learnt_where_the_user_gives_none(has_costs: bool, learns: bool) -> None:
    board, steering, spec = board_of(), Steering(CONFIG), spec_of(has_costs=has_costs)
    queue = SharedQueue(InProcessStore(), 0, 2)
    dealer = new_dealer("queue", spec, board, queue, CONFIG, steering, released=lambda: True)
    steering.attend(board, dealer, spec, None)

    assert len(board.after_exchange) == 1 + learns


def with_steps(replica: int, first: int, num: int) -> ReplicaRecord:
    """Steps that last 20 ms, and 10 ms per sample."""
    sizes = [1 + (7 * number) % 8 for number in range(first, first + num)]
    steps = tuple(StepShape(number, size, None, 0.02 + 0.01 * size) for number, size in enumerate(sizes, first))
    return ReplicaRecord(replica=replica, steps=first + num - 1, newest_steps=steps)


def test_what_was_learnt_is_published_and_kept_for_the_next_epoch() -> None:
    board, steering, clock = board_of(), Steering(CONFIG), ScriptedClock()
    lessons = Lessons(board, steering, clock)
    assert board.learnt is None
    for first in range(1, 400, 40):
        board.view.record = with_steps(0, first, 40)
        board.view.take_in({1: Published(record=with_steps(1, first, 40))})
        lessons.observe()
        assert board.learnt is None  # before its time
    clock.now_s += 1.0
    lessons.observe()

    assert steering.learnt is not None
    assert board.learnt is not None
    assert parameters_of(board.learnt) == steering.learnt
    # an empty step costs as much as two samples
    assert steering.learnt.per_step / steering.learnt.per_sample == pytest.approx(2.0, rel=0.05)
    next_board = board_of()
    Lessons(next_board, steering, clock)
    assert next_board.learnt == board.learnt


def test_lessons_become_rare_while_nothing_is_learnt() -> None:
    clock, asked = ScriptedClock(), [0]
    lessons = Lessons(board_of(), Steering(CONFIG), clock)

    class Learner:
        def observe(self, record: ReplicaRecord) -> None:
            """Takes it in."""

        def propose(self, current: CostParameters | None) -> None:
            asked[0] += 1

    lessons._learner = Learner()  # type: ignore[assignment]
    for _ in range(1000):
        clock.now_s += 1.0
        lessons.observe()

    # after 1, 3, 7, 15, 31, 63 and 127 s, and then every 64 s
    assert asked[0] == 20


def test_costs_with_another_hash_than_their_writer_says_are_refused() -> None:
    told = f"{HALF_PER_STEP.digest} {HALF_PER_STEP.to_json()}"
    assert parameters_of(told) == HALF_PER_STEP
    other = replace(HALF_PER_STEP, per_step=0.25)

    with pytest.raises(PlanError, match=f"learnt costs have hash {other.digest}, their writer says"):
        parameters_of(f"{HALF_PER_STEP.digest} {other.to_json()}")


def test_everybody_reads_what_the_leader_has_learnt() -> None:
    leader, other = board_of(0), board_of(1)
    leader.learnt, other.learnt = "from the leader", "not heeded"
    assert learnt_by_leader(leader) == "from the leader"
    assert learnt_by_leader(other) is None
    other.view.take_in({0: Published(record=ReplicaRecord(replica=0), learnt="from the leader")})

    assert learnt_by_leader(other) == "from the leader"
