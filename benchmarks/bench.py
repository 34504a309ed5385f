"""Runs of cases, each made once and shared, and the ratios that follow from them."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.runs import Mode, RunResult, RunSpec, measure
from tests.ranks import RankFailed


class Bench:
    """Makes runs on demand, each at most once; a run that fails is noted, and the others go on."""

    def __init__(self, cases: Mapping[str, Case], *, stock_only: bool = False) -> None:
        self.cases = cases
        self.stock_only = stock_only
        self.failures: list[str] = []
        self.runs: dict[RunSpec, RunResult | None] = {}
        self._names: dict[RunSpec, str] = {}

    def stock(self, name: str) -> list[RunResult]:
        """Runs of the stock Trainer on a case."""
        self._alternate(name)
        return self._made(name, None)

    def ours(self, name: str, mode: Mode = "queue") -> list[RunResult]:
        """Runs of this package on a case."""
        self._alternate(name)
        return self._made(name, mode)

    def stock_over_nominal(self, name: str = "equal") -> float | None:
        """What the stock loop takes on equal ranks, over the steps alone: a factor of every bound."""
        return _median(run.loop_s / run.ideal_s for run in self.stock(self.cases[name].factor_from))

    def over_bound(self, name: str, mode: Mode | None) -> float | None:
        """Loop time over the bound, the median of the runs; ``mode=None`` is stock."""
        runs = self.stock(name) if mode is None else self.ours(name, mode)
        factor = self.stock_over_nominal(name)
        return None if factor is None else _median(run.loop_s / (run.ideal_s * factor) for run in runs)

    def balanced(self) -> list[RunResult | None]:
        """Every run of this package; ``None`` for one that failed."""
        return [run for spec, run in self.runs.items() if spec.mode is not None]

    def records(self) -> list[dict[str, Any]]:
        """Every run in the order in which it was made, as plain data."""
        return [
            {"case": self._names[spec], "mode": spec.mode or "stock", "repetition": spec.repetition}
            | ({"failed": True} if run is None else asdict(run))
            for spec, run in self.runs.items()
        ]

    def _alternate(self, name: str) -> None:
        """Makes all runs of a case; stock and ours take turns, so that a slow drift of the host hits both."""
        case = self.cases[name]
        for repetition in range(max(case.repeats, case.stock_repeats)):
            turn: list[Mode | None] = [None] if repetition < case.stock_repeats else []
            if repetition < case.repeats and not self.stock_only:
                turn += case.modes
            for mode in turn if repetition % 2 == 0 else reversed(turn):
                self._run(case, mode, repetition)

    def _made(self, name: str, mode: Mode | None) -> list[RunResult]:
        case = self.cases[name]
        repeats = case.stock_repeats if mode is None else case.repeats
        specs = [case.spec(mode, repetition) for repetition in range(repeats)]
        return [run for spec in specs if (run := self.runs.get(spec)) is not None]

    def _run(self, case: Case, mode: Mode | None, repetition: int) -> None:
        spec = case.spec(mode, repetition)
        if spec in self.runs:
            return
        label = f"{case.name} {mode or 'stock'} #{repetition + 1}"
        started_s = time.monotonic()
        self._names[spec] = case.name
        run: RunResult | None = None
        try:
            run = measure(spec)
        except RankFailed:
            self.failures.append(label)
            traceback.print_exc(file=sys.stderr)
        self.runs[spec] = run
        if run is not None and run.check is not None and not run.check.passed:
            print(f"{label}: wrong results, {run.check}", file=sys.stderr)
        print(f"{label}: {time.monotonic() - started_s:.1f} s", file=sys.stderr, flush=True)


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None
