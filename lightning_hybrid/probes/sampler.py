"""Reads a device on a thread of its own, so that whoever wants to know its state never waits for a driver."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.probes.base import DeviceProbe

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """What the thread and its sampler share from one start to the next stop."""

    latest: DeviceState
    began_s: float | None = None
    """When the reading that is going on began."""
    woken: threading.Condition = field(default_factory=threading.Condition)
    is_stopped: bool = False

    def goes_on(self) -> bool:
        return not self.is_stopped


class Sampler:
    """Reads one device over and over in the background; a `DeviceProbe` itself, whose ``read`` costs microseconds.

    A reading that takes longer than ``overdue_s`` has nobody wait for it: until it is done ``read`` gives a state that
    knows who the device is and that it does not answer. In a forked child the sampler must be started again.

    Args:
        probe: What is asked; on the sampler's thread only.
        kind: Type of the device, as torch names it.
        period_s: Seconds from the beginning of one reading to the next; at once if a reading took longer.
        kept: How many of the newest readings are kept.
        overdue_s: Seconds after which a device does not answer.
        clock: Monotonic seconds.

    Raises:
        ConfigError: ``period_s``, ``kept`` or ``overdue_s`` is not positive.
    """

    def __init__(
        self,
        probe: DeviceProbe,
        *,
        kind: str = "cpu",
        period_s: float = 1.0,
        kept: int = 120,
        overdue_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("period_s", period_s), ("kept", kept), ("overdue_s", overdue_s)):
            _check_positive(name, value)
        self.after: list[Callable[[DeviceState], None]] = []
        """Called on the sampler's thread with each new state."""
        self._probe, self._clock, self._period_s, self._overdue_s = probe, clock, period_s, overdue_s
        self._unread = DeviceState(kind=kind, error="not read yet")
        self._kept: deque[DeviceState] = deque(maxlen=kept)
        self._run = _Run(self._unread, is_stopped=True)
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._silent: tuple[DeviceState, DeviceState] | None = None

    @property
    def period_s(self) -> float:
        """Seconds from one reading to the next; may be set at any time, and holds at once.

        Raises:
            ConfigError: it is not positive.
        """
        return self._period_s

    @period_s.setter
    def period_s(self, value: float) -> None:
        _check_positive("period_s", value)
        with self._run.woken:
            self._period_s = value
            self._run.woken.notify_all()

    @property
    def is_running(self) -> bool:
        """Whether the thread is there, in this process."""
        return self._pid == os.getpid() and self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread, which reads at once; does nothing where it runs already."""
        if self.is_running and not self._run.is_stopped:
            return
        before = self._thread if self._pid == os.getpid() else None
        self._pid = os.getpid()
        self._run = _Run(self._unread)
        self._thread = threading.Thread(
            target=self._work, args=(self._run, before), name="lightning_hybrid-sampler", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends the thread, without waiting longer than ``timeout_s`` for a driver; the newest state stays."""
        run, thread = self._run, self._thread
        if self._pid != os.getpid():
            return  # the thread stayed in the parent
        with run.woken:
            run.is_stopped = True
            run.woken.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def read(self) -> DeviceState:
        """The newest state; never waits."""
        run = self._run
        began_s, latest = run.began_s, run.latest
        if self._pid != os.getpid():
            return self._unread
        if began_s is None or run.is_stopped or self._clock() - began_s <= self._overdue_s:
            return latest
        if self._silent is None or self._silent[0] is not latest:
            self._silent = (latest, latest.silent("the driver does not answer"))
        return self._silent[1]

    def history(self) -> tuple[DeviceState, ...]:
        """The newest states, the oldest first."""
        return tuple(self._kept)

    def _work(self, run: _Run, before: threading.Thread | None) -> None:
        run.began_s = self._clock()
        if before is not None:
            before.join()  # it may still wait for its driver, and two threads must not share a probe
        while run.goes_on():
            began_s = run.began_s = self._clock()
            state = self._read_once(run)
            if not run.goes_on():
                break
            run.latest, run.began_s = state, None
            self._kept.append(state)
            for call in self.after:
                call(state)
            with run.woken:
                while run.goes_on() and (left_s := began_s + self._period_s - self._clock()) > 0:
                    run.woken.wait(left_s)
        close = getattr(self._probe, "close", None)
        if close is not None and run is self._run:
            close()

    def _read_once(self, run: _Run) -> DeviceState:
        try:
            read: object = self._probe.read()
            if not isinstance(read, DeviceState):
                raise TypeError(f"read() must give a DeviceState, got {type(read).__name__}")
            return read
        except Exception as err:  # a probe of the user's; one that fails must not end the others' work
            state = run.latest.silent(f"the probe failed: {type(err).__name__}: {err}")
            if state.error != run.latest.error:
                _log.warning("the state of %s is not known: %s", state.name or state.kind, state.error)
            return state


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(name, value, "be positive and finite")
