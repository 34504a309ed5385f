"""The arithmetic of the shared work queue: who owns what after an atomic add, and how much to ask for.

A queue of ``n`` cells is one 64-bit counter that holds how many cells were taken from the head (low 31 bits) and from
the tail (the next 31). Every claim is one atomic fetch-and-add, and the value that it returns tells the claimer which
cells are its own, whatever the others do at the same time. Claims at the two ends that run into each other are cut:
the later one gets what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MAX_CELLS = 2**30
"""Most cells of one queue; the other half of each field is room for claims that overshoot."""

_FIELD = 31
_MASK = 2**_FIELD - 1
TAIL_UNIT = 2**_FIELD
"""What one cell taken from the tail adds to the counter."""


class Span(NamedTuple):
    """Cells ``start`` to ``stop``; empty when they are equal."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of cells."""
        return self.stop - self.start


def taken(value: int) -> tuple[int, int]:
    """Cells taken from the head and from the tail in counter ``value``; together they may exceed the queue."""
    return value & _MASK, value >> _FIELD


def remaining(value: int, num_cells: int) -> int:
    """Cells of a queue of ``num_cells`` that nobody has taken."""
    head, tail = taken(value)
    return max(0, num_cells - head - tail)


def head_claim(value: int, size: int, num_cells: int) -> Span:
    """Cells won by adding ``size`` to the head, given the counter's ``value`` after the addition."""
    head, tail = taken(value)
    free_stop = max(0, num_cells - tail)
    start = min(head - size, num_cells)  # not less where the tail overshot: what was won before stays won
    return Span(start, max(start, min(head, free_stop)))


def tail_claim(value: int, size: int, num_cells: int) -> Span:
    """Cells won by adding ``size * TAIL_UNIT``, given the counter's ``value`` after the addition."""
    head, tail = taken(value)
    stop = max(min(head, num_cells), num_cells - (tail - size))
    start = max(min(head, num_cells), num_cells - tail)
    return Span(min(start, stop), stop)


def claim_size(unclaimed: int, speed: float, all_speeds: float, claim_frac: float) -> int:
    """Cells to claim from the shared queue: ``claim_frac`` of the fair share of what is unclaimed, at least one.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987), weighted by speed.
    """
    return max(1, math.floor(claim_frac * unclaimed * speed / all_speeds))


def reserve_size(
    *, cells_left: float, step_s: float, all_cells_per_s: float, reserve_frac: float, ahead_s: float
) -> int:
    """Cells that a replica may hold out of thieves' reach ahead of the running one; zero near the end.

    One is allowed as long as it would surely end before all is done: behind a whole step that runs now.

    ``cells_left`` counts what no replica has reserved, ``all_cells_per_s`` is the speed of all replicas together.
    """
    time_left_s = cells_left / all_cells_per_s
    held_s = min(reserve_frac * time_left_s, ahead_s)
    return max(math.floor(held_s / step_s), 1 if held_s > 0 and time_left_s >= 2 * step_s else 0)


def declines(me: int, cells_left: int, steps_s: Sequence[float], busy_s: Sequence[float]) -> bool:
    """Whether replica ``me``, free now, leaves the remaining equal cells to the others because they end sooner.

    Gives each cell to the replica with the earliest completion, ``busy_s`` being how long each is expected to be busy
    with what it runs now. A replica that would get none of the cells declines; the one with the earliest completion
    never does.
    """
    ends_s = [busy + step for busy, step in zip(busy_s, steps_s, strict=True)]
    ends_s[me] = steps_s[me]
    for _ in range(cells_left):
        first = min(range(len(ends_s)), key=lambda i: (ends_s[i], i != me))
        if first == me:
            return False
        ends_s[first] += steps_s[first]
    return cells_left > 0


def steal_size(backlog: int, my_speed: float, owner_speed: float) -> int:
    """Cells to take from an owner who has ``backlog`` cells that he has not reserved.

    What the thief would do of them if both worked on until they were done, halved because others may steal too.
    """
    share = backlog * my_speed / (my_speed + owner_speed)
    return max(1, min(backlog, math.floor(share / 2)))
