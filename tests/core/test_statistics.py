from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core import statistics as statistics_module
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.statistics import History, PolicyTotal, Schedule, Statistics

STAGES = st.sampled_from(["predict", "validate"])
POLICIES = st.sampled_from(["hybrid", "load_balanced", "mine"])
KINDS = st.sampled_from(["start", "switch", "undo", "off"])
BEGINNINGS = st.lists(st.tuples(STAGES, POLICIES, KINDS, st.integers(0, 50)), max_size=60)


def history_of(beginnings: list[tuple[str, str, Any, int]], **config: Any) -> History:
    history = History(HybridConfig(**config))
    for number, (stage, policy, kind, samples) in enumerate(beginnings):
        history.begin(stage, policy, start_s=float(number), kind=kind, reason="because")
        history.add_samples(samples)
    return history


def run() -> History:
    history = History(HybridConfig())
    history.begin("predict", "hybrid", start_s=100.0)
    history.add_samples(60)
    history.add_samples(40)
    history.begin("predict", "load_balanced", start_s=102.5, kind="switch", reason="load imbalance 0.60 is above 0.50")
    history.add_samples(20)
    history.add_effect(2000.0, 1500.0)
    history.begin("predict", "hybrid", start_s=107.5, kind="undo", reason="1500 cost units/s, 2000 before")
    history.add_samples(180)
    return history


def test_before_the_first_schedule_everything_is_empty() -> None:
    history = History(HybridConfig())
    history.add_samples(3)
    history.add_effect(1.0, 2.0)

    assert history.statistics == Statistics()
    assert history.statistics.mean_samples is None
    assert history.statistics.scalars("predict") == {
        "balance/predict/policy/num_schedules": 0.0,
        "balance/predict/policy/num_switches": 0.0,
        "balance/predict/policy/num_undone": 0.0,
    }


def test_samples_count_for_the_newest_schedule() -> None:
    assert [schedule.samples for schedule in run().statistics.schedules] == [100, 20, 180]


def test_the_totals_tell_what_each_policy_did() -> None:
    statistics = run().statistics

    assert statistics.totals == (
        PolicyTotal(stage="predict", policy="hybrid", schedules=2, samples=280, switches=1, undos=1),
        PolicyTotal(stage="predict", policy="load_balanced", schedules=1, samples=20, switches=1),
    )
    assert (statistics.num_schedules, statistics.num_samples, statistics.num_switches) == (3, 300, 2)
    assert statistics.distribution == {"hybrid": 2, "load_balanced": 1}
    assert statistics.mean_samples == 100.0


def test_an_effect_belongs_to_the_switch_that_it_was_measured_for() -> None:
    switched, undone = run().statistics.switches

    assert switched.effect_frac == -0.25
    assert (undone.before_per_s, undone.after_per_s, undone.effect_frac) == (None, None, None)


def test_an_effect_is_found_after_the_next_epoch_has_begun() -> None:
    history = run()
    history.begin("predict", "load_balanced", start_s=110.0, kind="switch")
    history.begin("predict", "load_balanced", start_s=120.0)
    history.add_effect(100.0, 110.0)

    assert history.statistics.schedules[-2].effect_frac == pytest.approx(0.1)


@pytest.mark.parametrize(("before_per_s", "after_per_s"), [(None, 5.0), (5.0, None), (0.0, 5.0), (None, None)])
def test_an_effect_that_was_not_measured_is_not_known(before_per_s: float | None, after_per_s: float | None) -> None:
    history = run()
    history.add_effect(before_per_s, after_per_s)

    assert history.statistics.switches[0].effect_frac is None
    assert "balance/predict/policy/last_effect_frac" not in history.statistics.scalars("predict")


def test_a_full_history_is_cut_to_its_newest_part() -> None:
    history = History(HybridConfig())
    for number in range(101):
        history.begin("predict", "hybrid", start_s=float(number))
    assert [schedule.start_s for schedule in history.statistics.schedules] == [float(n) for n in range(51, 101)]

    for number in range(101, 151):
        history.begin("predict", "hybrid", start_s=float(number))
    assert len(history.statistics.schedules) == 100
    assert history.statistics.num_schedules == 151


@given(BEGINNINGS, st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None)
def test_the_history_is_bounded_and_the_totals_are_not_cut(
    beginnings: list[tuple[str, str, Any, int]], most: int, trimmed: int
) -> None:
    statistics = history_of(beginnings, max_schedules=most, trimmed_schedules=trimmed).statistics

    assert len(statistics.schedules) <= most
    assert statistics.num_schedules == len(beginnings)
    assert statistics.num_samples == sum(samples for *_, samples in beginnings)
    assert [schedule.policy for schedule in statistics.schedules] == [
        policy for _, policy, *_ in beginnings[len(beginnings) - len(statistics.schedules) :]
    ]


def test_the_recent_ones_are_the_last_ten_or_as_many_as_configured() -> None:
    beginnings = [("predict", "hybrid", "start", number) for number in range(20)]

    assert [schedule.samples for schedule in history_of(beginnings).statistics.recent] == list(range(10, 20))
    assert len(history_of(beginnings, recent_schedules=3).statistics.recent) == 3
    assert len(history_of(beginnings[:4]).statistics.recent) == 4


@given(BEGINNINGS)
def test_statistics_survive_the_way_through_json(beginnings: list[tuple[str, str, Any, int]]) -> None:
    history = history_of(beginnings)
    history.add_effect(100.0, 90.0)
    statistics = history.statistics

    assert Statistics.from_json(statistics.to_json()) == statistics
    assert Statistics.from_json(statistics.to_json().encode()) == statistics


def test_the_scalars_of_a_stage_are_its_own() -> None:
    history = run()
    history.begin("validate", "mine", start_s=110.0)
    history.add_samples(7)

    assert history.statistics.scalars("predict") == {
        "balance/predict/policy/num_schedules": 3.0,
        "balance/predict/policy/num_switches": 2.0,
        "balance/predict/policy/num_undone": 1.0,
        "balance/predict/policy/mean_samples_per_schedule": 100.0,
        "balance/predict/policy/last_effect_frac": -0.25,
        "balance/predict/policy/share_frac/hybrid": 280 / 300,
        "balance/predict/policy/share_frac/load_balanced": 20 / 300,
    }
    assert history.statistics.scalars("validate")["balance/validate/policy/share_frac/mine"] == 1.0


def test_every_scalar_is_in_the_table_of_the_docstring() -> None:
    for tag in run().statistics.scalars("predict"):
        documented = (
            tag.replace("/predict/", "/<stage>/").replace("hybrid", "<policy>").replace("load_balanced", "<policy>")
        )
        assert f"``{documented}``" in (Statistics.scalars.__doc__ or "")


def test_the_timeline_has_a_blank_line_before_its_table_and_the_newest_row_last() -> None:
    assert run().statistics.format_markdown() == (
        "3 schedules (hybrid 2, load_balanced 1), 100.0 samples each in the mean, 2 switches.\n"
        "\n"
        "| start s | stage | policy | samples | before /s | after /s | effect % | why |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| 0.0 | predict | hybrid | 100 | - | - | - | start: first of an epoch |\n"
        "| 2.5 | predict | load_balanced | 20 | 2,000 | 1,500 | -25.0 | switch: load imbalance 0.60 is above 0.50 |\n"
        "| 7.5 | predict | hybrid | 180 | - | - | - | undo: 1500 cost units/s, 2000 before |"
    )


def test_the_timeline_says_what_it_leaves_out() -> None:
    beginnings = [("predict", "hybrid", "start", 1)] * 5
    text = history_of(beginnings, max_schedules=4, trimmed_schedules=2).statistics.format_markdown()

    assert text.startswith(
        "5 schedules (hybrid 5), 1.0 samples each in the mean, 0 switches. The 3 oldest are left out."
    )


def test_a_reason_cannot_break_the_table() -> None:
    statistics = Statistics(
        totals=(PolicyTotal(stage="predict", policy="hybrid", schedules=1),),
        schedules=(Schedule(stage="predict", policy="hybrid", kind="switch", reason="a|b\nc", start_s=0.0),),
    )

    assert "| switch: a\\|b c |" in statistics.format_markdown()


def test_the_examples_in_the_documentation_hold() -> None:
    assert doctest.testmod(statistics_module).failed == 0
