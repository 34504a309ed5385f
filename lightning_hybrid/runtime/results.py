"""Outputs of steps and their rows: made plain, cut, joined, and gathered from all ranks."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Piece:
    """The output of one step over positions ``start`` to ``stop`` of the grid.

    The samples at the positions ``absent`` could not be run, and have no row in ``output``.
    """

    start: int
    stop: int
    output: Any
    absent: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Samples that were run."""
        return self.stop - self.start - len(self.absent)

    @property
    def is_lost(self) -> bool:
        """Whether none of its samples could be run."""
        return bool(self.absent) and self.num_rows == 0

    def present(self) -> list[Piece]:
        """The parts between the absent samples; itself where none is absent, or where the output has no rows."""
        if not self.absent or not (self.is_lost or has_rows(self.output, self.num_rows)):
            return [self]
        parts, row = [], 0
        for start, stop in zip((self.start - 1, *self.absent), (*self.absent, self.stop), strict=True):
            size = stop - start - 1
            if size:
                parts.append(Piece(start + 1, stop, take_rows(self.output, row, row + size)))
                row += size
        return parts


def map_tensors(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``output`` with ``function`` applied to every tensor in its lists, tuples, named tuples and mappings."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if isinstance(output, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in output.items()}
        return mapped if type(output) is dict else rebuilt(output, mapped)
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
    trigger_wait = getattr(tensor, "trigger_wait", None)
    if trigger_wait is not None:  # what a collective of tensor parallelism has yet to fill
        tensor = trigger_wait()
    tensor = tensor.detach()
    is_view = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    if tensor.device.type != "cpu":
        return tensor.cpu()
    return tensor.clone() if tensor.is_inference() or is_view else tensor


def rebuilt(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """``items`` as a mapping of the type of ``like``, if that can be made from a dict."""
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


def num_rows(output: Any) -> int:
    """Number of samples of an output that `has_rows`."""
    while isinstance(output, Mapping | tuple):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return len(output)


def take_rows(output: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of an output that `has_rows`."""
    if isinstance(output, Mapping):
        return rebuilt(output, {key: take_rows(value, start, stop) for key, value in output.items()})
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
        return rebuilt(first, {key: join_rows([output[key] for output in outputs]) for key in first})
    if isinstance(first, tuple):
        items = [join_rows(parts) for parts in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    return [row for output in outputs for row in output]


def row_of(output: Any, i: int) -> Any:
    """Row ``i`` of an output that `has_rows`, without the dimension of the samples."""
    if isinstance(output, Mapping):
        return rebuilt(output, {key: row_of(value, i) for key, value in output.items()})
    if isinstance(output, tuple):
        items = [row_of(value, i) for value in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    return output[i]


def row_form(output: Any) -> Any:
    """What the rows of an output that `has_rows` look like, hashable; rows of equal forms fit into one output."""
    if isinstance(output, torch.Tensor):
        return output.dtype, output.layout, output.shape[1:]
    if isinstance(output, Mapping):
        return type(output), frozenset((key, row_form(value)) for key, value in output.items())
    if isinstance(output, tuple):
        return type(output), *(row_form(value) for value in output)
    return type(output)


def pick_rows(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """An output whose row ``i`` is a copy of row ``rows[i]`` of ``outputs[i]``; all must have the same `row_form`."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.stack([output[row] for output, row in zip(outputs, rows, strict=True)])
    if isinstance(first, Mapping):
        return rebuilt(first, {key: pick_rows([output[key] for output in outputs], rows) for key in first})
    if isinstance(first, tuple):
        items = [pick_rows(parts, rows) for parts in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    return [independent(output[row]) for output, row in zip(outputs, rows, strict=True)]


def independent(output: Any) -> Any:
    """A copy of ``output`` whose tensors and containers share no memory with it."""
    with torch.inference_mode(False):
        return map_tensors(output, torch.Tensor.clone)


def gather_pieces(pieces: Sequence[Piece], *, to_all: bool, chunk_bytes: int) -> list[Piece] | None:
    """The pieces of every rank, on every rank or on rank zero alone (``None`` elsewhere).

    Sent in rounds of at most about ``chunk_bytes`` from each rank, as bytes: shapes and types may differ.
    """
    parcel = Parcel(pieces, to_all=to_all, chunk_bytes=chunk_bytes)
    return parcel.exchange(_exchanged(parcel.head))


Chunk = list[tuple[int, int, tuple[int, ...], bytes]]


class Parcel:
    """The pieces of one rank, made ready to be sent.

    Args:
        pieces: The pieces.
        to_all: Whether every rank gets the pieces of all, or rank zero alone.
        chunk_bytes: About as much is sent at once.
    """

    def __init__(self, pieces: Sequence[Piece], *, to_all: bool, chunk_bytes: int) -> None:
        self._to_all, self._chunks = to_all, list(_chunks(pieces, chunk_bytes)) or [[]]

    @property
    def head(self) -> tuple[int, Chunk]:
        """How many chunks there are, and the first of them if it is for all; it may travel with other things."""
        return len(self._chunks), self._chunks[0] if self._to_all else []

    def exchange(self, heads: Sequence[tuple[int, Chunk]], leaders: Sequence[int] | None = None) -> list[Piece] | None:
        """Sends the rest, and returns the pieces of all ranks; ``None`` on a rank that gets none.

        Args:
            heads: Those of all ranks.
            leaders: The ranks whose pieces count; all where it is left out.
        """
        counts = dict.fromkeys(range(len(heads)) if leaders is None else leaders, True)
        leads, receives = dist.get_rank() in counts, self._to_all or dist.get_rank() == 0
        rounds = [[first for _, first in heads]]
        for i in range(int(self._to_all), max(heads[rank][0] for rank in counts)):
            mine = self._chunks[i] if leads and i < len(self._chunks) else []
            rounds.append(_exchanged(mine) if self._to_all else _collected(mine))
        if not receives:
            return None
        parts = [part for parts in rounds for rank, part in enumerate(parts) if rank in counts]
        return [Piece(start, stop, pickle.loads(data), absent) for part in parts for start, stop, absent, data in part]


def _exchanged(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _collected(mine: Any) -> list[Any]:
    """What every rank has, on rank zero; nothing elsewhere."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    return everyone or []


class _Pickler(pickle.Pickler):
    """Pickles tensors by their numbers; torch's own way writes a whole file for each of them."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.dtype not in _NUMPY_TYPES or obj.layout != torch.strided:
            return NotImplemented
        if obj.requires_grad or obj.is_conj() or obj.is_neg():
            return NotImplemented
        return torch.from_numpy, (obj.numpy(),)


_NUMPY_TYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


def _pickled(output: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(output)
    return buffer.getvalue()


def _chunks(pieces: Sequence[Piece], chunk_bytes: int) -> Iterator[Chunk]:
    chunk: Chunk = []
    size = 0
    for piece in pieces:
        data = _pickled(piece.output)
        if chunk and size + len(data) > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((piece.start, piece.stop, piece.absent, data))
        size += len(data)
    if chunk:
        yield chunk
