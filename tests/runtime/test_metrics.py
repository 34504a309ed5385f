from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.runtime.metrics import Partial, Reduction, combine

NAN = float("nan")
LOGGED = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 64)), min_size=1, max_size=30)
"""Values of steps and their batch sizes."""


def one_process(reduction: Reduction, logged: list[tuple[float, int]]) -> float:
    values = [value for value, _ in logged]
    if reduction == "mean":
        return math.fsum(value * size for value, size in logged) / sum(size for _, size in logged)
    return {"sum": math.fsum, "max": max, "min": min}[reduction](values)


def part_of(reduction: Reduction, logged: list[tuple[float, int]]) -> Partial:
    if reduction == "mean":
        return Partial("mean", math.fsum(value * size for value, size in logged), sum(size for _, size in logged))
    return Partial(reduction, one_process(reduction, logged))


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
@given(logged=LOGGED, replicas=st.lists(st.integers(0, 3), min_size=30, max_size=30))
@settings(deadline=None)
def test_the_value_over_replicas_is_that_of_one_process(
    reduction: Reduction, logged: list[tuple[float, int]], replicas: list[int]
) -> None:
    shares: list[list[tuple[float, int]]] = [[], [], [], []]
    for step, replica in zip(logged, replicas, strict=False):
        shares[replica].append(step)
    parts = [{"loss": part_of(reduction, share)} if share else {} for share in shares]

    assert combine(parts)["loss"] == pytest.approx(one_process(reduction, logged), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        # every value is 1.0, in 3 and 2, 1 and 6, 0 and 7 samples
        (Partial("mean", 3.0, 3), Partial("mean", 2.0, 2), 1.0),
        (Partial("mean", 1.0, 1), Partial("mean", 6.0, 6), 1.0),
        (Partial("mean", 0.0, 0), Partial("mean", 7.0, 7), 1.0),
        (Partial("mean", 3.0, 1), Partial("mean", 2.0, 3), 1.25),
        (Partial("sum", 3.0), Partial("sum", 4.5), 7.5),
        (Partial("max", 3.0), Partial("max", 4.5), 4.5),
        (Partial("min", 3.0), Partial("min", 4.5), 3.0),
        # a replica that only took ghost steps holds the neutral element
        (Partial("max", -math.inf), Partial("max", -4.5), -4.5),
        (Partial("min", math.inf), Partial("min", 4.5), 4.5),
        (Partial("sum", 0.0), Partial("sum", 4.5), 4.5),
    ],
)
def test_two_replicas_make_one_value(first: Partial, second: Partial, value: float) -> None:
    assert combine([{"k": first}, {"k": second}]) == {"k": value}
    assert combine([{"k": second}, {"k": first}]) == {"k": value}


def test_a_key_that_a_replica_did_not_log_adds_nothing_there() -> None:
    parts = [
        {"loss": Partial("mean", 4.0, 2), "worst": Partial("max", 3.0)},
        {"loss": Partial("mean", 2.0, 1), "hits": Partial("sum", 5.0)},
        {},
    ]

    assert combine(parts) == {"loss": 2.0, "worst": 3.0, "hits": 5.0}


def test_no_replica_and_no_key_make_nothing() -> None:
    assert combine([]) == {}
    assert combine([{}, {}]) == {}


def test_a_mean_of_nothing_is_not_a_number() -> None:
    assert math.isnan(combine([{"k": Partial("mean", 0.0, 0.0)}])["k"])


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_value_that_is_not_a_number_is_not_hidden_by_the_other_replicas(reduction: Reduction, where: int) -> None:
    values = [1.0, 2.0, 3.0]
    values[where] = NAN

    assert math.isnan(combine([{"k": Partial(reduction, value, 1.0)} for value in values])["k"])


def test_a_small_value_is_not_lost_beside_a_large_sum() -> None:
    parts = [{"k": Partial("mean", 2.0**40, 2.0**40)}, {"k": Partial("mean", 3.0, 1.0)}]

    assert combine(parts)["k"] == (2.0**40 + 3) / (2.0**40 + 1)
