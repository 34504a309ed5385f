"""Steps that fit: a device whose memory comes and goes, sizes that are found in the run, and what it costs.

README.md beside this file says what each figure means.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from benchmarks import memory_runs
from benchmarks.command import parse_parts, show
from benchmarks.report import Target
from examples.embed_text import StandardLibraryDocstrings, quiet

TARGETS = (
    Target(figure="identical", equals=True),
    Target(figure="throughput_over_oracle", at_least=0.9),
    Target(figure="wasted_work_frac", at_most=0.05),
    Target(figure="failed_attempts_per_change", at_most=1),
    Target(figure="settled_size", at_least=64),
    Target(figure="attempts_to_settle", at_most=8),
    Target(figure="settled_throughput_frac", at_least=0.95),
    Target(figure="auto_over_grid_best", at_least=1),
    Target(figure="peak_over_limit", at_most=1),
    Target(figure="recovery_us_per_step", at_most=30),
)
PARTS = ("shrinking", "limit", "model", "overhead")
SIZES = (4, 8, 16, 32, 64)
"""Fixed sizes of the grid search."""
LIMIT_BYTES = 96 * 2**20
SEED = 0


def collect(parts: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Runs the parts and names what they gave; a figure that was not measured is ``None``."""
    found: dict[str, Any] = {target.figure: None for target in TARGETS}
    if "overhead" in parts:
        found |= memory_runs.overhead(200 if quick else 2000)
    if "shrinking" in parts:
        found |= memory_runs.shrinking(200 if quick else 2000, SEED) | {"seed": SEED}
    if "limit" in parts:
        found |= memory_runs.limited(limit=100, asked=128, batches=30 if quick else 100)
    if "model" in parts:
        found |= _real_model(60 if quick else 1200, 1 if quick else 3)
    return found


def _real_model(num_texts: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of passes with fixed sizes that stay under the limit, and with the size that is found, in turns."""
    model = memory_runs.RealModel(StandardLibraryDocstrings(num_texts).texts, LIMIT_BYTES)
    expected = model.embeddings(SIZES[0])
    difference = float((model.embeddings(None) - expected).abs().max())
    peaks = {size: max(model.peaks(size)) for size in (*SIZES, None)}
    fixed = [size for size in SIZES if peaks[size] <= LIMIT_BYTES]
    took_s: dict[int | None, list[float]] = {size: [] for size in (*fixed, None)}
    for number in range(rounds):
        for size in sorted(took_s, key=lambda size: (hash((size, number)), size or 0)):
            took_s[size].append(model.cpu_s(size))
    medians = {size: median(times) for size, times in took_s.items()}
    best = min(medians[size] for size in fixed) if fixed else math.nan
    return {
        "auto_over_grid_best": best / medians[None],
        "peak_over_limit": peaks[None] / LIMIT_BYTES,
        "max_abs_diff": difference,
        "cpu_s": {str(size or "auto"): seconds for size, seconds in medians.items()},
        "peak_over_limit_of": {str(size or "auto"): peak / LIMIT_BYTES for size, peak in peaks.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if an output was not what it would be without a lack of memory."""
    options = parse_parts("memory", __doc__, PARTS, argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    quiet()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_hybrid"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.pop("LIGHTNING_HYBRID", None)
    started_s = time.monotonic()
    figures = collect(options.parts, quick=options.quick)
    show(figures, TARGETS, options, started_s)
    return 1 if figures["identical"] is False else 0


if __name__ == "__main__":
    sys.exit(main())
