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
from lightning_hybrid.probes.nvml_queries import QUERIES, Query, memory_and_links, nvlinks
from lightning_hybrid.probes.values import Energy, Rate, Unknown
from lightning_hybrid.probes.visible import Seen
from lightning_hybrid.probes.xid import XidLog

_log = logging.getLogger(__name__)

_MOST_NVLINK_BYTES_PER_S = 1e13
_MOST_PROCESSES = 32
_PATIENCE = 3
"""Readings in a row that do not find the device before that is said."""
_NOT_THE_SLICE = Unknown("measured for the whole GPU only, and this is a MIG slice", lasting=True)
_READERS: dict[str, tuple[str, ...]] = {
    "_driver_version": ("driver_version",),
    "_nvlinks": ("num_nvlinks", "num_nvlinks_active"),
    "_field_values": ("memory_temperature_celsius", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"),
}
"""What takes more than one question, and the fields that it gives."""
_SELDOM_READERS = ("_driver_version", "_nvlinks")
_SELDOM_PERIOD_S = 10.0
_IDENTITY = ("name", "pci_bus_id", "compute_capability", "driver_version")

NVML_FIELDS = frozenset(
    {name for query in QUERIES for name in query.fields}
    | {name for names in _READERS.values() for name in names}
    | set(GPM_FIELDS)
    | {"nvml_index", "uuid", "mig_parent_uuid", "mig_gpu_instance", "mig_compute_instance"}
    | {"xid_events", "memory_process_bytes", "memory_others_bytes"}
)
"""Fields of `DeviceState` that `NvmlReader` gives."""

Values = dict[str, Any]
"""Values by field, `Unknown` among them."""
Source = int | str
"""Place of a query, or name of a reader."""


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
        self._asked: list[Source] = [*range(len(QUERIES)), *_READERS]
        self._ways = [0] * len(QUERIES)
        self._settled: Values = {}  # what does not change, and what cannot be had
        self._seldom: Values = {}
        self._seldom_sources: list[Source] = []
        self._seldom_until_s = float("-inf")
        self._energy = energy
        self._nvlink = (Rate(_MOST_NVLINK_BYTES_PER_S), Rate(_MOST_NVLINK_BYTES_PER_S))
        part = self._seen.slice
        self._gpm = GpmMeter(nvml, located.gpu_handle, None if part is None else part.gpu_instance)
        self._xid = XidLog(nvml, located.gpu_handle, xids)
        self._who: Values = {"nvml_index": self._seen.gpu.number, "uuid": self._seen.uuid}
        if part is not None:
            self._who["mig_parent_uuid"] = self._seen.gpu.uuid
            self._who["mig_gpu_instance"] = part.gpu_instance
            self._who["mig_compute_instance"] = part.compute_instance

    def read(self) -> Values:
        if self._clock() >= self._seldom_until_s:
            self._asked, self._seldom_sources, self._seldom = self._asked + self._seldom_sources, [], {}
            self._seldom_until_s = self._clock() + _SELDOM_PERIOD_S
        values = self._settled | self._seldom
        for source in tuple(self._asked):
            values.update(zip(_fields_of(source), self._answer(source), strict=True))
        if not isinstance(values["energy_j"], Unknown):
            values["energy_j"] = self._energy.update(values["energy_j"], self._clock())
        self._add_gpm(values)
        values["xid_events"] = self._checked(self._xid.read())
        values |= self._who
        values |= _own_memory(values)
        values["active"] = True
        if not isinstance(values["processes"], Unknown):
            values["processes"] = values["processes"][:_MOST_PROCESSES]
        return values

    def identity(self) -> Values:
        """Who the device is, as far as it has told."""
        told = self._settled | self._seldom
        return self._who | {name: told[name] for name in _IDENTITY if name in told}

    def close(self) -> tuple[int, ...]:
        """The XID errors that it had."""
        xids = self._xid.read()
        self._gpm.close()
        self._xid.close()
        return () if isinstance(xids, Unknown) else xids

    def _answer(self, source: Source) -> tuple[Any, ...]:
        if isinstance(source, str):
            values: tuple[Any, ...] = getattr(self, source)()
            once, seldom = False, source in _SELDOM_READERS
        else:
            query = QUERIES[source]
            values, once, seldom = self._answer_to(source, query), query.once, query.seldom
        unknown = [value for value in values if type(value) is Unknown]
        if unknown:
            for value in unknown:
                self._checked(value)
            once = len(unknown) == len(values) and all(value.lasting for value in unknown)
            seldom = False
        if once or seldom:
            self._asked.remove(source)
            (self._settled if once else self._seldom).update(zip(_fields_of(source), values, strict=True))
            if seldom and not once:
                self._seldom_sources.append(source)
        return values

    def _answer_to(self, place: int, query: Query) -> tuple[Any, ...]:
        if query.of == "whole" and self._seen.slice is not None:
            return (_NOT_THE_SLICE,) * len(query.fields)
        handle = self._located.handle if query.of == "slice" else self._located.gpu_handle
        answer: Any = None
        while self._ways[place] < len(query.calls):
            function, arguments = query.calls[self._ways[place]]
            answer = self.nvml.call(function, handle, *arguments)
            if not isinstance(answer, Unknown):
                return query.take(answer) if len(query.fields) > 1 else (query.take(answer),)
            if not answer.lasting:
                break
            self._ways[place] += 1
        return (answer,) * len(query.fields)

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

    def _nvlinks(self) -> tuple[Any, ...]:
        return nvlinks(self.nvml, self._located.gpu_handle)

    def _field_values(self) -> tuple[Any, ...]:
        temperature, sent, received = memory_and_links(self.nvml, self._located.gpu_handle)
        now_s = self._clock()
        return temperature, self._nvlink[0].update(sent, now_s), self._nvlink[1].update(received, now_s)


def _fields_of(source: Source) -> tuple[str, ...]:
    return _READERS[source] if isinstance(source, str) else QUERIES[source].fields


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
