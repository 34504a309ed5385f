"""How many samples a step may have on this replica: learnt from what steps took, what is free, and what failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.memory_model import MemoryModel
from lightning_hybrid.core.size_cap import SizeCap
from lightning_hybrid.core.step_memory import StepMemoryMeter

_FIRST_STEPS = 4
_EVERY_STEPS = 64
"""The memory of the first steps is measured, of the first ones after a failure, and of one in so many later."""
_LARGER_FRAC = 1.1
"""A step so much larger than any that was measured is measured too."""


class StepSizes:
    """Knows how many samples of a batch fit into one step.

    Where the memory that steps take and the memory that is free can be read, a step is made as large as what is free
    allows. Where they cannot, sizes are halved by failures and grow back step by step.

    Args:
        meter: Measures steps and what is free; ``None`` where neither can be read.
        config: Says what part of what is free a step may take.
    """

    def __init__(self, meter: StepMemoryMeter | None, config: HybridConfig) -> None:
        self._meter, self._safety_frac = meter, config.memory_safety_frac
        self._model, self._cap = MemoryModel(), SizeCap()
        self._unmeasured = self._failures = 0
        self._to_measure = _FIRST_STEPS
        self._largest = 0.0
        self._available_bytes: float | None = None

    @property
    def is_watching(self) -> bool:
        """Whether sizes of batches matter: memory can be read, or has run out."""
        return self._meter is not None or self._failures > 0

    @property
    def num_failures(self) -> int:
        """How often a step ran out of memory."""
        return self._failures

    def refresh(self) -> None:
        """Asks the driver what others have left; may take a while, so it is for a background thread."""
        if self._meter is not None:
            self._available_bytes = self._meter.available_bytes(fresh=True)

    def most(self, samples: int, elements: int | None) -> int:
        """How many samples of a batch to run at once, 1 to ``samples``.

        By what is free, so that its parts are about equal; by what has failed as many as may fit, so that the cap
        learns.
        """
        if not self.is_watching or samples < 2:
            return samples
        by_memory = self._fitting_by_memory(samples, elements)
        if by_memory is None:
            return self._fitting_by_cap(samples, elements)
        return -(-samples // -(-samples // by_memory))

    def fitting(self, samples: int, elements: int | None) -> int:
        """How many samples of a batch fit into one step, 1 to ``samples``."""
        if not self.is_watching or samples < 2:
            return samples
        by_memory = self._fitting_by_memory(samples, elements)
        return self._fitting_by_cap(samples, elements) if by_memory is None else by_memory

    def measuring(self, samples: int, elements: int | None) -> AbstractContextManager[object]:
        """Around a step: learns what memory it took, and that it fitted, unless it raised."""
        if not self.is_watching:
            return nullcontext()
        return self._measuring(samples, elements)

    def failed(self, samples: int, elements: int | None) -> None:
        """A step of this size ran out of memory, and nothing of it is alive any more."""
        self._failures += 1
        self._to_measure = _FIRST_STEPS
        self.refresh()
        self._model.failed(samples, elements, self._budget_bytes())
        self._cap.fail(_size(samples, elements))

    @contextmanager
    def _measuring(self, samples: int, elements: int | None) -> Iterator[None]:
        size = _size(samples, elements)
        self._unmeasured += 1
        is_due = self._to_measure > 0 or self._unmeasured >= _EVERY_STEPS or size > _LARGER_FRAC * self._largest
        if self._meter is None or not is_due:
            yield
        else:
            with self._meter.measure() as memory:
                yield
            if memory.peak_bytes is not None:
                self._unmeasured, self._largest = 0, max(self._largest, size)
                self._to_measure -= 1
                self._model.observe(samples, elements, memory.peak_bytes)
        self._cap.succeed(size, size / samples)

    def _fitting_by_memory(self, samples: int, elements: int | None) -> int | None:
        """By what is free; ``None`` where that is not known."""
        needed_bytes, budget_bytes = self._model.predict(samples, elements), self._budget_bytes()
        if needed_bytes is None or self._meter is None:
            return None
        if budget_bytes is None or needed_bytes > budget_bytes / 2:  # what was read before may be out of date
            self._available_bytes = self._meter.available_bytes()
            budget_bytes = self._budget_bytes()
        if budget_bytes is None:
            return None
        if needed_bytes <= budget_bytes:
            return samples
        per_sample = None if elements is None else elements / samples
        return max(1, self._model.most_samples(per_sample, budget_bytes, at_most=samples) or 0)

    def _fitting_by_cap(self, samples: int, elements: int | None) -> int:
        """By what has failed."""
        cap = self._cap.cap
        per_sample = 1.0 if elements is None else elements / samples
        return samples if cap is None else max(1, min(samples, int(cap / per_sample + 1e-9)))

    def _budget_bytes(self) -> float | None:
        return None if self._available_bytes is None else self._safety_frac * self._available_bytes


def _size(samples: int, elements: int | None) -> float:
    return float(samples if elements is None else elements)
