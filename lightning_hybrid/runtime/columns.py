"""What a user means by a name: a column or attribute of a dataset, or a part of each of its samples."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset


class ColumnError(ValueError):
    """A column has not one entry per sample; the message begins with its name."""


def column_of(dataset: Any, name: str) -> Any:
    """One entry per sample under this name, ``None`` where the dataset itself has none.

    A column of a Hugging Face dataset, of a frame or mapping of columns, or an attribute that is a sequence or array. A
    torch `Subset` or `ConcatDataset` is looked through.

    Raises:
        ColumnError: below a `Subset` or `ConcatDataset` there are too few or too many entries.
    """
    own = _own_column(dataset, name)
    if own is not None:
        return own
    if isinstance(dataset, Subset):
        column = column_of(dataset.dataset, name)
        return None if column is None else _taken(column, dataset, name)
    if isinstance(dataset, ConcatDataset):
        columns = [column_of(part, name) for part in dataset.datasets]
        return None if any(column is None for column in columns) else _joined(columns, dataset, name)
    return None


def at_once(column: Any) -> Any:
    """All entries: a column of a Hugging Face dataset is slow one by one."""
    if isinstance(column, torch.Tensor):
        return column
    if hasattr(column, "__array__"):
        return np.asarray(column)
    try:
        return column[:]
    except (LookupError, TypeError):  # not every sequence can be sliced
        return list(column)


def part_of(sample: Any, name: str) -> Any:
    """What a sample has under this name.

    Raises:
        LookupError: nothing.
    """
    if isinstance(sample, Mapping) and name in sample:
        return sample[name]
    if not isinstance(sample, Mapping) and hasattr(sample, name):
        return getattr(sample, name)
    raise LookupError(name)


def names_in(dataset: Any, sample: Any) -> str:
    """Which names there are, as the end of a message."""
    found = {
        "columns": _column_names(dataset),
        "attributes": [key for key, value in getattr(dataset, "__dict__", {}).items() if is_per_sample(value)],
        "keys of a sample": list(sample) if isinstance(sample, Mapping) else list(getattr(sample, "__dict__", {})),
    }
    there = [f"{what} {sorted(map(str, names))}" for what, names in found.items() if names]
    return f"there are {', '.join(there)}" if there else f"its samples are of type {type(sample).__name__}"


def is_per_sample(value: Any) -> bool:
    """Whether a value may hold one entry per sample."""
    is_array = isinstance(value, Sequence) or hasattr(value, "__array__")  # tensors and frames' columns have it too
    return is_array and not isinstance(value, str | bytes)


def _taken(column: Any, subset: Subset[Any], name: str) -> Any:
    _check(column, subset.dataset, repr(name))
    indices = [operator.index(index) for index in subset.indices]
    if isinstance(column, np.ndarray | torch.Tensor):
        return column[np.asarray(indices, dtype=np.int64)]
    return [column[index] for index in indices]


def _joined(columns: list[Any], dataset: ConcatDataset[Any], name: str) -> list[Any]:
    for number, (column, part) in enumerate(zip(columns, dataset.datasets, strict=True)):
        _check(column, part, f"{name!r} of part {number}")
    return [entry for column in columns for entry in column]


def _check(column: Any, dataset: Any, what: str) -> None:
    num = len(dataset) if hasattr(dataset, "__len__") else len(column)
    if len(column) != num:
        raise ColumnError(f"{what} must have one entry per sample, {num}, got {len(column)}")


def _own_column(dataset: Any, name: str) -> Any:
    if name in _column_names(dataset):
        plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
        return at_once(plain[name])
    column = getattr(dataset, name, None)
    return at_once(column) if is_per_sample(column) else None


def _column_names(dataset: Any) -> list[str]:
    names = getattr(dataset, "column_names", None)
    if names is None and callable(getattr(dataset, "keys", None)):
        names = dataset.keys()
    return [name for name in names or () if isinstance(name, str)]
