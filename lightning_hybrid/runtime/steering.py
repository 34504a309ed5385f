"""What replica 0 decides for all while an epoch runs: the policy in force, and what a step is taken to cost."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_hybrid.core.conductor import Conductor, Executor
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.learned import CostLearner, CostParameters
from lightning_hybrid.core.planner import QueuePlanner
from lightning_hybrid.core.policies import MemoryBounds, Policy, policy_named
from lightning_hybrid.core.selector import AUTO, OFF, Selector
from lightning_hybrid.core.statistics import History, Statistics
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.claimer import QueueDealer
from lightning_hybrid.runtime.lockstep import LockstepDealer
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.work import Dealer

LEADER = 0
"""The replica that decides."""

_FIRST_LESSON_S, _LONGEST_PAUSE_S = 1.0, 64.0


class Steering:
    """What is decided in the course of a run; on the replicas that decide nothing, what every epoch begins with.

    Args:
        config: Names the policy, and holds all thresholds.
        policy: An object of the user's own that is in force throughout, instead of one that ``config`` names.
        bounds: How much memory a step may take on each replica.
        history: Of earlier runs, to be gone on with.
    """

    def __init__(
        self,
        config: HybridConfig,
        policy: Policy | None = None,
        bounds: MemoryBounds | None = None,
        history: History | None = None,
    ) -> None:
        self._config, self._policy, self._bounds = config, policy, bounds
        self._selector, self._history = Selector(config), history or History(config)
        self.learnt: CostParameters | None = None
        """What a step costs, as far as it was learnt in this run."""

    @property
    def first_policy(self) -> Policy:
        """The policy that every epoch begins with, the same on all replicas."""
        if self._policy is not None:
            return self._policy
        return policy_named("hybrid" if self._config.policy == AUTO else self._config.policy, self._config)

    def bounds_on(self, board: Board) -> MemoryBounds:
        """How much memory a step may take on each replica: as was given, else as the replicas have found."""
        return PublishedBounds(board) if self._bounds is None else self._bounds

    @property
    def statistics(self) -> Statistics:
        """Which policies were in force, and what switching did."""
        return self._history.statistics

    def attend(self, board: Board, dealer: Dealer, spec: EpochSpec, conductor: Conductor | None) -> Conductor | None:
        """Has this replica decide for all by which policy an epoch is run, and learn what its steps cost.

        Args:
            board: What the replicas know of each other.
            dealer: Who deals the epoch out; another one where the mode is decided after the epoch has begun.
            spec: The epoch.
            conductor: Who decided in this epoch before, if anybody did.
        """
        executor = self._executor(board, dealer, spec)
        if executor is None or conductor is not None:
            if conductor is not None and executor is not None:
                conductor.executor = executor
            return conductor
        conductor = Conductor(
            board.view,
            executor,
            self.first_policy,
            self._config,
            selector=self._selector,
            history=self._history,
            stage=spec.stage,
        )
        board.after_exchange.append(conductor.observe)
        if spec.costs is None:
            board.after_exchange.append(Lessons(board, self).observe)
        return conductor

    def _executor(self, board: Board, dealer: Dealer, spec: EpochSpec) -> Executor | None:
        if isinstance(dealer, QueueDealer):
            return QueuePlanner(
                dealer.claimant, board, dealer.keys, spec.cell_costs, self._config, self.bounds_on(board)
            )
        if not isinstance(dealer, LockstepDealer):
            return None
        board.policy = self.first_policy.name
        return LockstepExecutor(board)


class PublishedBounds:
    """What the replicas have found of how much memory a step may take on each of them."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def bound(self, replica: int) -> float | None:
        """Most memory cost of a cell; ``None`` while no step has had to be run in parts."""
        view = self._board.view
        if replica == view.me:
            return view.record.memory_bound
        peer = view.published.get(replica)
        return None if peer is None else peer.record.memory_bound


class LockstepExecutor:
    """Puts policies into force in lockstep mode: whoever cuts the next rounds reads which one it is."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def enforce(self, policy: Policy, *, off: bool) -> str | None:
        """Publishes its name; ``off`` means equal shares."""
        self._board.policy = OFF if off else policy.name
        self._board.exchange_soon()
        return None

    def revise(self, policy: Policy) -> str | None:
        """Nothing to do: every block is cut anew by what is known."""
        return None


class Lessons:
    """Learns on replica 0's background thread what steps cost, and publishes it there.

    The fit takes some milliseconds, so it is made ever less often while it brings nothing new.

    Args:
        board: What the replicas know of each other.
        steering: Keeps what was learnt from epoch to epoch.
        clock: Monotonic seconds.
    """

    def __init__(self, board: Board, steering: Steering, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._steering, self._clock = board, steering, clock
        self._learner = CostLearner(board.view.world)
        self._pause_s, self._next_s = _FIRST_LESSON_S, clock() + _FIRST_LESSON_S
        self._publish()

    def observe(self) -> None:
        """Takes in the newest steps, and now and then what they teach."""
        for record in self._board.view.records():
            self._learner.observe(record)
        now = self._clock()
        if now < self._next_s:
            return
        learnt = self._learner.propose(self._steering.learnt)
        self._pause_s = _FIRST_LESSON_S if learnt else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_s = now + self._pause_s
        if learnt is not None:
            self._steering.learnt = learnt
            self._publish()

    def _publish(self) -> None:
        learnt = self._steering.learnt
        self._board.learnt = None if learnt is None else f"{learnt.digest} {learnt.to_json()}"


def parameters_of(learnt: str) -> CostParameters:
    """The cost parameters in what replica 0 has published.

    Raises:
        PlanError: they have another hash than their writer says.
    """
    digest, _, text = learnt.partition(" ")
    parameters = CostParameters.from_json(text)
    if parameters.digest != digest:
        raise PlanError(f"learnt costs have hash {parameters.digest}, their writer says {digest}: {text}")
    return parameters


def learnt_by_leader(board: Board) -> str | None:
    """What replica 0 has published about the cost of steps, its hash first, as far as it is known here."""
    if board.view.me == LEADER:
        return board.learnt
    leader = board.view.published.get(LEADER)
    return None if leader is None else leader.learnt
