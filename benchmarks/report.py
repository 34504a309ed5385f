"""How a benchmark shows what it measured: a table, targets beside figures, and the JSON line at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hybrid.reports.columns import aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a figure must reach: ``at_most`` or ``at_least`` a number, or ``equals`` a truth value."""

    figure: str
    at_most: float | None = None
    at_least: float | None = None
    equals: bool | None = None

    def met_by(self, value: object) -> bool | None:
        """Whether ``value`` reaches the target; ``None`` when it was not measured."""
        if value is None:
            return None
        if self.equals is not None:
            return value is self.equals
        assert isinstance(value, int | float)
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most

    def __str__(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}" if self.at_most is not None else str(self.equals).lower()


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns in text: numbers to the right with three decimals, ``None`` as ``-``."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [all(_is_number(row[column]) for row in cells) for column in range(len(headers))]
    widths = [max(len(line[column]) for line in [list(headers), *cells]) for column in range(len(headers))]
    lines = [list(headers), ["-" * width for width in widths], *cells]
    return "\n".join(aligned(lines, [not right for right in numeric]))


def target_table(figures: Mapping[str, Any], targets: Sequence[Target]) -> str:
    """Each target beside what was measured."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    rows = [
        (target.figure, figures.get(target.figure), target, words[target.met_by(figures.get(target.figure))])
        for target in targets
    ]
    return table(("figure", "measured", "target", "verdict"), rows)


def missed(figures: Mapping[str, Any], targets: Sequence[Target]) -> list[str]:
    """Names of the measured figures that do not reach their target."""
    return [target.figure for target in targets if target.met_by(figures.get(target.figure)) is False]


def json_line(figures: Mapping[str, Any]) -> str:
    """The figures on one line, floats to four decimals, small ones to three digits; never NaN or infinity."""
    rounded = {name: _rounded(value) if isinstance(value, float) else value for name, value in figures.items()}
    return json.dumps(rounded, allow_nan=False)


def write_record(path: Path, figures: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Writes the figures and every single run behind them as one JSON file."""
    path.write_text(json.dumps({"figures": dict(figures), "runs": list(runs)}, indent=1, allow_nan=False) + "\n")


def _rounded(value: float) -> float:
    return float(f"{value:.3g}") if abs(value) < 1e-3 else round(value, 4)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"
    return str(value)


def _is_number(text: str) -> bool:
    return text == "-" or text.lstrip("-").replace(".", "", 1).isdigit()
