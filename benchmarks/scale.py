"""How well, how far and how exactly the scheduler scales: in the simulator that runs its own code, and on a real store.

README.md beside this file says what each figure means.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks import scale_instances, scale_store, scale_traces
from benchmarks.command import parse_parts, show
from benchmarks.report import Target, table
from benchmarks.scale_replay import replay_errors

TARGETS = (
    Target(figure="exactly_once_violations", at_most=0),
    Target(figure="simulated_median_over_bound", at_most=1.03),
    Target(figure="simulated_p99_over_bound", at_most=1.08),
    Target(figure="plan_10k_replicas_s", at_most=60),
    Target(figure="plan_peak_gib", at_most=4),
    Target(figure="tcpstore_requests_per_claim", at_most=1.01),
    Target(figure="auto_over_best_policy", at_most=1.03),
    Target(figure="auto_over_worst_policy", at_most=0.80),
    Target(figure="replay_error_frac", at_most=0.05),
)
PARTS = ("instances", "large", "store", "traces", "replay")
_VIOLATIONS = ("exactly_once_violations", "plan_violations", "tcpstore_violations", "trace_violations")


def _in_own_process(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Runs it in a forked process, so that its peak of memory is its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def _large(quick: bool) -> dict[str, Any]:
    replicas, samples = (500, 500_000) if quick else (10_000, 10_000_000)
    growth = (8, 32) if quick else (16, 64, 256)
    return _in_own_process(scale_instances.large, replicas, samples) | scale_instances.claims_growth(16, growth)


def _traces(quick: bool, runs: list[dict[str, Any]]) -> dict[str, Any]:
    results = [scale_traces.measured(seed) for seed in range(4 if quick else 60)]
    runs += [
        {"seed": r.seed, "replicas": r.replicas, "makespans_s": r.makespans_s, "switches": r.switches} for r in results
    ]
    headers = ("seed", "replicas", *scale_traces.POLICIES, "auto", "auto/best", "auto/worst")
    rows = [
        (r.seed, r.replicas, *(r.makespans_s[p] for p in (*scale_traces.POLICIES, "auto")), r.over_best, r.over_worst)
        for r in results
    ]
    print(table(headers, rows), "\n")
    return scale_traces.figures(results)


def _replay(quick: bool) -> dict[str, Any]:
    errors = replay_errors(1 if quick else 3)
    return {"replay_error_frac": median(map(abs, errors)), "replay_errors": errors}


def collect(parts: Sequence[str], *, quick: bool, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs the parts and names what they gave; a figure that was not measured is ``None``."""
    found: dict[str, Any] = {target.figure: None for target in TARGETS}
    if "instances" in parts:
        found |= scale_instances.figures(20 if quick else 1000)
    if "large" in parts:
        found |= _large(quick)
    if "store" in parts:
        found |= scale_store.figures(8, 20_000) if quick else scale_store.figures()
    if "traces" in parts:
        found |= _traces(quick, runs)
    if "replay" in parts:
        found |= _replay(quick)
    counted = [found[name] for name in _VIOLATIONS if found.get(name) is not None]
    found["exactly_once_violations"] = sum(counted) if counted else None
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if a cell was not run exactly once."""
    options = parse_parts("scale", __doc__, PARTS, argv, written="the figures and every trace")
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.pop("LIGHTNING_HYBRID", None)
    started_s = time.monotonic()
    runs: list[dict[str, Any]] = []
    figures = collect(options.parts, quick=options.quick, runs=runs)
    show(figures, TARGETS, options, started_s, runs)
    return 1 if figures["exactly_once_violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
