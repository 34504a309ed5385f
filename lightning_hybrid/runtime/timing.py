"""How long a step takes on its device, without the waiting."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from lightning_hybrid.runtime.work import Work

Timed = tuple[Work, float, bool]
"""A finished step: its work, its seconds, and whether it was the first of its shape."""


class StepTimer(Protocol):
    """Times steps; an asynchronous device tells the time of a step only some steps later."""

    is_synchronous: bool
    """Whether the host waits for the device, so that its clock sees how long a collective takes."""
    blocked_s: float
    """Seconds that the loop's thread has waited for the device."""

    def start(self) -> None:
        """Called right before the step."""
        ...

    def stop(self, work: Work, waited_s: float) -> None:
        """Called right after the step, which spent ``waited_s`` of its time waiting for other ranks."""
        ...

    def finished(self, *, drain: bool = False) -> Iterator[Timed]:
        """Steps whose time has become known; with ``drain`` waits for all."""
        ...


class HostTimer:
    """For devices that work synchronously: the host's clock around the step."""

    is_synchronous = True

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.blocked_s = 0.0
        self._start_s = 0.0
        self._finished: deque[Timed] = deque()
        self._sizes: set[int] = set()

    def start(self) -> None:
        """Reads the clock."""
        self._start_s = self._clock()

    def stop(self, work: Work, waited_s: float) -> None:
        """Reads the clock again."""
        first = work.size not in self._sizes
        self._sizes.add(work.size)
        self._finished.append((work, max(0.0, self._clock() - self._start_s - waited_s), first))

    def finished(self, *, drain: bool = False) -> Iterator[Timed]:
        """All steps so far."""
        while self._finished:
            yield self._finished.popleft()


class EventTimer:
    """For asynchronous devices: a pair of events around the step, read when the step has surely run.

    At most ``in_flight`` steps are in flight: the end of step ``i - in_flight`` is waited for after step ``i``, and no
    other synchronisation happens.

    Args:
        in_flight: Most steps that run ahead of the device.
        new_event: Makes an event with ``record()``, ``synchronize()`` and ``elapsed_time(end)`` in milliseconds, as
            `torch.cuda.Event(enable_timing=True)`.
    """

    is_synchronous = False

    def __init__(self, in_flight: int, new_event: Callable[[], Any]) -> None:
        self.blocked_s = 0.0
        self._in_flight, self._new_event = in_flight, new_event
        self._pending: deque[tuple[Work, Any, Any, float, bool]] = deque()
        self._begin: Any = None
        self._sizes: set[int] = set()

    def start(self) -> None:
        """Records the first event of the step."""
        self._begin = self._new_event()
        self._begin.record()

    def stop(self, work: Work, waited_s: float) -> None:
        """Records the second event of the step."""
        end = self._new_event()
        end.record()
        first = work.size not in self._sizes
        self._sizes.add(work.size)
        self._pending.append((work, self._begin, end, waited_s, first))

    def finished(self, *, drain: bool = False) -> Iterator[Timed]:
        """Steps behind the in-flight window."""
        while self._pending and (drain or len(self._pending) > self._in_flight):
            work, begin, end, waited_s, first = self._pending.popleft()
            start_s = time.perf_counter()
            end.synchronize()
            self.blocked_s += time.perf_counter() - start_s
            yield work, max(0.0, begin.elapsed_time(end) / 1e3 - waited_s), first


def timer_for(device: torch.device, in_flight: int) -> StepTimer:
    """The timer that fits a device."""
    if device.type == "cuda":
        return EventTimer(in_flight, functools.partial(torch.cuda.Event, enable_timing=True))
    return HostTimer()
