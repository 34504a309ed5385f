"""Outputs of steps, and whether two are the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Scores(NamedTuple):
    logits: Any
    names: Any


def output_of(start: int, stop: int) -> dict[str, Any]:
    """What a step over these positions returns: tensors, names and a pair."""
    ids = torch.arange(start, stop)
    return {
        "ids": ids,
        "features": ids[:, None].float() * torch.ones(3),
        "names": [f"sample {i}" for i in range(start, stop)],
        "pair": Scores(ids * 2, [str(i) for i in range(start, stop)]),
    }


def same(one: Any, other: Any) -> bool:
    """Whether two outputs have the same structure, types and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*both) for both in zip(one, other, strict=True))
    return bool(one == other)
