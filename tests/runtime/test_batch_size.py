from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_hybrid.runtime.batch_size import num_samples


@dataclass
class Pair:
    image: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), 1),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ((torch.tensor(1.0), torch.zeros(5)), 5),
        ({"text": ["a", "b"], "ids": torch.zeros(2, 7)}, 2),
        ({"text": ["a", "b", "c"]}, 3),
        (["a", "b"], 2),
        ([1] * 100_000, 100_000),
        ([], 0),
        (Pair(torch.zeros(6, 1), torch.zeros(6)), 6),
        (object(), 1),
        (None, 1),
        ("text", 1),
    ],
)
def test_a_batch_has_so_many_samples(batch: Any, expected: int) -> None:
    assert num_samples(batch) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_say_its_size_is_one_sample() -> None:
    class Broken:
        ndim = 1

    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert num_samples(nested) == 2
    assert num_samples([Broken()]) == 1


def test_a_batch_that_raises_is_one_sample() -> None:
    class Raising(dict[str, torch.Tensor]):
        def values(self) -> Any:
            raise RuntimeError("not now")

    assert num_samples(Raising(x=torch.zeros(4))) == 1
