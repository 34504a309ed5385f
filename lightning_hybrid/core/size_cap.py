"""The largest size of a step that is believed to run, on a device whose memory cannot be read.

A failure halves the size, or leads back to one that has run. From there it grows by bisection towards the size that
failed, and rests just below it; after a long time without a failure what failed is forgotten, as memory may have become
free again. Growing less and less often is as in the additive increase, multiplicative decrease of networks (Chiu and
Jain, 1989), with bisection in place of the increase, as a failed attempt is dear.
"""

from __future__ import annotations

_AT_CAP = 0.9
"""A step of this part of the cap counts as one of its size."""
_CLOSE_FRAC = 0.1
"""So close to the size that failed there is nothing to gain any more."""
_GROWTH = 1.5
"""Growth per patience once no failure is remembered."""
_RESTS = 8
"""Patiences after which a failure is forgotten."""


class SizeCap:
    """The cap of one kind of step; sizes are in any unit.

    Args:
        patience: Steps at the cap before a larger one is tried; doubled by each attempt to grow that fails.
        most_patience: To at most this.
    """

    def __init__(self, *, patience: int = 4, most_patience: int = 64) -> None:
        self.cap: float | None = None
        """The largest size to try, ``None`` while no step has failed."""
        self._first_patience, self._most_patience = patience, most_patience
        self._patience = patience
        self._failed: float | None = None
        self._good = self._largest = 0.0
        self._streak = self._rests = 0

    def fail(self, size: float) -> None:
        """A step of ``size`` ran out of memory."""
        if self._largest > 0 and size > self._good:
            self._patience = min(2 * self._patience, self._most_patience)
        if size <= self._good:  # what ran before does not any more
            self._good, self._patience = 0.0, self._first_patience
        self.cap = self._good if self._good >= size / 2 else size / 2
        self._failed, self._largest = size, max(self._largest, size)
        self._streak = self._rests = 0

    def succeed(self, size: float, unit: float = 1.0) -> None:
        """A step of ``size`` has run; one sample more would have been ``unit`` more."""
        if self.cap is None:
            return
        self._good = max(self._good, size)
        if self._failed is not None and size >= self._failed:
            self._failed = None
        self._streak += size >= _AT_CAP * self.cap or size + unit > self.cap
        if self._streak >= self._patience:
            self._streak = 0
            self._grow(self.cap)

    def _grow(self, cap: float) -> None:
        if self._failed is None:
            self.cap = _GROWTH * cap
            if self.cap >= self._largest:
                self.cap = None  # what has run is still known, should a step fail again
        elif self._failed - cap > _CLOSE_FRAC * cap:
            self.cap = (cap + self._failed) / 2
        else:
            self._rests += 1
            if self._rests >= _RESTS:
                self._failed, self._rests = None, 0
