"""How fast replicas are before they are measured: from the load of their devices."""

from __future__ import annotations

import statistics


def load_score(
    memory_frac: float | None,
    compute_frac: float | None,
    network_frac: float | None,
    *,
    weights: tuple[float, float, float],
) -> float | None:
    """Weighted load of a device, 0 (free) to 1 (full), from the parts that are known.

    An unknown part is left out and the weights of the others are scaled up.
    """
    parts = [
        (weight, part)
        for weight, part in zip(weights, (memory_frac, compute_frac, network_frac), strict=True)
        if part is not None and weight > 0
    ]
    total = sum(weight for weight, _ in parts)
    return sum(weight * min(1.0, max(0.0, part)) for weight, part in parts) / total if total else None


def prior_speeds(scores: list[float | None]) -> list[float]:
    """Relative speeds before any measurement: proportional to 1 - load score, an unknown score counting as the mean.

    When every score is 1, or none is known, all replicas count as equal.
    """
    known = [score for score in scores if score is not None]
    if not known:
        return [1.0] * len(scores)
    mean = sum(known) / len(known)
    speeds = [1.0 - (mean if score is None else score) for score in scores]
    return speeds if max(speeds) > 0 else [1.0] * len(scores)


def fill_speeds(measured: list[float | None], prior: list[float]) -> list[float]:
    """Measured speeds, with the prior's proportions for replicas that have not been measured yet."""
    known = [(speed, guess) for speed, guess in zip(measured, prior, strict=True) if speed is not None and guess > 0]
    fastest = max((speed for speed in measured if speed is not None), default=1.0)
    scale = statistics.median(speed / guess for speed, guess in known) if known else fastest
    slowest = min((speed for speed, _ in known), default=1.0)
    return [
        speed if speed is not None else max(guess * scale, 0.01 * slowest)
        for speed, guess in zip(measured, prior, strict=True)
    ]
