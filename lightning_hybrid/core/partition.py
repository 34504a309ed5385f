"""Cutting a number of samples into shares by speed."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from lightning_hybrid.core.errors import ConfigError


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole, non-negative shares of ``total`` in proportion to ``weights``; they always add up to ``total``.

    Largest-remainder method (Hamilton): floors first, then one more for the largest fractions, ties to the first.

    Raises:
        ValueError: a weight is negative or not finite, or all are zero.
    """
    if any(weight < 0 or not math.isfinite(weight) for weight in weights) or not any(weights):
        raise ValueError(f"weights must be finite, not negative and not all zero, got {list(weights)}")
    # in whole numbers throughout, or rounding gives the last sample to a slower one, and huge totals do not add up
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    common = max(denominator for _, denominator in ratios)  # all are powers of two
    parts = [numerator * (common // denominator) for numerator, denominator in ratios]
    whole = sum(parts)
    quotas = [divmod(total * part, whole) for part in parts]
    shares = [share for share, _ in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-quotas[i][1], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def distribute_workload(total: int, speeds: Sequence[float]) -> list[int]:
    """Whole shares of ``total`` in proportion to ``speeds``: they add up to it, and a faster replica never gets less.

    Raises:
        ConfigError: the total is no whole number of at least 0; there is no speed, one is negative, NaN or infinite, or
            all are zero.

    Example:
        >>> distribute_workload(10, [3.0, 1.0, 1.0])
        [6, 2, 2]
    """
    try:
        whole = operator.index(total)
    except TypeError as err:
        raise ConfigError("total", total, "be a whole number") from err
    if isinstance(total, bool) or whole < 0:
        raise ConfigError("total", total, "be a whole number of at least 0")
    for replica, speed in enumerate(speeds):
        if not 0 <= speed < math.inf:
            raise ConfigError(f"speeds[{replica}]", speed, "be finite and at least 0")
    if not any(speed > 0 for speed in speeds):
        raise ConfigError("speeds", list(speeds), "hold at least one that is positive")
    return apportion(whole, speeds)


ROUND_EFFICIENCY = 0.98
"""How close to the best throughput a round must come to be taken for its size."""


def round_sizes(speeds: Sequence[float], max_size: int, caps: Sequence[int | None] = ()) -> list[int]:
    """Samples of each replica in one lockstep round: at most ``max_size`` and its cap, at least one.

    A round lasts as long as its slowest replica, so for each size of the fastest replica the others get what they can
    finish in the same time, or in a little more, rounded down. Of the rounds whose throughput is within 2 % of the
    best, the largest wins: small steps pay more overhead than these speeds tell. Caps that leave less than one full
    batch to a round are not kept.
    """
    most = [max_size if cap is None else min(cap, max_size) for cap in caps or [None] * len(speeds)]
    most = most if sum(most) >= max_size else [max_size] * len(speeds)
    rounds = [
        _round_of(speeds, slack * largest / max(speeds), most)
        for largest in range(1, max_size + 1)
        for slack in (1.0, 1.03)  # without slack a replica slower by a thousandth gets one sample less
    ]
    # never fewer samples than one full batch, or there would be more rounds than the loader has batches
    full = [(per_s, sizes) for per_s, sizes in [*rounds, _round_of(speeds, math.inf, most)] if sum(sizes) >= max_size]
    best_per_s = max(per_s for per_s, _ in full)
    return max((sizes for per_s, sizes in full if per_s >= ROUND_EFFICIENCY * best_per_s), key=sum)


def _round_of(speeds: Sequence[float], target_s: float, most: Sequence[int]) -> tuple[float, list[int]]:
    sizes = [max(1, int(min(cap, _floor(speed * target_s)))) for speed, cap in zip(speeds, most, strict=True)]
    round_s = max(size / speed for size, speed in zip(sizes, speeds, strict=True))
    return sum(sizes) / round_s, sizes


def _floor(value: float) -> float:
    return value if math.isinf(value) else math.floor(value + 1e-9)


def last_round_sizes(remaining: int, speeds: Sequence[float], full: Sequence[int]) -> list[int]:
    """Samples of each replica in a round that uses up ``remaining``; every replica gets one where there are enough.

    Each further sample goes to the replica that has it done first. No replica gets more than in a ``full`` round, of
    which ``remaining`` is a part: that is what it has memory for. A replica that gets none takes a ghost step.
    """
    sizes = [1 if i < remaining else 0 for i in range(len(speeds))]
    for _ in range(remaining - sum(sizes)):
        free = [i for i, size in enumerate(sizes) if size < full[i]]
        first = min(free, key=lambda i: ((sizes[i] + 1) / speeds[i], i))
        sizes[first] += 1
    return sizes
