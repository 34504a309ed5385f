from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.config import ENVIRONMENT_PREFIX, HybridConfig
from lightning_hybrid.core.errors import ConfigError, HybridError

CHOICES = {
    "mode": "be one of 'auto', 'queue', 'lockstep'",
    "order": "be one of 'loader', 'dataset'",
    "gather": "be one of 'all', 'rank_zero', 'none'",
    "iterable": "be one of 'stock', 'claim', 'sharded'",
    "comm_probe": "be one of 'quick', 'full', 'off'",
    "on_error": "be one of 'raise', 'skip'",
}
BOOLEANS = {
    "enabled": "be of type bool",
    "order_by_cost": "be of type bool",
    "count_flops": "be of type bool",
    "batch_dependent": "be of type None or bool",
}
TEXTS = {"policy": "be of type str"}
WHOLE = {
    "micro_batch_size": "be of type None or int or 'auto'",
    "max_micro_batch_size": "be of type None or int",
    "max_errors": "be of type None or int",
    "memory_limit_bytes": "be of type None or int",
    "speed_window_steps": "be of type int",
    "look_replicas": "be of type int",
    "in_flight_steps": "be of type int",
    "lockstep_block_rounds": "be of type int",
    "gather_chunk_bytes": "be of type int",
    "switch_trial_steps": "be of type int",
    "max_schedules": "be of type int",
    "trimmed_schedules": "be of type int",
    "recorded_steps": "be of type int",
    "recent_schedules": "be of type int",
}
NUMBERS = {
    "memory_safety_frac": "be of type float",
    "memory_weight": "be of type float",
    "compute_weight": "be of type float",
    "network_weight": "be of type float",
    "target_throughput_per_s": "be of type None or float",
    "hybrid_balance_weight": "be of type float",
    "hybrid_performance_weight": "be of type float",
    "hybrid_memory_weight": "be of type float",
    "heavy_margin_frac": "be of type float",
    "head_margin_frac": "be of type float",
    "middle_frac": "be of type float",
    "memory_pressure_threshold_frac": "be of type float",
    "performance_pressure_threshold_frac": "be of type float",
    "load_imbalance_threshold_frac": "be of type float",
    "switch_hysteresis_frac": "be of type float",
    "switch_dwell_s": "be of type float",
    "switch_settle_s": "be of type float",
    "switch_trial_s": "be of type float",
    "switch_regret_frac": "be of type float",
    "switch_retry_s": "be of type float",
    "self_check_s": "be of type float",
    "overhead_tolerated_frac": "be of type float",
    "claim_frac": "be of type float",
    "reserve_frac": "be of type float",
    "reserve_ahead_s": "be of type float",
    "publish_period_s": "be of type float",
    "most_exchanges_per_s": "be of type float",
    "endgame_poll_s": "be of type float",
    "stream_ahead_s": "be of type float",
    "claim_deadline_s": "be of type float",
    "alarm_grace_s": "be of type float",
    "lease_s": "be of type None or float",
    "speed_change_frac": "be of type float",
    "device_period_s": "be of type float",
    "comm_probe_patience_s": "be of type float",
    "straggler_threshold_frac": "be of type float",
}
OPTIONAL = {
    "batch_dependent",
    "lease_s",
    "max_errors",
    "max_micro_batch_size",
    "memory_limit_bytes",
    "micro_batch_size",
    "target_throughput_per_s",
}

AT_LEAST_ONE = "be at least 1 and finite"
NOT_NEGATIVE = "be at least 0 and finite"
POSITIVE = "be positive and finite"
A_PART = "be at least 0 and at most 1 and finite"
RANGES = {
    "max_micro_batch_size": (AT_LEAST_ONE, [1, 2**40], [0, -1]),
    "memory_weight": (NOT_NEGATIVE, [0, 0.0, 7.5], [-1e-9]),
    "compute_weight": (NOT_NEGATIVE, [0, 0.0, 7.5], [-1e-9]),
    "network_weight": (NOT_NEGATIVE, [0, 0.0, 7.5], [-1e-9]),
    "target_throughput_per_s": (POSITIVE, [1e-9, 60], [0, -1]),
    "hybrid_balance_weight": (NOT_NEGATIVE, [0, 0.0, 7.5], [-1e-9]),
    "hybrid_performance_weight": (NOT_NEGATIVE, [0, 0.0, 7.5], [-1e-9]),
    "hybrid_memory_weight": (NOT_NEGATIVE, [0, 0.0, 7.5], [-1e-9]),
    "heavy_margin_frac": (NOT_NEGATIVE, [0, 2.5], [-0.1]),
    "head_margin_frac": (A_PART, [0, 0.5, 1], [-0.001, 1.001]),
    "middle_frac": (A_PART, [0, 0.5, 1], [-0.001, 1.001]),
    "memory_pressure_threshold_frac": (A_PART, [0, 0.5, 1], [-0.001, 1.001]),
    "performance_pressure_threshold_frac": (NOT_NEGATIVE, [0, 2.5], [-0.1]),
    "load_imbalance_threshold_frac": (A_PART, [0, 0.5, 1], [-0.001, 1.001]),
    "switch_hysteresis_frac": (NOT_NEGATIVE, [0, 2.5], [-0.1]),
    "switch_dwell_s": (NOT_NEGATIVE, [0, 60], [-1]),
    "switch_settle_s": (NOT_NEGATIVE, [0, 60], [-1]),
    "switch_trial_s": (POSITIVE, [1e-9, 60], [0, -1]),
    "switch_trial_steps": (NOT_NEGATIVE, [0, 100], [-1]),
    "switch_regret_frac": (A_PART, [0, 0.5, 1], [-0.001, 1.001]),
    "switch_retry_s": (NOT_NEGATIVE, [0, 60], [-1]),
    "self_check_s": (NOT_NEGATIVE, [0, 60], [-1]),
    "overhead_tolerated_frac": (A_PART, [0, 0.5, 1], [-0.001, 1.001]),
    "max_schedules": (AT_LEAST_ONE, [1, 100], [0, -1]),
    "trimmed_schedules": (AT_LEAST_ONE, [1, 100], [0, -1]),
    "recorded_steps": (NOT_NEGATIVE, [0, 1, 10**6], [-1]),
    "recent_schedules": (AT_LEAST_ONE, [1, 100], [0, -1]),
    "micro_batch_size": (AT_LEAST_ONE, [1, 10**6], [0, -1]),
    "max_errors": (NOT_NEGATIVE, [0, 10**6], [-1]),
    "memory_limit_bytes": (AT_LEAST_ONE, [1, 2**40], [0, -1]),
    "memory_safety_frac": ("be positive and at most 1 and finite", [1e-9, 0.5, 1], [0, -0.5, 1.001]),
    "claim_frac": ("be positive and at most 1 and finite", [1e-9, 0.5, 1], [0, -0.5, 1.001]),
    "reserve_frac": (A_PART, [0, 0.5, 1], [-0.001, 1.001]),
    "reserve_ahead_s": (NOT_NEGATIVE, [0, 60], [-1]),
    "publish_period_s": (POSITIVE, [1e-9, 60], [0, -1]),
    "most_exchanges_per_s": (POSITIVE, [1e-9, 60], [0, -1]),
    "endgame_poll_s": (POSITIVE, [1e-9, 60], [0, -1]),
    "stream_ahead_s": (NOT_NEGATIVE, [0, 60], [-1]),
    "claim_deadline_s": (POSITIVE, [1e-9, 60], [0, -1]),
    "alarm_grace_s": (NOT_NEGATIVE, [0, 60], [-1]),
    "lease_s": (POSITIVE, [1e-9, 60], [0, -1]),
    "speed_window_steps": (AT_LEAST_ONE, [1, 100], [0, -1]),
    "look_replicas": (AT_LEAST_ONE, [1, 100], [0, -1]),
    "speed_change_frac": (NOT_NEGATIVE, [0, 2.5], [-0.1]),
    "in_flight_steps": (AT_LEAST_ONE, [1, 100], [0, -1]),
    "lockstep_block_rounds": (AT_LEAST_ONE, [1, 100], [0, -1]),
    "gather_chunk_bytes": (AT_LEAST_ONE, [1, 2**40], [0, -1]),
    "device_period_s": (POSITIVE, [1e-9, 60], [0, -1]),
    "comm_probe_patience_s": (NOT_NEGATIVE, [0, 60], [-1]),
    "straggler_threshold_frac": (NOT_NEGATIVE, [0, 2.5], [-0.1]),
}


def made(field: str, value: object) -> HybridConfig:
    given: dict[str, Any] = {field: value}
    return HybridConfig(**given)


def refused(field: str, value: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        made(field, value)
    return caught.value


def from_environment(field: str, text: str) -> HybridConfig:
    return HybridConfig.from_environment({ENVIRONMENT_PREFIX + field.upper(): text})


def test_every_field_is_checked_here() -> None:
    names = {field.name for field in fields(HybridConfig)}

    assert names == {*CHOICES, *BOOLEANS, *TEXTS, *WHOLE, *NUMBERS}
    assert set(RANGES) == {*WHOLE, *NUMBERS}


def test_a_config_is_frozen_and_survives_pickling() -> None:
    config = HybridConfig(mode="queue", lease_s=2)

    with pytest.raises(FrozenInstanceError):
        config.mode = "auto"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_fields_are_given_by_name_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        HybridConfig(True)  # type: ignore[misc]


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(TypeError, match="claim_fraction"):
        made("claim_fraction", 0.5)


@pytest.mark.parametrize("field", CHOICES)
@pytest.mark.parametrize("value", ["turbo", "", "QUEUE", None, 1, True, ["queue"]])
def test_a_word_that_is_no_choice_is_refused(field: str, value: object) -> None:
    error = refused(field, value)

    assert (error.field, error.value, error.rule) == (field, value, CHOICES[field])
    assert str(error) == f"{field} must {CHOICES[field]}, got {value!r}"


@pytest.mark.parametrize("field", BOOLEANS)
@pytest.mark.parametrize("value", ["yes", 1, 0, 1.0, [True]])
def test_what_is_no_truth_value_is_refused(field: str, value: object) -> None:
    error = refused(field, value)

    assert (error.field, error.value, error.rule) == (field, value, BOOLEANS[field])


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("value", [1, 0.5, True, ["hybrid"], b"hybrid"])
def test_what_is_no_text_is_refused(field: str, value: object) -> None:
    error = refused(field, value)

    assert (error.field, error.value, error.rule) == (field, value, TEXTS[field])


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("value", ["1", 1.0, 2.5, True, float("inf"), [1], np.float64(1)])
def test_what_is_no_whole_number_is_refused(field: str, value: object) -> None:
    error = refused(field, value)

    assert (error.field, error.value, error.rule) == (field, value, WHOLE[field])


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["0.5", True, [0.5], 0.5j])
def test_what_is_no_number_is_refused(field: str, value: object) -> None:
    error = refused(field, value)

    assert (error.field, error.value, error.rule) == (field, value, NUMBERS[field])


@pytest.mark.parametrize("field", [*CHOICES, *BOOLEANS, *TEXTS, *WHOLE, *NUMBERS])
def test_none_is_taken_where_it_has_a_meaning_and_only_there(field: str) -> None:
    if field in OPTIONAL:
        assert getattr(made(field, None), field) is None
    else:
        assert refused(field, None).field == field


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, (_, good, _) in RANGES.items() for v in good])
def test_the_ends_of_each_range_are_taken(field: str, value: float) -> None:
    assert getattr(made(field, value), field) == value


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, (_, _, bad) in RANGES.items() for v in bad])
def test_what_lies_beyond_a_range_is_refused(field: str, value: float) -> None:
    error = refused(field, value)

    assert (error.field, error.value, error.rule) == (field, value, RANGES[field][0])


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_must_be_finite(field: str, value: float) -> None:
    error = refused(field, value)

    assert error.field == field
    assert error.rule.endswith("finite")


@pytest.mark.parametrize("field", NUMBERS)
def test_a_whole_number_is_a_number(field: str) -> None:
    assert getattr(made(field, 1), field) == 1


def test_hybrid_needs_one_weight() -> None:
    weights = {"hybrid_balance_weight": 0.0, "hybrid_performance_weight": 0.0, "hybrid_memory_weight": 0.0}

    with pytest.raises(ConfigError, match=r"^hybrid_balance_weight must be positive where the two other weights"):
        HybridConfig(**weights)  # type: ignore[arg-type]
    assert HybridConfig(**(weights | {"hybrid_memory_weight": 1})).hybrid_memory_weight == 1  # type: ignore[arg-type]


def test_but_changes_what_is_given_and_keeps_the_rest() -> None:
    config = HybridConfig(mode="queue", lease_s=2.0)
    other = config.but(lease_s=None, claim_frac=1)

    assert (other.mode, other.lease_s, other.claim_frac) == ("queue", None, 1)
    assert (config.lease_s, config.claim_frac) == (2.0, 0.5)


def test_but_checks_what_it_changes() -> None:
    with pytest.raises(ConfigError, match=r"^lease_s must be positive and finite, got 0$"):
        HybridConfig().but(lease_s=0)


def test_an_environment_without_our_variables_gives_the_defaults() -> None:
    environment = {"PATH": "/bin", "LIGHTNING_HYBRID": "1", "lightning_hybrid_mode": "queue"}

    assert HybridConfig.from_environment(environment) == HybridConfig()


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("mode", "lockstep", "lockstep"),
        ("mode", " Queue ", "queue"),
        ("policy", " MyPolicy ", "MyPolicy"),
        ("gather", "none", "none"),
        ("enabled", "0", False),
        ("enabled", "Off", False),
        ("enabled", "no", False),
        ("enabled", "FALSE", False),
        ("enabled", "1", True),
        ("enabled", "on", True),
        ("enabled", "Yes", True),
        ("enabled", "true", True),
        ("batch_dependent", "none", None),
        ("batch_dependent", "1", True),
        ("max_micro_batch_size", "None", None),
        ("max_micro_batch_size", "32", 32),
        ("lease_s", "NONE", None),
        ("lease_s", "2.5", 2.5),
        ("claim_frac", "1e-3", 0.001),
        ("reserve_ahead_s", " 2 ", 2.0),
        ("gather_chunk_bytes", "1024", 1024),
    ],
)
def test_a_variable_is_read_by_the_type_of_its_field(field: str, text: str, value: object) -> None:
    read = getattr(from_environment(field, text), field)

    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("field", "text", "rule"),
    [
        ("enabled", "maybe", "be 1 or 0"),
        ("enabled", "none", "be 1 or 0"),
        ("batch_dependent", "2", "be 1 or 0"),
        ("speed_window_steps", "2.5", "parse as int"),
        ("speed_window_steps", "none", "parse as int"),
        ("max_micro_batch_size", "many", "parse as int"),
        ("claim_frac", "half", "parse as float"),
        ("claim_frac", "", "parse as float"),
        ("lease_s", "2 s", "parse as float"),
    ],
)
def test_text_that_does_not_parse_is_refused_by_the_name_of_its_variable(field: str, text: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment(field, text)

    assert (caught.value.field, caught.value.value) == (f"LIGHTNING_HYBRID_{field.upper()}", text)
    assert caught.value.rule == rule


@pytest.mark.parametrize(("field", "text"), [("mode", "turbo"), ("claim_frac", "2"), ("lease_s", "nan")])
def test_a_variable_out_of_range_is_refused(field: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment(field, text)

    assert caught.value.field == field


@pytest.mark.parametrize("variable", ["LIGHTNING_HYBRID_CLAIM_FRACTION", "LIGHTNING_HYBRID_"])
def test_a_variable_that_names_no_field_is_refused_with_the_fields(variable: str) -> None:
    with pytest.raises(ConfigError, match=r"must name a field of HybridConfig \(.*claim_frac.*\), got '1'$") as caught:
        HybridConfig.from_environment({variable: "1"})

    assert caught.value.field == variable


def test_an_argument_counts_more_than_the_environment() -> None:
    environment = {"LIGHTNING_HYBRID_MODE": "queue", "LIGHTNING_HYBRID_LEASE_S": "2"}
    config = HybridConfig.from_environment(environment, mode="lockstep")

    assert (config.mode, config.lease_s) == ("lockstep", 2.0)


@given(
    field=st.sampled_from(sorted({*CHOICES, *BOOLEANS, *TEXTS, *WHOLE, *NUMBERS})),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()),
)
@settings(deadline=None)
def test_any_value_is_kept_as_it_is_or_refused_by_name(field: str, value: object) -> None:
    try:
        config = made(field, value)
    except HybridError as caught:
        refusal = caught
    else:
        assert getattr(config, field) is value
        return

    assert isinstance(refusal, ConfigError)
    assert refusal.field == field
    assert str(refusal).startswith(f"{field} must be ")


@given(st.dictionaries(st.sampled_from(sorted(RANGES)), st.floats(0.25, 1)))
@settings(deadline=None)
def test_what_a_config_holds_can_be_said_by_the_environment(values: dict[str, float]) -> None:
    chosen: dict[str, Any] = {field: value for field, value in values.items() if field in NUMBERS}
    environment = {ENVIRONMENT_PREFIX + field.upper(): repr(value) for field, value in chosen.items()}

    assert HybridConfig.from_environment(environment) == HybridConfig(**chosen)


def test_a_field_of_a_number_or_a_word_takes_both() -> None:
    assert made("micro_batch_size", "auto").micro_batch_size == "auto"
    assert from_environment("micro_batch_size", "Auto").micro_batch_size == "auto"
    assert from_environment("micro_batch_size", "12").micro_batch_size == 12
    assert refused("micro_batch_size", "all").rule == "be of type None or int or 'auto'"
    with pytest.raises(ConfigError, match="must parse as int, got 'all'"):
        from_environment("micro_batch_size", "all")
