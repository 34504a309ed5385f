from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.errors import CostError
from lightning_hybrid.core.learned import CostLearner, CostParameters
from lightning_hybrid.core.state import ReplicaRecord, StepShape

Draw = Callable[[random.Random, int], tuple[int, int | None]]
"""Samples and elements of a replica's next step."""


def lengths(noise: random.Random, _: int) -> tuple[int, int]:
    """Batches of 8 samples of unlike lengths."""
    return 8, int(8 * math.exp(noise.gauss(4, 0.5)))


def ragged(noise: random.Random, _: int) -> tuple[int, int]:
    """Batches of unlike sizes and lengths."""
    samples = noise.randint(2, 12)
    return samples, int(samples * math.exp(noise.gauss(4, 0.5)))


def learner_of(
    draw: Draw,
    *,
    price: tuple[float, float, float],
    speeds: tuple[float, ...] = (1000.0, 300.0),
    noise_frac: float = 0.03,
    num_steps: int = 48,
    outlier_frac: float = 0.0,
    factor: Callable[[int], float] = lambda _: 1.0,
    seed: int = 0,
) -> CostLearner:
    noise, learner = random.Random(seed), CostLearner(len(speeds))
    for replica, speed in enumerate(speeds):
        steps: list[StepShape] = []
        for number in range(1, num_steps + 1):
            samples, elements = draw(noise, replica)
            cost = price[0] + price[1] * samples + price[2] * (elements or 0)
            seconds = cost / (speed * factor(number)) * math.exp(noise.gauss(0, noise_frac))
            seconds *= 10 if noise.random() < outlier_frac else 1
            steps.append(StepShape(number, samples, elements, seconds))
            learner.observe(ReplicaRecord(replica=replica, newest_steps=tuple(steps[-8:])))
    return learner


def learnt(draw: Draw, *, price: tuple[float, float, float], **options: object) -> CostParameters:
    parameters = learner_of(draw, price=price, **options).propose()  # type: ignore[arg-type]  # named as there
    assert parameters is not None
    return parameters


# --- CostParameters -------------------------------------------------------------------------------------------------

PARAMETERS = CostParameters(
    version=3, per_step=2.0, per_sample=0.25, per_element=0.01, samples_per_step=8.0, elements_per_sample=50.0
)


def test_a_cost_adds_up_steps_samples_and_elements() -> None:
    assert PARAMETERS.cost(8, 400) == 2.0 + 2.0 + 4.0
    assert PARAMETERS.cost(80, 4000, steps=10) == 80.0


def test_samples_of_unknown_size_cost_what_a_mean_sample_costs() -> None:
    assert PARAMETERS.cost(8) == PARAMETERS.cost(8, 400)
    assert CostParameters(version=1, per_sample=2.0).cost(8) == 16.0


@given(
    st.builds(
        CostParameters,
        version=st.integers(1, 99),
        per_step=st.floats(0, 1e9),
        per_sample=st.floats(1e-9, 1e9),
        per_element=st.floats(0, 1e9),
        elements_per_sample=st.none() | st.floats(0, 1e9),
    )
)
def test_parameters_come_back_from_their_json_with_the_same_digest(parameters: CostParameters) -> None:
    again = CostParameters.from_json(parameters.to_json().encode())

    assert again == parameters
    assert again.digest == parameters.digest
    assert "\n" not in parameters.to_json()
    assert len(parameters.digest) == 16


def test_a_digest_changes_with_every_number() -> None:
    others = [
        CostParameters(version=4, per_sample=1.0),
        CostParameters(version=3, per_sample=1.0),
        CostParameters(version=3, per_sample=1.0, per_step=1.0),
    ]

    assert len({PARAMETERS.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize("prices", [(0.0, 0.0, 0.0), (-1.0, 1.0, 0.0), (0.0, math.nan, 0.0), (0.0, 1.0, math.inf)])
def test_impossible_prices_are_refused(prices: tuple[float, float, float]) -> None:
    with pytest.raises(CostError, match="cost parameters must be at least 0, finite and not all zero, got"):
        CostParameters(version=1, per_step=prices[0], per_sample=prices[1], per_element=prices[2])


# --- what is learnt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "price"),
    [
        (lengths, (0, 0, 1)),
        (lengths, (0, 50, 1)),
        (ragged, (200, 0, 1)),
        (ragged, (200, 30, 1)),
        (ragged, (0, 60, 1)),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prices_are_found_in_proportion_on_devices_of_unlike_speeds(
    draw: Draw, price: tuple[float, float, float], seed: int
) -> None:
    parameters = learnt(draw, price=price, seed=seed)

    for samples, elements in ((8, 200), (8, 1000), (3, 300)):
        if draw is lengths and samples != 8:
            continue  # what other batch sizes would cost cannot be told from batches of 8
        right = (price[0] + price[1] * samples + price[2] * elements) / (price[0] + price[1] * 8 + price[2] * 500)
        assert parameters.cost(samples, elements) / parameters.cost(8, 500) == pytest.approx(right, rel=0.05)


def test_the_mean_sample_costs_one() -> None:
    learner = learner_of(ragged, price=(200, 30, 1))
    parameters = learner.propose()
    assert parameters is not None
    steps = [step for known in learner._steps.values() for step in known]

    costs = sum(parameters.cost(step.samples, step.elements) for step in steps)
    assert costs == pytest.approx(sum(step.samples for step in steps))
    assert parameters.cost(round(parameters.samples_per_step)) == pytest.approx(parameters.samples_per_step, rel=0.1)


def test_a_rank_with_longer_samples_is_not_slow() -> None:
    def longer(noise: random.Random, replica: int) -> tuple[int, int]:
        return 8, int(8 * math.exp(noise.gauss(5 if replica else 4, 0.3)))

    parameters = learnt(longer, price=(0, 20, 1), speeds=(1000.0, 1000.0))

    assert parameters.cost(8, 8 * 150) / parameters.cost(8, 8 * 50) == pytest.approx((20 + 150) / (20 + 50), rel=0.05)


def test_a_rank_all_of_whose_samples_are_longer_is_not_slow_either() -> None:
    parameters = learnt(lambda _, replica: (8, 2400 if replica else 800), price=(0, 0, 1), speeds=(1000.0, 1000.0))

    assert parameters.cost(8, 2400) / parameters.cost(8, 800) == pytest.approx(3.0, rel=0.05)


def test_a_slow_device_with_samples_like_the_others_stays_slow() -> None:
    parameters = learnt(lengths, price=(0, 20, 1), speeds=(1000.0, 100.0))

    assert parameters.cost(8, 1200) / parameters.cost(8, 400) == pytest.approx((160 + 1200) / (160 + 400), rel=0.05)


@pytest.mark.parametrize("outlier_frac", [0.05, 0.1])
def test_slow_single_steps_do_not_move_prices(outlier_frac: float) -> None:
    parameters = learnt(lengths, price=(0, 50, 1), outlier_frac=outlier_frac)

    assert parameters.cost(8, 1200) / parameters.cost(8, 400) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    "factor", [lambda k: 1.0 if k < 20 else 0.5, lambda k: 1 - k / 96, lambda k: 1 + 0.3 * math.sin(k / 10)]
)
def test_a_drifting_device_does_not_move_prices(factor: Callable[[int], float]) -> None:
    parameters = learnt(lengths, price=(0, 50, 1), factor=factor)

    assert parameters.cost(8, 1200) / parameters.cost(8, 400) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("draw", "price"),
    [
        (lengths, (0, 1, 0)),
        (ragged, (0, 1, 0)),
        (lambda _noise, _replica: (8, 800), (0, 1, 0)),
        (lambda _noise, _replica: (8, None), (0, 1, 0)),
        (lambda _noise, replica: (8, None if replica else 800), (0, 1, 0)),
    ],
)
def test_samples_alone_are_kept_where_elements_do_not_vary_or_explain_nothing(
    draw: Draw, price: tuple[float, float, float]
) -> None:
    for seed in range(5):
        assert learner_of(draw, price=price, seed=seed).propose() is None


def test_nothing_is_known_of_few_steps() -> None:
    assert CostLearner(2).propose() is None
    assert learner_of(lengths, price=(0, 0, 1), num_steps=7).propose() is None


def test_sixteen_steps_of_one_replica_are_enough() -> None:
    assert learnt(lengths, price=(0, 0, 1), speeds=(1000.0,), num_steps=16).per_element > 0


def test_batches_of_unlike_sizes_show_the_overhead_of_a_step_without_elements() -> None:
    parameters = learnt(lambda noise, _: (noise.randint(2, 12), None), price=(8, 1, 0))

    assert parameters.per_step / parameters.per_sample == pytest.approx(8.0, rel=0.1)
    assert parameters.elements_per_sample is None


# --- versions -------------------------------------------------------------------------------------------------------


def test_parameters_that_still_hold_are_kept() -> None:
    first = learner_of(lengths, price=(0, 50, 1), seed=1).propose()
    assert first is not None
    assert first.version == 1

    assert learner_of(lengths, price=(0, 50, 1), seed=2).propose(first) is None


def test_parameters_that_are_off_get_a_next_version() -> None:
    first = CostParameters(version=6, per_sample=1.0)
    second = learner_of(lengths, price=(0, 50, 1)).propose(first)

    assert second is not None
    assert second.version == 7


@pytest.mark.parametrize("elements_per_sample", [None, 50.0])
def test_parameters_with_a_price_per_element_are_judged_by_their_mean_where_batches_have_none(
    elements_per_sample: float | None,
) -> None:
    current = CostParameters(version=1, per_element=0.02, elements_per_sample=elements_per_sample)

    assert learner_of(lambda noise, _: (noise.randint(2, 12), None), price=(0, 1, 0)).propose(current) is None


def test_a_record_that_is_seen_twice_counts_once() -> None:
    learner = CostLearner(1)
    record = ReplicaRecord(replica=0, newest_steps=tuple(StepShape(k, 8, 100 * k, 0.1 * k) for k in range(1, 9)))
    for _ in range(10):
        learner.observe(record)

    assert len(learner._steps[0]) == 8


def test_memory_is_bounded() -> None:
    learner = learner_of(lengths, price=(0, 0, 1), num_steps=300, speeds=(1.0,) * 3)
    many = CostLearner(10_000)
    for replica in range(10_000):
        many.observe(ReplicaRecord(replica=replica, newest_steps=(StepShape(1, 8, 100, 0.1),) * 1))

    assert max(map(len, learner._steps.values())) == 64
    assert len(many._steps) <= 256


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.none() | st.integers(0, 10**6), st.floats(1e-6, 1e3)), min_size=16, max_size=40
    )
)
@settings(deadline=None, max_examples=50)
def test_whatever_the_steps_the_parameters_are_ones_that_can_be(steps: list[tuple[int, int | None, float]]) -> None:
    learner = CostLearner(1)
    for number, step in enumerate(steps, start=1):
        learner.observe(ReplicaRecord(replica=0, newest_steps=(StepShape(number, *step),)))
    parameters = learner.propose()

    if parameters is not None:  # its constructor has checked the prices
        assert parameters.version == 1
        assert all(0 <= parameters.cost(samples, elements) < math.inf for samples, elements, _ in steps)
