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
    if arrangement.slots is None:
        entries, ragged = into_batches(grid, ordered)
    else:
        _check_cover(ordered, grid.num_samples)
        if not all(piece.output is None or has_rows(piece.output, piece.stop - piece.start) for piece in ordered):
            return Outputs(grid=grid, pieces=ordered, arrangement=arrangement)
        entries, ragged = _rearranged(arrangement, ordered)
    batches = arrangement.batches
    return Outputs(
        grid=batches,
        # the pieces are let go: the rows of the entries are all that is needed of them
        pieces=[Piece(*batches.span(cell), entry) for cell, entry in enumerate(entries)],
        form="batches",
        arrangement=arrangement,
        ragged=frozenset(ragged),
    )


def into_batches(grid: Grid, pieces: Iterable[Piece]) -> tuple[list[Any], tuple[int, ...]]:
    """One output per cell of ``grid``, from pieces that were cut elsewhere; and the numbers of the ragged ones.

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
            parts.append(_cut(ordered[at], start, end))
            at += end == ordered[at].stop
            start = end
        batch, is_ragged = _joined(parts)
        batches.append(batch)
        if is_ragged:
            ragged.append(cell)
    return batches, tuple(ragged)


def _cut(piece: Piece, start: int, stop: int) -> Any:
    if not has_rows(piece.output, piece.stop - piece.start):
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
    """One result per sample, piece by piece; the outputs of the pieces numbered in ``ragged`` are lists of rows.

    Raises:
        ResultsError: an output does not have the samples as its first dimension.
    """
    rows: list[Any] = []
    for number, piece in enumerate(pieces):
        size = piece.stop - piece.start
        if piece.output is None:
            rows += [None] * size
        elif number in ragged:
            rows += piece.output
        elif has_rows(piece.output, size):
            rows += [row_of(piece.output, i) for i in range(size)]
        else:
            raise ResultsError(
                f"the output for samples {piece.start} to {piece.stop - 1} of the run is a"
                f" {type(piece.output).__name__} without one row per sample; use what trainer.predict returned"
            )
    return rows


def _rearranged(arrangement: Arrangement, ordered: Sequence[Piece]) -> tuple[list[Any], tuple[int, ...]]:
    """The user's batches, each row of which may lie in another piece, and the numbers of those that are ragged."""
    starts = np.asarray([piece.start for piece in ordered], dtype=np.int64)
    forms = [row_form(piece.output) for piece in ordered]
    batches: list[Any] = []
    ragged = []
    with torch.inference_mode(False):
        for cell in range(arrangement.batches.num_cells):
            slots = arrangement.slots_at(*arrangement.batches.span(cell))
            numbers = np.searchsorted(starts, slots, side="right") - 1
            rows = (slots - starts[numbers]).tolist()
            outputs = [ordered[number].output for number in numbers.tolist()]
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
