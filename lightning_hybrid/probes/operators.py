"""What the probes that watch operators on their way to their kernels must know of torch."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

_COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd


def subclasses(types: Any) -> list[Any]:
    """Those of an operator's types of tensors that change what operators do."""
    return [each for each in types if each.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__]


def are_wrappers(found: list[Any]) -> bool:
    """Whether `subclasses` will call operators on the tensors that they hold, which can be watched instead."""
    return bool(found) and FakeTensor not in found


@cache
def is_composite(func: Any) -> bool:
    """Whether an operator only calls others; under ``inference_mode`` such ones arrive as they are."""
    return isinstance(func, OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(func._name, _COMPOSITE)


def run_composite(func: Any, args: Any, kwargs: Any) -> Any:
    """Has a composite operator call those that it is made of."""
    # not `func.decompose`, which prefers decompositions in Python that round in other places
    return func._op_dk(_COMPOSITE, *args, **kwargs)


def uncompiled() -> AbstractContextManager[Any]:
    """Has compiled functions run as they were written: dynamo refuses or skips them while operators are watched."""
    return torch.compiler.set_stance("force_eager") if _has_compiler() else nullcontext()


def can_run_uncompiled() -> bool:
    """Whether `uncompiled` works: from torch 2.6 on, and before in a process that has not loaded the compiler."""
    return hasattr(torch.compiler, "set_stance") or not _has_compiler()


def _has_compiler() -> bool:
    return "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules
