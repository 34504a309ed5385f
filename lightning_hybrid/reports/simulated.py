"""What a simulation found: figures, a report, and pictures."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.recording import RecordedRun
from lightning_hybrid.core.simulated import SimulatedRun
from lightning_hybrid.core.statistics import Statistics
from lightning_hybrid.core.traces import SpeedTrace
from lightning_hybrid.reports import gantt

_ROWS = 16
"""The report has a row for each of so many replicas at most."""
_SCHEDULES = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulationResult:
    """A run in virtual time: how long it took, how good that is, and what the scheduler did."""

    run: SimulatedRun
    """Every step."""
    statistics: Statistics
    """Which policies were in force, and why."""
    config: HybridConfig
    recording: RecordedRun | None = None
    """What was run again, if anything was."""

    @property
    def makespan_s(self) -> float:
        """Seconds to the end of the last step."""
        return self.run.makespan_s

    @cached_property
    def bound_s(self) -> float | None:
        """No schedule is faster; ``None`` where the devices never get done, because all fail."""
        bound_s = self.run.bound_s
        return bound_s if math.isfinite(bound_s) else None

    @property
    def over_bound(self) -> float | None:
        """Makespan over the bound, 1 is best."""
        return self.makespan_s / self.bound_s if self.bound_s else None

    @cached_property
    def idle_frac(self) -> float | None:
        """Share of the replicas' time in which they ran no step, 0..1."""
        return self.run.idle_frac if self.makespan_s > 0 else None

    @property
    def claims_per_s(self) -> float | None:
        """Claims of all replicas per second."""
        return self.run.claims / self.makespan_s if self.makespan_s > 0 else None

    @property
    def store_requests_per_claim(self) -> float | None:
        """Requests to the store per claim, those counted in by which replicas tell each other how they stand."""
        return self.run.store_requests / self.run.claims if self.run.claims else None

    @property
    def cells_stolen(self) -> int:
        """Cells that a replica took from what another one had claimed."""
        return self.run.cells_stolen

    @cached_property
    def exactly_once_violations(self) -> int:
        """Cells that were run more or less often than once."""
        return self.run.exactly_once_violations

    @property
    def exactly_once(self) -> bool:
        """Whether every cell was run once."""
        return self.exactly_once_violations == 0

    @property
    def recorded_s(self) -> float | None:
        """What the run took in the Trainer, where it was recorded."""
        return None if self.recording is None else self.recording.makespan_s

    def figures(self) -> dict[str, Any]:
        """Everything as one object that JSON can hold; what is not known is ``None``."""
        return {
            "replicas": len(self.run.workload.traces),
            "cells": len(self.run.workload.costs),
            "costs_known": self.run.workload.costs_known,
            "policy": self.config.policy,
            "makespan_s": self.makespan_s,
            "recorded_s": self.recorded_s,
            "bound_s": self.bound_s,
            "over_bound": self.over_bound,
            "idle_frac": self.idle_frac,
            "exactly_once_violations": self.exactly_once_violations,
            "claims": self.run.claims,
            "claims_per_s": self.claims_per_s,
            "store_requests": self.run.store_requests,
            "store_requests_per_claim": self.store_requests_per_claim,
            "cells_stolen": self.cells_stolen,
            "policy_switches": self.statistics.num_switches,
            "schedules": json.loads(self.statistics.to_json())["schedules"],
        }

    def to_json(self) -> str:
        """`figures` as one line of JSON."""
        return json.dumps(self.figures(), allow_nan=False)

    def format(self) -> str:
        """A report in plain text."""
        return "\n".join(
            [self._title(), *self._figure_lines(), "", *self._schedule_lines(), "", *self._replica_lines()]
        )

    def gantt_text(self, width: int = 100) -> str:
        """One line per replica, one character per part of the time.

        Raises:
            ConfigError: ``width`` is less than 40.
        """
        return gantt.gantt_text(self.run, width)

    def save_gantt(self, path: str | Path) -> None:
        """Draws who ran what when into a PNG, SVG or PDF file.

        Raises:
            ConfigError: the path has another ending.
            ImportError: matplotlib is not installed; tells how to install it.
        """
        title = f"{self._title()}\n{self._summary()}"
        gantt.save_gantt(self.run, path, title, recorded_s=self.recorded_s)

    # --- parts of the report ------------------------------------------------------------------------------------

    def _title(self) -> str:
        workload = self.run.workload
        known = "known" if workload.costs_known else "not known"
        what = "replayed" if self.recording is not None else "simulated"
        replicas = "1 replica" if len(workload.traces) == 1 else f"{len(workload.traces):,} replicas"
        return f"{what}: {len(workload.costs):,} cells on {replicas}, policy {self.config.policy}, costs {known}"

    def _summary(self) -> str:
        parts = [f"makespan {self.makespan_s:.4g} s", _shown(self.over_bound, "{:.3f} x the bound")]
        return ", ".join([*parts, f"{_percent(self.idle_frac)} idle"])

    def _figure_lines(self) -> list[str]:
        rows = [
            ("makespan", f"{self.makespan_s:.4g} s", self._against_the_record()),
            ("bound", _shown(self.bound_s, "{:.4g} s"), "no schedule is faster"),
            ("makespan / bound", _shown(self.over_bound, "{:.3f}"), ""),
            ("idle", _percent(self.idle_frac), "of the replicas' time"),
            ("claims", f"{self.run.claims:,}", _shown(self.claims_per_s, "{:.3g} per second")),
            (
                "store requests",
                f"{self.run.store_requests:,}",
                _shown(self.store_requests_per_claim, "{:.3g} per claim"),
            ),
            ("stolen", f"{self.cells_stolen:,} cells", "from what others had claimed"),
            (
                "exactly once",
                "yes" if self.exactly_once else f"NO: {self.exactly_once_violations:,} cells were not",
                "",
            ),
        ]
        return [f"  {name:<16}  {value:>10}  {note}".rstrip() for name, value, note in rows]

    def _against_the_record(self) -> str:
        if self.recorded_s is None or self.recording is None:
            return ""
        note = f"recorded {self.recorded_s:.4g} s under {self.recording.policy}"
        if self.recorded_s > 0:
            note += f", {100 * (self.makespan_s / self.recorded_s - 1):+.1f} %"
        return note if self.recording.mode == "queue" else f"{note}, in {self.recording.mode} mode; here it is a queue"

    def _schedule_lines(self) -> list[str]:
        schedules = self.statistics.schedules[-_SCHEDULES:]
        left_out = self.statistics.num_schedules - len(schedules)
        lines = [f"  {item.start_s:>8.4g} s  {item.policy}: {item.reason}" for item in schedules]
        return ["policies", *([f"  {left_out:,} earlier ones are left out"] if left_out else []), *lines]

    def _replica_lines(self) -> list[str]:
        traces = self.run.workload.traces
        cells = Counter(step.replica for step in self.run.steps)
        stolen = Counter(step.replica for step in self.run.steps if step.origin.is_stolen)
        busy_s, shown = self.run.busy_s, gantt.sample(self.run, _ROWS)
        lines = ["replica  speed             cells  stolen  busy %"]
        for r in shown:
            busy = _shown(100 * float(busy_s[r]) / self.makespan_s if self.makespan_s > 0 else None, "{:.1f}")
            lines.append(f"{r:>7}  {_speed(traces[r]):<16}  {cells[r]:>5}  {stolen[r]:>6}  {busy:>6}")
        return lines if len(shown) == len(traces) else [*lines, f"{len(shown)} of {len(traces):,} replicas"]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _percent(frac: float | None) -> str:
    return "-" if frac is None else f"{100 * frac:.1f} %"


def _speed(trace: SpeedTrace) -> str:
    low, high = min(trace.speeds), max(trace.speeds)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
