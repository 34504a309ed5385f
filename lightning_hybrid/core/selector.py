"""Which policy is in force: a state machine that follows pressures slowly, and takes back what did not pay."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.pressures import Pressures, load_imbalance, memory_pressure, performance_pressure

__all__ = [
    "AUTO",
    "OFF",
    "Decision",
    "DecisionKind",
    "Pressures",
    "Selector",
    "Trial",
    "load_imbalance",
    "memory_pressure",
    "performance_pressure",
]

DecisionKind = Literal["switch", "undo", "off"]

AUTO = "auto"
"""The policy option that lets the selector choose."""
OFF = "off"
"""Instead of a policy: balancing is turned off."""

_DEFAULT = "hybrid"
_LONGEST_TRIAL = 4
"""A trial whose throughput stays unknown ends after this many times its length."""
_LEAST_LOOKS = 4
"""How often balancing must be found not to pay before it is turned off."""
_MOST_READINGS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """From now on ``policy`` is in force; ``off`` means that every replica runs an equal share."""

    policy: str
    reason: str
    kind: DecisionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a switch did to the throughput, in cost units per second; ``None`` where it was not measured."""

    previous: str
    policy: str
    before_per_s: float | None
    after_per_s: float | None
    kept: bool


class Selector:
    """Chooses the policy while the loop runs.

    Memory pressure above its threshold calls for ``memory_aware``; else performance pressure for
    ``performance_optimized``; else load imbalance for ``load_balanced``; else ``hybrid`` is right. A pressure that is
    not known calls for nothing, and leaves the policy in force that it called for before. A policy is left when its
    pressure has fallen clearly below the threshold, never soon after the last decision, and only for what has been
    called for as long as it takes to measure the throughput meanwhile.

    Every switch is on trial: when the throughput after it is clearly lower than in that time before, it is undone, and
    the same switch is not tried again for a time that doubles whenever it is undone again. When balancing itself has
    cost more than it gains for a while it is turned off for the rest of the run, whatever policy is in force.

    Args:
        config: Its ``policy`` is in force throughout, unless it is ``auto``.

    Example:
        >>> selector = Selector(HybridConfig(switch_dwell_s=5.0))
        >>> selector.observe(0.0, Pressures(memory=0.95))
        >>> selector.observe(5.0, Pressures(memory=0.95))
        Decision(policy='memory_aware', reason='memory pressure 0.95 is above 0.80', kind='switch')
    """

    def __init__(self, config: HybridConfig) -> None:
        self._config = config
        self._is_free = config.policy == AUTO
        self._policy = _DEFAULT if self._is_free else config.policy
        self._last_s: float | None = None
        self._decided_s = 0.0
        self._call = _Call(None, 0.0)
        self._trial_s = config.switch_trial_s
        self._readings: deque[_Reading] = deque(maxlen=_MOST_READINGS)
        self._before: _Before | None = None
        self._last_trial: Trial | None = None
        self._refusals: dict[tuple[str, str], _Refusal] = {}
        self._wasted_s = 0.0

    @property
    def policy(self) -> str:
        """Name of the policy in force."""
        return self._policy

    @property
    def last_trial(self) -> Trial | None:
        """The switch whose trial ended last; every trial is an object of its own."""
        return self._last_trial

    def observe(
        self,
        now_s: float,
        pressures: Pressures,
        *,
        throughput_per_s: float | None = None,
        overhead_frac: float | None = None,
        gain_frac: float | None = None,
        step_s: float | None = None,
    ) -> Decision | None:
        """Takes in what was measured since the last call, and decides.

        Args:
            now_s: Of any clock that never goes back.
            pressures: Now.
            throughput_per_s: Cost units per second of all replicas together.
            overhead_frac: Part of the time that balancing itself takes.
            gain_frac: Part of the time that balancing saves.
            step_s: Seconds of a usual step of the slowest replica; a trial lasts several.

        Returns:
            What is to be done from now on, ``None`` where nothing changes.
        """
        if self._last_s is None:
            self._last_s = self._decided_s = now_s
        since_s, self._last_s = self._last_s, now_s
        if self._policy == OFF:
            return None
        self._trial_s = max(self._config.switch_trial_s, self._config.switch_trial_steps * (_known(step_s) or 0.0))
        if _known(throughput_per_s) is not None and now_s > since_s:
            self._readings.append(_Reading(since_s, now_s, throughput_per_s or 0.0))
        return (
            self._check_itself(now_s, now_s - since_s, _known(overhead_frac), _known(gain_frac))
            or self._judge(now_s)
            or self._follow(now_s, pressures)
        )

    def _check_itself(
        self, now_s: float, elapsed_s: float, overhead_frac: float | None, gain_frac: float | None
    ) -> Decision | None:
        if overhead_frac is None or gain_frac is None:
            return None
        if overhead_frac <= gain_frac:
            self._wasted_s = 0.0
            return None
        # one look counts for no more, however long after the last: there may be hours between two epochs
        self._wasted_s += min(elapsed_s, self._config.self_check_s / _LEAST_LOOKS)
        if self._wasted_s < self._config.self_check_s:
            return None
        what = f"balancing took {100 * overhead_frac:.1f} % of the time and saved {100 * gain_frac:.1f} %"
        return self._decide(now_s, "off", OFF, f"{what} for {self._wasted_s:.1f} s")

    def _judge(self, now_s: float) -> Decision | None:
        if self._before is None:
            return None
        settled_s = self._settled_s
        read_s, after_per_s = _mean(self._readings, settled_s, math.inf)
        if read_s < self._trial_s and now_s < settled_s + _LONGEST_TRIAL * self._trial_s:
            return None
        before, self._before = self._before, None
        after_per_s = after_per_s if read_s >= self._trial_s / 2 else None
        is_worse = _is_worse(before.per_s, after_per_s, self._config.switch_regret_frac)
        self._last_trial = Trial(
            previous=before.policy,
            policy=self._policy,
            before_per_s=before.per_s,
            after_per_s=after_per_s,
            kept=not is_worse,
        )
        switch = (before.policy, self._policy)
        refusal = self._refusals.pop(switch, _Refusal(0, 0.0))
        if not is_worse:
            return None
        until_s = now_s + self._config.switch_retry_s * 2.0 ** min(refusal.times, 64)
        self._refusals[switch] = _Refusal(refusal.times + 1, until_s)
        reason = f"{after_per_s:.4g} cost units/s with {self._policy}, {before.per_s:.4g} before"
        return self._decide(now_s, "undo", before.policy, reason)

    def _follow(self, now_s: float, pressures: Pressures) -> Decision | None:
        if not self._is_free:
            return None
        policy, reason = self._called_for(now_s, pressures)
        if policy != self._call.policy:
            self._call = _Call(policy, now_s)
        may_s = max(self._decided_s + self._config.switch_dwell_s, self._call.since_s + self._trial_s / 2)
        if policy is None or self._before is not None or now_s < may_s:
            return None
        read_s, per_s = _mean(self._readings, max(self._settled_s, self._call.since_s), self._trial_s)
        self._before = _Before(self._policy, per_s if read_s >= self._trial_s / 4 else None)
        return self._decide(now_s, "switch", policy, reason)

    def _called_for(self, now_s: float, pressures: Pressures) -> tuple[str | None, str]:
        stays, reason = self._policy == _DEFAULT, ""
        for policy, what, pressure, threshold in self._calls(pressures):
            is_current = policy == self._policy
            least = threshold - (self._config.switch_hysteresis_frac if is_current else 0.0)
            if pressure is None:
                stays |= is_current
            elif pressure <= least:
                reason = f"{what} {pressure:.2f} is not above {least:.2f}" if is_current else reason
            elif is_current:
                return None, ""
            elif not self._is_refused(policy, now_s):
                return policy, f"{what} {pressure:.2f} is above {least:.2f}"
            else:
                stays = True
        return (None, "") if stays or self._is_refused(_DEFAULT, now_s) else (_DEFAULT, reason)

    def _calls(self, pressures: Pressures) -> Iterator[tuple[str, str, float | None, float]]:
        memory, performance, imbalance = map(_known, (pressures.memory, pressures.performance, pressures.imbalance))
        config = self._config
        yield "memory_aware", "memory pressure", memory, config.memory_pressure_threshold_frac
        yield "performance_optimized", "performance pressure", performance, config.performance_pressure_threshold_frac
        yield "load_balanced", "load imbalance", imbalance, config.load_imbalance_threshold_frac

    def _is_refused(self, policy: str, now_s: float) -> bool:
        refusal = self._refusals.get((self._policy, policy))
        return refusal is not None and now_s < refusal.until_s

    @property
    def _settled_s(self) -> float:
        return self._decided_s + self._config.switch_settle_s

    def _decide(self, now_s: float, kind: DecisionKind, policy: str, reason: str) -> Decision:
        self._policy, self._decided_s = policy, now_s
        self._call = _Call(None, now_s)
        return Decision(policy=policy, reason=reason, kind=kind)


class _Call(NamedTuple):
    """The policy that the pressures call for instead of the one in force, and since when."""

    policy: str | None
    since_s: float


class _Before(NamedTuple):
    """The policy before the switch that is on trial, and its throughput."""

    policy: str
    per_s: float | None


class _Refusal(NamedTuple):
    """How often a switch was undone, and until when it is not tried again."""

    times: int
    until_s: float


class _Reading(NamedTuple):
    start_s: float
    stop_s: float
    per_s: float


def _mean(readings: deque[_Reading], since_s: float, enough_s: float) -> tuple[float, float | None]:
    """Length and mean throughput of the newest readings that lie mostly after then, of no more than are enough."""
    total_s = cost = 0.0
    for start_s, stop_s, per_s in reversed(readings):
        if (start_s + stop_s) / 2 < since_s or total_s >= enough_s:
            break
        seconds = stop_s - max(start_s, since_s)
        total_s += seconds
        cost += seconds * per_s
    return total_s, cost / total_s if total_s > 0 else None


def _is_worse(before_per_s: float | None, after_per_s: float | None, margin_frac: float) -> bool:
    return before_per_s is not None and after_per_s is not None and after_per_s < (1 - margin_frac) * before_per_s


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
