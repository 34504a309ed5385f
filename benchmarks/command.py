"""The command line of a benchmark that has parts, and what it shows in the end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Target, json_line, missed, target_table, write_record


def parse_parts(
    name: str,
    description: str | None,
    parts: Sequence[str],
    argv: Sequence[str] | None,
    *,
    written: str = "the figures",
) -> argparse.Namespace:
    """The command line of ``python -m benchmarks.<name>``, checked.

    Args:
        name: Of the benchmark.
        description: What it is for.
        parts: Names of all its parts.
        argv: The arguments; those of the process where it is ``None``.
        written: What ``--out`` writes.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--parts", default=",".join(parts), help="comma-separated subset of: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small: shows that all of it works; figures do not count")
    parser.add_argument("--out", type=Path, help=f"also write {written} to this JSON file")
    options = parser.parse_args(argv)
    options.parts = names_in(parser, "--parts", options.parts, parts)
    return options


def names_in(parser: argparse.ArgumentParser, flag: str, text: str, known: Sequence[str]) -> list[str]:
    """The names in a comma-separated argument; ends the program where one is not known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{flag}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def show(
    figures: Mapping[str, Any],
    targets: Sequence[Target],
    options: argparse.Namespace,
    started_s: float,
    runs: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Prints the figures beside their targets, and as JSON; writes them where ``--out`` says.

    Args:
        figures: What was measured.
        targets: What had to be reached.
        options: What `parse_parts` gave.
        started_s: When the benchmark began, by `time.monotonic`.
        runs: The single runs behind the figures.
    """
    shown = dict(figures) | {
        "missed": missed(figures, targets),
        "quick": options.quick,
        "duration_s": time.monotonic() - started_s,
    }
    print(f"{target_table(shown, targets)}\n")
    if options.out is not None:
        write_record(options.out, shown, runs)
    print(json_line(shown))
