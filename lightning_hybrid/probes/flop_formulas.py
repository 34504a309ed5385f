"""Formulas of operators that torch's flop counter has none for.

They are fused ones, which inference runs in place of single products, and those that only call others, which arrive as
they are under ``inference_mode``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Shapes are (..., queries, width), (..., keys, width) and (..., keys, width of a value)."""
    num_queries = query.numel() // query.shape[-1]
    return 2 * num_queries * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _convolution(inputs: Tensor, weight: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Weight is (channels out, channels in of a group, kernel...)."""
    return 2 * out_val.numel() * prod(weight.shape[1:])


def _transposed_convolution(inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """Weight is (channels in, channels out of a group, kernel...)."""
    return 2 * inputs.numel() * prod(weight.shape[1:])


def _matmul(left: Tensor, right: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * out_val.numel() * left.shape[-1]


def _matrix_vector(matrix: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * matrix.numel()


def _added_matrix_vector(added: Tensor, matrix: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * matrix.numel()


def _product(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _linear(inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * inputs.numel() * weight.shape[0]


def _added_product(added: Tensor, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _distances(left: Tensor, right: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * out_val.numel() * left.shape[-1]


def _mkldnn_rnn(
    inputs: Tensor, weight_input: Tensor, weight_hidden: Tensor, *args: Any, out_val: Any, **kwargs: Any
) -> int:
    """One layer in one direction; weights are (gates x hidden, input) and (gates x hidden, hidden)."""
    num_steps = prod(inputs.shape[:-1])
    return 2 * num_steps * (weight_input.numel() + weight_hidden.numel())


def _cudnn_rnn(inputs: Tensor, weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> int:
    """All layers and directions; every matrix among the weights is used once per step."""
    num_steps = prod(inputs.shape[:-1])
    return 2 * num_steps * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _encoder_layer(
    source: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    *args: Any,
    **kwargs: Any,
) -> int:
    """The fast path of `nn.TransformerEncoderLayer`; the two matrices of its feed-forward part come last."""
    feed_forward = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 2 and embed_dim in arg.shape]
    return _self_attention(source, embed_dim, [qkv_weight, proj_weight, *feed_forward[-2:]])


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    *args: Any,
    **kwargs: Any,
) -> int:
    """The fast path of `nn.MultiheadAttention`, which is for self-attention only."""
    return _self_attention(query, embed_dim, [qkv_weight, proj_weight])


def _self_attention(source: Tensor, embed_dim: int, weights: Sequence[Tensor]) -> int:
    lengths = _lengths(source)
    projections = 2 * sum(lengths) * sum(weight.numel() for weight in weights)
    return projections + sum(4 * length * length * embed_dim for length in lengths)


def _lengths(source: Tensor) -> list[int]:
    """Tokens of every sample of a batch-first tensor; a nested one has none of the padding."""
    if source.is_nested:
        return [sample.shape[0] for sample in source.unbind()]
    return [source.shape[1]] * source.shape[0]


_FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_attention_math_for_mps": _attention,
    "mv": _matrix_vector,
    "dot": _matrix_vector,
    "vdot": _matrix_vector,
    "addmv": _added_matrix_vector,
    "linear": _linear,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "conv_transpose1d": _transposed_convolution,
    "conv_transpose2d": _transposed_convolution,
    "conv_transpose3d": _transposed_convolution,
    "_int_mm": _product,
    "_addmm_activation": _added_product,
    "addbmm": _added_product,
    "_cdist_forward": _distances,
    "mkldnn_rnn_layer": _mkldnn_rnn,
    "_cudnn_rnn": _cudnn_rnn,
    "miopen_rnn": _cudnn_rnn,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_native_multi_head_attention": _multi_head_attention,
}

MORE_FORMULAS: dict[Any, Callable[..., int]] = {
    getattr(_aten, name): formula for name, formula in _FORMULAS.items() if hasattr(_aten, name)
}
"""By operator; each takes its arguments, and its result as ``out_val``, and returns the operations."""
