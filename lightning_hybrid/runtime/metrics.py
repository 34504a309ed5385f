"""Epoch values of logged numbers, exact over replicas with different numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Reduction = Literal["mean", "sum", "max", "min"]


class Partial(NamedTuple):
    """One replica's part of a logged value.

    For a mean ``value`` is the weighted sum and ``weight`` the sum of weights; otherwise ``weight`` is unused.
    """

    reduction: Reduction
    value: float
    weight: float = 0.0


def combine(partials: Iterable[Mapping[str, Partial]]) -> dict[str, float]:
    """The value of every key over all replicas, in float64; a key that a replica did not log adds nothing there."""
    merged: dict[str, Partial] = {}
    for replica in partials:
        for key, part in replica.items():
            merged[key] = _merge(merged[key], part) if key in merged else part
    return {key: _value(part) for key, part in merged.items()}


def _merge(a: Partial, b: Partial) -> Partial:
    if math.isnan(a.value) or math.isnan(b.value):
        return Partial(a.reduction, math.nan, a.weight + b.weight)
    if a.reduction == "max":
        return Partial("max", max(a.value, b.value))
    if a.reduction == "min":
        return Partial("min", min(a.value, b.value))
    return Partial(a.reduction, a.value + b.value, a.weight + b.weight)


def _value(part: Partial) -> float:
    if part.reduction != "mean":
        return part.value
    return part.value / part.weight if part.weight else float("nan")
