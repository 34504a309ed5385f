"""This package beside Ray Data, Accelerate and a pool of processes, in one run on the same emulated devices.

README.md beside this file says what each figure means, and how each peer is set up.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.command import names_in
from benchmarks.peer_bench import PeerBench
from benchmarks.peer_cases import CASE_NAMES, peer_cases
from benchmarks.peer_runs import System
from benchmarks.report import Target, json_line, missed, table, target_table, write_record

PEERS: tuple[System, ...] = ("accelerate", "pool", "ray")
MODULES: Mapping[System, Sequence[str]] = {"ray": ("ray", "pandas", "pyarrow"), "accelerate": ("accelerate",)}
"""What has to be installed for a peer; the pool comes with Python."""

TARGETS = (
    Target(figure="ray_over_ours_min", at_least=1.0),
    Target(figure="accelerate_over_ours_min", at_least=1.0),
    Target(figure="pool_over_ours_min", at_least=0.98),
    Target(figure="valid", equals=True),
)


def is_installed(peer: System) -> bool:
    """Whether all that ``peer`` needs is there."""
    return all(find_spec(module) is not None for module in MODULES.get(peer, ()))


def versions() -> dict[str, str | None]:
    """Version of each peer; the pool is as old as this Python."""
    known = {peer: metadata.version(peer) if is_installed(peer) else None for peer in MODULES}
    return {**known, "pool": platform.python_version()}


def case_figures(bench: PeerBench, case: str) -> dict[str, float | None]:
    """Every system over the ideal, and every peer over ours; ``None`` where a system did not run."""
    ours_s = bench.loop_s(case, "ours")
    over_ideal = {f"{case}_{system}_over_ideal": bench.over_ideal(case, system) for system in ("ours", *PEERS)}
    return over_ideal | {f"{case}_{peer}_over_ours": ratio(bench.loop_s(case, peer), ours_s) for peer in PEERS}


def ratio(peer_s: float | None, ours_s: float | None) -> float | None:
    """``peer_s`` over ``ours_s``, if both are known."""
    return None if peer_s is None or ours_s is None else peer_s / ours_s


def collect(bench: PeerBench, cases: Mapping[str, Sequence[Case]]) -> dict[str, Any]:
    """Runs the cases and names what they gave, the smallest ratios first."""
    for repetitions in cases.values():
        bench.run_all(repetitions)
    by_case = {name: value for case in cases for name, value in case_figures(bench, case).items()}
    smallest = {}
    for peer in PEERS:
        ratios = [value for case in cases if (value := by_case[f"{case}_{peer}_over_ours"]) is not None]
        smallest[f"{peer}_over_ours_min"] = min(ratios, default=None)
    return {**smallest, "valid": bench.valid, **by_case, "failed_runs": bench.failures}


def case_rows(bench: PeerBench, case: str) -> list[tuple[object, ...]]:
    """Lines of the table, one per system: times and ratios are medians, the rest is of the run in the middle."""
    rows: list[tuple[object, ...]] = []
    for system in bench.systems:
        run, loop_s = bench.median_run(case, system), bench.loop_s(case, system)
        if run is None:
            continue
        rows.append(
            (
                case,
                system,
                loop_s,
                bench.over_ideal(case, system),
                ratio(loop_s, bench.loop_s(case, "ours")),
                1e3 * (run.loop_s - run.steps_s),
                "/".join(map(str, run.steps)),
                run.valid,
            )
        )
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASE_NAMES), help="comma-separated subset of: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few steps, one run of each: shows that all of it works")
    parser.add_argument("--repeats", type=int, default=3, help="runs per case, the median counts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the heavy-tailed costs (%(default)s)")
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
    os.environ.pop("LIGHTNING_HYBRID", None)  # it would take the callback from ours
    torch.set_num_threads(1)  # as in the workers: the number of threads may change bits
    started_s = time.monotonic()
    repeats = 1 if options.quick else options.repeats
    by_name = peer_cases(steps=8 if options.quick else 30, seed=options.seed, repeats=repeats)
    cases = {name: by_name[name] for name in options.cases}
    systems: tuple[System, ...] = ("ours", *(peer for peer in PEERS if is_installed(peer)))
    with PeerBench(systems) as bench:
        figures = collect(bench, cases)
    figures |= {
        "missed": missed(figures, TARGETS),
        "peers": versions(),
        "seeds": [case.workload.seed for case in by_name["heavy_tail"]],
        "quick": options.quick,
        "settings": {name: value for name, value in os.environ.items() if name.startswith("LIGHTNING_HYBRID_")},
        "duration_s": time.monotonic() - started_s,
    }
    headers = ("case", "system", "loop s", "/ideal", "/ours", "end ms", "steps", "valid")
    print(table(headers, [row for case in cases for row in case_rows(bench, case)]))
    print(f"\n{target_table(figures, TARGETS)}\n")
    for peer in PEERS:
        if not is_installed(peer):
            print(f"{peer} is not installed: pip install 'lightning-hybrid[peers]'\n")
    if options.out is not None:
        write_record(options.out, figures, bench.records())
    print(json_line(figures))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
