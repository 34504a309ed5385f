"""Reads what a torch module is made of: parameters, bytes, types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_hybrid.core.system_state import ModelInfo
from lightning_hybrid.probes.flops import FlopCount

_OF_PARAMETERS = (
    "num_parameters",
    "num_trainable_parameters",
    "num_local_parameters",
    "num_meta_parameters",
    "parameter_bytes",
)
_WHOLE = _OF_PARAMETERS[:2]


def model_info(module: nn.Module, flops: FlopCount | None = None, num_samples: int = 0) -> ModelInfo:
    """What ``module`` is made of, without running it or copying from its device.

    * Parameters and buffers that modules share count once, whether they are the same object or the same memory.
    * DTensor (tensor parallel, FSDP2) counts whole in ``num_parameters``, and with this rank's part in local numbers
      and bytes. FSDP1 keeps flat shards that do not tell what they are part of: the whole is not known.
    * Quantised subclasses of tensors count the elements that they stand for, and the bytes of what they hold; 4 bit
      parameters of bitsandbytes likewise. Modules of `torch.ao` that hide packed weights, and lazy modules before their
      first step, make the numbers unknown.

    Args:
        module: The module.
        flops: Operations of a step of it.
        num_samples: How many samples that step had.
    """
    unknown = dict(_unknown_parameters(module))
    values: dict[str, Any] = {}
    if _OF_PARAMETERS[-1] not in unknown:
        values = _parameters(module)
    for name in unknown:
        values.pop(name, None)
    if _WHOLE[0] in unknown:
        values.pop("num_parameters_by_dtype", None)
    buffers = [buffer for buffer in _distinct(module.buffers()) if not is_lazy(buffer)]
    values["num_buffers"] = sum(_local(buffer).numel() for buffer in buffers)
    values["buffer_bytes"] = sum(_bytes_by_dtype(buffers).values())
    if flops is not None and flops.by_dtype is not None and num_samples > 0:
        per_sample = {dtype: count / num_samples for dtype, count in flops.by_dtype.items()}
        values["flops_per_sample_by_dtype"] = per_sample
        values["flops_per_sample"] = sum(per_sample.values())
    else:
        unknown["flops_per_sample"] = (flops and flops.reason) or "the operations of a sample were not counted"
    return ModelInfo(name=type(module).__name__, unknown=unknown, **values)


def _parameters(module: nn.Module) -> dict[str, Any]:
    parameters = _distinct(module.parameters())
    by_dtype: Counter[str] = Counter()
    for parameter in parameters:
        by_dtype[_dtype(parameter)] += _num_elements(parameter)
    stored = _bytes_by_dtype(parameters)
    return {
        "num_parameters": by_dtype.total(),
        "num_trainable_parameters": sum(_num_elements(each) for each in parameters if each.requires_grad),
        "num_local_parameters": sum(_num_elements(_local(each)) for each in parameters),
        "num_meta_parameters": sum(_num_elements(_local(each)) for each in parameters if each.is_meta),
        "parameter_bytes": stored.total(),
        "num_parameters_by_dtype": dict(by_dtype),
        "parameter_bytes_by_dtype": dict(stored),
    }


def _unknown_parameters(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Fields that cannot be known, and why."""
    for each in module.modules():
        own, kind = list(each.parameters(recurse=False)), type(each).__name__
        if any(isinstance(held, torch.ScriptObject) for held in vars(each).values()):
            yield from dict.fromkeys(_OF_PARAMETERS, f"{kind} hides packed weights").items()
        if any(map(is_lazy, own)):
            yield from dict.fromkeys(_OF_PARAMETERS, f"{kind} has no shape before its first step").items()
        if any(hasattr(held, "_is_flat_param") for held in own):
            yield from dict.fromkeys(_WHOLE, "FSDP1 holds flat shards of the parameters").items()


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that do not share all of their memory with an earlier one."""
    return list({_place(tensor): tensor for tensor in tensors}.values())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if is_lazy(tensor) or tensor.is_meta or not tensor.numel():
        return (id(tensor),)
    parts = [(part.device, part.data_ptr(), part.dtype, part.shape, part.stride()) for part in _stored(tensor)]
    return (*parts, tensor.shape) if all(part[1] for part in parts) else (id(tensor),)


def _stored(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that one is made of, on this rank."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for held in (getattr(tensor, name) for name in names):
        if isinstance(held, Tensor):
            yield from _stored(held)


def _bytes_by_dtype(tensors: Iterable[Tensor]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        for part in _stored(tensor):
            found[_dtype(part)] += part.numel() * part.element_size()
    return found


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, and any other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def _num_elements(tensor: Tensor) -> int:
    """Elements that a tensor stands for: bitsandbytes packs two in a byte and keeps the shape beside them."""
    packed_from = getattr(getattr(tensor, "quant_state", None), "shape", None)
    return tensor.numel() if packed_from is None else prod(packed_from)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
