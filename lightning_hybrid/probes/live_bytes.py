"""Counts the bytes of host memory that tensors hold, from one operator to the next."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.probes.operators import are_wrappers, is_composite, run_composite, subclasses

_FRESH = frozenset({"aten::lift_fresh"})
"""Receive what was made where no operator shows, as by `torch.tensor`."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees the operators that this thread calls inside ``with``, and adds up the CPU storages that they make.

    A storage counts once, whatever views of it there are, from the return of the operator that made it until nothing
    refers to it, on whatever thread and inside the block or after it; one that grows (``resize_``, ``out=``) counts
    with what it grew by. Storages that came into the block from outside do not count, nor what memory they give back.
    The block may be entered again, one time after the other, and keeps its count, which is read on its own thread.

    Operators that only call others are taken apart, so that what these hold for each other is seen. torch then chooses
    between kernels of equal meaning, as it does under any dispatch mode, and may round the last bit otherwise.

    Not seen: the workspace of a kernel, and storages that it makes and frees before it returns (fused and custom
    operators, scripted code that torch has fused); memory of numpy and others, also under a tensor; sparse and MKLDNN
    tensors; ``untyped_storage().resize_``; what the allocator adds or keeps. Compiled code cannot be seen at all: see
    `uncompiled`.

    Example:
        >>> x = torch.zeros(256)
        >>> with LiveBytes() as live:
        ...     y = x + 1
        ...     z = y * 2
        ...     del y
        >>> live.live_bytes, live.peak_bytes
        (1024, 2048)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.peak_bytes = 0
        """Most bytes at once since the last `restart`."""
        self.hidden: str | None = None
        """A higher-order operator that ran since then: it calls others where nothing sees them."""
        self._live_bytes = 0
        self._held: dict[int, _Held] = {}  # by the address of the storage
        # Whoever frees a storage only leaves word: that may be another thread, or the middle of any line here.
        self._freed: deque[_Held] = deque()

    @property
    def live_bytes(self) -> int:
        """Bytes now."""
        self._settle()
        return self._live_bytes

    def restart(self) -> int:
        """Lets the peak begin anew at the bytes now, and returns them."""
        self.peak_bytes, self.hidden = self.live_bytes, None
        return self.peak_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if are_wrappers(subclasses(types)):
            return NotImplemented  # subclasses of tensors call operators on what they hold, which come here next
        if is_composite(func):
            with self:
                return run_composite(func, args, kwargs)
        if isinstance(func, HigherOrderOperator):
            self.hidden = str(func)
        before = [(each, each.nbytes()) for each in _storages((args, kwargs))] if _is_mutable(func) else ()
        out = func(*args, **kwargs)
        self._settle()
        for storage, num_bytes in before:
            self._add(storage, storage.nbytes() - num_bytes)
        new = [each for each in _storages(out) if each._cdata not in self._held]
        if new:
            self._take(new, func, args, kwargs)
        return out

    def _take(self, new: list[torch.UntypedStorage], func: Any, args: Any, kwargs: Any) -> None:
        """Counts what an operator returned, unless it was handed in or is other people's memory."""
        if _is_fresh(func):
            new = [each for each in new if each.resizable()]
        else:
            inputs = {each._cdata for each in _storages((args, kwargs))}
            new = [each for each in new if each._cdata not in inputs]
        for storage in {each._cdata: each for each in new}.values():
            self._add(storage, storage.nbytes())

    def _add(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if not num_bytes:
            return
        held = self._held.get(storage._cdata)
        if held is None:
            held = self._held[storage._cdata] = _Held(storage, self._freed.append)
            held.key, held.num_bytes = storage._cdata, 0
        held.num_bytes += num_bytes
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _settle(self) -> None:
        """Takes off what was freed, before the address of one of them can be that of a storage to be counted."""
        while self._freed:
            gone = self._freed.popleft()
            self._live_bytes -= gone.num_bytes
            del self._held[gone.key]


class _Held(weakref.ref[torch.UntypedStorage]):
    """A storage that counts, its address and its bytes."""

    __slots__ = ("key", "num_bytes")
    key: int
    num_bytes: int


def _storages(nested: Any) -> Iterator[torch.UntypedStorage]:
    """Those of the CPU tensors in ``nested``."""
    if isinstance(nested, torch.Tensor):
        if nested.layout is torch.strided:
            storage = nested.untyped_storage()
            if storage.device.type == "cpu":  # a fake tensor's is on "meta", whatever its own device
                yield storage
    elif isinstance(nested, list | tuple):
        for each in nested:
            yield from _storages(each)
    elif isinstance(nested, dict):
        yield from _storages(list(nested.values()))


@cache
def _is_mutable(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.is_mutable


@cache
def _is_fresh(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.name in _FRESH
