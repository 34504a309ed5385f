"""Outputs of all steps, put back into the user's batches or into rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from lightning_hybrid.core.config import OrderOption
from lightning_hybrid.core.errors import PlanError, ResultsError
from lightning_hybrid.core.plan import Arrangement, Grid, Offsets
from lightning_hybrid.runtime.results import (
    Piece,
    has_rows,
    independent,
    join_rows,
    num_rows,
    pick_rows,
    plain,
    row_form,
    row_of,
    take_rows,
)

Form = Literal["batches", "cells"]
"""``batches``: one entry per batch of the user's. ``cells``: one per step, as it was run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outputs:
    """What the user gets of one loader, as far as this rank holds it.

    ``pieces`` are the entries of the list that `trainer.predict` returns. Their positions are those of ``grid``: the
    user's batches in the form of ``batches``, else what was run.
    """

    grid: Grid
    pieces: Sequence[Piece]
    form: Form = "cells"
    arrangement: Arrangement
    """How the user's batches lie in what was run."""
    ragged: frozenset[int] = frozenset()
    """Numbers of the batches whose rows differ in shape, so that they are lists of rows."""

    def rows(self, order: OrderOption) -> list[Any]:
        """One result per sample that is held, in the loader's order or by dataset index.

        Raises:
            ResultsError: an output does not have the samples as its first dimension.
        """
        if self.form == "batches":
            rows = into_rows(self.pieces, self.ragged)
            positions = np.arange(len(rows))
        else:
            held = sorted(self.pieces, key=lambda piece: piece.start)
            positions, numbers = self._positions_of(held)
            rows = _repeated(into_rows(held), numbers)
        if order == "loader":
            return rows
        indices = self.arrangement.batches.order_at(positions)
        return [rows[number] for number in sorted(range(len(indices)), key=indices.__getitem__)]

    def indices(self) -> list[list[Any]]:
        """Dataset indices of every entry."""
        return [self.grid.indices(piece.start, piece.stop) for piece in self.pieces]

    def _positions_of(self, held: Sequence[Piece]) -> tuple[Offsets, Offsets]:
        """The loader's positions whose results are held, and for each the number of its row in ``held``."""
        slots = [np.arange(piece.start, piece.stop, dtype=np.int64) for piece in held]
        held_slots = np.concatenate(slots) if slots else np.empty(0, dtype=np.int64)
        if self.arrangement.slots is None:
            return held_slots, np.arange(len(held_slots))
        number_of = np.full(self.grid.num_samples, -1, dtype=np.int64)
        number_of[held_slots] = np.arange(len(held_slots))
        numbers = number_of[self.arrangement.slots]
        positions = np.flatnonzero(numbers >= 0)
        return positions, numbers[positions]


def assembled(grid: Grid, arrangement: Arrangement, pieces: Iterable[Piece]) -> Outputs:
    """The pieces of a whole loader as one entry per batch of the user's, or per cell where they have no rows.

    Args:
        grid: What was run.
        arrangement: How the user's batches lie in it.
        pieces: The outputs of all steps, in any order.

    Raises:
        PlanError: the pieces do not hold every position of ``grid`` once.
        ResultsError: pieces that were cut out of batches have no rows.
    """
    ordered = sorted(pieces, key=lambda piece: piece.start)
    _check_cover(ordered, grid.num_samples)
    is_cut_anew = arrangement.is_cut_anew(grid)
    if is_cut_anew and not all(piece.output is None or has_rows(piece.output, piece.num_rows) for piece in ordered):
        return Outputs(grid=grid, pieces=ordered, arrangement=arrangement)
    if arrangement.slots is None:
        entries, ragged = into_batches(arrangement.batches, ordered)
    else:
        entries, ragged = _rearranged(arrangement, ordered)
    batches = arrangement.batches
    absent = frozenset(position for piece in ordered for position in piece.absent)
    return Outputs(
        grid=batches,
        # the pieces are let go: the rows of the entries are all that is needed of them
        pieces=[
            Piece(*batches.span(cell), entry, _absent_of(batches.span(cell), arrangement, absent))
            for cell, entry in enumerate(entries)
        ],
        form="batches",
        arrangement=arrangement,
        ragged=frozenset(ragged),
    )


def _absent_of(span: tuple[int, int], arrangement: Arrangement, absent: frozenset[int]) -> tuple[int, ...]:
    """Positions of a batch whose samples could not be run."""
    if not absent:
        return ()
    slots = arrangement.slots_at(*span).tolist()
    return tuple(position for position, slot in zip(range(*span), slots, strict=True) if slot in absent)


def into_batches(grid: Grid, pieces: Iterable[Piece]) -> tuple[list[Any], tuple[int, ...]]:
    """One output per cell of ``grid``, from pieces that were cut elsewhere; and the numbers of the ragged ones.

    Samples that could not be run have no row; a cell of which none could has ``None``.

    Raises:
        PlanError: the pieces do not hold every position once.
        ResultsError: a piece that must be cut has no rows.
    """
    ordered = sorted(pieces, key=lambda piece: piece.start)
    _check_cover(ordered, grid.num_samples)
    batches: list[Any] = []
    ragged = []
    at = 0
    for cell in range(grid.num_cells):
        start, stop = grid.span(cell)
        if ordered[at].start == start and ordered[at].stop == stop:
            batches.append(ordered[at].output)
            at += 1
            continue
        parts = []
        while start < stop:
            end = min(stop, ordered[at].stop)
            parts += [_cut(piece, start, end) for piece in ordered[at].present() if _overlap(piece, start, end)]
            at += end == ordered[at].stop
            start = end
        batch, is_ragged = _joined(parts) if parts else (None, False)
        batches.append(batch)
        if is_ragged:
            ragged.append(cell)
    return batches, tuple(ragged)


def _overlap(piece: Piece, start: int, stop: int) -> bool:
    return piece.start < stop and start < piece.stop


def _cut(piece: Piece, start: int, stop: int) -> Any:
    start, stop = max(start, piece.start), min(stop, piece.stop)
    if not has_rows(piece.output, piece.num_rows):
        raise ResultsError(
            f"the output for samples {piece.start} to {piece.stop - 1} cannot be put back into the loader's"
            " batches, because it has not one row per sample; use HybridBalanceCallback(batch_dependent=True)"
        )
    return take_rows(piece.output, start - piece.start, stop - piece.start)


def _joined(parts: Sequence[Any]) -> tuple[Any, bool]:
    """One output of all parts, or a list of their rows where those differ in form."""
    if len({row_form(part) for part in parts}) == 1:
        return plain(join_rows(parts)), False
    return [independent(row_of(part, i)) for part in parts for i in range(num_rows(part))], True


def into_rows(pieces: Sequence[Piece], ragged: Container[int] = ()) -> list[Any]:
    """One result per sample, piece by piece, ``None`` for a sample that could not be run.

    The outputs of the pieces numbered in ``ragged`` are lists of rows.

    Raises:
        ResultsError: an output does not have the samples as its first dimension.
    """
    rows: list[Any] = []
    for number, piece in enumerate(pieces):
        if piece.output is None:
            rows += [None] * (piece.stop - piece.start)
        elif number in ragged:
            rows += _with_absent(piece, piece.output)
        elif has_rows(piece.output, piece.num_rows):
            rows += _with_absent(piece, [row_of(piece.output, i) for i in range(piece.num_rows)])
        else:
            raise ResultsError(
                f"the output for samples {piece.start} to {piece.stop - 1} of the run is a"
                f" {type(piece.output).__name__} without one row per sample; use what trainer.predict returned"
            )
    return rows


def _with_absent(piece: Piece, present: list[Any]) -> list[Any]:
    """The rows of a piece, with ``None`` at the places of the absent samples."""
    if not piece.absent:
        return present
    rows, absent = iter(present), frozenset(piece.absent)
    return [None if position in absent else next(rows) for position in range(piece.start, piece.stop)]


def _rearranged(arrangement: Arrangement, ordered: Sequence[Piece]) -> tuple[list[Any], tuple[int, ...]]:
    """The user's batches, each row of which may lie in another piece, and the numbers of those that are ragged."""
    parts = [part for piece in ordered for part in piece.present()]
    starts, stops = (np.asarray([getattr(part, name) for part in parts], dtype=np.int64) for name in ("start", "stop"))
    forms = [row_form(part.output) for part in parts]
    batches: list[Any] = []
    ragged = []
    with torch.inference_mode(False):
        for cell in range(arrangement.batches.num_cells):
            slots = arrangement.slots_at(*arrangement.batches.span(cell))
            numbers = np.searchsorted(starts, slots, side="right") - 1
            is_present = (numbers >= 0) & (slots < stops[numbers]) if len(parts) else np.zeros(len(slots), dtype=bool)
            slots, numbers = slots[is_present], numbers[is_present]
            if not len(slots):
                batches.append(None)
                continue
            rows = (slots - starts[numbers]).tolist()
            outputs = [parts[number].output for number in numbers.tolist()]
            if len({forms[number] for number in numbers.tolist()}) == 1:
                batches.append(None if outputs[0] is None else pick_rows(outputs, rows))
            else:
                ragged.append(cell)
                batches.append([_row_or_none(output, row) for output, row in zip(outputs, rows, strict=True)])
    return batches, tuple(ragged)


def _row_or_none(output: Any, row: int) -> Any:
    return None if output is None else independent(row_of(output, row))


def _repeated(rows: Sequence[Any], numbers: Offsets) -> list[Any]:
    """``rows[number]`` for every number; copies where one comes again."""
    given: set[int] = set()
    found = []
    for number in numbers.tolist():
        found.append(independent(rows[number]) if number in given else rows[number])
        given.add(number)
    return found


def _check_cover(ordered: Sequence[Piece], num_samples: int) -> None:
    at = 0
    for piece in ordered:
        if piece.start != at:
            raise PlanError(f"results hold positions up to {at}, the next piece begins at {piece.start}")
        at = piece.stop
    if at != num_samples:
        raise PlanError(f"results hold {at} of {num_samples} positions")
