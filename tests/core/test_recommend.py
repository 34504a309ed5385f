from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.recommend import Recommendation, format_markdown, straggler
from lightning_hybrid.core.state import BalanceSnapshot, DeviceState, Mode, ReplicaRecord


def snapshot_of(
    speeds_per_s: Sequence[float | None],
    *,
    samples_total: int = 1000,
    mode: Mode = "queue",
    device: DeviceState | None = None,
) -> BalanceSnapshot:
    records = tuple(ReplicaRecord(replica=r, speed_per_s=s, device=device) for r, s in enumerate(speeds_per_s))
    return BalanceSnapshot(
        stage="predict", mode=mode, loader_idx=0, epoch=0, samples_total=samples_total, replicas=records
    )


def found(snapshot: BalanceSnapshot, threshold_frac: float = 0.25) -> Recommendation:
    recommendation = straggler(snapshot, threshold_frac=threshold_frac)
    assert recommendation is not None
    return recommendation


def test_one_of_four_three_times_slower_costs_a_sixth_of_the_balanced_run() -> None:
    recommendation = found(snapshot_of([300.0, 300.0, 100.0, 300.0]))

    assert recommendation.id == "straggler/predict/replica2"
    assert recommendation.kind == "straggler"
    assert recommendation.priority == "medium"
    assert recommendation.expected_gain_s == pytest.approx(1.0 - 1000 / 1200)
    assert recommendation.expected_gain_frac == pytest.approx(1 / 6)
    assert recommendation.evidence == {
        "replica_speed_per_s": 100.0,
        "median_speed_of_others_per_s": 300.0,
        "times_slower": 3.0,
        "num_replicas": 4,
        "num_samples": 1000,
        "dealt_by_speed_s": pytest.approx(1.0),
        "dealt_by_speed_without_straggler_s": pytest.approx(1000 / 1200),
        "equal_shares_s": pytest.approx(2.5),
        "equal_shares_without_straggler_s": pytest.approx(1000 / 1200),
        "wall_so_far_s": None,
    }


def test_the_text_tells_who_how_much_slower_what_it_costs_and_what_balancing_saved() -> None:
    assert found(snapshot_of([300.0, 300.0, 100.0, 300.0])).description == (
        "Replica 2 needs 3 times as long per sample as the median of the 3 others (100 against 300 samples/s)."
        " At these speeds the 1,000 samples of this run, dealt out by speed, take 1.00 s. With this replica as fast as"
        " the others they would take 0.83 s, which is 0.17 s (16.7 %) less. In equal shares, as stock Lightning deals"
        " them, they would take 2.50 s: dealing by speed saves 1.50 s."
    )


def test_two_replicas_compare_with_the_other_one() -> None:
    recommendation = found(snapshot_of([50.0, 200.0]))

    assert recommendation.expected_gain_s == 1.5
    assert recommendation.expected_gain_frac == 0.375
    assert recommendation.priority == "high"
    assert "as the other replica (50 against 200 samples/s)" in recommendation.description


def test_without_redistribution_the_straggler_costs_its_whole_lag() -> None:
    recommendation = found(snapshot_of([300.0, 300.0, 300.0, 100.0], samples_total=1200, mode="static"))

    assert recommendation.expected_gain_s == pytest.approx(2.0)
    assert recommendation.expected_gain_frac == pytest.approx(2 / 3)
    assert "1,200 samples of this run, in equal shares, take 3.00 s" in recommendation.description
    assert recommendation.description.endswith("Dealt out by speed they would take 1.20 s.")


def test_one_very_fast_replica_makes_no_straggler_of_the_rest() -> None:
    assert straggler(snapshot_of([100.0, 100.0, 100.0, 900.0])) is None


def test_the_first_of_two_equal_stragglers_is_named() -> None:
    assert found(snapshot_of([400.0, 100.0, 400.0, 100.0, 400.0])).id == "straggler/predict/replica1"


@pytest.mark.parametrize(
    "speeds_per_s", [[], [100.0], [100.0, None], [None, None], [100.0, 0.0], [100.0, 100.0], [125.0, 100.0]]
)
def test_no_recommendation_without_two_known_speeds_and_a_clear_difference(speeds_per_s: list[float | None]) -> None:
    assert straggler(snapshot_of(speeds_per_s)) is None


def test_the_threshold_is_the_callers() -> None:
    speeds_per_s = snapshot_of([140.0, 100.0])

    assert straggler(speeds_per_s, threshold_frac=0.5) is None
    assert found(speeds_per_s, threshold_frac=0.0).id == "straggler/predict/replica1"


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"threshold_frac must be at least 0, got -0\.1"):
        straggler(snapshot_of([100.0, 100.0]), threshold_frac=-0.1)


def test_replicas_of_unknown_speed_are_left_out_of_the_sums() -> None:
    recommendation = found(snapshot_of([200.0, None, 50.0, None]))

    assert recommendation.id == "straggler/predict/replica2"
    assert recommendation.evidence["num_replicas"] == 2
    assert recommendation.evidence["equal_shares_s"] == 10.0


def test_an_unknown_total_falls_back_to_the_samples_done() -> None:
    snapshot = snapshot_of([200.0, 50.0], samples_total=0)
    done = tuple(replace(record, samples=500, wall_s=4.0) for record in snapshot.replicas)

    recommendation = found(replace(snapshot, replicas=done))

    assert recommendation.expected_gain_s == 1.5
    assert recommendation.evidence["wall_so_far_s"] == 4.0


def test_without_any_number_of_samples_the_gain_is_relative_only() -> None:
    recommendation = found(snapshot_of([200.0, 50.0], samples_total=0))

    assert recommendation.expected_gain_s is None
    assert recommendation.expected_gain_frac == 0.375
    assert recommendation.evidence["dealt_by_speed_s"] is None
    assert recommendation.description.endswith("At the others' speed the run would be 37.5 % shorter.")


def test_a_small_gain_has_low_priority() -> None:
    assert found(snapshot_of([100.0] + [130.0] * 9)).priority == "low"


@pytest.mark.parametrize(
    ("device", "name", "tool"),
    [
        (DeviceState(kind="cuda", name="NVIDIA L40S"), "NVIDIA L40S", "`nvidia-smi`"),
        (DeviceState(kind="cpu"), "cpu", "`top`"),
        (DeviceState(kind="xpu"), "xpu", "look for other work"),
        (None, None, "look for other work"),
    ],
)
def test_the_advice_fits_the_kind_of_device(device: DeviceState | None, name: str | None, tool: str) -> None:
    recommendation = found(snapshot_of([200.0, 50.0], device=device))

    assert recommendation.device == name
    assert tool in recommendation.how_to


def hot_and_cool() -> BalanceSnapshot:
    readings: dict[str, Any] = {"kind": "cuda", "name": "NVIDIA L40S", "sm_clock_max_mhz": 2520}
    cool = DeviceState(clock_event_reasons=(), temperature_celsius=60, sm_clock_mhz=2400, **readings)
    hot = DeviceState(
        clock_event_reasons=("hw_thermal_slowdown",), temperature_celsius=91, sm_clock_mhz=1005, **readings
    )
    snapshot = snapshot_of([200.0, 50.0, 200.0])
    records = [replace(record, device=hot if record.replica == 1 else cool) for record in snapshot.replicas]
    return replace(snapshot, replicas=tuple(records))


def test_what_was_read_of_the_devices_names_the_causes_with_their_numbers() -> None:
    recommendation = found(hot_and_cool())

    assert recommendation.description.endswith(
        " Likely causes: 1. thermal throttling (clock_event_reasons hw_thermal_slowdown; temperature_celsius 91;"
        " sm_clock_mhz 1,005, limit 2,016); 2. low clocks (sm_clock_mhz 1,005, limit 2,016)."
    )
    assert recommendation.how_to.startswith("Cool it:")
    assert recommendation.evidence["temperature_celsius"] == 91
    assert recommendation.evidence["times_slower"] == 4.0
    assert "| temperature_celsius | 91 |" in format_markdown([recommendation])


def test_what_all_devices_share_names_no_cause() -> None:
    snapshot = hot_and_cool()
    alike = tuple(replace(record, device=snapshot.replicas[1].device) for record in snapshot.replicas)

    assert "Likely cause" not in found(replace(snapshot, replicas=alike)).description


def costly(replica: int, *, samples: int, cost: float, busy_s: float, error_frac: float | None = None) -> ReplicaRecord:
    return ReplicaRecord(
        replica=replica,
        samples=samples,
        cost=cost,
        steps=20,
        busy_s=busy_s,
        speed_per_s=samples / busy_s,
        cost_speed_per_s=cost / busy_s,
        mean_cost_speed_per_s=cost / busy_s,
        cost_speed_error_frac=error_frac,
    )


def test_a_replica_with_longer_samples_is_no_straggler() -> None:
    short, long = costly(0, samples=300, cost=300, busy_s=3.0), costly(1, samples=100, cost=310, busy_s=3.0)

    assert straggler(replace(snapshot_of([]), replicas=(short, long))) is None
    assert straggler(snapshot_of([short.speed_per_s, long.speed_per_s])) is not None


def test_a_slow_replica_with_shorter_samples_is_a_straggler() -> None:
    quick, slow = costly(0, samples=100, cost=300, busy_s=1.0), costly(1, samples=100, cost=100, busy_s=1.0)
    recommendation = found(replace(snapshot_of([]), replicas=(quick, slow)))

    assert recommendation.id == "straggler/predict/replica1"
    # the mean sample costs 2: 150 and 50 of them per second
    assert recommendation.evidence["median_speed_of_others_per_s"] == 150.0
    assert recommendation.evidence["replica_speed_per_s"] == 50.0
    assert recommendation.evidence["dealt_by_speed_s"] == 5.0


@pytest.mark.parametrize(("error_frac", "is_one"), [(None, True), (0.0, True), (0.1, True), (0.2, False), (0.6, False)])
def test_a_straggler_is_only_who_is_slow_beyond_the_error_of_its_speed(error_frac: float | None, is_one: bool) -> None:
    quick = costly(0, samples=200, cost=200, busy_s=1.0)
    slow = costly(1, samples=100, cost=100, busy_s=1.0, error_frac=error_frac)

    assert (straggler(replace(snapshot_of([]), replicas=(quick, slow))) is not None) == is_one


@given(
    speeds_per_s=st.lists(st.floats(0.01, 1e5), min_size=2, max_size=12),
    samples_total=st.integers(1, 10**9),
    mode=st.sampled_from(["queue", "lockstep", "static"]),
)
def test_the_gain_is_never_negative_nor_more_than_the_run(
    speeds_per_s: list[float], samples_total: int, mode: Mode
) -> None:
    recommendation = straggler(snapshot_of(speeds_per_s, samples_total=samples_total, mode=mode))

    if recommendation is not None:
        by_speed_s = recommendation.evidence["dealt_by_speed_s"]
        equal_shares_s = recommendation.evidence["equal_shares_s"]
        assert by_speed_s is not None
        assert equal_shares_s is not None
        assert by_speed_s <= equal_shares_s * (1 + 1e-9)
        now_s = equal_shares_s if mode == "static" else by_speed_s
        assert recommendation.expected_gain_s is not None
        assert -1e-9 * now_s <= recommendation.expected_gain_s < now_s


RECOMMENDATION = Recommendation(
    id="a/b",
    kind="a",
    priority="low",
    action="Do this",
    description="Because.",
    evidence={"num_samples": 1234, "wall_s": 0.5, "lag_s": None},
    expected_gain_s=12.34,
    expected_gain_frac=0.25,
    how_to="Like so.",
    device="cpu",
)


def test_markdown_has_the_texts_and_a_table_with_a_blank_line_before_it() -> None:
    assert format_markdown([RECOMMENDATION]) == (
        "**Do this** (low priority, expected gain 12.3 s, 25.0 % of the run)\n"
        "\n"
        "Because.\n"
        "\n"
        "Like so.\n"
        "\n"
        "| evidence (cpu) | value |\n"
        "|---|---|\n"
        "| num_samples | 1,234 |\n"
        "| wall_s | 0.5 |\n"
        "| lag_s | - |"
    )


def test_markdown_puts_the_most_urgent_first() -> None:
    text = format_markdown([RECOMMENDATION, replace(RECOMMENDATION, priority="high", action="Do that first")])

    assert text.index("Do that first") < text.index("Do this")


def test_markdown_says_when_the_gain_is_not_known() -> None:
    unknown = replace(RECOMMENDATION, expected_gain_s=None, expected_gain_frac=None)

    assert "(low priority, expected gain not known)" in format_markdown([unknown])


def test_markdown_needs_no_evidence_and_no_device() -> None:
    assert format_markdown([replace(RECOMMENDATION, evidence={}, device=None)]).endswith("\n\nLike so.")


def test_a_device_name_cannot_break_the_table() -> None:
    assert "| evidence (a\\|b c) | value |" in format_markdown([replace(RECOMMENDATION, device="a|b\nc")])
