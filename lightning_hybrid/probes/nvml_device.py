"""Reads everything that NVML tells of one GPU or MIG slice."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from lightning_hybrid.core.device_state import DeviceProcess
from lightning_hybrid.probes.gpm import FIELDS as GPM_FIELDS
from lightning_hybrid.probes.gpm import GpmMeter
from lightning_hybrid.probes.nvml import Nvml, session
from lightning_hybrid.probes.nvml_gpus import Located, locate
from lightning_hybrid.probes.nvml_queries import QUERIES, Query, memory_temperature, nvlink_bytes, nvlinks
from lightning_hybrid.probes.values import Energy, Rate, Unknown
from lightning_hybrid.probes.visible import Seen
from lightning_hybrid.probes.xid import XidLog

_log = logging.getLogger(__name__)

_MOST_NVLINK_BYTES_PER_S = 1e13
_MOST_PROCESSES = 32
_PATIENCE = 3
"""Readings in a row that do not find the device before that is said."""
_NOT_THE_SLICE = Unknown("measured for the whole GPU only, and this is a MIG slice", lasting=True)
_SINGLE: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    (("memory_temperature_celsius",), "_memory_temperature", False),
    (("num_nvlinks", "num_nvlinks_active"), "_nvlinks", True),
    (("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"), "_nvlink_rates", False),
)
"""Fields, what reads them, and whether they seldom change."""
_SELDOM_PERIOD_S = 10.0

NVML_FIELDS = frozenset(
    {name for query in QUERIES for name in query.fields}
    | {name for names, _, _ in _SINGLE for name in names}
    | set(GPM_FIELDS)
    | {"nvml_index", "uuid", "driver_version", "mig_parent_uuid", "mig_gpu_instance", "mig_compute_instance"}
    | {"xid_events", "memory_process_bytes", "memory_others_bytes"}
)
"""Fields of `DeviceState` that `NvmlReader` gives."""

Values = dict[str, Any]
"""Values by field, `Unknown` among them."""


class _Lost(Exception):
    def __init__(self, why: Unknown) -> None:
        super().__init__(why.reason)
        self.why = why


class NvmlReader:
    """Asks NVML for everything about one device, each time anew.

    The device is found when it is first read, in every process anew, and again after it was lost. A question that
    this device, driver or binding cannot answer is asked once; one that failed for another reason is asked again.

    Args:
        find: Tells which GPU or slice it is.
        nvml: The session of this process.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        find: Callable[[Nvml], Seen | Unknown],
        *,
        nvml: Callable[[], Nvml] = session,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find, self._session, self._clock = find, nvml, clock
        self._seen: Seen | None = None
        self._device: _Device | None = None
        self._energy = Energy()
        self._xids: tuple[int, ...] = ()
        self._identity: Values = {}
        self._was_lost, self._not_found = False, 0

    def read(self) -> Values:
        """Values by field, and ``active`` and ``error``; takes as long as the driver takes."""
        nvml = self._session()
        if self._device is None or self._device.nvml is not nvml:
            self._device = None  # handles do not outlive a fork
            located = self._locate(nvml)
            if isinstance(located, Unknown):
                self._warn_in_time(nvml, located)
                return self._without(located)
            self._device = _Device(nvml, located, self._clock, self._energy, self._xids)
        try:
            values = self._device.read()
        except _Lost as lost:
            self._identity = self._device.identity()
            self.close()
            self._energy.interrupt()
            return self._without(lost.why)
        self._was_lost, self._not_found = False, 0
        return values

    def forget(self) -> None:
        """Has the device found anew at the next reading, which then counts as the first."""
        self.close()
        self._seen, self._was_lost = None, False
        self._energy, self._xids, self._identity = Energy(), (), {}

    def close(self) -> None:
        """Gives everything back to the driver."""
        if self._device is not None:
            self._xids = self._device.close()
            self._device = None

    def _locate(self, nvml: Nvml) -> Any:
        if self._seen is None:  # once found it keeps its UUID, whatever becomes of its number
            seen = self._find(nvml)
            if isinstance(seen, Unknown):
                return seen
            self._seen = seen
        return locate(nvml, self._seen)

    def _warn_in_time(self, nvml: Nvml, why: Unknown) -> None:
        """Says once that the device is not found, where CUDA has had the time to start and to tell which one it is."""
        self._not_found += 1
        if self._not_found == _PATIENCE and not why.lost and nvml.start() is None:
            _log.warning("the state of a GPU is not known here: %s", why.reason)

    def _without(self, why: Unknown) -> Values:
        values: Values = dict.fromkeys(NVML_FIELDS, why)
        if why.lost:
            if not self._was_lost:
                _log.warning("a GPU can no longer be read: %s", why.reason)
            self._was_lost = True
        # a device that was lost and is not found again is still lost
        if self._was_lost:
            values |= self._identity | {"active": False, "error": why.reason, "xid_events": self._xids}
        return values


class _Device:
    """A device that was found."""

    def __init__(
        self, nvml: Nvml, located: Located, clock: Callable[[], float], energy: Energy, xids: tuple[int, ...]
    ) -> None:
        self.nvml, self._located, self._clock = nvml, located, clock
        self._seen = located.seen
        self._fixed: dict[int, tuple[Any, ...]] = {}  # by place of the query
        self._ways = [0] * len(QUERIES)
        self._refused: dict[str, tuple[Any, ...]] = {}
        self._seldom: dict[int | str, tuple[Any, ...]] = {}  # by place of the query or name of the reader
        self._seldom_until_s = float("-inf")
        self._energy = energy
        self._nvlink = (Rate(_MOST_NVLINK_BYTES_PER_S), Rate(_MOST_NVLINK_BYTES_PER_S))
        part = self._seen.slice
        self._gpm = GpmMeter(nvml, located.gpu_handle, None if part is None else part.gpu_instance)
        self._xid = XidLog(nvml, located.gpu_handle, xids)

    def read(self) -> Values:
        values: Values = {}
        if self._clock() >= self._seldom_until_s:
            self._seldom.clear()
            self._seldom_until_s = self._clock() + _SELDOM_PERIOD_S
        for place, query in enumerate(QUERIES):
            values.update(zip(query.fields, self._answer(place, query), strict=True))
        if not isinstance(values["energy_j"], Unknown):
            values["energy_j"] = self._energy.update(values["energy_j"], self._clock())
        for fields, reader, is_seldom in _SINGLE:
            values.update(zip(fields, self._kept(reader, is_seldom=is_seldom), strict=True))
        self._add_gpm(values)
        values["xid_events"] = self._checked(self._xid.read())
        values |= self.identity() | _own_memory(values) | {"active": True}
        if not isinstance(values["processes"], Unknown):
            values["processes"] = values["processes"][:_MOST_PROCESSES]
        return values

    def identity(self) -> Values:
        """Who the device is; needs no answer of the driver but the first."""
        gpu, part = self._seen
        known: Values = {
            name: value
            for place, values in self._fixed.items()
            for name, value in zip(QUERIES[place].fields, values, strict=True)
            if name in ("name", "pci_bus_id", "compute_capability")
        }
        version = self._kept("_driver_version", is_seldom=True)[0]
        known |= {"nvml_index": gpu.number, "uuid": self._seen.uuid, "driver_version": version}
        if part is not None:
            known |= {
                "mig_parent_uuid": gpu.uuid,
                "mig_gpu_instance": part.gpu_instance,
                "mig_compute_instance": part.compute_instance,
            }
        return known

    def close(self) -> tuple[int, ...]:
        """The XID errors that it had."""
        xids = self._xid.read()
        self._gpm.close()
        self._xid.close()
        return () if isinstance(xids, Unknown) else xids

    def _answer(self, place: int, query: Query) -> tuple[Any, ...]:
        fixed = self._fixed.get(place) or self._seldom.get(place)
        if fixed is not None:
            return fixed
        if query.of == "whole" and self._seen.slice is not None:
            return (_NOT_THE_SLICE,) * len(query.fields)
        handle = self._located.handle if query.of == "slice" else self._located.gpu_handle
        way = self._ways[place]
        answer: Any = None
        while way < len(query.calls):
            function, arguments = query.calls[way]
            answer = self._checked(self.nvml.call(function, handle, *arguments))
            if not isinstance(answer, Unknown) or not answer.lasting:
                break
            way += 1
        self._ways[place] = way
        if isinstance(answer, Unknown):
            values: tuple[Any, ...] = (answer,) * len(query.fields)
            if answer.lasting:
                self._fixed[place] = values
            return values
        values = query.take(answer)
        if (query.once or query.seldom) and not any(isinstance(value, Unknown) for value in values):
            (self._fixed if query.once else self._seldom)[place] = values
        return values

    def _kept(self, reader: str, *, is_seldom: bool = False) -> tuple[Any, ...]:
        """What the method ``reader`` gives, as long as it makes sense to ask."""
        kept = self._refused.get(reader) or self._seldom.get(reader)
        if kept is not None:
            return kept
        values: tuple[Any, ...] = getattr(self, reader)()
        for value in values:
            self._checked(value)
        if all(isinstance(value, Unknown) and value.lasting for value in values):
            self._refused[reader] = values
        elif is_seldom and not any(isinstance(value, Unknown) for value in values):
            self._seldom[reader] = values
        return values

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, Unknown) and answer.lost:
            raise _Lost(answer)
        return answer

    def _add_gpm(self, values: Values) -> None:
        for name, value in self._gpm.read().items():
            self._checked(value)
            # the driver's own figure stays where it has one: it covers a known period
            if name != "utilization_frac" or self._seen.slice is not None or isinstance(values[name], Unknown):
                values[name] = value

    def _driver_version(self) -> tuple[Any, ...]:
        return (self.nvml.call("nvmlSystemGetDriverVersion"),)

    def _memory_temperature(self) -> tuple[Any, ...]:
        return (memory_temperature(self.nvml, self._located.gpu_handle),)

    def _nvlinks(self) -> tuple[Any, ...]:
        return nvlinks(self.nvml, self._located.gpu_handle)

    def _nvlink_rates(self) -> tuple[Any, ...]:
        sent, received = nvlink_bytes(self.nvml, self._located.gpu_handle)
        now_s = self._clock()
        return self._nvlink[0].update(sent, now_s), self._nvlink[1].update(received, now_s)


def _own_memory(values: Values) -> Values:
    processes, used = values["processes"], values["memory_used_bytes"]
    if isinstance(processes, Unknown):
        return {"memory_process_bytes": processes, "memory_others_bytes": processes}
    own: DeviceProcess | None = next((each for each in processes if each.pid == os.getpid()), None)
    if own is None or own.memory_bytes is None:
        why = Unknown("the driver does not tell what this process uses")
        return {"memory_process_bytes": why, "memory_others_bytes": why}
    others: Any = used
    if isinstance(values["memory_driver_reserved_bytes"], Unknown):
        others = Unknown("what this driver counts as used holds its own share")
    elif not isinstance(used, Unknown):
        others = used - own.memory_bytes
        if others < 0:
            others = Unknown("this process uses more than all together, says the driver")
    return {"memory_process_bytes": own.memory_bytes, "memory_others_bytes": others}
