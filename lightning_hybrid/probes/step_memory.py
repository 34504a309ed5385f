"""Meters of the memory that a step takes on its device, and of what is left there for the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.step_memory import StepMemory, StepMemoryMeter
from lightning_hybrid.probes.live_bytes import LiveBytes
from lightning_hybrid.probes.operators import can_run_uncompiled, uncompiled


class NoMeter:
    """For devices whose memory cannot be measured."""

    def measure(self) -> AbstractContextManager[StepMemory]:
        """A block of which nothing is known."""
        return nullcontext(StepMemory())

    def available_bytes(self, *, fresh: bool = False) -> int | None:
        """Not known."""
        return None


class CudaMeter:
    """Asks the caching allocator of a CUDA, ROCm or XPU device, and seldom its driver; never waits for the device.

    The allocator keeps its books on the host, when a tensor is made or dropped, so that they are right while the device
    is still at work. A measured step costs one reset and two readings of the allocator's counters, some ten
    microseconds each; `torch.cuda.memory_stats` sorts and renames the same counters at several times that. Available
    bytes cost one such reading, and with ``fresh`` a call to the driver, which may take a lock of the whole device.

    The peak is that of all threads and streams of the process, in blocks as the allocator rounds them, without what
    goes past it (NCCL, cuBLAS handles, the context). The process's peak counters, which
    `torch.cuda.max_memory_allocated` reads, begin anew with every step. A single tensor may not fit in what is
    available, as the allocator's free blocks lie apart. Before the process has used the device nothing is known.

    Args:
        device: The device.
        limit_bytes: Most bytes that this process may have allocated on it.
        module: Stands in for the torch module of the device's type, such as `torch.cuda`.

    Raises:
        ConfigError: ``limit_bytes`` is not positive.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None, *, module: Any = None) -> None:
        self._device = device
        self._limit_bytes = _checked(limit_bytes)
        self._module = getattr(torch, device.type) if module is None else module
        self._ceiling_bytes: int | None = None
        self._has_asked = False

    @contextmanager
    def measure(self) -> Iterator[StepMemory]:
        """A block around one step, as it is queued: the peak counts no matter whether the device has run it."""
        step = StepMemory()
        begin_bytes = self._begin()
        try:
            yield step
        finally:
            peak_bytes = self._bytes("allocated_bytes", "peak")
            if begin_bytes is not None and peak_bytes is not None:
                step.peak_bytes = max(0, peak_bytes - begin_bytes)

    def available_bytes(self, *, fresh: bool = False) -> int | None:
        """What the driver has free and the allocator has cached, within the limit and the process's memory fraction.

        Without ``fresh``, what others allocated or freed since the driver was last asked is not counted.
        """
        allocated_bytes = self._bytes("allocated_bytes", "current")
        if allocated_bytes is None:
            return None
        if fresh or not self._has_asked:
            self._has_asked = True
            self._ceiling_bytes = self._ask_driver()
        return _left(allocated_bytes, self._ceiling_bytes, self._limit_bytes)

    def _begin(self) -> int | None:
        if not self._module.is_initialized():
            return None
        try:
            self._module.reset_peak_memory_stats(self._device)
        except RuntimeError:
            return None
        return self._bytes("allocated_bytes", "current")

    def _ask_driver(self) -> int | None:
        """Bytes that the process could have allocated in all: free, cached and allocated."""
        reserved_bytes = self._bytes("reserved_bytes", "current")
        memory = _try(lambda: self._module.mem_get_info(self._device))
        if reserved_bytes is None or memory is None:
            return None
        free_bytes, total_bytes = memory
        read_frac = getattr(self._module, "get_per_process_memory_fraction", None)
        frac = None if read_frac is None else _try(lambda: read_frac(self._device))
        ceiling_bytes = int(free_bytes + reserved_bytes)
        return ceiling_bytes if frac is None else min(ceiling_bytes, int(frac * total_bytes))

    def _bytes(self, counter: str, metric: str) -> int | None:
        stats = _try(lambda: self._module.memory_stats_as_nested_dict(self._device))
        return int(stats[counter]["all"][metric]) if stats else None


class MpsMeter:
    """Asks Metal's allocator, which keeps no peak: of a step nothing is known, of the device what is left.

    Memory is shared with the host and with other processes, and what these hold is not counted.

    Args:
        limit_bytes: Most bytes that this process may have allocated on the device.
        module: Stands in for `torch.mps`.

    Raises:
        ConfigError: ``limit_bytes`` is not positive.
    """

    def __init__(self, limit_bytes: int | None = None, *, module: Any = torch.mps) -> None:
        self._limit_bytes = _checked(limit_bytes)
        self._module = module

    def measure(self) -> AbstractContextManager[StepMemory]:
        """A block of which nothing is known."""
        return nullcontext(StepMemory())

    def available_bytes(self, *, fresh: bool = False) -> int | None:
        """What is left of the memory that Metal recommends to use at most; always fresh."""
        allocated_bytes = _try(self._module.current_allocated_memory)
        if allocated_bytes is None:
            return None
        return _left(allocated_bytes, _try(self._module.recommended_max_memory), self._limit_bytes)


class HostMeter:
    """Counts the bytes of the CPU tensors that steps make, see `LiveBytes` for what it cannot see.

    Every operator takes some tens of microseconds longer, compiled code runs uncompiled inside the block (torch 2.6 and
    later; before, nothing is known in a process that has loaded the compiler), and results may be rounded differently.
    Nothing is known of a step with higher-order operators.

    Args:
        limit_bytes: Most bytes of tensors that steps have made, those that outlive their step included. What was there
            before, such as the weights, is not part of it.

    Raises:
        ConfigError: ``limit_bytes`` is not positive.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = _checked(limit_bytes)
        self._live = LiveBytes()

    @contextmanager
    def measure(self) -> Iterator[StepMemory]:
        """A block around one step; operators of other threads do not count."""
        step = StepMemory()
        if not can_run_uncompiled():
            yield step
            return
        begin_bytes = self._live.restart()
        try:
            with uncompiled(), self._live:
                yield step
        finally:
            if self._live.hidden is None:
                step.peak_bytes = self._live.peak_bytes - begin_bytes

    def available_bytes(self, *, fresh: bool = False) -> int | None:
        """What is left of the limit; always fresh."""
        return _left(self._live.live_bytes, self._limit_bytes)


def meter_for(device: torch.device, limit_bytes: int | None = None) -> StepMemoryMeter:
    """The meter that fits a device.

    Args:
        device: The device.
        limit_bytes: Most bytes that this process may have allocated on it. The CPU is only measured where it is given,
            because that takes time.

    Raises:
        ConfigError: ``limit_bytes`` is not positive.
    """
    if device.type == "cpu":
        return NoMeter() if limit_bytes is None else HostMeter(limit_bytes)
    module = getattr(torch, device.type, None)
    if all(hasattr(module, name) for name in _OF_ALLOCATOR):
        return CudaMeter(device, limit_bytes)
    if all(hasattr(module, name) for name in _OF_METAL):
        return MpsMeter(limit_bytes)
    return NoMeter()


_OF_ALLOCATOR = ("is_initialized", "mem_get_info", "memory_stats_as_nested_dict", "reset_peak_memory_stats")
"""What `CudaMeter` needs of a module; that of XPU has it from torch 2.6 on."""
_OF_METAL = ("current_allocated_memory", "recommended_max_memory")


def _checked(limit_bytes: int | None) -> int | None:
    if limit_bytes is not None and limit_bytes <= 0:
        raise ConfigError("limit_bytes", limit_bytes, "be positive")
    return limit_bytes


def _left(used_bytes: int, *bounds: int | None) -> int | None:
    """What the least bound leaves, ``None`` where no bound is known."""
    known = [bound for bound in bounds if bound is not None]
    return max(0, min(known) - used_bytes) if known else None


def _try(read: Callable[[], Any]) -> Any:
    """What ``read`` returns, ``None`` where torch or the driver refuses."""
    try:
        return read()
    except RuntimeError:
        return None
