"""Batches cut into parts along their samples, and the outputs of the parts put together again.

The number of samples is known from the plan, so that nothing is guessed: a part of a batch is cut only where its first
dimension, or its length, is that number. What might mean something else once it is cut is not cut, and the batch runs
whole; a function of the user's may know better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_hybrid.core.errors import BatchError
from lightning_hybrid.runtime.results import has_rows, join_rows, num_rows, plain, rebuilt, row_form, row_of

_TEXTS = (str, bytes)
_SCALARS = (*_TEXTS, int, float, type(None))
_Cut = Callable[[int, int], Any]
"""Gives the samples from ``start`` to ``stop`` of a part of a batch."""
SplitFunction = Callable[[Any, int, int], Any]
"""The user's: samples ``start`` to ``stop`` of a batch."""
MergeFunction = Callable[[Sequence[Any], Sequence[int]], Any]
"""The user's: one output of the outputs of the parts, and of how many samples each part had."""


def split(batch: Any, sizes: Sequence[int], *, is_collated: bool = False) -> list[Any]:
    """``batch`` in parts of ``sizes`` samples.

    Tensors and arrays are views of the batch's. Lists, tuples, named tuples, mappings (`transformers.BatchEncoding`
    too) and dataclasses of such parts keep their types; strings and ``None`` go to every part as they are.

    Args:
        batch: As the loader gives it.
        sizes: Samples of each part; their sum is the number of samples of the batch.
        is_collated: Whether `torch.utils.data.default_collate` made the batch, so that a list or tuple in it holds
            the fields of a sample, and not samples, unless it holds strings.

    Raises:
        BatchError: names the part of the batch that has not one entry per sample, or may have them or not.
    """
    cut = cutter(batch, sum(sizes), is_collated=is_collated)
    stops = np.cumsum(sizes).tolist()
    return [cut(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def cutter(batch: Any, size: int, *, is_collated: bool = False) -> Callable[[int, int], Any]:
    """A function that gives samples ``start`` to ``stop`` of a batch of ``size``; see `split`."""
    return _cut_of(batch, size, "batch", is_collated=is_collated)


def merge(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The output of a whole batch of those of its parts.

    Parts with one row per sample are joined; where rows of tensors differ in form from part to part, the output is a
    list of rows. ``None`` stays ``None``, and what is equal for all parts stays what it is.

    Args:
        outputs: What the step gave for each part, all of one structure.
        sizes: Samples of each part.

    Raises:
        BatchError: an output without one row per sample differs from part to part.
    """
    return _merged(outputs, sizes, "output")


def _merged(outputs: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(has_rows(output, size) for output, size in zip(outputs, sizes, strict=True)):
        if len({row_form(output) for output in outputs}) == 1:
            return join_rows(outputs)
        if not isinstance(first, Mapping | tuple):
            return [plain(row_of(output, i)) for output in outputs for i in range(num_rows(output))]
    if isinstance(first, Mapping) and all(_has_keys(output, first) for output in outputs):
        return rebuilt(first, {k: _merged([part[k] for part in outputs], sizes, f"{path}[{k!r}]") for k in first})
    if isinstance(first, tuple) and all(type(part) is type(first) and len(part) == len(first) for part in outputs):
        items = [_merged(parts, sizes, f"{path}[{i}]") for i, parts in enumerate(zip(*outputs, strict=True))]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if isinstance(first, list) and all(isinstance(part, list) for part in outputs):
        return _merged_lists(outputs, sizes, path)
    if all(_are_equal(first, other) for other in outputs[1:]):
        return first
    raise BatchError(
        f"{path} of a step that was run in parts is a {type(first).__name__} that has not one row per sample and is"
        " not the same for all parts; pass merge_fn= to say how the parts of it make one"
    )


def _merged_lists(outputs: Sequence[list[Any]], sizes: Sequence[int], path: str) -> list[Any]:
    """Lists of one entry per sample behind each other, or lists of outputs joined entry by entry."""
    parts = list(zip(outputs, sizes, strict=True))
    are_samples = all(len(part) == size for part, size in parts)
    are_outputs = len({len(part) for part in outputs}) == 1 and all(
        has_rows(item, size) for part, size in parts for item in part
    )
    if are_samples and not are_outputs:
        return [item for part in outputs for item in part]
    if are_outputs and not are_samples:
        return [_merged(items, sizes, f"{path}[{i}]") for i, items in enumerate(zip(*outputs, strict=True))]
    raise BatchError(
        f"{path} of a step that was run in parts is a list of which it is not sure whether it holds one entry per"
        " sample; pass merge_fn= to say how the parts of it make one"
    )


def _has_keys(output: Any, like: Mapping[Any, Any]) -> bool:
    return isinstance(output, Mapping) and output.keys() == like.keys()


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return type(a) is type(b) and bool(np.all(a == b))


def _cut_of(part: Any, size: int, path: str, *, is_collated: bool) -> _Cut:
    """How to cut a part of a batch of ``size`` samples."""
    if part is None or isinstance(part, str | bytes):
        return lambda start, stop: part
    if isinstance(part, torch.Tensor):
        return _cut_of_tensor(part, size, path)
    if isinstance(part, np.ndarray):
        if part.ndim == 0 or part.shape[0] != size:
            raise _unclear(path, f"an array of shape {part.shape}", size)
        return lambda start, stop: part[start:stop]
    if isinstance(part, PackedSequence):
        raise _unclear(path, "a PackedSequence, whose first dimension is not the samples", size)
    if isinstance(part, Mapping):
        return _cut_of_mapping(part, size, path, is_collated=is_collated)
    if isinstance(part, list | tuple):
        return _cut_of_sequence(part, size, path, is_collated=is_collated)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return _cut_of_dataclass(part, size, path, is_collated=is_collated)
    raise _unclear(path, f"a {type(part).__name__}", size)


def _cut_of_tensor(tensor: torch.Tensor, size: int, path: str) -> _Cut:
    if tensor.is_nested or tensor.layout != torch.strided:
        raise _unclear(path, "a nested or sparse tensor", size)
    if tensor.dim() == 0 or tensor.shape[0] != size:
        raise _unclear(path, f"a tensor of shape {tuple(tensor.shape)}", size)
    return lambda start, stop: tensor[start:stop]


def _cut_of_mapping(mapping: Mapping[Any, Any], size: int, path: str, *, is_collated: bool) -> _Cut:
    cuts = {key: _cut_of(value, size, f"{path}[{key!r}]", is_collated=is_collated) for key, value in mapping.items()}
    encodings = getattr(mapping, "encodings", None)  # what a fast tokenizer knows of each sample

    def cut(start: int, stop: int) -> Any:
        items = {key: cut(start, stop) for key, cut in cuts.items()}
        if encodings is None:
            return rebuilt(mapping, items)
        make: Any = type(mapping)
        return make(items, encoding=encodings[start:stop])

    return cut


def _cut_of_dataclass(batch: Any, size: int, path: str, *, is_collated: bool) -> _Cut:
    fields = [field.name for field in dataclasses.fields(batch) if field.init]
    cuts = {name: _cut_of(getattr(batch, name), size, f"{path}.{name}", is_collated=is_collated) for name in fields}
    return lambda start, stop: dataclasses.replace(batch, **{name: cut(start, stop) for name, cut in cuts.items()})


def _cut_of_sequence(sequence: Sequence[Any], size: int, path: str, *, is_collated: bool) -> _Cut:
    is_named = hasattr(sequence, "_fields")
    may_be_samples = not is_named and len(sequence) == size
    scalars = _TEXTS if is_collated else _SCALARS
    if may_be_samples and all(isinstance(item, scalars) for item in sequence):
        return lambda start, stop: sequence[start:stop]
    try:
        cuts = [_cut_of(item, size, f"{path}[{i}]", is_collated=is_collated) for i, item in enumerate(sequence)]
    except BatchError:
        if not may_be_samples:
            raise
        return lambda start, stop: sequence[start:stop]
    if may_be_samples and not is_collated and size > 1:
        raise _unclear(path, f"a {type(sequence).__name__} of {size} parts of {size} entries each", size)

    def cut(start: int, stop: int) -> Any:
        items = [cut(start, stop) for cut in cuts]
        make: Any = type(sequence)
        return make(*items) if is_named else make(items)

    return cut


def _unclear(path: str, what: str, size: int) -> BatchError:
    return BatchError(f"{path} is {what}, of which it is not sure what belongs to each of the {size} samples")
