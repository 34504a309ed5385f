"""Random instances of known and unknown costs, and one that is very large, in the simulator."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.simulate import Simulation
from lightning_hybrid.core.simulated import Workload
from lightning_hybrid.core.traces import SpeedTrace

_STEP_S = 1.0
"""Mean seconds of a step on a device of speed 1."""
_CELLS_PER_REPLICA = 20
_SIGMA = 1.0
_RATIO = 8.0
_BATCH = 32


class Outcome(NamedTuple):
    """One instance: makespan over the lower bound, and cells that were not run once."""

    seed: int
    over_bound: float
    violations: int


def _speeds(random: np.random.Generator, world: int) -> tuple[SpeedTrace, ...]:
    speeds = np.exp(random.uniform(-math.log(_RATIO), 0.0, world))
    return tuple(SpeedTrace.constant(float(speed)) for speed in speeds)


def instance(seed: int, *, known: bool) -> Workload:
    """2 to 64 replicas whose speeds differ up to 8 times, 20 cells for each, of log-normal costs with sigma 1."""
    random = np.random.default_rng(seed)
    world = int(random.integers(2, 65))
    traces = _speeds(random, world)
    costs = random.lognormal(0.0, _SIGMA, world * _CELLS_PER_REPLICA)
    costs = -np.sort(-costs) if known else costs  # as the Trainer arranges them with ``cost=``
    return Workload(costs=Costs(compute=costs * (_STEP_S / costs.mean())), traces=traces, costs_known=known)


def _outcome(job: tuple[int, bool]) -> Outcome:
    seed, known = job
    run = Simulation(instance(seed, known=known), HybridConfig()).run()
    return Outcome(seed, run.over_bound, run.exactly_once_violations)


def _all(jobs: Sequence[tuple[int, bool]]) -> list[Outcome]:
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return list(pool.imap_unordered(_outcome, jobs, chunksize=8))


def figures(seeds: int) -> dict[str, Any]:
    """Median and 99th percentile of makespan over bound, with known and with unknown costs."""
    found: dict[str, Any] = {"instance_seeds": [0, seeds - 1], "exactly_once_violations": 0}
    for known, name, num in ((True, "simulated", seeds), (False, "unknown_costs", max(1, seeds // 5))):
        outcomes = _all([(seed, known) for seed in range(num)])
        over = [outcome.over_bound for outcome in outcomes]
        found["exactly_once_violations"] += sum(outcome.violations for outcome in outcomes)
        found |= {
            f"{name}_median_over_bound": float(np.median(over)),
            f"{name}_p99_over_bound": float(np.quantile(over, 0.99)),
        }
        found[f"{name}_worst_seed"] = max(outcomes, key=lambda outcome: outcome.over_bound).seed
    return found


def large(replicas: int, samples: int) -> dict[str, Any]:
    """Plans and simulates very many replicas: sorts the samples, cuts the cells, and runs them all."""
    random = np.random.default_rng(0)
    traces = _speeds(random, replicas)
    costs = random.lognormal(0.0, _SIGMA, samples)
    gc.disable()  # millions of small objects that live to the end: looking for garbage among them takes a fifth
    started_s = time.monotonic()
    ordered = Costs(compute=-np.sort(-costs))
    cells = ordered.of_cells(np.arange(0, samples + 1, _BATCH, dtype=np.int64))
    cells = Costs(compute=cells.compute * (_STEP_S / cells.compute.mean()))
    run = Simulation(Workload(costs=cells, traces=traces), HybridConfig()).run()
    return {
        "plan_10k_replicas_s": time.monotonic() - started_s,
        "plan_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "plan_replicas": replicas,
        "plan_samples": samples,
        "plan_over_bound": run.over_bound,
        "plan_violations": run.exactly_once_violations,
        "plan_claims_per_replica": run.claims / replicas,
    }


def claims_growth(replicas: int, cells_per_replica: Sequence[int]) -> dict[str, Any]:
    """Claims per replica while the cells per replica grow: so many more each time that these double."""
    claims = []
    for per_replica in cells_per_replica:
        random = np.random.default_rng(0)
        workload = Workload(
            costs=Costs(compute=np.full(replicas * per_replica, 10.0 / per_replica)),
            traces=_speeds(random, replicas),
            costs_known=False,
        )
        claims.append(Simulation(workload, HybridConfig()).run().claims / replicas)
    doublings = math.log2(cells_per_replica[-1] / cells_per_replica[0])
    return {
        "claims_per_replica": dict(zip(map(str, cells_per_replica), claims, strict=True)),
        "claims_per_doubling_of_cells": (claims[-1] - claims[0]) / doublings,
    }
