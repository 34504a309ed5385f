"""NVIDIA's management library: one initialisation per process, one way to ask, one table of its errors."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from types import ModuleType
from typing import Any, NamedTuple

from lightning_hybrid.probes.values import Unknown

_log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """What an error of NVML means to us; see `Unknown`."""

    reason: str
    lasting: bool = False
    lost: bool = False


_ERRORS = {
    1: Kind("NVML was shut down"),
    2: Kind("NVML refuses the question on this device", lasting=True),
    3: Kind("not supported by this device or driver", lasting=True),
    4: Kind("not permitted to this user", lasting=True),
    6: Kind("NVML finds nothing there"),
    7: Kind("NVML's answer was too long"),
    8: Kind("the GPU lacks external power", lost=True),
    9: Kind("the NVIDIA driver is not loaded", lasting=True),
    10: Kind("NVML timed out"),
    11: Kind("the driver has trouble with the GPU's interrupts"),
    12: Kind("NVML's library is not installed", lasting=True),
    13: Kind("this driver is too old for the question", lasting=True),
    14: Kind("the GPU's information ROM is corrupted"),
    15: Kind("the GPU is lost: it fell off the bus", lost=True),
    16: Kind("the GPU must be reset", lost=True),
    17: Kind("the operating system blocks the GPU"),
    18: Kind("driver and NVML library are of different versions", lasting=True),
    25: Kind("this driver is too old for the question's form", lasting=True),
    26: Kind("the question is no longer supported", lasting=True),
    28: Kind("the GPU is not there", lost=True),
    999: Kind("NVML failed without saying why"),
}
"""By NVML's return code (``nvmlReturn_t``); others are failures that may pass."""

_UNINITIALIZED = 1


def meaning(code: int) -> Unknown:
    """What an NVML return code says about the value that was asked for."""
    return Unknown(*_ERRORS.get(code, Kind(f"NVML failed with code {code}")))


class Nvml:
    """NVML in this process. Get it from `session`.

    Its first question initialises the library, and says once in the log when that fails.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._module: ModuleType | None = None
        self._failed: Unknown | None = None
        self._refusals: tuple[type[Exception], ...] = ()

    def call(self, function: str, *args: Any) -> Any:
        """What nvidia-ml-py's ``function`` returns, or `Unknown`; never raises for what the driver does.

        It takes as long as the driver takes, so it is not for the thread that runs steps.
        """
        if self._module is None:
            failed = self.start()
            if failed is not None:
                return failed
        try:
            return getattr(self._module, function)(*args)
        except self._refusals as err:
            refused = self._refused(function, err)
        if refused.code != _UNINITIALIZED:
            return refused.unknown
        self._ask("nvmlInit", ())  # somebody else in this process has shut the library down
        found = self._ask(function, args)
        return found.unknown if isinstance(found, _Refused) else found

    def constant(self, name: str) -> Any:
        """A constant of nvidia-ml-py or one of its types, `Unknown` where this version has none."""
        failed = self.start()
        if failed is not None:
            return failed
        return getattr(self._module, name, Unknown(f"this nvidia-ml-py has no {name}", lasting=True))

    def field_values(self, handle: Any, fields: list[tuple[int, int]]) -> list[Any]:
        """Values by their ``NVML_FI_`` numbers and scopes, in one question; each of them may be `Unknown`."""
        found = self.call("nvmlDeviceGetFieldValues", handle, fields)
        return [found] * len(fields) if isinstance(found, Unknown) else [_value_of(each) for each in found]

    def start(self) -> Unknown | None:
        """Initialises NVML, the first time; why it could not be, ``None`` when it could."""
        if self._module is None and self._failed is None:
            with self._lock:
                self._begin()
        return self._failed

    def _begin(self) -> None:
        if self._module is None and self._failed is None:
            self._failed = self._initialise()
            if self._failed is not None:
                _log.warning("the state of NVIDIA GPUs is not known here: %s", self._failed.reason)

    def _initialise(self) -> Unknown | None:
        try:
            module = importlib.import_module("pynvml")
        except ImportError as err:
            return Unknown(f"nvidia-ml-py cannot be imported: {err}", lasting=True)
        if not hasattr(module, "NVMLError") or not hasattr(module, "nvmlInit"):
            return Unknown("the module pynvml that is installed here is not nvidia-ml-py", lasting=True)
        try:
            module.nvmlInit()
        except module.NVMLError as err:
            return Unknown(meaning(_code(err)).reason, lasting=True)
        except (AttributeError, OSError) as err:
            return Unknown(f"NVML cannot be loaded: {type(err).__name__}: {err}", lasting=True)
        self._module, self._refusals = module, (module.NVMLError, *_misfits(module))
        return None

    def _ask(self, function: str, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(self._module, function)(*args)
        except self._refusals as err:
            return self._refused(function, err)

    def _refused(self, function: str, err: Exception) -> _Refused:
        module: Any = self._module
        if isinstance(err, module.NVMLError):
            return _Refused(_code(err), meaning(_code(err)))
        if not hasattr(module, function):
            return _Refused(0, Unknown(f"this nvidia-ml-py has no {function}", lasting=True))
        return _Refused(0, Unknown(f"{function} failed: {type(err).__name__}: {err}", lasting=True))


def _value_of(field: Any) -> Any:
    code = _member(field, "nvmlReturn")
    if code != 0:
        return meaning(code)
    kind = _member(field, "valueType")
    name = _VALUE_TYPES.get(kind)
    return Unknown(f"NVML gives a value of type {kind}") if name is None else getattr(_member(field, "value"), name)


_member = object.__getattribute__
"""Passes by the look-up of nvidia-ml-py's structures, which tries to decode every number as text."""


def _code(error: Any) -> int:
    return int(getattr(error, "value", 999))


def _misfits(module: Any) -> tuple[type[Exception], ...]:
    """What comes of a binding of another time than the driver: wrong signatures, no such structure, text that is none.

    nvidia-ml-py's own error for it is no `NVMLError`.
    """
    mismatch: type[Exception] = getattr(module, "NVMLLibraryMismatchError", AttributeError)
    return mismatch, AttributeError, ctypes.ArgumentError, OSError, TypeError, ValueError


class _Refused(NamedTuple):
    code: int
    unknown: Unknown


_VALUE_TYPES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Member of ``nvmlValue_t`` by ``nvmlValueType_t``."""


class _Sessions:
    """Holds the session of this process; a forked child begins with none."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._session: Nvml | None = None

    def get(self) -> Nvml:
        with self._lock:
            if self._session is None or self._session.pid != os.getpid():
                self._session = Nvml()
            return self._session


_SESSIONS = _Sessions()


def session() -> Nvml:
    """NVML in this process, the same for all callers; a new one after a fork."""
    return _SESSIONS.get()
