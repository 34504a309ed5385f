"""Counts the floating-point operations of a step while it runs, by the formulas of torch's flop counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_hybrid.probes.flop_formulas import MORE_FORMULAS
from lightning_hybrid.probes.operators import (
    are_wrappers,
    can_run_uncompiled,
    is_composite,
    run_composite,
    subclasses,
    uncompiled,
)

# fmt: off
_MATRIX_WORDS = frozenset({
    "mm", "addmm", "addbmm", "bmm", "baddbmm", "matmul", "mv", "addmv", "dot", "vdot", "inner", "einsum",
    "tensordot", "linear", "bilinear", "trilinear", "conv", "conv1d", "conv2d", "conv3d", "convolution", "rnn",
    "lstm", "gru", "attention", "transformer", "fft", "stft", "istft", "linalg", "cdist", "pdist", "cov",
    "corrcoef", "smm", "hspmm", "sspaddmm", "cholesky", "svd", "qr", "geqrf", "ormqr", "orgqr", "solve", "det",
    "slogdet", "logdet", "inverse", "pinverse", "matrix",
})
"""An operator with one of these in its name multiplies matrices, unless it stands in the next set."""
_NO_MATRIX_PRODUCT = frozenset({
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_cudnn_rnn_flatten_weight",
    "_use_cudnn_rnn_flatten_weight", "linalg_vector_norm", "slice_inverse", "linalg_cross", "linalg_diagonal",
    "_linalg_check_errors",
})
# fmt: on
_PLAIN_NAMESPACES = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "torchvision"})
"""Whose operators have names that tell what they do."""
_MOST_REASONS = 8


class FlopCount:
    """The operations of the steps inside `counting_flops`; complete once it has ended."""

    def __init__(self) -> None:
        self.reasons: dict[str, None] = {}
        """Why the operations are not known, in order; empty where they are."""
        self._by_dtype: Counter[str] = Counter()

    @property
    def reason(self) -> str | None:
        """Why the operations are not known, ``None`` where they are."""
        return "; ".join(self.reasons) or None

    @property
    def by_dtype(self) -> dict[str, int] | None:
        """Operations by the type that is computed in, ``None`` where they are not known."""
        return None if self.reasons else dict(self._by_dtype)

    @property
    def total(self) -> int | None:
        """All operations, ``None`` where they are not known."""
        return None if self.reasons else self._by_dtype.total()

    def add(self, dtype: str, flops: int) -> None:
        """Counts operations."""
        self._by_dtype[dtype] += flops

    def refuse(self, reason: str) -> None:
        """Makes the operations unknown."""
        if len(self.reasons) < _MOST_REASONS:
            self.reasons[reason] = None


@contextmanager
def counting_flops(module: nn.Module | None = None) -> Iterator[FlopCount]:
    """Counts the operations of this thread while the block runs: two per multiply and add of a matrix product.

    Counted are matrix products, convolutions, attention and recurrent layers, with the formulas of
    `torch.utils.flop_counter` and a few that it lacks; as there, causal attention counts as full, and what works
    element by element does not count, nor what has only a shape (meta tensors). Of tensors that are sharded (DTensor)
    this rank's part counts. If an operator
    multiplies matrices in a way that nobody has a formula for, or a custom one might, nothing is known, and the reason
    names it.

    Results may be rounded differently: before operators can be seen, torch chooses between kernels and layouts of equal
    meaning, and chooses otherwise while they are watched. Whoever needs results to the last bit counts a step beside
    the real ones and drops what it returns. ``inference_mode``, ``no_grad``, autocast and gradients work, and an
    exception leaves nothing behind.

    A module that was compiled is run as always and not counted, because compiled code does not show its operations.
    Other compiled functions run uncompiled while they are counted (torch 2.6 and later; before, nothing is counted in
    a process that has loaded the compiler).

    Args:
        module: The module that the block runs, to find out beforehand whether it can be counted.
    """
    count = FlopCount()
    reason = _why_not(module)
    if reason is not None:
        count.refuse(reason)
        yield count
        return
    with uncompiled(), _Counter(count):
        yield count


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees every operator on its way to its kernel.

    Not torch's own `FlopCounterMode`: that passes operators that it has no formula for over in silence, and breaks
    steps with higher-order operators.
    """

    supports_higher_order_operators = True

    def __init__(self, count: FlopCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = subclasses(types)
        if are_wrappers(special):
            return NotImplemented  # subclasses of tensors call operators on what they hold, which come here next
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        formula = _formula(packet)
        if formula is None and _may_multiply(packet) and is_composite(func):
            with self:
                return run_composite(func, args, kwargs)
        out = func(*args, **kwargs)
        if special or _is_of_meta(args):
            return out  # nothing is computed: only shapes are asked for, as DTensor does for each operator
        if formula is not None:
            self._add(formula, packet, args, kwargs, out)
        elif _may_multiply(packet):
            self._count.refuse(f"{packet} is an operator without a formula")
        return out

    def _add(self, formula: Callable[..., int], packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        try:
            flops = formula(*args, **kwargs, out_val=out)
        except Exception as err:  # formulas assert and unpack; one that fails must not end the user's step
            self._count.refuse(f"the formula of {packet} failed: {type(err).__name__}: {err}")
            return
        self._count.add(_computed_in(packet, args), flops)


def _formula(packet: Any) -> Callable[..., int] | None:
    return MORE_FORMULAS.get(packet) or flop_registry.get(packet)


@cache
def _may_multiply(packet: Any) -> bool:
    if isinstance(packet, HigherOrderOperator):
        return True
    namespace, _, name = str(packet).partition(".")
    if namespace not in _PLAIN_NAMESPACES:
        return True
    return name not in _NO_MATRIX_PRODUCT and not _MATRIX_WORDS.isdisjoint(name.strip("_").split("_"))


def _first_tensor(args: Any) -> torch.Tensor | None:
    return next((arg for arg in args if isinstance(arg, torch.Tensor)), None)


def _is_of_meta(args: Any) -> bool:
    first = _first_tensor(args)
    return first is not None and first.is_meta


def _computed_in(packet: Any, args: Any) -> str:
    """The type of an operator's first tensor, or ``tfloat32`` where the device rounds it to that."""
    first = _first_tensor(args)
    if first is None:
        return "unknown"
    name = str(first.dtype).removeprefix("torch.")
    if name != "float32" or first.device.type != "cuda" or not _has_tfloat32(first.device):
        return name
    return "tfloat32" if _allows_tfloat32(str(packet)) else name


def _allows_tfloat32(operator: str) -> bool:
    """Whether the process's settings let an operator round to TF32; by default convolutions may and products not."""
    backends = torch.backends
    part = "conv" if "conv" in operator else "rnn" if "rnn" in operator else None
    owner: Any = backends.cuda.matmul if part is None else getattr(backends.cudnn, part, None)
    if hasattr(owner, "fp32_precision"):  # from torch 2.9 on; asking in the older way raises once it was set
        return bool(owner.fp32_precision == "tf32")
    return bool(backends.cuda.matmul.allow_tf32 if part is None else backends.cudnn.allow_tf32)


@cache
def _has_tfloat32(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _why_not(module: nn.Module | None) -> str | None:
    if not can_run_uncompiled():
        return "this torch cannot run compiled functions uncompiled"
    for each in () if module is None else module.modules():
        if _is_compiled(each):
            return f"{type(each).__name__} is compiled"
        if isinstance(each, nn.DataParallel):
            return "DataParallel runs the module on other threads"
    return None


def _is_compiled(module: nn.Module) -> bool:
    held = (module, getattr(module, "_compiled_call_impl", None), *vars(module).values(), type(module).forward)
    return any(hasattr(each, "_torchdynamo_orig_callable") for each in held[1:]) or "_orig_mod" in module._modules
