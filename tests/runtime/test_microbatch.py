"""Batches of any structure cut and put together again; what is not sure is not cut."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from lightning_hybrid.core.errors import BatchError
from lightning_hybrid.runtime.microbatch import merge, split


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str


@dataclass
class Changing:
    x: Any
    aside: Any = None


NESTED = {"in": (torch.ones(5), {"y": torch.zeros(5, 1)}), "id": list("abcde")}
RAGGED = [torch.ones(n) for n in (1, 2, 3, 4, 6)]
SAMPLES = [{"x": torch.ones(2), "id": n} for n in range(5)]
x5 = torch.arange(10).view(5, 2)
y5 = torch.arange(5.0)


def same(a: Any, b: Any) -> bool:
    """Whether two structures have the same types, shapes and values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if hasattr(a, "keys"):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return same(vars(a), vars(b))
    return bool(a == b)


SPLITTABLE: dict[str, tuple[Any, Callable[[slice], Any]]] = {
    "tensor": (x5, lambda at: x5[at]),
    "list of fields": ([x5, y5], lambda at: [x5[at], y5[at]]),
    "tuple of fields": ((x5, y5), lambda at: (x5[at], y5[at])),
    "dict": ({"x": x5, "y": y5}, lambda at: {"x": x5[at], "y": y5[at]}),
    "ordered dict": (OrderedDict(x=x5), lambda at: OrderedDict(x=x5[at])),
    "nested": (
        NESTED,
        lambda at: {"in": (torch.ones(5)[at], {"y": torch.zeros(5, 1)[at]}), "id": list("abcde")[at]},
    ),
    "named tuple": (Pair(x5, y5), lambda at: Pair(x5[at], y5[at])),
    "frozen dataclass": (Frozen(x5, "test"), lambda at: Frozen(x5[at], "test")),
    "dataclass with none": (Changing(x5), lambda at: Changing(x5[at])),
    "array": (x5.numpy(), lambda at: x5.numpy()[at]),
    "strings": (list("abcde"), lambda at: list("abcde")[at]),
    "tuple of strings": (tuple("abcde"), lambda at: tuple("abcde")[at]),
    "numbers": ([1, 2.0, None, 4, 5], lambda at: [1, 2.0, None, 4, 5][at]),
    "samples of unequal shapes": (RAGGED, lambda at: RAGGED[at]),
    "samples as dicts": (SAMPLES, lambda at: SAMPLES[at]),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "part"), SPLITTABLE.values(), ids=SPLITTABLE)
@pytest.mark.parametrize("sizes", [[5], [3, 2], [1, 1, 1, 1, 1], [2, 2, 1]])
def test_each_part_has_its_samples_and_the_types_of_the_whole(
    batch: Any, part: Callable[[slice], Any], sizes: list[int]
) -> None:
    stops = np.cumsum(sizes).tolist()
    expected = [part(slice(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]

    assert all(map(same, split(batch, sizes), expected))


def test_parts_of_tensors_are_views() -> None:
    (first, _) = split(x5, [3, 2])
    assert first.data_ptr() == x5.data_ptr()


def test_an_encoding_of_a_fast_tokenizer_keeps_its_type_and_what_it_knows_of_each_sample() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate("abcde")}))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    batch = tokenizer(list("abcde"), return_tensors="pt")

    parts = split(batch, [3, 2])

    assert [type(part) for part in parts] == [transformers.BatchEncoding] * 2
    assert [part.tokens(0) for part in parts] == [["a"], ["d"]]
    assert parts[1]["input_ids"].tolist() == [[3], [4]]
    assert split(transformers.BatchEncoding({"input_ids": x5}), [5])[0].encodings is None


UNCLEAR = {
    "scalar": ({"x": x5, "n": torch.tensor(3)}, "batch['n'] is a tensor of shape ()"),
    "number": ({"x": x5, "n": 3}, "batch['n'] is a int"),
    "a mask for all": ([x5, torch.ones(1, 2)], "batch[1] is a tensor of shape (1, 2)"),
    "sequence first": (torch.ones(7, 5, 3), "batch is a tensor of shape (7, 5, 3)"),
    "a list of another length": ({"x": x5, "ids": list("abc"), "n": [1, 2]}, "batch['n'][0] is a int"),
    "packed": (pack_sequence([torch.ones(5)]), "batch is a PackedSequence"),
    "sparse": (torch.eye(5).to_sparse(), "batch is a nested or sparse tensor"),
    "nested": (torch.nested.as_nested_tensor(RAGGED, layout=torch.jagged), "batch is a nested"),
    "an object": ([x5, object()], "batch[1] is a object"),
    "array without dimensions": (np.array(3), "batch is an array of shape ()"),
    "five fields or five samples": ([x5] * 5, "batch is a list of 5 parts of 5 entries each"),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "reason"), UNCLEAR.values(), ids=UNCLEAR)
def test_what_is_not_sure_is_named_and_not_cut(batch: Any, reason: str) -> None:
    with pytest.raises(BatchError) as error:
        split(batch, [3, 2])

    assert str(error.value).startswith(reason)


def test_the_default_collate_function_makes_fields_of_what_may_be_samples() -> None:
    batch = default_collate([(torch.ones(2) * n, n) for n in range(2)])

    with pytest.raises(BatchError):
        split(batch, [1, 1])
    first, second = split(batch, [1, 1], is_collated=True)

    assert same(first, [torch.zeros(1, 2), torch.tensor([0])])
    assert same(second, [torch.ones(1, 2), torch.tensor([1])])


def test_one_field_named_or_not_is_no_list_of_samples() -> None:
    pair = namedtuple("pair", "x")
    assert same(split(pair(torch.ones(1)), [1]), [pair(torch.ones(1))])
    assert same(split([torch.ones(1, 2)], [1]), [[torch.ones(1, 2)]])


MERGED: dict[str, tuple[list[Any], Any]] = {
    "rows": ([x5[:3], x5[3:]], x5),
    "none": ([None, None], None),
    "dict": ([{"a": x5[:3], "b": y5[:3]}, {"a": x5[3:], "b": y5[3:]}], {"a": x5, "b": y5}),
    "dict with a constant": ([{"a": x5[:3], "b": "cls"}, {"a": x5[3:], "b": "cls"}], {"a": x5, "b": "cls"}),
    "named tuple": ([Pair(x5[:3], None), Pair(x5[3:], None)], Pair(x5, None)),
    "list of results": ([["a", "b", "c"], ["d", "e"]], list("abcde")),
    "list of tensors per sample": (
        [[torch.ones(n) for n in (1, 2, 3)], [torch.ones(n) for n in (4, 5)]],
        [torch.ones(n) for n in (1, 2, 3, 4, 5)],
    ),
    "list of outputs": ([[x5[:3], y5[:3]], [x5[3:], y5[3:]]], [x5, y5]),
    "ragged rows": ([torch.ones(3, 2), torch.ones(2, 4)], [torch.ones(2)] * 3 + [torch.ones(4)] * 2),
    "ragged within a dict": (
        [{"a": torch.ones(3, 2), "b": y5[:3]}, {"a": torch.ones(2, 4), "b": y5[3:]}],
        {"a": [torch.ones(2)] * 3 + [torch.ones(4)] * 2, "b": y5},
    ),
    "equal constants": ([torch.tensor(2.0), torch.tensor(2.0)], torch.tensor(2.0)),
}


@pytest.mark.parametrize(("outputs", "whole"), MERGED.values(), ids=MERGED)
def test_outputs_of_parts_make_the_output_of_the_whole(outputs: list[Any], whole: Any) -> None:
    assert same(merge(outputs, [3, 2]), whole)


@pytest.mark.parametrize(
    ("outputs", "sizes", "reason"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], [3, 2], "output of a step"),
        ([{"a": x5[:3], "n": 1}, {"a": x5[3:], "n": 2}], [3, 2], "output['n'] of a step"),
        ([[torch.ones(2, 1)] * 2, [torch.ones(2, 1)] * 2], [2, 2], "output of a step"),
        ([x5[:3], None], [3, 2], "output of a step"),
    ],
)
def test_what_cannot_be_put_together_is_named(outputs: list[Any], sizes: list[int], reason: str) -> None:
    with pytest.raises(BatchError, match="merge_fn") as error:
        merge(outputs, sizes)

    assert str(error.value).startswith(reason)


leaves = st.sampled_from(["rows", "column", "strings", "none"])
structures = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=6,
)


def built(structure: Any, size: int) -> Any:
    if isinstance(structure, dict):
        return {key: built(value, size) for key, value in structure.items()}
    if isinstance(structure, tuple):
        return tuple(built(value, size) for value in structure)
    return {
        "rows": torch.arange(2.0 * size).view(size, 2),
        "column": torch.arange(size),
        "strings": [f"s{i}" for i in range(size)],
        "none": None,
    }[structure]


@given(structures, st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_a_batch_that_is_cut_and_put_together_is_the_batch(structure: Any, sizes: list[int]) -> None:
    batch = built(structure, sum(sizes))

    assert same(merge(split(batch, sizes, is_collated=True), sizes), batch)
