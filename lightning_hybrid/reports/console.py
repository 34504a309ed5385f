"""The table that the user sees when a run ends. The only place of the package that prints."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TextIO

from lightning_hybrid.core.recommend import Recommendation
from lightning_hybrid.core.state import BalanceSnapshot, DeviceState, ReplicaRecord
from lightning_hybrid.reports.columns import aligned
from lightning_hybrid.reports.scalars import overhead_us_per_step

_GIB = 2**30
_UNKNOWN = "-"
_WIDTH = 100
_HEADER = ("replica", "device", "share %", "samples", "speed /s", "busy %", "waited s", "stolen", "memory GiB")
_LEFT_ALIGNED = frozenset({"device", "memory GiB"})


def format_table(snapshot: BalanceSnapshot, recommendations: Sequence[Recommendation] = ()) -> str:
    """A plain-text table with one row per replica, the figures of the whole run, and the recommendations.

    Samples and waiting are counted; share and busy are shares of all samples and of the wall time; speed is in samples
    of the run's mean cost; stolen counts the cells that a replica took from others' claims. What is not known is shown
    as ``-``.
    """
    rows = [_HEADER, *(_row(snapshot, record) for record in snapshot.replicas)]
    table = aligned(rows, [title in _LEFT_ALIGNED for title in _HEADER])
    lines = [_title(snapshot), *table, _figures(snapshot)]
    for recommendation in recommendations:
        lines += _paragraph(f"Recommendation ({recommendation.priority} priority): {recommendation.action}.")
        lines += _paragraph(recommendation.description, indent="  ")
        lines += _paragraph(recommendation.how_to, indent="  ")
    return "\n".join(lines)


def print_table(
    snapshot: BalanceSnapshot, recommendations: Sequence[Recommendation] = (), *, file: TextIO | None = None
) -> None:
    """Print `format_table` to ``file``, by default to standard output."""
    print(f"\n{format_table(snapshot, recommendations)}", file=file, flush=True)


def _paragraph(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width=_WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _title(snapshot: BalanceSnapshot) -> str:
    loader = f" of loader {snapshot.loader_idx}" if snapshot.loader_idx else ""
    of_all = "" if snapshot.samples_total is None else f" of {snapshot.samples_total:,}"
    return (
        f"lightning_hybrid, {snapshot.stage}, {snapshot.mode} mode:"
        f" {snapshot.samples_done:,}{of_all} samples{loader} in {snapshot.wall_s:.2f} s"
    )


def _row(snapshot: BalanceSnapshot, record: ReplicaRecord) -> tuple[str, ...]:
    return (
        str(record.replica),
        _device(record.device),
        _percent(snapshot.share_frac(record)),
        f"{record.samples:,}",
        _number(snapshot.speed_of(record), 1),
        _percent(record.busy_frac),
        f"{record.wait_s:.2f}",
        str(record.cells_stolen),
        _memory(record.device),
    )


def _figures(snapshot: BalanceSnapshot) -> str:
    return ", ".join(
        (
            f"all replicas: {_number(snapshot.throughput_per_s, 1)} samples/s",
            f"load imbalance {_number(snapshot.load_imbalance, 3)} (0 is even)",
            f"own overhead {_number(overhead_us_per_step(snapshot), 0)} us per step",
        )
    )


def _device(device: DeviceState | None) -> str:
    return _UNKNOWN if device is None else device.name or device.kind


def _memory(device: DeviceState | None) -> str:
    if device is None:
        return _UNKNOWN
    if device.memory_used_bytes is not None and device.memory_total_bytes is not None:
        return f"{device.memory_used_bytes / _GIB:.2f} of {device.memory_total_bytes / _GIB:.2f}"
    if device.memory_allocated_bytes is not None:
        return f"{device.memory_allocated_bytes / _GIB:.2f} allocated"
    if device.process_memory_bytes is not None:
        return f"{device.process_memory_bytes / _GIB:.2f} process"
    return _UNKNOWN


def _percent(frac: float | None) -> str:
    return _UNKNOWN if frac is None else f"{100 * frac:.1f}"


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:,.{digits}f}"
