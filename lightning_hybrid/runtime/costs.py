"""What the user's samples cost, and how large a batch is.

Costs are found once, before the first step, on the user's own terms: a sequence, the name of a column or attribute, or
a function of a sample.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hybrid.core.cost import Costs, FloatArray, check_cost, check_costs
from lightning_hybrid.core.errors import ConfigError, CostError
from lightning_hybrid.runtime.columns import ColumnError, at_once, column_of, names_in, part_of

OneCost = Callable[[Any], float] | Sequence[float] | npt.NDArray[Any] | torch.Tensor | str
CostOption = OneCost | Mapping[str, OneCost]
"""A cost, or one for each of ``compute``, ``memory`` and ``io``."""
Indices = range | npt.NDArray[np.int64] | list[Any]

_KINDS = ("compute", "memory", "io")


def sample_costs(cost: CostOption, dataset: Any, indices: Indices) -> Costs:
    """The costs of the samples at ``indices``.

    Args:
        cost: One of

            * a sequence, array or tensor with one number per sample of the dataset;
            * the name of a column of the dataset (Hugging Face), of a key of a columnar dataset, or of an attribute
              with one entry per sample; else the name of a key or attribute of each sample, which is then read once
              more. Entries that are not numbers count by their size: tokens of a list, characters of a text. A torch
              `Subset` or `ConcatDataset` is looked through;
            * a callable that is given one sample, ``dataset[index]``, and returns a number: every sample is read once
              more than the loader reads it;
            * a mapping with ``compute``, and where known ``memory`` and ``io``, to one of the above.
        dataset: Map-style dataset that the loader draws from.
        indices: Dataset indices, in the order in which the costs are wanted.

    Raises:
        CostError: a cost is negative, NaN, infinite or no number, costs are too few or too many, a callable raises, or
            a name is not known; names the index.
        ConfigError: ``cost`` is none of the above.

    Example:
        >>> texts = ["a", "long", "to"]
        >>> sample_costs(len, texts, [2, 0]).compute.tolist()
        [2.0, 1.0]
    """
    if not isinstance(cost, Mapping):
        return Costs(compute=_costs_of(cost, dataset, indices, "cost"))
    if "compute" not in cost or not set(cost) <= set(_KINDS):
        raise ConfigError("cost", sorted(map(str, cost)), f"have the key 'compute' and no others than {_KINDS}")
    return Costs(**{kind: _costs_of(cost[kind], dataset, indices, f"{kind} cost") for kind in _KINDS if kind in cost})


def _costs_of(cost: OneCost, dataset: Any, indices: Indices, kind: str) -> FloatArray:
    if isinstance(cost, str):
        column = _column(dataset, cost, kind)
        if column is None:
            return _read(lambda sample: _size(_part(sample, cost, dataset)), dataset, indices, kind)
        return _taken(_sizes(column), dataset, indices, f"{kind} {cost!r}")
    if isinstance(cost, torch.Tensor):
        return _taken(_sizes(cost) if cost.ndim == 1 else cost.tolist(), dataset, indices, kind)
    if isinstance(cost, Sequence) or hasattr(cost, "__array__"):
        return _taken(at_once(cost), dataset, indices, kind)
    if callable(cost):
        return _read(cost, dataset, indices, kind)
    raise ConfigError("cost", cost, "be a callable, a sequence, an array, a name, or a mapping of these")


# --- columns --------------------------------------------------------------------------------------------------------


def _column(dataset: Any, name: str, kind: str) -> Any:
    try:
        return column_of(dataset, name)
    except ColumnError as err:
        raise CostError(f"{kind} {err}") from err


def _sizes(column: Any) -> Any:
    """The numbers of a column; the sizes of its entries where these are not numbers."""
    if isinstance(column, torch.Tensor):
        column = column.detach().to("cpu", torch.float64).numpy()
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "biuf":
        return column
    if set(map(type, column)) <= {int, float}:
        return column
    return [_size(value) for value in column]


def _size(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numel() if value.ndim else value.item()
    if isinstance(value, np.ndarray):
        return value.size if value.ndim else value.item()
    return len(value) if hasattr(value, "__len__") else value


def _taken(values: Any, dataset: Any, indices: Indices, kind: str) -> FloatArray:
    """The entries at ``indices`` of a list with one entry per sample."""
    num = len(dataset) if hasattr(dataset, "__len__") else len(values)
    costs = check_costs(values, num, kind=kind)
    if isinstance(indices, list):
        indices = [_index(index, num, kind) for index in indices]
    return np.asarray(costs[np.asarray(indices, dtype=np.int64)])


def _index(index: Any, num: int, kind: str) -> int:
    try:
        number = operator.index(index)
    except TypeError:
        number = num
    if not -num <= number < num:
        raise CostError(f"{kind} has {num} entries, none for sample {index!r}; give a callable")
    return number


# --- samples --------------------------------------------------------------------------------------------------------


def _read(cost: Callable[[Any], Any], dataset: Any, indices: Indices, kind: str) -> FloatArray:
    """What ``cost`` tells of every sample."""
    plain = indices.tolist() if isinstance(indices, np.ndarray) else indices
    return np.array([check_cost(_told(cost, dataset, index, kind), index, kind=kind) for index in plain], dtype=float)


def _told(cost: Callable[[Any], Any], dataset: Any, index: Any, kind: str) -> Any:
    try:
        sample = dataset[index]
    except Exception as err:
        raise CostError(f"{kind} of sample {index!r}: to read it raised {type(err).__name__}: {err}") from err
    try:
        return cost(sample)
    except CostError:
        raise
    except Exception as err:
        raise CostError(f"{kind} of sample {index!r}: the callable raised {type(err).__name__}: {err}") from err


def _part(sample: Any, name: str, dataset: Any) -> Any:
    try:
        return part_of(sample, name)
    except LookupError as err:
        there = names_in(dataset, sample)
        raise CostError(f"cost names {name!r}, which {type(dataset).__name__} does not have; {there}") from err


# --- batches --------------------------------------------------------------------------------------------------------

_PLAIN = (str, bytes, int, float, type(None))
_MIXED_LEN = 16
"""A longer list counts as all of one kind."""


def batch_elements(batch: Any) -> int | None:
    """Number of elements of all tensors of a batch, ``None`` where there is none.

    Looks into mappings, lists, tuples and dataclasses.
    """
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    total = None
    for part in _parts(batch):
        if isinstance(part, _PLAIN):
            continue
        elements = part.numel() if isinstance(part, torch.Tensor) else batch_elements(part)
        if elements is not None:
            total = elements if total is None else total + elements
    return total


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, list | tuple):
        return () if len(batch) > _MIXED_LEN and isinstance(batch[0], _PLAIN) else batch
    if isinstance(batch, Mapping):
        return batch.values()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return ()
