from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.runtime.keys import sample_keys

KEYS = ["x", "y", "x", "z"]


class Records(Dataset[Any]):
    """Has its keys as an attribute, and in every sample."""

    def __init__(self) -> None:
        self.keys_of_all = KEYS

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"key": KEYS[i], "tokens": [1, i], "tensor": torch.tensor(i // 2)}


class Columnar(dict[str, Any]):
    column_names = ("key",)

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("reuse", "keys"),
    [
        (KEYS, KEYS),
        (tuple(KEYS), KEYS),
        (np.array([1, 2, 1, 3]), [1, 2, 1, 3]),
        (torch.tensor([1, 2, 1, 3]), [1, 2, 1, 3]),
        ("keys_of_all", KEYS),
        ("key", KEYS),
        ("tensor", [0, 0, 1, 1]),
        (lambda sample: tuple(sample["tokens"]), [(1, 0), (1, 1), (1, 2), (1, 3)]),
        (lambda sample: np.int64(3), [3] * 4),
    ],
)
def test_keys_by_every_way_to_name_them(reuse: Any, keys: list[Any]) -> None:
    assert sample_keys(reuse, Records(), range(4)) == keys
    assert sample_keys(reuse, Records(), np.array([3, 0])) == [keys[3], keys[0]]


def test_a_column() -> None:
    assert sample_keys("key", Columnar(key=KEYS), [2, 1]) == ["x", "y"]


def test_attributes_of_samples() -> None:
    samples: Any = [SimpleNamespace(key=key) for key in KEYS]
    assert sample_keys("key", samples, range(4)) == KEYS


def test_a_subset_and_a_concatenation_are_looked_through() -> None:
    subset = Subset(Records(), [3, 2, 0])
    joined = ConcatDataset([subset, Records()])

    assert sample_keys("keys_of_all", subset, range(3)) == ["z", "x", "x"]
    assert sample_keys("keys_of_all", joined, range(7)) == ["z", "x", "x", *KEYS]


def test_indices_of_any_kind_are_given_to_the_dataset() -> None:
    assert sample_keys(len, {"a": "xy", "b": "z"}, ["b", "a"]) == [1, 2]


def raises(sample: Any) -> str:
    return str(sample["missing"])


@pytest.mark.parametrize(
    ("reuse", "message"),
    [
        ("tokens", r"that of sample 0 is a list, got \[1, 0\]"),
        (["a", "b", {}, "c"], r"that of sample 2 is a dict, got \{\}"),
        (lambda sample: torch.ones(2), "that of sample 0 is a Tensor"),
        (np.ones((4, 2)), "that of sample 0 is a list"),
        (raises, "give every sample a key; for sample 0 it raised KeyError: 'missing'"),
        (["a"], "have one key per sample, 4, got 1"),
        ("colour", r"be a name that the dataset has; there are attributes \['keys_of_all'\], keys of a sample \['key'"),
    ],
)
def test_a_key_that_is_none_is_refused_with_its_index(reuse: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^reuse must .*{message}"):
        sample_keys(reuse, Records(), range(4))
