from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.sweep import Sweeper
from lightning_hybrid.core.workqueue import Span
from tests.core.claimants import DictKeys, ScriptedClock


class Watch:
    """Replica 0 of 2 and its sweeper, with a lease of 10 s, over cells 0 to 5."""

    def __init__(self, first_cell: int = 0, num_cells: int = 6) -> None:
        self.clock, self.keys = ScriptedClock(), DictKeys()
        self.sweeper = self.of(0, range(first_cell, num_cells))

    def of(self, replica: int, cells: Sequence[int] = range(6)) -> Sweeper:
        """The sweeper of a replica that shares the keys and the clock."""
        return Sweeper(self.keys, replica, 10.0, cells=np.array(cells, dtype=np.int64), clock=self.clock)

    def adopt(self, *peers: Published | None) -> int | None:
        return self.sweeper.adopt(known(*peers))

    def after(self, seconds: float, *peers: Published | None) -> int | None:
        self.clock.now_s += seconds
        return self.adopt(*peers)


def known(*peers: Published | None) -> dict[int, Published]:
    return {r: peer for r, peer in enumerate(peers) if peer is not None}


def said(
    replica: int,
    *,
    steps: int = 0,
    reserved: int = 0,
    done: tuple[tuple[int, int], ...] = (),
    held: tuple[tuple[int, int], ...] = (),
) -> Published:
    return Published(
        record=ReplicaRecord(replica=replica, steps=steps),
        reserved=reserved,
        done=tuple(Span(*span) for span in done),
        held=tuple(Span(*span) for span in held),
    )


def test_nothing_is_lost_while_every_cell_is_done_or_held() -> None:
    watch = Watch()
    peers = said(0, done=((0, 3),)), said(1, done=((3, 4),), held=((4, 6),))

    assert watch.adopt(*peers) is None
    assert watch.after(9.9, *peers) is None


def test_the_cells_of_a_replica_that_stands_still_are_taken_over_one_by_one() -> None:
    watch = Watch()
    peers = said(0, done=((0, 3),)), said(1, done=((3, 4),), held=((4, 6),))
    watch.adopt(*peers)

    # held by no live replica from now on, but a thief may have yet to speak of them
    assert watch.after(10.0, *peers) is None
    assert watch.after(9.9, *peers) is None
    assert watch.after(0.1, *peers) == 4
    mine_too = said(0, done=((0, 3),), held=((4, 5),)), peers[1]
    assert watch.after(0.0, *mine_too) == 5


def test_a_cell_that_this_replica_took_over_is_not_taken_over_again_before_it_spoke_of_it() -> None:
    watch = Watch()
    peers = said(0, done=((0, 4),)), None
    watch.adopt(*peers)

    assert watch.after(10.0, *peers) == 4
    assert watch.after(0.0, *peers) == 5
    assert watch.after(0.0, *peers) is None
    assert watch.after(60.0, *peers) is None


@pytest.mark.parametrize(
    "moved", [said(1, steps=1, held=((3, 6),)), said(1, reserved=1, held=((3, 6),)), said(1, held=((4, 6),))]
)
def test_a_replica_that_moves_keeps_its_cells(moved: Published) -> None:
    watch = Watch()
    mine = said(0, done=((0, 4),))
    watch.adopt(mine, said(1, held=((3, 6),)))
    watch.after(9.0, mine, said(1, held=((3, 6),)))

    assert watch.after(9.0, mine, moved) is None
    assert watch.after(9.0, mine, moved) is None


def test_own_cells_are_never_taken_for_lost() -> None:
    watch = Watch()
    peers = said(0, held=((0, 6),)), said(1)
    for _ in range(5):
        assert watch.after(10.0, *peers) is None


def test_cells_that_nobody_speaks_of_are_taken_over_after_a_lease() -> None:
    watch = Watch()
    peers = said(0, done=((0, 4),)), None

    assert watch.adopt(*peers) is None
    assert watch.after(9.9, *peers) is None
    assert watch.after(0.1, *peers) == 4


def test_a_cell_that_is_spoken_of_in_time_is_not_lost() -> None:
    watch = Watch()
    mine = said(0, done=((0, 4),))
    watch.adopt(mine, said(1))
    watch.after(9.0, mine, said(1, held=((4, 6),)))

    assert watch.after(9.0, mine, said(1)) is None
    assert watch.after(9.9, mine, said(1)) is None
    assert watch.after(0.1, mine, said(1)) == 4


def test_a_cell_that_another_replica_took_over_is_left_to_it() -> None:
    watch = Watch()
    other = watch.of(1)
    lost = said(0, done=((0, 4), (5, 6)))
    other.adopt(known(lost))
    peers = said(0, done=((0, 4),)), None
    watch.adopt(*peers)
    watch.clock.now_s += 10.0
    assert other.adopt(known(lost)) == 4

    assert watch.adopt(*peers) == 5
    assert other.adopt(known(*peers)) is None


def test_a_cell_whose_new_owner_died_as_well_is_taken_over_again() -> None:
    watch = Watch()
    other = watch.of(1)
    peers = said(0, done=((0, 4), (5, 6))), said(1)
    other.adopt(known(*peers))
    watch.clock.now_s += 10.0
    assert other.adopt(known(*peers)) == 4
    watch.adopt(*peers)

    # the other one took it over 100 s ago and neither runs it nor says anything
    assert 4 in [watch.after(10.0, *peers) for _ in range(10)]


def test_cells_before_the_queue_are_not_swept() -> None:
    watch = Watch(first_cell=4)
    peers = said(0, done=((5, 6),)), None
    watch.adopt(*peers)

    assert watch.after(10.0, *peers) == 4


@pytest.mark.parametrize(
    ("first_cell", "peers", "mine", "complete"),
    [
        (0, (None, said(1, done=((3, 6),))), ((0, 3),), True),
        (0, (None, said(1, done=((3, 5),))), ((0, 3),), False),
        (0, (None, None), ((0, 6),), True),
        (0, (None, None), (), False),
        (0, (None, said(1, done=((0, 6),))), ((2, 4),), True),
        (0, (None, said(1, done=((2, 4), (5, 6)))), ((2, 4), (0, 2)), False),
        (0, (said(0, done=((0, 6),)), None), ((0, 5),), False),
        (2, (None, said(1, done=((2, 5),))), ((5, 6),), True),
        (2, (None, said(1, done=((0, 4),))), ((5, 6),), False),
        (6, (None, None), (), True),
    ],
)
def test_an_epoch_is_complete_when_every_cell_is_done_by_somebody(
    first_cell: int, peers: tuple[Published | None, ...], mine: tuple[tuple[int, int], ...], complete: bool
) -> None:
    sweeper = Watch(first_cell=first_cell).sweeper

    assert sweeper.is_complete(known(*peers), [Span(*span) for span in mine]) is complete


def test_a_cell_outside_the_queue_is_no_reason_to_sweep() -> None:
    watch = Watch(first_cell=2, num_cells=5)
    peers = said(0, done=((2, 5),)), said(1, done=((0, 2), (5, 9)))
    watch.adopt(*peers)

    assert watch.after(10.0, *peers) is None
    assert watch.sweeper.is_complete(known(*peers), [Span(2, 5)])


def test_cells_that_are_still_in_the_queue_are_not_lost() -> None:
    watch = Watch()
    peers = known(said(0, done=((0, 2),)), said(1, done=((2, 3), (4, 5))))
    for _ in range(3):
        assert watch.sweeper.adopt(peers, np.array([5, 3])) is None
        watch.clock.now_s += 10.0

    # one was claimed, and is missing from now on
    assert watch.sweeper.adopt(peers, np.array([5])) is None
    watch.clock.now_s += 10.0
    assert watch.sweeper.adopt(peers, np.array([5])) == 3
    assert watch.sweeper.adopt(peers, np.array([5])) is None


def test_cells_in_any_order_with_gaps_between_them_are_swept_and_the_gaps_are_not() -> None:
    watch = Watch()
    sweeper = watch.of(0, [9, 2, 4, 5])
    peers = known(said(0, done=((2, 3),)), said(1, done=((9, 10),)))
    assert sweeper.adopt(peers) is None
    watch.clock.now_s += 10.0

    assert [sweeper.adopt(peers) for _ in range(3)] == [4, 5, None]
    assert not sweeper.is_complete(peers, [Span(2, 3), Span(4, 5)])
    assert sweeper.is_complete(peers, [Span(2, 3), Span(4, 6)])
