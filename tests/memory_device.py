"""A device whose memory is only counted: for steps that run out of it as a GPU's would, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lightning_hybrid.core.step_memory import StepMemory
from lightning_hybrid.lightning import attachment
from lightning_hybrid.runtime.batch_size import num_samples
from lightning_hybrid.runtime.costs import batch_elements

GIB = 2**30


class Attempt(NamedTuple):
    """A step that was tried."""

    step: int
    """Number of the attempt, from 0."""
    samples: int
    elements: int
    """Of all tensors of the batch; the samples where it has none."""
    ok: bool
    """Whether it fitted."""


class EmulatedMemory:
    """Memory of a device, and the meter of it; a step takes ``fixed_bytes + bytes_per_element * elements``.

    Args:
        capacity_bytes: What steps may take, above what is there for good; or what tells it for the number of an
            attempt, as when others take and give back memory.
        bytes_per_element: What a step takes for each element of its batch.
        fixed_bytes: What it takes besides.

    Example:
        >>> device = EmulatedMemory(1000, bytes_per_element=10)
        >>> with device.measure() as step:
        ...     device.allocate(torch.zeros(4, 20))
        >>> step.peak_bytes, device.available_bytes()
        (800, 1000)
    """

    def __init__(
        self, capacity_bytes: Callable[[int], int] | int, bytes_per_element: float, fixed_bytes: int = 0
    ) -> None:
        self.attempts: list[Attempt] = []
        self._capacity_bytes = capacity_bytes
        self._bytes_per_element, self._fixed_bytes = bytes_per_element, fixed_bytes
        self._peak_bytes: int | None = None

    @property
    def num_failed(self) -> int:
        """Attempts that ran out of memory."""
        return sum(not attempt.ok for attempt in self.attempts)

    def allocate(self, batch: Any) -> None:
        """Called by the step: takes the memory for ``batch`` and gives it back.

        Raises:
            torch.OutOfMemoryError: The step takes more than there is at this attempt.
        """
        samples = num_samples(batch)
        elements = batch_elements(batch)
        elements = samples if elements is None else elements
        capacity_bytes = self._capacity(len(self.attempts))
        needed_bytes = self.needed_bytes(elements)
        ok = needed_bytes <= capacity_bytes
        self.attempts.append(Attempt(len(self.attempts), samples, elements, ok))
        # what failed got as far as the device was large
        self._peak_bytes = max(self._peak_bytes or 0, min(needed_bytes, capacity_bytes))
        if not ok:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {needed_bytes / GIB:.2f} GiB. GPU 0 has a total capacity of "
                f"{capacity_bytes / GIB:.2f} GiB of which {capacity_bytes / GIB:.2f} GiB is free."
            )

    def needed_bytes(self, elements: int) -> int:
        """What a step of so many elements takes."""
        return self._fixed_bytes + round(self._bytes_per_element * elements)

    @contextmanager
    def measure(self) -> Iterator[StepMemory]:
        """As `StepMemoryMeter.measure`; a block that allocated nothing has a peak of 0."""
        step = StepMemory()
        self._peak_bytes = 0
        try:
            yield step
        finally:
            step.peak_bytes = self._peak_bytes

    def available_bytes(self, *, fresh: bool = False) -> int | None:
        """As `StepMemoryMeter.available_bytes`: the capacity at the next attempt; always fresh."""
        return self._capacity(len(self.attempts))

    def _capacity(self, step: int) -> int:
        return self._capacity_bytes(step) if callable(self._capacity_bytes) else self._capacity_bytes


@contextmanager
def metered(device: EmulatedMemory) -> Iterator[None]:
    """Has Trainers whose run begins inside read the memory of ``device``."""
    before = attachment.meter_for
    attachment.meter_for = lambda *_: device  # type: ignore[assignment]
    try:
        yield
    finally:
        attachment.meter_for = before
