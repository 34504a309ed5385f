"""XID errors of the GPUs, which the driver gives out as events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from lightning_hybrid.probes.nvml import Nvml
from lightning_hybrid.probes.values import Unknown

_XID_CRITICAL_ERROR = 0x8
_KEPT = 16
_MOST_AT_ONCE = 64


class XidLog:
    """The newest 16 XID errors of one GPU since this log was made.

    Args:
        nvml: The session.
        gpu: Handle of the GPU; a MIG slice's errors are those of its GPU.
        found: Errors that are known already.
    """

    def __init__(self, nvml: Nvml, gpu: Any, found: Iterable[int] = ()) -> None:
        self._nvml, self._gpu = nvml, gpu
        self._events: Any = None
        self._refused: Unknown | None = None
        self._found = deque(found, maxlen=_KEPT)

    def read(self) -> Any:
        """All of them, the oldest first, as a tuple; `Unknown` where the driver does not tell."""
        if self._events is None:
            refused = self._refused or self._open()
            if refused is not None:
                self._refused = refused if refused.lasting else None
                return refused
        for _ in range(_MOST_AT_ONCE):
            event = self._nvml.call("nvmlEventSetWait", self._events, 0)
            if isinstance(event, Unknown):  # most often: there is no further event
                break
            self._found.append(event.eventData)
        return tuple(self._found)

    def close(self) -> None:
        """Gives the events' queue back."""
        if self._events is not None:
            self._nvml.call("nvmlEventSetFree", self._events)
            self._events = None

    def _open(self) -> Unknown | None:
        events = self._nvml.call("nvmlEventSetCreate")
        if isinstance(events, Unknown):
            return events

        refused = self._nvml.call("nvmlDeviceRegisterEvents", self._gpu, _XID_CRITICAL_ERROR, events)
        if isinstance(refused, Unknown):
            self._nvml.call("nvmlEventSetFree", events)
            return refused
        self._events = events
        return None
