from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.load import fill_speeds, load_score, prior_speeds

FRACTIONS = st.floats(0, 1)
WEIGHTS = (0.4, 0.4, 0.2)


# --- load_score -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "compute", "network", "score"),
    [
        (0.5, 0.25, 1.0, 0.5),
        (0.0, 0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0, 1.0),
        (0.5, 0.25, None, 0.375),
        (0.5, None, None, 0.5),
        (None, None, 0.75, 0.75),
        (None, 0.3, 0.9, 0.5),
        (None, None, None, None),
        (1.7, -0.2, 0.0, 0.4),
    ],
)
def test_unknown_parts_of_a_load_are_left_out_and_the_weights_scaled_up(
    memory: float | None, compute: float | None, network: float | None, score: float | None
) -> None:
    given_score = load_score(memory_frac=memory, compute_frac=compute, network_frac=network, weights=WEIGHTS)

    assert given_score == (None if score is None else pytest.approx(score))


def test_a_part_of_weight_zero_says_nothing() -> None:
    score = load_score(memory_frac=0.9, compute_frac=0.1, network_frac=None, weights=(0, 0.4, 0.2))

    assert score == pytest.approx(0.1)
    assert load_score(memory_frac=0.9, compute_frac=None, network_frac=None, weights=(0, 0.4, 0.2)) is None
    assert load_score(memory_frac=0.9, compute_frac=0.9, network_frac=0.9, weights=(0, 0, 0)) is None


@given(FRACTIONS, FRACTIONS, FRACTIONS, st.tuples(*[st.floats(0.01, 100)] * 3))
@settings(deadline=None)
def test_a_load_lies_between_its_least_and_its_greatest_part(
    memory: float, compute: float, network: float, weights: tuple[float, float, float]
) -> None:
    score = load_score(memory_frac=memory, compute_frac=compute, network_frac=network, weights=weights)

    assert score is not None
    assert min(memory, compute, network) - 1e-9 <= score <= max(memory, compute, network) + 1e-9


# --- prior_speeds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "speeds"),
    [
        ([0.0, 0.5], [1.0, 0.5]),
        ([0.25, 0.25, 0.25], [0.75, 0.75, 0.75]),
        ([1.0, 1.0], [1.0, 1.0]),
        ([None, None, None], [1.0, 1.0, 1.0]),
        ([1.0, None], [1.0, 1.0]),
        ([0.0, None, 0.5], [1.0, 0.75, 0.5]),
        ([1.0, 0.5], [0.0, 0.5]),
        ([], []),
    ],
)
def test_speeds_follow_the_free_part_of_each_device(scores: list[float | None], speeds: list[float]) -> None:
    assert prior_speeds(scores) == speeds


@given(st.lists(st.none() | FRACTIONS, min_size=1, max_size=8))
@settings(deadline=None)
def test_prior_speeds_are_never_negative_and_never_all_zero(scores: list[float | None]) -> None:
    speeds = prior_speeds(scores)

    assert len(speeds) == len(scores)
    assert min(speeds) >= 0
    assert max(speeds) > 0


@given(st.none() | FRACTIONS, st.integers(1, 8))
@settings(deadline=None)
def test_devices_of_equal_load_count_as_equal(score: float | None, world: int) -> None:
    assert prior_speeds([score] * world) == pytest.approx([prior_speeds([score] * world)[0]] * world)


# --- fill_speeds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "prior", "speeds"),
    [
        ([8.0, 4.0], [1.0, 1.0], [8.0, 4.0]),
        ([None, None], [1.0, 0.5], [1.0, 0.5]),
        ([8.0, None], [1.0, 0.5], [8.0, 4.0]),
        ([8.0, None], [1.0, 1.0], [8.0, 8.0]),
        ([8.0, 2.0, 6.0, None], [1.0, 1.0, 1.0, 0.5], [8.0, 2.0, 6.0, 3.0]),
        ([8.0, None], [1.0, 0.0], [8.0, 0.08]),
        ([None, None], [1.0, 0.0], [1.0, 0.01]),
    ],
)
def test_a_replica_without_a_speed_gets_the_one_that_the_prior_implies(
    measured: list[float | None], prior: list[float], speeds: list[float]
) -> None:
    assert fill_speeds(measured, prior) == pytest.approx(speeds)


def test_a_measured_replica_whose_prior_was_zero_does_not_mix_the_units() -> None:
    # replica 0 was fully loaded by others when it was asked, and has done 1000 samples per second since
    speeds = fill_speeds([1000.0, None], [0.0, 1.0])

    assert speeds[0] == 1000.0
    assert speeds[1] >= 1000.0


@given(st.lists(st.tuples(st.none() | st.floats(1e-3, 1e6), st.floats(0.01, 1)), min_size=1, max_size=8))
@settings(deadline=None)
def test_filled_speeds_are_positive_and_keep_what_was_measured(pairs: list[tuple[float | None, float]]) -> None:
    speeds = fill_speeds([speed for speed, _ in pairs], [guess for _, guess in pairs])

    assert min(speeds) > 0
    assert all(speed == known for speed, (known, _) in zip(speeds, pairs, strict=True) if known is not None)
