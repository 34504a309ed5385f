"""Stock Trainer, this package and the theoretical bound, side by side in one run on emulated devices.

README.md beside this file says what each figure means.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bench import Bench
from benchmarks.cases import CASE_NAMES, Case, build_cases
from benchmarks.command import names_in
from benchmarks.devices import ideal_s, list_schedule_s
from benchmarks.report import Target, json_line, missed, table, target_table, write_record

STOCK_SLOW_RANK_OVER_BOUND = (2.53 * 0.95, 2.60 * 1.05)
"""Known range of the stock Trainer with one of four ranks three times slower, and 5 % on either side."""

TARGETS = (
    Target(figure="slow_rank_queue_over_bound", at_most=1.05),
    Target(figure="slow_rank_lockstep_over_bound", at_most=1.12),
    Target(figure="midrun_queue_over_bound", at_most=1.08),
    Target(figure="recover_over_bound", at_most=1.08),
    Target(figure="heavy_tail_over_bound", at_most=1.08),
    Target(figure="workers_penalty", at_most=0.03),
    Target(figure="equal_over_stock", at_most=1.01),
    Target(figure="callback_us_per_step", at_most=150.0),
    Target(figure="bit_identical", equals=True),
    Target(figure="stock_valid", equals=True),
)


def slow_rank_figures(bench: Bench) -> dict[str, Any]:
    """Both modes with one slow rank, and whether stock behaves as it is known to."""
    stock = bench.over_bound("slow_rank", None)
    low, high = STOCK_SLOW_RANK_OVER_BOUND
    return {
        "slow_rank_queue_over_bound": bench.over_bound("slow_rank", "queue"),
        "slow_rank_lockstep_over_bound": bench.over_bound("slow_rank", "lockstep"),
        "slow_rank_stock_over_bound": stock,
        "stock_valid": None if stock is None else low <= stock <= high,
    }


def heavy_tail_figures(bench: Bench) -> dict[str, Any]:
    """Heavy-tailed costs, beside what a queue that costs nothing would take in the same order."""
    case = bench.cases["heavy_tail"]
    costs = case.workload.batch_costs()
    return {
        "heavy_tail_over_bound": bench.over_bound("heavy_tail", "queue"),
        "heavy_tail_stock_over_bound": bench.over_bound("heavy_tail", None),
        "heavy_tail_list_schedule_over_ideal": list_schedule_s(case.curves, costs) / ideal_s(case.curves, costs),
        "seed": case.workload.seed,
    }


def workers_figures(bench: Bench) -> dict[str, Any]:
    """How much more of the bound ours needs with loader workers than without, less what stock loses by them."""
    with_workers, without = bench.over_bound("workers", "queue"), bench.over_bound("slow_rank", "queue")
    stock_with, stock_without = bench.over_bound("workers", None), bench.over_bound("slow_rank", None)
    if stock_with is None or stock_without is None:
        return {}
    lost_by_stock = stock_with / stock_without - 1.0
    penalty = None if with_workers is None or without is None else with_workers - without - lost_by_stock
    return {
        "workers_penalty": penalty,
        "workers_queue_over_bound": with_workers,
        "workers_stock_over_bound": stock_with,
        "workers_lost_by_stock": lost_by_stock,
    }


def short_step_figures(bench: Bench) -> dict[str, Any]:
    """Overhead: equal ranks and short steps, where the bound is the stock Trainer itself."""
    runs = bench.ours("equal_20ms")
    overheads = [run.overhead_us_per_step for run in runs if run.overhead_us_per_step is not None]
    return {
        "equal_over_stock": bench.over_bound("equal_20ms", "queue"),
        "callback_us_per_step": median(overheads) if overheads else None,
        "stock_over_nominal_20ms": bench.stock_over_nominal("equal_20ms"),
    }


def check_figures(bench: Bench) -> dict[str, Any]:
    """What the results of all runs of ours were like; a run that failed counts as wrong."""
    runs = bench.balanced()
    checks = [run.check for run in runs if run is not None and run.check is not None]
    if not runs:
        return {}
    return {
        "bit_identical": len(checks) == len(runs) and all(check.passed for check in checks),
        "loader_batches": len(checks) == len(runs) and all(check.loader_batches for check in checks),
        "bit_check_can_fail": all(check.other_grid_differs for check in checks),
        "runs_checked": len(checks),
    }


def collect(bench: Bench, selected: Sequence[str]) -> dict[str, Any]:
    """Runs the selected cases and names what they gave; a figure that was not measured is ``None``."""
    figures: dict[str, Any] = {target.figure: None for target in TARGETS}
    figures["stock_over_nominal"] = bench.stock_over_nominal()
    figures["equal_over_bound"] = bench.over_bound("equal", "queue")
    if "slow_rank" in selected:
        figures |= slow_rank_figures(bench)
    if "midrun" in selected:
        figures["midrun_queue_over_bound"] = bench.over_bound("midrun", "queue")
        figures["midrun_stock_over_bound"] = bench.over_bound("midrun", None)
    if "recover" in selected:
        figures["recover_over_bound"] = bench.over_bound("recover", "queue")
        figures["recover_stock_over_bound"] = bench.over_bound("recover", None)
    if "heavy_tail" in selected:
        figures |= heavy_tail_figures(bench)
    if "workers" in selected:
        figures |= workers_figures(bench)
    if "equal_20ms" in selected:
        figures |= short_step_figures(bench)
    figures |= check_figures(bench)
    figures["failed_runs"] = bench.failures
    return figures


def case_rows(bench: Bench, case: Case) -> list[tuple[object, ...]]:
    """Lines of the table, one per mode of ours: times are medians, shares those of the median run."""
    stock, factor = sorted(bench.stock(case.name), key=lambda run: run.loop_s), bench.stock_over_nominal(case.name)
    rows: list[tuple[object, ...]] = []
    for mode in case.modes:
        ours = sorted(bench.ours(case.name, mode), key=lambda run: run.loop_s)
        shown = ours[len(ours) // 2] if ours else stock[len(stock) // 2] if stock else None
        rows.append(
            (
                case.name,
                mode,
                stock[len(stock) // 2].loop_s if stock else None,
                ours[len(ours) // 2].loop_s if ours else None,
                shown.ideal_s * factor if shown and factor else None,
                bench.over_bound(case.name, None),
                bench.over_bound(case.name, mode),
                "/".join(f"{samples / sum(shown.samples):.0%}" for samples in shown.samples) if shown else None,
                all(run.check is not None and run.check.passed for run in ours) if ours else None,
            )
        )
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASE_NAMES), help="comma-separated subset of: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few steps, one run of each: shows that all of it works")
    parser.add_argument("--repeats", type=int, default=3, help="runs of ours per case, the median counts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the heavy-tailed costs (%(default)s)")
    parser.add_argument("--stock-only", action="store_true", help="baselines and bounds, without this package")
    parser.add_argument("--out", type=Path, help="also write the figures and every single run to this JSON file")
    options = parser.parse_args(argv)
    options.cases = names_in(parser, "--cases", options.cases, CASE_NAMES)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if any run failed."""
    options = parse(argv)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.pop("LIGHTNING_HYBRID", None)  # it would add the callback to stock runs, or take it from ours
    torch.set_num_threads(1)  # as in the ranks: the number of threads may change bits
    started_s = time.monotonic()
    cases = build_cases(
        steps=15 if options.quick else 60,
        seed=options.seed,
        repeats=1 if options.quick else options.repeats,
        short_repeats=1 if options.quick else 5,
    )
    bench = Bench(cases, stock_only=options.stock_only)
    figures = collect(bench, options.cases)
    figures |= {
        "missed": missed(figures, TARGETS),
        "quick": options.quick,
        "settings": {name: value for name, value in os.environ.items() if name.startswith("LIGHTNING_HYBRID_")},
        "duration_s": time.monotonic() - started_s,
    }
    headers = ("case", "mode", "stock s", "ours s", "bound s", "stock/bound", "ours/bound", "shares", "bits")
    print(table(headers, [row for name in options.cases for row in case_rows(bench, cases[name])]))
    print(f"\n{target_table(figures, TARGETS)}\n")
    if figures["stock_valid"] is False:
        low, high = STOCK_SLOW_RANK_OVER_BOUND
        measured = figures["slow_rank_stock_over_bound"]
        print(
            f"WARNING: stock over bound is {measured:.3f}, known is {low:.2f} to {high:.2f}: the run does not count\n"
        )
    if options.out is not None:
        write_record(options.out, figures, bench.records())
    print(json_line(figures))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
