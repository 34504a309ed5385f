"""How fast a rank copies from its host to its device, from memory that is pinned and from memory that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class HostCopies(Protocol):
    """Copies from a host to its device."""

    def copy(self, num_bytes: int, *, pinned: bool) -> None:
        """Copies that many bytes; returns once they have arrived."""
        ...


class TorchHostCopies:
    """Copies of torch, in buffers that end with this object.

    Args:
        device: Where to.
        empty: Makes a buffer, as `torch.empty`.
        synchronize: Waits until a device has done all its work.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        empty: Callable[..., Any] = torch.empty,
        synchronize: Callable[[Any], object] = torch.cuda.synchronize,
    ) -> None:
        self._device, self._empty, self._synchronize = device, empty, synchronize
        self._buffers: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def copy(self, num_bytes: int, *, pinned: bool) -> None:
        """Copies that many bytes; returns once they have arrived."""
        if (num_bytes, pinned) not in self._buffers:
            self._buffers[num_bytes, pinned] = (
                self._empty(num_bytes, dtype=torch.uint8, device=self._device),
                self._empty(num_bytes, dtype=torch.uint8, pin_memory=pinned),
            )
        target, source = self._buffers[num_bytes, pinned]
        target.copy_(source, non_blocking=pinned)
        self._synchronize(self._device)
