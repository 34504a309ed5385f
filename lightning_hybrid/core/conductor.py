"""Decides which policy is in force while the loop runs.

One replica conducts for all; how a policy is put into force is its `Executor`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.others import speed_of
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.planner import FALLBACK
from lightning_hybrid.core.policies import Policy, policy_named
from lightning_hybrid.core.pressures import Pressures, load_imbalance, memory_pressure, performance_pressure, score_of
from lightning_hybrid.core.selector import OFF, Decision, Selector
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.statistics import History, ScheduleKind


class Executor(Protocol):
    """Puts policies into force."""

    def enforce(self, policy: Policy, *, off: bool) -> str | None:
        """From now on the rest is run by ``policy``, or with ``off`` in equal shares for good.

        Returns:
            What was wrong with the policy's answer; then the rest is run by `lightning_hybrid.core.planner.FALLBACK`.
        """
        ...

    def revise(self, policy: Policy) -> str | None:
        """Called while nothing is switched: looks whether the policy in force should be applied anew."""
        ...


class Pulse:
    """What the replicas' records say about the run as a whole, from one look to the next.

    Args:
        config: Weights of the load score, and the target throughput.
    """

    def __init__(self, config: HybridConfig) -> None:
        self._config = config
        self._done: tuple[float, float, int] | None = None
        self._cost_versions: set[int] = set()
        self.throughput_per_s: float | None = None
        """Cost units per second of all replicas since the last look."""
        self.samples_per_s: float | None = None
        """The same in samples."""
        self.new_samples = 0
        """Samples finished since the last look."""

    def take_in(self, now_s: float, records: Sequence[ReplicaRecord]) -> None:
        """Notes what has been done by now."""
        cost = sum(record.samples if record.cost is None else record.cost for record in records)
        samples = sum(record.samples for record in records)
        before, self._done = self._done, (now_s, cost, samples)
        self.new_samples = samples - (before[2] if before else 0)
        units_before, self._cost_versions = self._cost_versions, {record.cost_version for record in records}
        self.throughput_per_s = self.samples_per_s = None
        if before is not None and now_s > before[0]:
            self.samples_per_s = self.new_samples / (now_s - before[0])
            if self._cost_versions == units_before and len(units_before) == 1:  # else in unlike units
                self.throughput_per_s = (cost - before[1]) / (now_s - before[0])

    def pressures(self, records: Sequence[ReplicaRecord]) -> Pressures:
        """What may call for another policy."""
        return Pressures(
            memory=memory_pressure(records),
            performance=performance_pressure(self._config.target_throughput_per_s, self.samples_per_s),
            imbalance=load_imbalance([score_of(record, self._config) for record in records]),
        )

    @staticmethod
    def overhead_frac(records: Sequence[ReplicaRecord]) -> float | None:
        """Share of the loops' time that this package takes."""
        wall_s = sum(record.wall_s for record in records)
        return sum(record.overhead_s for record in records) / wall_s if wall_s > 0 else None

    @staticmethod
    def gain_frac(records: Sequence[ReplicaRecord]) -> float | None:
        """Share of the time of equal shares that dealing by speed saves, at the speeds of now."""
        speeds = [speed for record in records if (speed := speed_of(record)) is not None]
        if len(speeds) < len(records) or not speeds:
            return None
        return 1.0 - len(speeds) * min(speeds) / sum(speeds)


class Conductor:
    """Lets the selector choose, and puts its choice into force.

    `observe` is called on the background thread once per publishing period.

    Args:
        peers: The replicas as this one sees them.
        executor: Puts policies into force.
        policy: In force from the start.
        config: Thresholds.
        selector: Chooses policies; goes on from epoch to epoch.
        history: Keeps the schedules; goes on too.
        stage: For the history.
    """

    def __init__(
        self,
        peers: Peers,
        executor: Executor,
        policy: Policy,
        config: HybridConfig,
        *,
        selector: Selector,
        history: History,
        stage: str,
    ) -> None:
        self._peers, self.executor, self.policy, self._config = peers, executor, policy, config
        self._selector, self._history, self._stage = selector, history, stage
        self._pulse = Pulse(config)
        self._is_over = False
        # every replica begins an epoch by the same policy; what was decided in an earlier one is put into force again
        self._is_due = selector.policy != policy.name
        self._note("start", policy.name, "begin of the epoch")

    def observe(self) -> None:
        """Looks at what was measured, and acts on it."""
        if self._peers.record.finished:
            return  # what is left at the end of an epoch says nothing about a policy
        now_s, records = self._peers.clock(), self._peers.records()
        self._take_in(now_s, records)
        if self._is_over or not self._peers.knows_all_speeds():
            return
        decision = self._decision(now_s, records)
        if decision is None and self._is_due:
            decision = Decision(policy=self._selector.policy, reason="in force since an earlier epoch", kind="switch")
        self._is_due = False
        complaint = self.executor.revise(self.policy) if decision is None else self._follow(decision)
        if complaint is not None:
            self._note("undo", FALLBACK, f"{self.policy.name} was refused: {complaint}")
            self.policy, self._is_over = policy_named(FALLBACK, self._config), True

    def take_stock(self, records: Sequence[ReplicaRecord]) -> None:
        """Counts what was finished up to the epoch's end, by the final records of all replicas."""
        self._pulse.take_in(self._peers.clock(), records)
        self._history.add_samples(self._pulse.new_samples)

    def _take_in(self, now_s: float, records: Sequence[ReplicaRecord]) -> None:
        self._pulse.take_in(now_s, records)
        self._history.add_samples(self._pulse.new_samples)
        observe: Callable[[ReplicaRecord], None] | None = getattr(self.policy, "observe", None)
        for record in records if observe is not None else ():
            observe(record)  # type: ignore[misc]  # not None here

    def _decision(self, now_s: float, records: Sequence[ReplicaRecord]) -> Decision | None:
        gain, before = self._pulse.gain_frac(records), self._selector.last_trial
        decision = self._selector.observe(
            now_s,
            self._pulse.pressures(records),
            throughput_per_s=self._pulse.throughput_per_s,
            overhead_frac=self._pulse.overhead_frac(records),
            gain_frac=None if gain is None else max(gain, self._config.overhead_tolerated_frac),
            step_s=max((record.step_s for record in records if record.step_s is not None), default=None),
        )
        trial = self._selector.last_trial
        if trial is not None and trial is not before:
            self._history.add_effect(trial.before_per_s, trial.after_per_s)
        return decision

    def _follow(self, decision: Decision) -> str | None:
        self._note(decision.kind, decision.policy, decision.reason)
        self._is_over = decision.policy == OFF
        if not self._is_over:
            self.policy = policy_named(decision.policy, self._config)
        return self.executor.enforce(self.policy, off=self._is_over)

    def _note(self, kind: ScheduleKind, policy: str, reason: str) -> None:
        self._history.begin(stage=self._stage, policy=policy, kind=kind, reason=reason, start_s=self._peers.clock())
