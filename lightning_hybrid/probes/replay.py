"""Records states to a file as lines of JSON, and plays them back in the order of their time."""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.system_state import SystemState

_log = logging.getLogger(__name__)

DeviceKey = tuple[str, str]
"""Which device a state is of: its UUID, or its type and index where it has none."""


class StateRecorder:
    """Appends states to a file, one line each; keeps the newest ones and never more than ``max_bytes``.

    The file is the newer half. When it is full it becomes ``<path>.older``, and what had that name goes. A last line
    that was cut off, because the process died while it wrote, is taken away when the file is opened again. Lines are
    handed to the system at once and not forced to the disk.

    What the disk refuses is said once and ends the recording, not the run: hand ``record`` to ``Sampler.after`` or call
    it between steps; it is never needed inside of one. A context manager that closes the file. One process writes.

    Args:
        path: The file; its directory must be there.
        max_bytes: Most bytes of both halves together.

    Raises:
        ConfigError: ``max_bytes`` is less than 2.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, max_bytes: int = 64 * 2**20) -> None:
        if max_bytes < 2:
            raise ConfigError("max_bytes", max_bytes, "be at least 2")
        self._path, self._half_bytes = Path(path), max_bytes // 2
        _drop_cut_line(self._path)
        self._file: Any = self._path.open("ab")
        self._size = self._path.stat().st_size

    def record(self, state: DeviceState | SystemState) -> None:
        """Writes a state; one that is larger than half of the file may be is left out."""
        kind = "system" if isinstance(state, SystemState) else "device"
        line = f'{{"{kind}":{state.to_json()}}}\n'.encode()
        if self._file is None or len(line) > self._half_bytes:
            return
        try:
            if self._size + len(line) > self._half_bytes:
                self._turn_over()
            self._file.write(line)
            self._file.flush()
        except (OSError, ValueError) as err:  # ValueError: another thread has closed the file
            _log.warning("states are not recorded in %s any more: %s", self._path, err)
            self._file = None
            return
        self._size += len(line)

    def close(self) -> None:
        """Closes the file; what is recorded later is dropped."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> StateRecorder:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _turn_over(self) -> None:
        self._file.close()
        self._path.replace(_older(self._path))
        self._file = self._path.open("ab")
        self._size = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStates:
    """What a recording holds, each in the order of its time; states without one stand where they were recorded."""

    systems: tuple[SystemState, ...]
    devices: dict[DeviceKey, tuple[DeviceState, ...]]
    """States that were recorded alone, and those in a `SystemState`, by the device that they are of."""


def load_states(path: str | Path) -> RecordedStates:
    """The states that a `StateRecorder` wrote.

    Args:
        path: The file that it was given.

    Raises:
        ConfigError: a line is no state; names the file and the line. A last line that was cut off is passed over.
        OSError: there is no such file, or it cannot be read.
    """
    path = Path(path)
    older = _older(path)
    files = [older, path] if older.exists() else [path]
    found = [state for file in files for state in _states(file)]
    systems = [state for state in found if isinstance(state, SystemState)]
    by_device: dict[DeviceKey, list[DeviceState]] = {}
    for state in found:
        for device in state.devices if isinstance(state, SystemState) else (state,):
            by_device.setdefault(device_key(device), []).append(device)
    devices = {key: tuple(_in_time(states)) for key, states in by_device.items()}
    return RecordedStates(systems=tuple(_in_time(systems)), devices=devices)


def device_key(state: DeviceState) -> DeviceKey:
    """Which device a state is of."""
    if state.uuid is not None:
        return state.kind, state.uuid
    index = state.nvml_index if state.index is None else state.index
    return state.kind, "" if index is None else str(index)


class ReplayProbe:
    """A `DeviceProbe` that gives the states of a device as they came, by a clock.

    The first reading gives the first state; a later one gives the newest state that was recorded no longer after the
    first than the clock has gone on since. The last one stands for ever after. To step through states whatever the
    time, use `FakeProbe`.

    Args:
        states: Of one device, with their times.
        clock: Monotonic seconds; a simulator's own, or one that runs faster.

    Raises:
        ConfigError: there is no state, or one has no ``timestamp_s``.
    """

    def __init__(self, states: Iterable[DeviceState], clock: Callable[[], float] = time.monotonic) -> None:
        self._states = _in_time(states)
        if not self._states:
            raise ConfigError("states", self._states, "hold at least one state")
        times_s = [state.timestamp_s for state in self._states]
        self._times_s = [time_s for time_s in times_s if time_s is not None]
        if len(self._times_s) < len(times_s):
            raise ConfigError("states", times_s, "all have a timestamp_s")
        self._clock = clock
        self._start_s: float | None = None

    def read(self) -> DeviceState:
        """The state of the device when as much time had passed."""
        now_s = self._clock()
        if self._start_s is None:
            self._start_s = now_s
        passed = bisect_right(self._times_s, self._times_s[0] + (now_s - self._start_s))
        return self._states[max(0, passed - 1)]


S = TypeVar("S", DeviceState, SystemState)


def _in_time(states: Iterable[S]) -> list[S]:
    """The states by their time; one without a time stays behind the one before it."""
    last_s = float("-inf")
    timed: list[tuple[float, S]] = []
    for state in states:
        last_s = last_s if state.timestamp_s is None else state.timestamp_s
        timed.append((last_s, state))
    return [state for _, state in sorted(timed, key=lambda each: each[0])]


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".older")


def _drop_cut_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        whole = file.read()
        if not whole.endswith(b"\n"):
            file.truncate(whole.rfind(b"\n") + 1)


def _states(path: Path) -> list[DeviceState | SystemState]:
    lines = path.read_bytes().splitlines(keepends=True)
    return [_state(path, number, line) for number, line in enumerate(lines, start=1) if line.endswith(b"\n")]


def _state(path: Path, number: int, line: bytes) -> DeviceState | SystemState:
    rule = 'be {"device": ...} or {"system": ...}, with the fields of a state'
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ConfigError("line", line[:80], "be an object")
        return SystemState.from_dict(found["system"]) if "system" in found else _device(found["device"])
    except (ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"{path} line {number}", line[:80], f"{rule} ({err})") from err


def _device(found: Any) -> DeviceState:
    return SystemState.from_dict({"devices": [found]}).devices[0]
