"""Which ranks exchange messages with which, how large and how often: all of it fixed before the first exchange.

An exchange is one message there and one of the same size back. Pairs of one round have no rank in common, so they
exchange at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lightning_hybrid.core.errors import ConfigError

Depth = Literal["quick", "full"]
"""How much is measured: neighbours in a ring, or all pairs."""
Pair = tuple[int, int]
"""Two ranks, the lower one first: it begins, and its clock counts."""
Round = tuple[Pair, ...]

SMALL_BYTES = 8
"""Size of the message whose time is the latency."""
PILOT_BYTES = 2**16
"""Size of the larger message of the pilot."""
_LEAST_BYTES = 2**12
_PLANNED_FRAC = 0.5
"""Part of what the pilot has left of the budget that is planned for; waits for ranks whose cores are busy take more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The most that one depth may take."""

    budget_s: float
    most_pairs: int
    """Pairs in all rounds; one round is run in any case, up to as many pairs."""
    most_alone: int
    """Pairs that exchange once more while all others are silent."""
    most_bytes: int
    most_repeats: int


LIMITS: dict[Depth, Limits] = {
    "quick": Limits(budget_s=0.2, most_pairs=64, most_alone=8, most_bytes=2**20, most_repeats=3),
    "full": Limits(budget_s=2.0, most_pairs=512, most_alone=64, most_bytes=2**24, most_repeats=5),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pilot:
    """What the first few operations took, in seconds of the slowest rank, so that all ranks plan alike."""

    all_reduce_s: float
    connect_s: float
    """The first exchange of a pair, which may have to connect."""
    small_s: float
    """An exchange of `SMALL_BYTES`."""
    large_s: float
    """An exchange of `PILOT_BYTES`."""
    spent_s: float = 0.0
    """All of it so far."""

    @property
    def s_per_byte(self) -> float:
        """What each further byte of a message adds to its exchange."""
        return max(0.0, self.large_s - self.small_s) / (PILOT_BYTES - SMALL_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangePlan:
    """What is measured, in this order: each round, each pair alone, then all-reduces of the whole group."""

    num_ranks: int
    rounds: tuple[Round, ...]
    alone: tuple[Pair, ...]
    message_bytes: int
    """Size of the message whose exchange is the bandwidth."""
    repeats: int
    """How often each size is exchanged, after one small exchange that is not counted."""

    @property
    def measurements(self) -> tuple[Round, ...]:
        """Who exchanges at once, one entry for each time that all ranks wait for each other."""
        return (*self.rounds, *((pair,) for pair in self.alone))

    @property
    def num_exchanges(self) -> int:
        """Exchanges of all ranks together."""
        return sum(map(len, self.measurements)) * (1 + 2 * self.repeats)

    @property
    def num_all_reduces(self) -> int:
        """All-reduces of the group: one before each measurement, one before and ``2 * repeats`` in the last."""
        return len(self.measurements) + 1 + 2 * self.repeats

    def predict_s(self, pilot: Pilot) -> float:
        """Seconds that it takes where everything goes as in the pilot."""
        more_s = self.message_bytes * pilot.s_per_byte
        first_s = len(self.rounds) * pilot.connect_s + len(self.alone) * pilot.small_s
        exchanges_s = len(self.measurements) * self.repeats * (2 * pilot.small_s + more_s)
        return first_s + exchanges_s + self.num_all_reduces * pilot.all_reduce_s + self.repeats * more_s


def plan_exchanges(depth: Depth, num_ranks: int, pilot: Pilot) -> ExchangePlan:
    """The most that fits into the depth's budget by the pilot's times; equal on all ranks, as the pilot is.

    On a slow network pairs alone are left out first, all but one, then repeats, that pair, and rounds; one round of
    small messages is measured in any case.

    Raises:
        ConfigError: ``num_ranks`` is less than 2.
    """
    if num_ranks < 2:
        raise ConfigError("num_ranks", num_ranks, "be at least 2")
    limits = LIMITS[depth]
    most_s = _PLANNED_FRAC * max(0.0, limits.budget_s - pilot.spent_s)
    rounds = _bounded(rounds_of(depth, num_ranks), limits.most_pairs)
    plan = ExchangePlan(
        num_ranks=num_ranks,
        rounds=rounds,
        alone=tuple(pair for each in rounds if len(each) > 1 for pair in each)[: limits.most_alone],
        message_bytes=_LEAST_BYTES,
        repeats=limits.most_repeats,
    )
    while plan.predict_s(pilot) > most_s and (fewer := _with_less(plan)) is not None:
        plan = fewer
    while plan.message_bytes < limits.most_bytes:
        larger = replace(plan, message_bytes=2 * plan.message_bytes)
        if larger.predict_s(pilot) > most_s:
            break
        plan = larger
    return plan


def rounds_of(depth: Depth, num_ranks: int) -> Iterator[Round]:
    """The rounds of a depth, without bounds."""
    return ring(num_ranks) if depth == "quick" else tournament(num_ranks)


def ring(num_ranks: int) -> Iterator[Round]:
    """Every rank with its two neighbours: two rounds, a third one where the number of ranks is odd.

    Example:
        >>> list(ring(4))
        [((0, 1), (2, 3)), ((1, 2), (0, 3))]
    """
    edges = [_pair(rank, (rank + 1) % num_ranks) for rank in range(num_ranks if num_ranks > 2 else 1)]
    last = len(edges) - num_ranks % 2
    yield tuple(edges[:last:2])
    yield from filter(None, (tuple(edges[1:last:2]), tuple(edges[last:])))


def tournament(num_ranks: int) -> Iterator[Round]:
    """Every pair once, in the fewest rounds: the circle method for round-robin tournaments.

    The last rank stays where it is and the others move round it by one seat; with an odd number of ranks, the one that
    would meet nobody sits the round out (Lucas, Récréations mathématiques II, 1883).

    Example:
        >>> list(tournament(4))
        [((0, 3), (1, 2)), ((1, 3), (0, 2)), ((2, 3), (0, 1))]
    """
    seats = num_ranks + num_ranks % 2
    turn = seats - 1
    for start in range(turn):
        around = (_pair((start + k) % turn, (start - k) % turn) for k in range(1, seats // 2))
        yield tuple(pair for pair in (_pair(start, turn), *around) if pair[1] < num_ranks)


def partner_of(rank: int, pairs: Round) -> int | None:
    """Whom a rank exchanges with in a round, ``None`` where it sits out."""
    for first, second in pairs:
        if rank in (first, second):
            return second if rank == first else first
    return None


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _bounded(rounds: Iterator[Round], most_pairs: int) -> tuple[Round, ...]:
    kept = [next(rounds)[:most_pairs]]
    num_pairs = len(kept[0])
    for each in rounds:
        num_pairs += len(each)
        if num_pairs > most_pairs:
            break
        kept.append(each)
    return tuple(kept)


def _with_less(plan: ExchangePlan) -> ExchangePlan | None:
    if len(plan.alone) > 1:  # without one of them nothing is known of contention
        return replace(plan, alone=plan.alone[:-1])
    if plan.repeats > 1:
        return replace(plan, repeats=plan.repeats - 1)
    if plan.alone:
        return replace(plan, alone=())
    return replace(plan, rounds=plan.rounds[:-1]) if len(plan.rounds) > 1 else None
