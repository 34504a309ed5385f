"""The memory that a step takes on its device, and the interface of what measures it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class StepMemory:
    """What a step took; known once the block of `StepMemoryMeter.measure` has ended, by an exception too."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """Most bytes that were allocated at once, above those at the beginning; ``None`` where that is not known."""


class StepMemoryMeter(Protocol):
    """Measures the memory of steps. Nothing raises: what cannot be had is ``None``."""

    def measure(self) -> AbstractContextManager[StepMemory]:
        """A block around one step; blocks of a device do not overlap."""
        ...

    def available_bytes(self, *, fresh: bool = False) -> int | None:
        """Bytes that this process may still allocate now, by the least of the bounds that are known.

        Args:
            fresh: Ask the driver, where there is one, what others have taken since it was asked last.
        """
        ...
