"""How many bytes a step takes at its peak, learnt from the steps that were measured.

A step takes ``fixed + linear * elements + quadratic * elements**2 / samples`` bytes: the last is what attention takes,
which grows with the square of the padded length of a sample. Where elements are not known samples stand in for them.
The prices are the non-negative ones that explain the measured peaks best, in relative terms, and a prediction is raised
by what the measured peaks were above them.
"""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

from lightning_hybrid.core.cost import FloatArray
from lightning_hybrid.core.errors import ConfigError

TRUST_FACTOR = 2.0
"""What a step takes is not predicted beyond so many times the largest peak that was measured."""
_MOST_POINTS = 64
_FIRST_DOUBT = 0.25
"""By how much the prediction from a single measurement is raised; over their number for more."""
_TELLING = 1.3
"""Sizes tell what is fixed if the largest is so many times the smallest."""
_RELIEF = 0.98
"""What is left, after each measurement, of a correction that a failure has brought."""


class MemoryModel:
    """Peak bytes of steps above what was allocated when they began."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float | None, float]] = deque(maxlen=_MOST_POINTS)
        self._largest: tuple[float, float | None, float] | None = None
        self._prices: FloatArray | None = None
        self._raised = self._correction = 1.0

    def observe(self, samples: int, elements: int | None, peak_bytes: int) -> None:
        """Takes in a measured step.

        Args:
            samples: Samples of its batch.
            elements: Elements of the tensors of its batch, ``None`` where that is not known.
            peak_bytes: Most bytes that were allocated at once, above those at its beginning.

        Raises:
            ConfigError: there are no samples, or a number is negative.
        """
        if samples < 1:
            raise ConfigError("samples", samples, "be at least 1")
        for name, number in (("elements", elements), ("peak_bytes", peak_bytes)):
            if number is not None and number < 0:
                raise ConfigError(name, number, "be at least 0")
        point = (float(samples), None if elements is None else float(elements), float(peak_bytes))
        self._points.append(point)
        if self._largest is None or point[2] >= self._largest[2]:
            self._largest = point
        self._correction = max(1.0, self._correction * _RELIEF)
        self._prices = None

    def failed(self, samples: int, elements: int | None, budget_bytes: float | None) -> None:
        """A step ran out of memory although it had ``budget_bytes``, so that it takes more."""
        predicted = self.predict(samples, elements)
        if predicted is not None and predicted > 0 and budget_bytes is not None and predicted <= budget_bytes:
            self._correction *= 1.05 * budget_bytes / predicted

    def predict(self, samples: float, elements: float | None) -> float | None:
        """Bytes that a step takes at most, ``None`` while none was measured."""
        if not self._points:
            return None
        if self._prices is None:
            self._fit()
        assert self._prices is not None
        return float(_features(samples, elements) @ self._prices) * self._raised * self._correction

    def most_samples(self, elements_per_sample: float | None, budget_bytes: float, *, at_most: int) -> int | None:
        """How many samples of a size fit into a budget, 0 to ``at_most``; ``None`` while no step was measured.

        Not more than what is predicted to take `TRUST_FACTOR` times the largest measured peak: sizes grow in steps.
        """
        if self._largest is None:
            return None
        budget_bytes = min(budget_bytes, TRUST_FACTOR * self._largest[2] * self._correction)
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            elements = None if elements_per_sample is None else middle * elements_per_sample
            predicted = self.predict(middle, elements)
            if predicted is not None and predicted <= budget_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _fit(self) -> None:
        assert self._largest is not None
        points = [*self._points, self._largest]
        rows = np.array([_features(samples, elements) for samples, elements, _ in points])
        peaks = np.maximum([peak for _, _, peak in points], 1.0)
        self._prices = _nonnegative(rows, peaks)
        above = peaks / np.maximum(rows @ self._prices, 1.0)
        self._raised = max(1.0, float(above.max())) + _FIRST_DOUBT / len(self._points)


def _features(samples: float, elements: float | None) -> FloatArray:
    size = samples if elements is None else elements
    return np.array([1.0, size, size * size / samples if elements is not None and samples else 0.0])


def _nonnegative(rows: FloatArray, peaks: FloatArray) -> FloatArray:
    """The prices, none negative, that come nearest to the peaks in relative terms; tries every set of free columns.

    Steps that are all alike do not tell what is fixed; then all of a step counts as proportional to its size.
    """
    relative = rows / peaks[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    scaled = relative / scale
    best, least = np.zeros(rows.shape[1]), np.inf
    ones = np.ones(len(rows))
    tells = len(rows) >= 4 and rows[:, 1].max() > _TELLING * rows[:, 1].min()
    for size in range(1, min(len(rows), rows.shape[1]) + 1):
        for free in itertools.combinations(range(rows.shape[1]), size):
            if not scaled[:, free].any(axis=0).all() or not (tells or free == (1,)):
                continue
            prices, *_ = np.linalg.lstsq(scaled[:, free], ones, rcond=None)
            error = float(np.square(scaled[:, free] @ prices - ones).sum())
            if (prices >= 0).all() and error < least * 0.9:  # a simpler model unless another explains more
                least, best = error, np.zeros(rows.shape[1])
                best[list(free)] = prices
    return np.asarray(best / scale)
