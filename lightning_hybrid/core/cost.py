"""What samples and cells cost."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hybrid.core.errors import CostError

FloatArray = npt.NDArray[np.float64]
ArrayLike = Sequence[float] | npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """Costs of samples, or of cells: compute always, memory and io where known.

    All are in cost units of their own kind, and the arrays are equally long.

    Raises:
        CostError: the arrays are not equally long.
    """

    compute: FloatArray
    memory: FloatArray | None = None
    io: FloatArray | None = None

    def __post_init__(self) -> None:
        for name, values in self._kinds():
            if values.shape != (len(self),):
                raise CostError(f"{name} costs must be as many as compute costs, {len(self)}, got shape {values.shape}")

    def __len__(self) -> int:
        return len(self.compute)

    def take(self, indices: npt.NDArray[np.int64]) -> Costs:
        """The costs at ``indices``, in that order."""
        return Costs(**{name: values[indices] for name, values in self._kinds()})

    def of_cells(self, offsets: npt.NDArray[np.int64]) -> Costs:
        """Sums of each kind over cells: cell ``c`` holds entries ``offsets[c]`` to ``offsets[c + 1]``.

        A kind whose costs are all zero tells nothing, so they count as all equal.
        """
        return Costs(**{name: _sums(values, offsets) for name, values in self._kinds()})

    @property
    def digest(self) -> str:
        """Hash of all values; equal on every rank that holds the same costs."""
        digest = hashlib.sha256()
        for name, values in self._kinds():
            digest.update(f"{name}:{len(values)}:".encode())
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()[:16]

    @classmethod
    def equal(cls, num: int) -> Costs:
        """Costs of ``num`` samples of which nothing is known: 1 each."""
        return cls(compute=np.ones(num))

    def _kinds(self) -> list[tuple[str, FloatArray]]:
        kinds = (("compute", self.compute), ("memory", self.memory), ("io", self.io))
        return [(name, values) for name, values in kinds if values is not None]


def check_costs(values: ArrayLike, expected_len: int, *, kind: str = "cost") -> FloatArray:
    """The costs as an array of their own, once all are known to be numbers that a cost can be.

    Costs that are all zero tell nothing, and count as all equal.

    Args:
        values: One number per sample; zero is allowed.
        expected_len: How many there must be.
        kind: What to call them in an error.

    Raises:
        CostError: names the index and the value of the first entry that is not a number, negative, NaN or infinite,
            or both lengths.
    """
    if len(values) != expected_len:
        raise CostError(f"{kind} must have one entry per sample, {expected_len}, got {len(values)}")
    try:
        array = np.asarray(values)
    except ValueError:  # entries of unlike lengths
        array = np.empty(0)
    if array.shape == (expected_len,) and array.dtype.kind in "biuf":
        costs = array.astype(np.float64)
        wrong = ~((costs >= 0) & (costs < np.inf))
        if wrong.any():
            check_cost(costs[wrong.argmax()], int(wrong.argmax()), kind=kind)
    else:
        costs = np.array([check_cost(value, index, kind=kind) for index, value in enumerate(values)])
    return costs if costs.any() else np.ones(expected_len)


def check_cost(value: object, index: object, *, kind: str = "cost") -> float:
    """The cost of one sample as a number.

    Raises:
        CostError: it is not a number, negative, NaN or infinite; names the index and the value.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number, though it may read as one")
        cost = float(value)  # type: ignore[arg-type]  # whether it can be is the question
    except (TypeError, ValueError) as err:
        raise CostError(f"{kind} of sample {index!r} must be a number, got {value!r}") from err
    if not 0 <= cost < math.inf:
        raise CostError(f"{kind} of sample {index!r} must be at least 0 and finite, got {cost!r}")
    return cost


def _sums(values: FloatArray, offsets: npt.NDArray[np.int64]) -> FloatArray:
    if not values.any():
        values = np.ones(len(values))
    sums = np.zeros(len(offsets) - 1)
    filled = offsets[1:] > offsets[:-1]
    if filled.any():
        sums[filled] = np.add.reduceat(values[: offsets[-1]], offsets[:-1][filled])
    return sums
