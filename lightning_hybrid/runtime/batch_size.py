"""How many samples a batch has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def num_samples(batch: Any) -> int:
    """Size of the first dimension of the first tensor in a batch; 1 for a batch of a kind that is not known.

    Looks into mappings, lists, tuples and dataclasses; a list of anything else has one sample per entry.

    Example:
        >>> num_samples({"text": ["a", "b"], "label": torch.zeros(2)}), num_samples(["a", "b", "c"])
        (2, 3)
    """
    try:
        found = _first(batch)
    except Exception:  # a batch of the user's, of a kind that does not say how large it is
        found = None
    return 1 if found is None else found


def _first(part: Any) -> int | None:
    if isinstance(part, torch.Tensor):
        return part.size(0) if part.ndim else None
    if isinstance(part, Mapping):
        return _first_of(part.values())
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return _first_of(getattr(part, field.name) for field in dataclasses.fields(part))
    if isinstance(part, list | tuple):
        # what is in a long list of plain things is not looked at one by one
        looks_inside = bool(part) and isinstance(part[0], torch.Tensor | Mapping | list | tuple)
        inside = _first_of(part) if looks_inside else None
        return len(part) if inside is None else inside
    return None


def _first_of(parts: Any) -> int | None:
    return next((size for size in map(_first, parts) if size is not None), None)
