"""Cutting a number of samples into shares by speed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole, non-negative shares of ``total`` in proportion to ``weights``; they always add up to ``total``.

    Largest-remainder method (Hamilton): floors first, then one more for the largest fractions, ties to the first.

    Raises:
        ValueError: a weight is negative or not finite, or all are zero.
    """
    if any(weight < 0 or not math.isfinite(weight) for weight in weights) or not any(weights):
        raise ValueError(f"weights must be finite, not negative and not all zero, got {list(weights)}")
    largest = max(weights)
    parts = [weight / largest for weight in weights]  # neither end of the number range is left this way
    scale = total / sum(parts)
    quotas = [part * scale for part in parts]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - quotas[i], i))
    missing = total - sum(shares)
    for i in by_remainder[:missing]:
        shares[i] += 1
    return shares


ROUND_EFFICIENCY = 0.98
"""How close to the best throughput a round must come to be taken for its size."""


def round_sizes(speeds: Sequence[float], max_size: int) -> list[int]:
    """Samples of each replica in one lockstep round: at most ``max_size``, at least one.

    A round lasts as long as its slowest replica, so for each size of the fastest replica the others get what they can
    finish in the same time, or in a little more, rounded down. Of the rounds whose throughput is within 2 % of the
    best, the largest wins: small steps pay more overhead than these speeds tell.
    """
    rounds = [
        _round_of(speeds, slack * largest / max(speeds), max_size)
        for largest in range(1, max_size + 1)
        for slack in (1.0, 1.03)  # without slack a replica slower by a thousandth gets one sample less
    ]
    # never fewer samples than one full batch, or there would be more rounds than the loader has batches
    full = [(per_s, sizes) for per_s, sizes in rounds if sum(sizes) >= max_size]
    best_per_s = max(per_s for per_s, _ in full)
    return max((sizes for per_s, sizes in full if per_s >= ROUND_EFFICIENCY * best_per_s), key=sum)


def _round_of(speeds: Sequence[float], target_s: float, max_size: int) -> tuple[float, list[int]]:
    sizes = [max(1, min(max_size, math.floor(speed * target_s + 1e-9))) for speed in speeds]
    round_s = max(size / speed for size, speed in zip(sizes, speeds, strict=True))
    return sum(sizes) / round_s, sizes


def last_round_sizes(remaining: int, speeds: Sequence[float], max_size: int) -> list[int]:
    """Samples of each replica in a round that uses up ``remaining``; every replica gets one where there are enough.

    Each further sample goes to the replica that has it done first. ``remaining`` is at most what `round_sizes` would
    take. A replica that gets none takes a ghost step.
    """
    sizes = [1 if i < remaining else 0 for i in range(len(speeds))]
    for _ in range(remaining - sum(sizes)):
        free = [i for i, size in enumerate(sizes) if size < max_size]
        first = min(free, key=lambda i: ((sizes[i] + 1) / speeds[i], i))
        sizes[first] += 1
    return sizes
