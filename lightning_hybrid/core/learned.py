"""What a step costs, learnt from the sizes of batches and the seconds that they took on all replicas.

A step costs ``per_step + per_sample * samples + per_element * elements`` cost units, and takes that long on a device of
speed 1. Replicas differ in speed, and each one's speed drifts, so only steps of one replica that follow each other are
compared: a replica whose samples are longer shows that longer samples cost more, never that it is slow. Where all
samples of a replica are alike, its steps tell nothing about that; then it counts as likelier that samples of unlike
sizes cost more than that devices differ.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import deque
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.cost import FloatArray
from lightning_hybrid.core.errors import CostError
from lightning_hybrid.core.state import ReplicaRecord, StepShape

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostParameters:
    """What a step costs, as one replica has learnt it for all; the mean sample that it saw costs 1.

    Raises:
        CostError: a number is negative or not finite, or all are zero.
    """

    version: int
    per_step: float = 0.0
    per_sample: float = 0.0
    per_element: float = 0.0
    samples_per_step: float = 1.0
    """Mean samples of the steps that were seen, and so also the cost of a usual step."""
    elements_per_sample: float | None = None
    """Mean elements of the samples that were seen, for batches whose elements are not known."""

    def __post_init__(self) -> None:
        prices = (self.per_step, self.per_sample, self.per_element)
        if not any(prices) or not all(0 <= price < math.inf for price in prices):
            raise CostError(f"cost parameters must be at least 0, finite and not all zero, got {prices}")

    def cost(self, samples: int, elements: int | None = None, *, steps: int = 1) -> float:
        """Cost of ``steps`` steps together; of mean samples where their elements are not known."""
        known = samples * (self.elements_per_sample or 0.0) if elements is None else elements
        return self.per_step * steps + self.per_sample * samples + self.per_element * known

    @property
    def digest(self) -> str:
        """Hash of all numbers; equal on every replica that uses the same parameters."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The parameters as one line of JSON; floats come back as they were."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> CostParameters:
        """The parameters that `to_json` wrote."""
        return cls(**json.loads(text))


_BLOCK_STEPS = 8
"""Steps of one replica that follow each other, within which its speed counts as steady."""
_MIN_BLOCKS = 2
_MAX_BLOCKS = 256
_BLOCKS_PER_REPLICA = 8
_DEVICE_SPREAD = 0.3
"""How unlike devices are taken to be, as standard deviation of log speeds, where steps do not tell."""
_MIN_CHANGE = 0.05
"""New parameters must move the costs of steps by this share."""
_MODELS = ((1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))
"""Columns (step, samples, elements) that may have a price; a simpler one is kept unless another explains more."""


class CostLearner:
    """Collects finished steps of all replicas, and tells what steps cost once they show it.

    Memory is bounded: of each replica the newest steps are kept, of very many replicas the first ones.

    Args:
        num_replicas: How many replicas there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_blocks = max(1, min(_BLOCKS_PER_REPLICA, _MAX_BLOCKS // max(1, num_replicas)))
        self._steps: dict[int, deque[StepShape]] = {}

    def observe(self, record: ReplicaRecord) -> None:
        """Takes in the newest steps of a record; those that were seen before count once."""
        if record.replica >= _MAX_BLOCKS:
            return
        known = self._steps.setdefault(record.replica, deque(maxlen=self._num_blocks * _BLOCK_STEPS))
        last = known[-1].number if known else 0
        known.extend(step for step in record.newest_steps if step.number > last and step.seconds > 0)

    def propose(self, current: CostParameters | None = None) -> CostParameters | None:
        """Better parameters than ``current``; ``None`` where the steps do not show that there are any.

        Args:
            current: What is used now; ``None`` for samples that all cost 1.
        """
        steps = _Steps.of(self._steps)
        if steps is None:
            return None
        used = _Fit(steps, _SAMPLES_ALONE if current is None else steps.shares_of(current))
        best = min((_fit(steps, columns) for columns in _MODELS if steps.tells(columns)), key=lambda fit: fit.badness)
        moved = float(np.mean(np.abs(np.log(best.expected / used.expected))))
        if moved < _MIN_CHANGE or best.badness >= used.badness:
            return None
        return steps.parameters(best.shares, version=1 if current is None else current.version + 1)


_SAMPLES_ALONE = np.array([0.0, 1.0, 0.0])


@dataclass(frozen=True, eq=False)
class _Steps:
    """Blocks of steps that follow each other on one replica."""

    sizes: FloatArray
    """[block, step, (1, samples, elements)], each over its mean."""
    seconds: FloatArray
    """[block, step]"""
    replica: Ints
    """[block]"""
    means: FloatArray
    """Means of (1, samples, elements)."""
    has_elements: bool

    @classmethod
    def of(cls, history: dict[int, deque[StepShape]]) -> _Steps | None:
        blocks = [(replica, block) for replica, steps in sorted(history.items()) for block in _blocks(list(steps))]
        if len(blocks) < _MIN_BLOCKS:
            return None
        has_elements = all(step.elements is not None for _, block in blocks for step in block)
        sizes = np.array([[(1, s.samples, s.elements if has_elements else 0) for s in block] for _, block in blocks])
        means = sizes.mean(axis=(0, 1))
        return cls(
            sizes=sizes / np.where(means > 0, means, 1.0),
            seconds=np.array([[step.seconds for step in block] for _, block in blocks]),
            replica=np.array([replica for replica, _ in blocks]),
            means=means,
            has_elements=has_elements and bool(means[2] > 0),
        )

    def tells(self, columns: tuple[int, ...]) -> bool:
        """Whether these columns are known, and differ from simpler ones at all."""
        if 2 in columns and not self.has_elements:
            return False
        flat = self.sizes.reshape(-1, 3)[:, columns]
        return all(
            np.abs(flat[:, i] - flat[:, j]).mean() > 0.01 for i, j in itertools.combinations(range(len(columns)), 2)
        )

    def shares_of(self, parameters: CostParameters) -> FloatArray:
        """What each column contributes to the cost of a mean step, 0..1."""
        per_sample, per_element = parameters.per_sample, parameters.per_element
        if not self.has_elements:
            per_sample, per_element = per_sample + per_element * (parameters.elements_per_sample or 0.0), 0.0
        prices = np.array([parameters.per_step, per_sample, per_element]) * self.means
        return np.asarray(prices / prices.sum()) if prices.any() else _SAMPLES_ALONE

    def parameters(self, shares: FloatArray, *, version: int) -> CostParameters:
        """Prices whose costs of all these steps add up to the number of their samples."""
        per_step, per_sample, per_element = (
            shares * self.means[1] / np.where(self.means > 0, self.means, 1.0)
        ).tolist()
        return CostParameters(
            version=version,
            per_step=per_step,
            per_sample=per_sample,
            per_element=per_element,
            samples_per_step=float(self.means[1]),
            elements_per_sample=float(self.means[2] / self.means[1]) if self.has_elements else None,
        )


class _Fit:
    """How well shares explain the steps.

    Args:
        steps: What was measured.
        shares: Contribution of each column to the cost of a mean step.
        num_free: How many shares were fitted.
    """

    def __init__(self, steps: _Steps, shares: FloatArray, num_free: int = 0) -> None:
        self.shares = shares
        self.expected = np.maximum(steps.sizes @ shares, 1e-3)
        pace = np.log(steps.seconds / self.expected)
        levels = np.median(pace, axis=1)
        self.off = pace - levels[:, None]
        """Log of each step's time over what it should be."""
        trimmed = np.sort(np.abs(self.off), axis=None)[: math.ceil(0.8 * self.off.size)]
        self.spread = max(float(trimmed.mean()), 1e-3)
        slowness = np.array([np.median(levels[steps.replica == r]) for r in np.unique(steps.replica)])
        unlike = float(np.square((slowness - np.median(slowness)) / _DEVICE_SPREAD).sum())
        size = self.off.size
        self.badness = 2 * size * math.log(self.spread) + num_free * math.log(size) + unlike

    @property
    def weights(self) -> FloatArray:
        """How far each step is believed, 0..1 (Tukey's biweight)."""
        return np.asarray(np.square(np.maximum(0.0, 1.0 - np.square(self.off / (6.0 * self.spread)))))


def _fit(steps: _Steps, columns: tuple[int, ...]) -> _Fit:
    """The shares of ``columns`` that explain the steps best: iteratively re-weighted least squares."""
    fit = _Fit(steps, _SAMPLES_ALONE)
    for _ in range(10 if len(columns) > 1 else 1):
        shares = np.zeros(3)
        shares[list(columns)] = _least(_equations(steps, fit)[:, columns])
        fit = _Fit(steps, shares, len(columns) - 1)
    return fit


def _equations(steps: _Steps, fit: _Fit) -> FloatArray:
    """Rows that the right shares make zero, each over its standard deviation.

    A step and the mean of its block, or a replica and the mean of all, relate as their times do, whatever the speed.
    """
    weights, expected = fit.weights + 1e-9, fit.expected
    block_sizes = np.average(steps.sizes, axis=1, weights=np.broadcast_to(weights[..., None], steps.sizes.shape))
    block_seconds = np.average(steps.seconds, axis=1, weights=weights)
    ratios = steps.seconds / block_seconds[:, None]
    within = ratios[..., None] * block_sizes[:, None, :] - steps.sizes
    within *= (np.sqrt(weights) / expected / (1.5 * fit.spread))[..., None]
    replicas = np.unique(steps.replica)
    sizes = np.array([block_sizes[steps.replica == r].mean(axis=0) for r in replicas])
    seconds = np.array([block_seconds[steps.replica == r].mean() for r in replicas])
    between = (seconds / seconds.mean())[:, None] * sizes.mean(axis=0) - sizes
    between /= (sizes @ fit.shares)[:, None] * _DEVICE_SPREAD
    return np.concatenate((within.reshape(-1, 3), between))


def _least(rows: FloatArray) -> FloatArray:
    """The shares that minimise ``|rows @ shares|``, none negative, with a sum of 1; tries every set of free ones."""
    square = rows.T @ rows
    square += 1e-9 * (np.trace(square) + 1.0) * np.eye(len(square))
    best, least = np.zeros(len(square)), math.inf
    for size in range(1, len(square) + 1):
        for free in itertools.combinations(range(len(square)), size):
            ahead = np.linalg.solve(square[np.ix_(free, free)], np.ones(size))
            if (ahead >= 0).all() and 1.0 / ahead.sum() < least:
                least = 1.0 / ahead.sum()
                best = np.zeros(len(square))
                best[list(free)] = ahead / ahead.sum()
    return best


def _blocks(steps: list[StepShape]) -> list[list[StepShape]]:
    newest = len(steps) - len(steps) % _BLOCK_STEPS
    steps = steps[len(steps) - newest :]
    return [steps[at : at + _BLOCK_STEPS] for at in range(0, newest, _BLOCK_STEPS)]
