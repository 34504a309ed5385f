"""Outputs of steps: made plain, gathered from all ranks, and put back into the user's batches or into rows."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.core.errors import PlanError, ResultsError
from lightning_hybrid.core.plan import Grid


@dataclass(frozen=True, slots=True)
class Piece:
    """The output of one step over positions ``start`` to ``stop``."""

    start: int
    stop: int
    output: Any


def map_tensors(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``output`` with ``function`` applied to every tensor in its lists, tuples, named tuples and mappings."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if isinstance(output, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in output.items()}
        return mapped if type(output) is dict else _rebuilt(output, mapped)
    if isinstance(output, tuple):
        items = [map_tensors(value, function) for value in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    if isinstance(output, list):
        return [map_tensors(value, function) for value in output]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        changed = {f.name: map_tensors(getattr(output, f.name), function) for f in dataclasses.fields(output) if f.init}
        return dataclasses.replace(output, **changed)
    return output


def plain(output: Any) -> Any:
    """``output`` with ordinary CPU tensors that own their memory: no inference tensors, no views of larger ones."""
    with torch.inference_mode(False):
        return map_tensors(output, _plain_tensor)


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    is_view = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    if tensor.device.type != "cpu":
        return tensor.cpu()
    return tensor.clone() if tensor.is_inference() or is_view else tensor


def _rebuilt(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    make: Callable[[dict[Any, Any]], Any] = type(like)
    try:
        return make(items)
    except TypeError:  # a mapping that is not made from a dict becomes one
        return items


def has_rows(output: Any, size: int) -> bool:
    """Whether every part of ``output`` has the ``size`` samples of its batch as its first dimension."""
    if isinstance(output, torch.Tensor):
        return output.dim() > 0 and output.shape[0] == size
    if isinstance(output, Mapping):
        return bool(output) and all(has_rows(value, size) for value in output.values())
    if isinstance(output, tuple):
        return bool(output) and all(has_rows(value, size) for value in output)
    if isinstance(output, list):
        return len(output) == size and not any(isinstance(item, torch.Tensor | list | tuple) for item in output)
    return False


def take_rows(output: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of an output that `has_rows`."""
    if isinstance(output, Mapping):
        return _rebuilt(output, {key: take_rows(value, start, stop) for key, value in output.items()})
    if isinstance(output, tuple):
        items = [take_rows(value, start, stop) for value in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    return output[start:stop]


def join_rows(outputs: Sequence[Any]) -> Any:
    """Outputs of the same structure put behind each other along the samples."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, Mapping):
        return _rebuilt(first, {key: join_rows([output[key] for output in outputs]) for key in first})
    if isinstance(first, tuple):
        items = [join_rows(parts) for parts in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    return [row for output in outputs for row in output]


def into_batches(grid: Grid, pieces: Iterable[Piece]) -> list[Any]:
    """One output per batch of the user's, in loader order, from pieces that were cut elsewhere or in another order.

    Raises:
        PlanError: the pieces do not hold every position once.
    """
    ordered = sorted(pieces, key=lambda piece: piece.start)
    _check_cover(ordered, grid.num_samples)
    batches = []
    at = 0
    for cell in range(grid.num_cells):
        start, stop = grid.span(cell)
        parts: list[Any] = []
        is_cut = False
        while start < stop:
            piece = ordered[at]
            end = min(stop, piece.stop)
            whole = (piece.start, piece.stop) == (start, end)
            is_cut = is_cut or not whole
            if not whole and not has_rows(piece.output, piece.stop - piece.start):
                raise ResultsError(
                    f"the output for samples {piece.start} to {piece.stop - 1} cannot be put back into the loader's"
                    " batches, because it has not one row per sample; use HybridBalanceCallback(batch_dependent=True)"
                )
            parts.append(piece.output if whole else take_rows(piece.output, start - piece.start, end - piece.start))
            at += end == piece.stop
            start = end
        batch = parts[0] if len(parts) == 1 else join_rows(parts)
        batches.append(plain(batch) if is_cut else batch)
    return batches


def into_rows(pieces: Iterable[Piece]) -> list[Any]:
    """One result per sample, in loader order.

    Raises:
        ResultsError: an output does not have the samples as its first dimension.
    """
    rows: list[Any] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        size = piece.stop - piece.start
        if piece.output is None:
            rows += [None] * size
        elif has_rows(piece.output, size):
            rows += [_row(piece.output, i) for i in range(size)]
        else:
            raise ResultsError(
                f"the output for samples {piece.start} to {piece.stop - 1} of the loader is a"
                f" {type(piece.output).__name__} without one row per sample; use what trainer.predict returned"
            )
    return rows


def _row(output: Any, i: int) -> Any:
    if isinstance(output, Mapping):
        return _rebuilt(output, {key: _row(value, i) for key, value in output.items()})
    if isinstance(output, tuple):
        items = [_row(value, i) for value in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    return output[i]


def _check_cover(ordered: Sequence[Piece], num_samples: int) -> None:
    at = 0
    for piece in ordered:
        if piece.start != at:
            raise PlanError(f"results hold positions up to {at}, the next piece begins at {piece.start}")
        at = piece.stop
    if at != num_samples:
        raise PlanError(f"results hold {at} of {num_samples} positions")


def gather_pieces(pieces: Sequence[Piece], *, to_all: bool, chunk_bytes: int) -> list[Piece] | None:
    """The pieces of every rank, on every rank or on rank zero alone (``None`` elsewhere).

    Sent in rounds of at most about ``chunk_bytes`` from each rank, as bytes: shapes and types may differ.
    """
    world = dist.get_world_size()
    chunks = list(_chunks(pieces, chunk_bytes))
    counts: list[int] = [0] * world
    dist.all_gather_object(counts, len(chunks))
    receives = to_all or dist.get_rank() == 0
    gathered: list[Piece] = []
    for i in range(max(counts)):
        mine = chunks[i] if i < len(chunks) else []
        parts: list[Any] = [None] * world
        if to_all:
            dist.all_gather_object(parts, mine)
        else:
            dist.gather_object(mine, parts if receives else None, dst=0)
        if receives:
            gathered += [Piece(start, stop, pickle.loads(data)) for part in parts for start, stop, data in part]
    return gathered if receives else None


def _chunks(pieces: Sequence[Piece], chunk_bytes: int) -> Iterator[list[tuple[int, int, bytes]]]:
    chunk: list[tuple[int, int, bytes]] = []
    size = 0
    for piece in pieces:
        data = pickle.dumps(piece.output, protocol=pickle.HIGHEST_PROTOCOL)
        if chunk and size + len(data) > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((piece.start, piece.stop, data))
        size += len(data)
    if chunk:
        yield chunk
