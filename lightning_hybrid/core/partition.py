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
    if any(weight < 0 or not math.isfinite(weight) for weight in weights) or not sum(weights) > 0:
        raise ValueError(f"weights must be finite, not negative and not all zero, got {list(weights)}")
    scale = total / sum(weights)
    quotas = [weight * scale for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - quotas[i], i))
    missing = total - sum(shares)
    for i in by_remainder[:missing]:
        shares[i] += 1
    return shares


def round_sizes(speeds: Sequence[float], max_size: int) -> list[int]:
    """Samples of each replica in one lockstep round: at most ``max_size``, at least one, together as fast as can be.

    The round lasts as long as its slowest replica, so for each size of the fastest replica the others get what they
    can finish in the same time, rounded down; among those rounds the one with the most samples per second wins, the
    larger on a tie.
    """
    best: tuple[float, int, list[int]] | None = None
    fastest = max(speeds)
    for largest in range(1, max_size + 1):
        target_s = largest / fastest
        sizes = [max(1, min(max_size, math.floor(speed * target_s + 1e-9))) for speed in speeds]
        round_s = max(size / speed for size, speed in zip(sizes, speeds, strict=True))
        candidate = (sum(sizes) / round_s * (1 + 1e-12 * largest), largest, sizes)
        if best is None or candidate > best:
            best = candidate
    assert best is not None
    return best[2]


def last_round_sizes(remaining: int, speeds: Sequence[float], max_size: int) -> list[int]:
    """Samples of each replica in a round that uses up ``remaining``; every replica gets one where there are enough.

    ``remaining`` is at most what `round_sizes` would take. A replica that gets none takes a ghost step.
    """
    world = len(speeds)
    base = [1 if i < remaining else 0 for i in range(world)]
    rest = remaining - sum(base)
    sizes = [b + extra for b, extra in zip(base, apportion(rest, speeds), strict=True)] if rest else base
    return _cap(sizes, max_size)


def _cap(sizes: list[int], max_size: int) -> list[int]:
    spill = sum(max(0, size - max_size) for size in sizes)
    capped = [min(size, max_size) for size in sizes]
    while spill:
        smallest = min((i for i in range(len(capped)) if capped[i] < max_size), key=lambda i: capped[i])
        capped[smallest] += 1
        spill -= 1
    return capped
