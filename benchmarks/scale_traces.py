"""Traces that change their nature while they run, for the choice among policies.

First other tenants take most of the memory of some devices, and steps whose cell does not fit are run again in parts;
later they give it back, and take speed from other devices instead. All is drawn from the seed; the ranges below were
fixed before any policy was run on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.simulate import Simulation
from lightning_hybrid.core.simulated import Workload
from lightning_hybrid.core.traces import SpeedTrace

POLICIES = ("load_balanced", "performance_optimized", "memory_aware", "hybrid")

_STEP_S = 0.5
"""Mean seconds of a step on a device of speed 1."""
_CELLS_PER_REPLICA = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResult:
    """Makespan of one trace under each fixed policy and under ``auto``, in virtual seconds."""

    seed: int
    replicas: int
    makespans_s: dict[str, float]
    switches: tuple[str, ...]
    violations: int

    @property
    def over_best(self) -> float:
        """``auto`` over the best fixed policy."""
        return self.makespans_s["auto"] / min(self.makespans_s[policy] for policy in POLICIES)

    @property
    def over_worst(self) -> float:
        """``auto`` over the worst fixed policy."""
        return self.makespans_s["auto"] / max(self.makespans_s[policy] for policy in POLICIES)


def drawn(seed: int) -> Workload:
    """The trace of a seed."""
    random = np.random.default_rng(seed)
    world = int(random.integers(4, 17))
    num = world * _CELLS_PER_REPLICA
    compute = random.lognormal(0.0, 1.0, num)
    compute = -np.sort(-compute)  # as the Trainer arranges them with ``cost=``
    memory = compute * random.lognormal(0.0, 0.3, num)  # what is long takes more of both
    changes_s = float(random.uniform(0.4, 0.6)) * _CELLS_PER_REPLICA * _STEP_S
    pressed = random.random(world) < random.uniform(0.3, 0.7)
    slowed = random.random(world) < random.uniform(0.2, 0.5)
    device = float(memory.max())  # alone, every device holds every cell
    left = np.quantile(memory, random.uniform(0.5, 0.8, world))
    slower = random.uniform(0.25, 0.6, world)
    speeds = random.uniform(0.8, 1.2, world)
    return Workload(
        costs=Costs(compute=compute * (_STEP_S / compute.mean()), memory=memory),
        traces=tuple(
            SpeedTrace.sudden(float(s), changes_s, float(s * f)) if slow else SpeedTrace.constant(float(s))
            for s, f, slow in zip(speeds, slower, slowed, strict=True)
        ),
        memory_capacities=tuple(
            SpeedTrace.sudden(float(part), changes_s, device) if press else SpeedTrace.constant(device)
            for part, press in zip(left, pressed, strict=True)
        ),
    )


def measured(seed: int) -> TraceResult:
    """Runs one trace under every policy."""
    workload = drawn(seed)
    makespans_s, violations, switches = {}, 0, ()
    for policy in (*POLICIES, "auto"):
        simulation = Simulation(workload, HybridConfig(policy=policy))
        run = simulation.run()
        makespans_s[policy] = run.makespan_s
        violations += run.exactly_once_violations
        if policy == "auto":
            switches = tuple(s.policy for s in simulation.history.statistics.switches)
    return TraceResult(
        seed=seed, replicas=len(workload.traces), makespans_s=makespans_s, switches=switches, violations=violations
    )


def figures(results: list[TraceResult]) -> dict[str, Any]:
    """What the traces say together."""
    worst = max(results, key=lambda result: result.over_best)
    return {
        "auto_over_best_policy": median(result.over_best for result in results),
        "auto_over_best_policy_worst": worst.over_best,
        "auto_over_best_policy_worst_seed": worst.seed,
        "auto_over_worst_policy": median(result.over_worst for result in results),
        "traces": len(results),
        "trace_seeds": [results[0].seed, results[-1].seed],
        "trace_violations": sum(result.violations for result in results),
    }
