"""Which samples are equal, by the user's word."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.runtime.columns import ColumnError, at_once, column_of, is_per_sample, names_in, part_of

KeyOption = Callable[[Any], Hashable] | Sequence[Hashable] | npt.NDArray[Any] | torch.Tensor | str
Indices = range | npt.NDArray[np.int64] | list[Any]


def sample_keys(reuse: KeyOption, dataset: Any, indices: Indices) -> list[Hashable]:
    """The keys of the samples at ``indices``; samples of equal keys are equal.

    Args:
        reuse: One of

            * a sequence, array or tensor with one key per sample of the dataset;
            * the name of a column of the dataset or of an attribute with one entry per sample; else the name of a key
              or attribute of each sample, which is then read once more;
            * a callable that is given one sample, ``dataset[index]``, and returns a key: every sample is read once
              more.
        dataset: Map-style dataset that the loader draws from.
        indices: Dataset indices, in the order in which the keys are wanted.

    Raises:
        ConfigError: there are too few or too many keys, a key is not hashable, a callable raises, or a name is not
            known; names the index.

    Example:
        >>> sample_keys(str.lower, ["A", "b", "a"], range(3))
        ['a', 'b', 'a']
    """
    plain = indices.tolist() if isinstance(indices, np.ndarray) else indices
    read = _reader(reuse, dataset)
    return [_key(read, index, reuse) for index in plain]


def _reader(reuse: KeyOption, dataset: Any) -> Callable[[Any], Any]:
    """Gives the key of a dataset index."""
    column = _column(reuse, dataset)
    if column is not None:
        if hasattr(dataset, "__len__") and len(column) != len(dataset):
            raise ConfigError("reuse", len(column), f"have one key per sample, {len(dataset)}")
        keys: Any = column.tolist() if hasattr(column, "tolist") else column
        return lambda index: keys[index]
    if isinstance(reuse, str):
        return lambda index: _named(dataset, index, reuse)
    if callable(reuse):
        return lambda index: reuse(dataset[index])
    raise ConfigError("reuse", reuse, "be a callable, a sequence, an array or a name")


def _column(reuse: KeyOption, dataset: Any) -> Any:
    """One key per sample, ``None`` where samples must be read for it."""
    if not isinstance(reuse, str):
        return at_once(reuse) if is_per_sample(reuse) else None
    try:
        return column_of(dataset, reuse)
    except ColumnError as err:
        raise ConfigError("reuse", reuse, f"name a column with one entry per sample; {err}") from err


def _named(dataset: Any, index: Any, name: str) -> Any:
    sample = dataset[index]
    try:
        return part_of(sample, name)
    except LookupError as err:
        raise ConfigError("reuse", name, f"be a name that the dataset has; {names_in(dataset, sample)}") from err


def _key(read: Callable[[Any], Any], index: Any, reuse: KeyOption) -> Hashable:
    try:
        key = read(index)
    except ConfigError:
        raise
    except Exception as err:
        what = reuse if callable(reuse) else type(reuse).__name__
        rule = f"give every sample a key; for sample {index!r} it raised {type(err).__name__}: {err}"
        raise ConfigError("reuse", what, rule) from err
    if isinstance(key, torch.Tensor | np.generic) and np.ndim(key) == 0:
        key = key.item()
    try:
        hash(key)
    except TypeError as err:
        raise _not_hashable(key, index) from err
    if isinstance(key, torch.Tensor):  # its hash is its address, so no two are equal
        raise _not_hashable(key, index)
    return key  # type: ignore[no-any-return]  # that it can be hashed was just tried


def _not_hashable(key: Any, index: Any) -> ConfigError:
    kind = type(key).__name__
    return ConfigError("reuse", key, f"give keys that can be hashed by value; that of sample {index!r} is a {kind}")
