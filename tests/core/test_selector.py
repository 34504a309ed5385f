from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core import selector as selector_module
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.selector import OFF, Decision, Pressures, Selector, Trial

CALM = Pressures(memory=0.3, performance=0.3, imbalance=0.1)
SHORT_OF_MEMORY = Pressures(memory=0.9, performance=0.3, imbalance=0.1)
TOO_SLOW = Pressures(memory=0.3, performance=1.2, imbalance=0.1)
UNEVEN = Pressures(memory=0.3, performance=0.3, imbalance=0.7)
UNKNOWN = Pressures()


class Run:
    """A selector that is asked every half second."""

    def __init__(self, **config: Any) -> None:
        self.selector = Selector(HybridConfig(**config))
        self.now_s = 100.0
        self.decisions: list[tuple[float, Decision]] = []

    def go(
        self, seconds: float, pressures: Pressures, per_s: float | Callable[[str], float] | None = None, **seen: Any
    ) -> Run:
        for _ in range(round(seconds / 0.5)):
            throughput = per_s(self.selector.policy) if callable(per_s) else per_s
            decision = self.selector.observe(self.now_s, pressures, throughput_per_s=throughput, **seen)
            if decision is not None:
                self.decisions.append((self.now_s - 100.0, decision))
                assert decision.policy == self.selector.policy
            self.now_s += 0.5
        return self

    @property
    def policies(self) -> list[str]:
        return [decision.policy for _, decision in self.decisions]


# --- thresholds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pressures", "policy"),
    [
        (CALM, "hybrid"),
        (SHORT_OF_MEMORY, "memory_aware"),
        (TOO_SLOW, "performance_optimized"),
        (UNEVEN, "load_balanced"),
        (UNKNOWN, "hybrid"),
        (Pressures(memory=0.8, performance=0.8, imbalance=0.5), "hybrid"),
        (Pressures(memory=0.81, performance=0.81, imbalance=0.51), "memory_aware"),
        (Pressures(memory=0.8, performance=0.81, imbalance=0.51), "performance_optimized"),
        (Pressures(memory=None, performance=None, imbalance=0.51), "load_balanced"),
        (Pressures(memory=float("nan")), "hybrid"),
    ],
)
def test_the_first_pressure_above_its_threshold_chooses(pressures: Pressures, policy: str) -> None:
    run = Run().go(20, pressures)

    assert run.selector.policy == policy
    assert len(run.decisions) == (policy != "hybrid")


def test_a_decision_tells_its_reason() -> None:
    ((at_s, decision),) = Run(memory_pressure_threshold_frac=0.5).go(6, Pressures(memory=0.6)).decisions

    assert at_s == 5.0
    assert decision == Decision(policy="memory_aware", reason="memory pressure 0.60 is above 0.50", kind="switch")


def test_the_higher_pressure_takes_over_from_a_lower_one() -> None:
    run = Run().go(20, UNEVEN).go(20, Pressures(memory=0.9, imbalance=0.7)).go(20, UNEVEN).go(20, CALM)

    assert run.policies == ["load_balanced", "memory_aware", "load_balanced", "hybrid"]


def test_a_named_policy_is_never_left() -> None:
    run = Run(policy="mine").go(30, SHORT_OF_MEMORY, 10.0).go(30, UNEVEN, 1.0)

    assert run.selector.policy == "mine"
    assert run.decisions == []


# --- hysteresis and dwell ---------------------------------------------------------------------------------------------


def test_a_policy_is_left_only_clearly_below_its_threshold() -> None:
    run = Run().go(20, SHORT_OF_MEMORY).go(60, Pressures(memory=0.71))
    assert run.policies == ["memory_aware"]

    run.go(20, Pressures(memory=0.7))
    assert run.policies == ["memory_aware", "hybrid"]
    assert run.decisions[-1][1].reason == "memory pressure 0.70 is not above 0.70"


def test_a_pressure_that_becomes_unknown_changes_nothing() -> None:
    run = Run().go(20, SHORT_OF_MEMORY).go(60, Pressures(memory=None, performance=0.1, imbalance=0.1))

    assert run.policies == ["memory_aware"]


def test_another_pressure_that_is_known_counts_more_than_one_that_became_unknown() -> None:
    assert Run().go(20, SHORT_OF_MEMORY).go(60, Pressures(imbalance=0.9)).policies == ["memory_aware", "load_balanced"]


def test_a_short_peak_is_waited_out() -> None:
    run = Run().go(20, CALM)
    for _ in range(10):
        run.go(1.5, SHORT_OF_MEMORY).go(1.5, CALM)

    assert run.decisions == []


def test_nothing_is_decided_soon_after_the_last_decision() -> None:
    run = Run(switch_dwell_s=30.0).go(31, SHORT_OF_MEMORY).go(60, CALM)

    assert [at_s for at_s, _ in run.decisions] == [30.0, 60.0]


PRESSURE = st.none() | st.floats(0, 1.5)
PRESSURES = st.builds(Pressures, memory=PRESSURE, performance=PRESSURE, imbalance=PRESSURE)
OBSERVATIONS = st.lists(st.tuples(st.floats(0, 6), PRESSURES, st.none() | st.floats(0, 100)), min_size=1, max_size=120)


@given(OBSERVATIONS, st.floats(0.5, 20), st.floats(0.1, 10))
@settings(deadline=None)
def test_decisions_never_come_thick_and_fast(
    observations: list[tuple[float, Pressures, float | None]], dwell_s: float, trial_s: float
) -> None:
    selector = Selector(HybridConfig(switch_dwell_s=dwell_s, switch_trial_s=trial_s))
    now_s, last_s, last = 0.0, 0.0, ""
    for elapsed_s, pressures, per_s in observations:
        now_s += elapsed_s
        decision = selector.observe(now_s, pressures, throughput_per_s=per_s)
        if decision is None:
            continue
        if decision.kind == "switch":
            assert now_s - last_s >= dwell_s or last == ""
        else:
            assert last == "switch"  # only a switch is undone, and only once
        last_s, last = now_s, decision.kind


@given(OBSERVATIONS)
@settings(deadline=None)
def test_a_policy_is_chosen_only_while_its_pressure_is_known_and_high(
    observations: list[tuple[float, Pressures, float | None]],
) -> None:
    selector, now_s = Selector(HybridConfig()), 0.0
    for elapsed_s, pressures, per_s in observations:
        now_s += elapsed_s
        decision = selector.observe(now_s, pressures, throughput_per_s=per_s)
        if decision is not None and decision.kind == "switch" and decision.policy != "hybrid":
            name, threshold = {
                "memory_aware": ("memory", 0.8),
                "performance_optimized": ("performance", 0.8),
                "load_balanced": ("imbalance", 0.5),
            }[decision.policy]
            assert getattr(pressures, name) > threshold


@given(st.lists(st.tuples(st.floats(0, 6), st.none() | st.floats(0, 100)), min_size=1, max_size=60))
def test_what_is_not_known_never_decides(observations: list[tuple[float, float | None]]) -> None:
    selector, now_s = Selector(HybridConfig()), 0.0
    for elapsed_s, per_s in observations:
        now_s += elapsed_s
        assert selector.observe(now_s, UNKNOWN, throughput_per_s=per_s, overhead_frac=0.5) is None
        assert selector.policy == "hybrid"


# --- the regret guard -------------------------------------------------------------------------------------------------


def test_a_switch_that_measured_worse_is_undone() -> None:
    run = Run().go(11, UNEVEN, lambda policy: 80.0 if policy == "load_balanced" else 100.0)

    assert [(at_s, decision.kind, decision.policy) for at_s, decision in run.decisions] == [
        (5.0, "switch", "load_balanced"),
        (10.0, "undo", "hybrid"),
    ]
    assert run.decisions[-1][1].reason == "80 cost units/s with load_balanced, 100 before"
    assert run.selector.last_trial == Trial(
        previous="hybrid", policy="load_balanced", before_per_s=100.0, after_per_s=80.0, kept=False
    )


def test_a_switch_that_measured_no_worse_is_kept() -> None:
    run = Run().go(60, UNEVEN, lambda policy: 96.0 if policy == "load_balanced" else 100.0)

    assert run.policies == ["load_balanced"]
    assert run.selector.last_trial is not None
    assert run.selector.last_trial.kept
    assert run.selector.last_trial.after_per_s == pytest.approx(96.0)


def test_the_same_switch_is_tried_again_after_a_time_that_doubles() -> None:
    run = Run().go(300, UNEVEN, lambda policy: 80.0 if policy == "load_balanced" else 100.0)
    switched = [at_s for at_s, decision in run.decisions if decision.kind == "switch"]
    undone = [at_s for at_s, decision in run.decisions if decision.kind == "undo"]
    waits = [again - before for before, again in zip(undone, switched[1:], strict=False)]

    assert waits[0] == pytest.approx(30.0, abs=3)
    assert waits[1] == pytest.approx(60.0, abs=3)
    assert waits[2] == pytest.approx(120.0, abs=3)


def test_a_switch_that_pays_at_last_is_forgiven() -> None:
    run = Run().go(20, UNEVEN, lambda policy: 80.0 if policy == "load_balanced" else 100.0)
    run.go(60, UNEVEN, 100.0)
    assert run.policies == ["load_balanced", "hybrid", "load_balanced"]

    run.go(20, CALM, 100.0).go(20, UNEVEN, 100.0)
    assert run.policies[3:] == ["hybrid", "load_balanced"]


def test_another_switch_may_follow_an_undone_one() -> None:
    run = Run().go(20, UNEVEN, lambda policy: 80.0 if policy == "load_balanced" else 100.0)
    run.go(10, Pressures(memory=0.9, imbalance=0.7), 100.0)

    assert run.policies == ["load_balanced", "hybrid", "memory_aware"]


def test_what_became_slow_before_the_switch_is_not_held_against_it() -> None:
    run = Run().go(20, CALM, 100.0).go(60, SHORT_OF_MEMORY, lambda policy: 60.0 if policy == "memory_aware" else 50.0)

    assert run.policies == ["memory_aware"]
    assert run.selector.last_trial is not None
    assert run.selector.last_trial.before_per_s == pytest.approx(50.0)
    assert run.selector.last_trial.after_per_s == pytest.approx(60.0)


def test_without_a_known_throughput_a_switch_is_kept_and_does_not_bar_the_next() -> None:
    run = Run().go(60, UNEVEN).go(60, CALM)

    assert run.policies == ["load_balanced", "hybrid"]
    assert run.selector.last_trial == Trial(
        previous="load_balanced", policy="hybrid", before_per_s=None, after_per_s=None, kept=True
    )


def test_a_trial_lasts_several_steps_however_long_they_are() -> None:
    run = Run().go(90, UNEVEN, lambda policy: 80.0 if policy == "load_balanced" else 100.0, step_s=2.0)

    assert [at_s for at_s, _ in run.decisions[:2]] == [8.0, 25.0]


def test_observations_that_are_rare_are_a_trial_too() -> None:
    selector, seen = Selector(HybridConfig()), []
    for number in range(8):
        per_s = 80.0 if selector.policy == "load_balanced" else 100.0
        seen.append(selector.observe(10.0 * number, UNEVEN, throughput_per_s=per_s))

    assert [None if decision is None else decision.kind for decision in seen[:4]] == [None, "switch", "undo", None]


@given(st.floats(1, 1000), st.floats(0, 2))
@settings(deadline=None)
def test_undone_is_exactly_what_lost_more_than_the_margin(before_per_s: float, ratio: float) -> None:
    after_per_s = before_per_s * ratio
    run = Run().go(11, UNEVEN, lambda policy: after_per_s if policy == "load_balanced" else before_per_s)

    if abs(ratio - 0.95) > 1e-6:
        assert (run.policies[-1] == "hybrid") == (ratio < 0.95)


# --- the self-check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "load_balanced", "mine"])
def test_balancing_that_costs_more_than_it_gains_is_turned_off_for_good(policy: str) -> None:
    run = Run(policy=policy).go(20, UNKNOWN, overhead_frac=0.03, gain_frac=0.01)

    ((at_s, decision),) = run.decisions
    assert at_s == 10.0
    assert decision == Decision(
        policy=OFF, reason="balancing took 3.0 % of the time and saved 1.0 % for 10.0 s", kind="off"
    )
    assert run.go(60, SHORT_OF_MEMORY, 10.0, overhead_frac=0.0, gain_frac=0.5).policies == [OFF]


def test_one_look_after_a_long_pause_turns_nothing_off() -> None:
    selector, seen = Selector(HybridConfig()), {"overhead_frac": 0.03, "gain_frac": 0.01}

    assert [selector.observe(3600.0 * n, UNKNOWN, **seen) for n in range(4)] == [None] * 4  # type: ignore[arg-type]
    assert selector.observe(4 * 3600.0, UNKNOWN, **seen) is not None  # type: ignore[arg-type]


def test_balancing_that_pays_now_and_then_stays_on() -> None:
    run = Run()
    for _ in range(10):
        run.go(9, UNKNOWN, overhead_frac=0.03, gain_frac=0.01).go(1, UNKNOWN, overhead_frac=0.03, gain_frac=0.2)

    assert run.decisions == []


@pytest.mark.parametrize("seen", [{"overhead_frac": 0.5}, {"gain_frac": 0.0}, {"overhead_frac": 0.5, "gain_frac": 0.5}])
def test_balancing_is_never_turned_off_without_proof(seen: dict[str, float]) -> None:
    assert Run().go(100, UNKNOWN, **seen).decisions == []


def test_the_examples_in_the_documentation_hold() -> None:
    assert doctest.testmod(selector_module).failed == 0
