"""The cases of the comparison with peers.

Steps are longer than those of `cases`, so that no peer's own computing decides on a host of few cores.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from statistics import fmean

from benchmarks.cases import BATCH_SIZE, Case
from benchmarks.devices import SpeedCurve, Workload, constant, ideal_s, list_schedule_s

STEP_S = 0.2
CASE_NAMES = ("equal", "slow_rank", "midrun", "heavy_tail")
NEUTRAL_FRAC = 0.005
NUM_ORDERS = 100


def peer_cases(*, steps: int, seed: int, repeats: int) -> dict[str, tuple[Case, ...]]:
    """For each case what to run, one after the other; ``steps`` are what each of four devices does of equal shares.

    Heavy-tailed costs are drawn anew for each of the ``repeats``, from ``seed`` on.
    """
    one = constant(1.0)
    slows_down = SpeedCurve(changes=((0.0, 1.0), (0.5 * steps * STEP_S, 1 / 3)))
    even = Workload(num_samples=4 * steps * BATCH_SIZE, sample_cost=STEP_S / BATCH_SIZE, batch_size=BATCH_SIZE)
    equal = Case(name="equal", curves=(one, one, one, one), workload=even)
    heavy = replace(equal, name="heavy_tail", workload=replace(even, sigma=1.75))
    return {
        "equal": repeats * (equal,),
        "slow_rank": repeats * (replace(equal, name="slow_rank", curves=(one, one, one, constant(1 / 3))),),
        "midrun": repeats * (replace(equal, name="midrun", curves=(one, one, one, slows_down)),),
        "heavy_tail": tuple(islice(neutral_draws(heavy, seed), repeats)),
    }


def neutral_draws(case: Case, seed: int) -> Iterator[Case]:
    """The case with costs of ``seed`` and of all later seeds whose order favours nobody.

    How long a queue takes that hands out single batches in loader order depends, by some per cent, on which batches
    happen to come last. Draws count where that is what the same batches take in random order in the mean.
    """
    for at in count(seed):
        drawn = replace(case, workload=replace(case.workload, seed=at))
        costs = drawn.workload.batch_costs()
        if abs(_list_over_ideal(drawn, costs) - _mean_list_over_ideal(drawn, costs)) <= NEUTRAL_FRAC:
            yield drawn


def _list_over_ideal(case: Case, costs: list[float]) -> float:
    return list_schedule_s(case.curves, costs) / ideal_s(case.curves, costs)


def _mean_list_over_ideal(case: Case, costs: list[float]) -> float:
    shuffle = random.Random(case.workload.seed)
    return fmean(_list_over_ideal(case, shuffle.sample(costs, len(costs))) for _ in range(NUM_ORDERS))
