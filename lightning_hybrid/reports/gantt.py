"""A simulated run as a picture: who ran what when, one row per replica."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.simulated import SimulatedRun, SimulatedStep
from lightning_hybrid.core.traces import SpeedTrace

FIRST, STOLEN = "dealt at the start", "taken from another replica"

_COLOURS = {
    FIRST: "#999999",
    "hybrid": "#0072B2",
    "load_balanced": "#009E73",
    "memory_aware": "#CC79A7",
    "performance_optimized": "#E69F00",
    "off": "#56B4E9",
    STOLEN: "#D55E00",
}
"""Told apart by people with any colour vision (Okabe and Ito, 2008)."""
_OTHER_COLOUR = "#F0E442"
_FORMATS = (".png", ".svg", ".pdf")
_ROWS = 32
_TEXT_ROWS = 24
_SEPARATE_BARS = 1500
"""Up to so many steps each has an outline of its own."""
_IDLE = " "


class Bar(NamedTuple):
    """A time in which a replica worked."""

    kind: str
    start_s: float
    end_s: float


def sample(run: SimulatedRun, most: int) -> list[int]:
    """The replicas to show: all, or some that lie evenly between the first and the last, and the one that ends last."""
    num_replicas = len(run.workload.traces)
    chosen = [round(r) for r in np.linspace(0, num_replicas - 1, min(most, num_replicas)).tolist()]
    latest = max(run.steps, key=lambda step: step.end_s).replica if run.steps else 0
    if latest not in chosen:
        chosen[min(range(1, most - 1), key=lambda i: abs(chosen[i] - latest))] = latest
    return chosen


def bars(steps: Iterable[SimulatedStep], replicas: Sequence[int], merged_gap_s: float | None) -> dict[int, list[Bar]]:
    """What each of ``replicas`` did, in order of time.

    Args:
        steps: Of the run.
        replicas: The ones to show.
        merged_gap_s: Steps of one kind that are no further apart become one bar; ``None``: each its own.
    """
    rows: dict[int, list[Bar]] = {replica: [] for replica in replicas}
    for step in sorted((step for step in steps if step.replica in rows), key=lambda step: step.start_s):
        row, kind = rows[step.replica], kind_of(step)
        follows = row and row[-1].kind == kind and merged_gap_s is not None
        if follows and step.start_s - row[-1].end_s <= (merged_gap_s or 0.0):
            row[-1] = row[-1]._replace(end_s=step.end_s)
        else:
            row.append(Bar(kind, step.start_s, step.end_s))
    return rows


def kind_of(step: SimulatedStep) -> str:
    """How the replica came by the step's cell: the policy in force, or a theft, or neither yet."""
    if step.origin.is_stolen:
        return STOLEN
    return FIRST if step.origin.policy is None else step.origin.policy


# --- as text --------------------------------------------------------------------------------------------------------


def gantt_text(run: SimulatedRun, width: int) -> str:
    """One line per replica and one character per part of the time, and what the characters mean.

    Raises:
        ConfigError: ``width`` is too small for anything to be seen.
    """
    if width < 40:
        raise ConfigError("width", width, "be at least 40")
    replicas = sample(run, _TEXT_ROWS)
    label = len(f"replica {replicas[-1]}")
    columns, rows = width - label - 3, bars(run.steps, replicas, None)
    letters = _letters(bar.kind for row in rows.values() for bar in row)
    lines = [
        f"{f'replica {replica}':<{label}} |{_line(row, letters, run.makespan_s, columns)}|"
        for replica, row in rows.items()
    ]
    at_bound = "" if not math.isfinite(run.bound_s) else f", bound {run.bound_s:.3g} s"
    axis = f"{'':<{label}}  {'0 s':<{columns // 2}}{f'{run.makespan_s:.3g} s{at_bound}':>{columns - columns // 2}}"
    legend = "  ".join([*(f"{letter} {kind}" for kind, letter in letters.items()), "blank: idle"])
    shown = (
        [f"{len(replicas)} of {len(run.workload.traces):,} replicas"] if len(rows) < len(run.workload.traces) else []
    )
    return "\n".join([*lines, axis, legend, *shown])


def _letters(kinds: Iterable[str]) -> dict[str, str]:
    marks = {FIRST: ".", STOLEN: "#"}
    letters: dict[str, str] = {}
    for kind in sorted(set(kinds), key=_rank):
        free = (letter for letter in f"{kind}ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in letters.values())
        letters[kind] = marks.get(kind) or next(free, "?")
    return letters


def _line(row: Sequence[Bar], letters: dict[str, str], makespan_s: float, columns: int) -> str:
    """Each character stands for what took most of its time, idleness counted."""
    kinds = [*letters, _IDLE]
    share = np.zeros((len(kinds), columns))
    edges = np.arange(columns + 1) * (makespan_s / columns)
    for bar in row:
        first = min(columns - 1, int(np.searchsorted(edges, bar.start_s, side="right")) - 1)
        last = min(columns - 1, int(np.searchsorted(edges, bar.end_s, side="left")) - 1)
        inside = slice(first, last + 1)
        overlap = np.minimum(edges[1:][inside], bar.end_s) - np.maximum(edges[:-1][inside], bar.start_s)
        share[kinds.index(bar.kind), inside] += overlap
    share[-1] = makespan_s / columns - share.sum(axis=0)
    return "".join(letters.get(kinds[most], _IDLE) for most in share.argmax(axis=0).tolist())


# --- as a picture ---------------------------------------------------------------------------------------------------


def check_picture(path: str | Path) -> None:
    """Whether a picture can be drawn into a file of that name.

    Raises:
        ConfigError: the path has an ending of another kind of file.
        ImportError: matplotlib is not installed; tells how to install it.
    """
    if Path(path).suffix not in _FORMATS:
        raise ConfigError("path", str(path), f"end in {', '.join(_FORMATS)}")
    _new_figure(1, 1)


def _new_figure(width_inches: float, height_inches: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ImportError('a picture needs matplotlib: pip install "lightning-hybrid[plots]"') from err
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_gantt(run: SimulatedRun, path: str | Path, title: str, *, recorded_s: float | None = None) -> None:
    """Draws the run into a PNG, SVG or PDF file, a sample of its replicas where there are many.

    Args:
        run: To draw.
        path: Of the file; its ending says which kind.
        title: Above the picture.
        recorded_s: What the run took in the Trainer, where it was recorded.

    Raises:
        ConfigError: the path has another ending.
        ImportError: matplotlib is not installed; tells how to install it.
    """
    check_picture(path)
    replicas = sample(run, _ROWS)
    figure = _new_figure(11, 1.9 + 0.3 * max(4, len(replicas)))
    axes = figure.add_subplot()
    _draw_rows(axes, run, replicas)
    _draw_times(axes, run, recorded_s)
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_rows(axes: Any, run: SimulatedRun, replicas: Sequence[int]) -> None:
    shown = set(replicas)
    is_detailed = sum(step.replica in shown for step in run.steps) <= _SEPARATE_BARS
    rows = bars(run.steps, replicas, None if is_detailed else run.makespan_s / 4000)
    for kind in sorted({bar.kind for row in rows.values() for bar in row}, key=_rank):
        label: str | None = _label(kind)
        for at, replica in enumerate(replicas):
            spans = [(bar.start_s, bar.end_s - bar.start_s) for bar in rows[replica] if bar.kind == kind]
            if not spans:
                continue
            edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4} if is_detailed else {"linewidth": 0}
            axes.broken_barh(spans, (at - 0.4, 0.8), facecolor=_COLOURS.get(kind, _OTHER_COLOUR), label=label, **edge)
            label = None
    axes.set_yticks(range(len(replicas)), [_row_label(run.workload.traces[r], r) for r in replicas], fontsize=8)
    axes.set_ylim(len(replicas) - 0.4, -0.6)
    if len(replicas) < len(run.workload.traces):
        axes.set_ylabel(f"{len(replicas)} of {len(run.workload.traces):,} replicas", fontsize=9)


def _draw_times(axes: Any, run: SimulatedRun, recorded_s: float | None) -> None:
    last_s = max(run.makespan_s, recorded_s or 0.0)
    if math.isfinite(run.bound_s):
        last_s = max(last_s, run.bound_s)
        label = f"bound, {run.bound_s:.4g} s: no schedule is faster"
        axes.axvline(run.bound_s, color="black", linestyle="--", linewidth=1.2, label=label)
    if recorded_s is not None:
        label = f"recorded run, {recorded_s:.4g} s"
        axes.axvline(recorded_s, color="#D55E00", linestyle=":", linewidth=1.5, label=label)
    axes.set_xlim(0, 1.01 * last_s)
    axes.set_xlabel("time in s (each box is a step, white is idle)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _row_label(trace: SpeedTrace, replica: int) -> str:
    low, high = min(trace.speeds), max(trace.speeds)
    speed = f"speed {low:.3g}" if low == high else f"speed {low:.3g} to {high:.3g}"
    return f"replica {replica}, {speed}"


def _label(kind: str) -> str:
    return kind if kind in (FIRST, STOLEN) else f"policy {kind}"


def _rank(kind: str) -> tuple[int, str]:
    known = list(_COLOURS)
    return (known.index(kind) if kind in _COLOURS else len(known) - 1, kind)
