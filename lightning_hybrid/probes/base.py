"""What a probe is, and the two that read nothing: one for where nothing can be read, one that replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.probes.values import Unknown


class DeviceProbe(Protocol):
    """Reads the state of one device. A reading never raises: what cannot be had is ``None``."""

    def read(self) -> DeviceState:
        """The state now."""
        ...


class NullProbe:
    """Knows the kind of its device and nothing else."""

    def __init__(self, kind: str = "cpu") -> None:
        self._state = DeviceState(kind=kind)

    def read(self) -> DeviceState:
        """A state of which only the kind is known."""
        return self._state


class FakeProbe:
    """Replays ``states`` in order, and the last one for ever after.

    Raises:
        ConfigError: ``states`` is empty.
    """

    def __init__(self, states: Iterable[DeviceState]) -> None:
        self._states = list(states)
        if not self._states:
            raise ConfigError("states", self._states, "hold at least one state")
        self._next = 0

    def read(self) -> DeviceState:
        """The next state of the recording."""
        state = self._states[self._next]
        self._next = min(self._next + 1, len(self._states) - 1)
        return state


def with_values(state: DeviceState, values: Mapping[str, Any]) -> DeviceState:
    """``state`` with ``values`` by field; the reason of each that is `Unknown` goes to ``unknown``."""
    changes = dict(values)
    reasons = {name: value.reason for name, value in values.items() if type(value) is Unknown}
    changes.update(dict.fromkeys(reasons))
    kept = {name: why for name, why in state.unknown.items() if changes.get(name) is None}
    return replace(state, **changes, unknown=kept | reasons)
