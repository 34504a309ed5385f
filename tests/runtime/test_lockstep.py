from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import CoordinationTimeout
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.lockstep import Block, LockstepDealer, ghost_work
from lightning_hybrid.runtime.sharedqueue import Published, SharedQueue
from lightning_hybrid.runtime.store import InProcessStore
from lightning_hybrid.runtime.work import Exhausted, Work

pytestmark = pytest.mark.timeout(60)

CONFIG = HybridConfig(publish_period_s=0.01, claim_deadline_s=20)
Speeds = Sequence[float | None]


class Lockstep:
    """All replicas' dealers of one epoch, in one thread; what each board knows is set by the test."""

    def __init__(
        self,
        grid: Grid,
        world: int,
        *,
        max_size: int | None,
        first_cell: int = 0,
        speeds: Speeds | None = None,
        recut: bool = True,
        config: HybridConfig = CONFIG,
    ) -> None:
        store = InProcessStore()
        self.grid, self.first_cell, self.recut = grid, first_cell, recut
        queues = [SharedQueue(store, me, world, first_cell, grid.num_cells) for me in range(world)]
        self.boards = [Board(queue, me, config) for me, queue in enumerate(queues)]
        self.dealers = [
            LockstepDealer(
                board,
                queue,
                grid,
                config,
                replica=me,
                first_cell=first_cell,
                max_size=max_size,
                prior=[1.0] * world,
            )
            for me, (board, queue) in enumerate(zip(self.boards, queues, strict=True))
        ]
        self.rounds: list[list[Work]] = [[] for _ in range(world)]
        if speeds is not None:
            self.measure(speeds)

    def measure(self, speeds: Speeds, *, seen_by: int | None = None) -> None:
        """What the boards know of every replica's speed."""
        for board in self.boards if seen_by is None else [self.boards[seen_by]]:
            board.peers = [
                Published(
                    record=ReplicaRecord(replica=r, speed_per_s=speed, step_s=None if speed is None else 1 / speed),
                    recut=self.recut,
                )
                for r, speed in enumerate(speeds)
            ]

    def take(self, me: int, *, may_wait: bool = True) -> bool:
        """Whether replica ``me`` had another round."""
        try:
            work = self.dealers[me].take(may_wait=may_wait)
        except Exhausted:
            return False
        self.rounds[me].append(work)
        return True

    def run(self) -> list[tuple[Work, ...]]:
        """The rounds, after every replica has asked until the end."""
        for me in range(len(self.dealers)):
            while self.take(me):
                pass
        return list(zip(*self.rounds, strict=True))

    def sizes(self, rounds: int) -> list[list[int]]:
        """Sizes of the first rounds, a list per round."""
        for _, me in itertools.product(range(rounds), range(len(self.dealers))):
            assert self.take(me)
        return [[work.size for work in works] for works in zip(*self.rounds, strict=True)]

    def check(self) -> None:
        """Every position from the first cell on is dealt out once, in order, in as many steps on every replica."""
        at = int(self.grid.offsets[min(self.first_cell, self.grid.num_cells)])
        for works in zip(*self.rounds, strict=True):
            for work in works:
                assert work.mode == "lockstep"
                if work.ghost:
                    assert (work.start, work.stop) == self.grid.span(0)
                    continue
                assert work.start == at < work.stop
                at = work.stop
            assert not all(work.ghost for work in works)
        assert at == self.grid.num_samples


# --- cut anew -------------------------------------------------------------------------------------------------------


def test_sizes_follow_the_speeds() -> None:
    lockstep = Lockstep(Grid.sequential(1000, 16), 4, max_size=16, speeds=[30.0, 30.0, 30.0, 10.0])

    assert lockstep.sizes(3) == [[16, 16, 16, 5]] * 3


def test_equal_replicas_get_equal_sizes() -> None:
    assert Lockstep(Grid.sequential(1000, 16), 4, max_size=16, speeds=[7.0] * 4).sizes(5) == [[16] * 4] * 5


def test_noise_in_the_speeds_keeps_equal_sizes() -> None:
    lockstep = Lockstep(Grid.sequential(1000, 16), 4, max_size=16, speeds=[100.0, 103.0, 98.0, 95.0])

    assert lockstep.sizes(10) == [[16] * 4] * 10


def test_noise_around_unequal_speeds_keeps_the_sizes() -> None:
    lockstep = Lockstep(Grid.sequential(4000, 16), 4, max_size=16, speeds=[30.0, 30.0, 30.0, 10.0])
    lockstep.sizes(3)
    lockstep.measure([30.5, 29.0, 31.0, 10.3])

    assert lockstep.sizes(30)[-1] == [16, 16, 16, 5]


def test_a_slowdown_moves_the_sizes_with_the_next_block() -> None:
    lockstep = Lockstep(Grid.sequential(4000, 16), 2, max_size=16, speeds=[10.0, 10.0])
    assert lockstep.sizes(4)[-1] == [16, 16]
    lockstep.measure([10.0, 5.0])

    assert lockstep.sizes(8 + 1)[-1] == [16, 8]


def test_blocks_grow_to_their_bound() -> None:
    lockstep = Lockstep(
        Grid.sequential(4000, 16), 2, max_size=16, speeds=[10.0, 10.0], config=CONFIG.but(lockstep_block_rounds=4)
    )
    blocks = []
    slower = 10.0
    for _ in range(40):
        lockstep.sizes(1)
        slower *= 0.8
        lockstep.measure([10.0, slower])
    sizes = [works[1].size for works in zip(*lockstep.rounds, strict=True)]
    blocks = [len(list(group)) for _, group in itertools.groupby(sizes)]

    assert blocks[:3] == [1, 1, 2]
    assert max(blocks[:-1]) == 4


def test_before_the_speeds_are_known_the_batches_are_the_users() -> None:
    lockstep = Lockstep(Grid.from_batches([[5, 6], [7], [8, 9, 3], [1], [2, 4]]), 2, max_size=4)
    works = [dealer.take(may_wait=False) for dealer in lockstep.dealers]

    assert [(work.start, work.stop, work.cell) for work in works] == [(0, 2, 0), (2, 3, 1)]


def test_one_that_may_wait_waits_for_the_first_speeds() -> None:
    lockstep = Lockstep(Grid.sequential(100, 10), 2, max_size=10)
    board = lockstep.boards[0]
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lockstep.dealers[0].take, may_wait=True)
        lockstep.measure([10.0, None])
        with board.changed:
            board.changed.notify_all()
        assert not taken.done()
        lockstep.measure([10.0, 5.0])
        with board.changed:
            board.changed.notify_all()

        assert taken.result(timeout=20) == Work(0, 10, mode="lockstep")


def test_a_wait_for_the_first_speeds_has_a_deadline() -> None:
    config = CONFIG.but(claim_deadline_s=0.05)
    lockstep = Lockstep(Grid.sequential(100, 10), 2, max_size=10, speeds=[1.0, None], config=config)

    with pytest.raises(CoordinationTimeout, match="first speeds"):
        lockstep.dealers[0].take(may_wait=True)


def test_a_block_that_another_replica_agreed_on_is_read_without_a_wait() -> None:
    lockstep = Lockstep(Grid.sequential(100, 10), 2, max_size=10)
    lockstep.measure([10.0, 5.0], seen_by=0)
    lockstep.take(0)

    assert lockstep.take(1)
    assert [works[0] for works in lockstep.rounds] == [Work(0, 10, mode="lockstep"), Work(10, 15, mode="lockstep")]


# --- not cut anew ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speeds", [None, [10.0, 1.0]])
def test_batches_that_must_not_be_cut_are_the_users(speeds: Speeds | None) -> None:
    lockstep = Lockstep(Grid.from_batches([[5, 6], [7], [8, 9, 3], [1], [2, 4]]), 2, max_size=None, speeds=speeds)
    rounds = lockstep.run()

    assert [[(work.start, work.stop, work.cell, work.ghost) for work in works] for works in rounds] == [
        [(0, 2, 0, False), (2, 3, 1, False)],
        [(3, 6, 2, False), (6, 7, 3, False)],
        [(7, 9, 4, False), (0, 2, 0, True)],
    ]


def test_a_replica_whose_outputs_cannot_be_cut_keeps_everybodys_batches() -> None:
    lockstep = Lockstep(Grid.sequential(100, 10), 2, max_size=10, speeds=[10.0, 1.0], recut=False)
    rounds = lockstep.run()

    assert [[work.cell for work in works] for works in rounds] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


# --- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_size", [None, 8])
def test_a_replica_without_a_sample_takes_a_ghost_step(max_size: int | None) -> None:
    grid = Grid.from_batches([[0], [1], [2]])
    lockstep = Lockstep(grid, 5, max_size=max_size, speeds=[1.0] * 5)
    (works,) = lockstep.run()

    assert [work.ghost for work in works] == [False, False, False, True, True]
    assert works[3] == ghost_work(grid, "lockstep") == Work(0, 1, cell=0, mode="lockstep", ghost=True)
    lockstep.check()


@pytest.mark.parametrize("first_cell", [3, 4])
def test_nothing_is_left_when_the_first_steps_were_all(first_cell: int) -> None:
    lockstep = Lockstep(Grid.from_batches([[0], [1], [2]]), 4, max_size=8, first_cell=first_cell, speeds=[1.0] * 4)

    assert lockstep.run() == []


def test_the_last_round_shares_what_is_left_by_speed() -> None:
    lockstep = Lockstep(Grid.sequential(24 + 12, 16), 2, max_size=16, speeds=[20.0, 10.0])
    rounds = lockstep.run()

    assert [[work.size for work in works] for works in rounds] == [[16, 8], [8, 4]]


def test_rounds_cannot_be_stolen_and_the_end_is_not_waited_for() -> None:
    lockstep = Lockstep(Grid.sequential(10, 5), 1, max_size=5, speeds=[1.0])
    dealer = lockstep.dealers[0]
    work = dealer.take(may_wait=True)

    assert dealer.begin(work)
    dealer.done(work)
    dealer.finish()


@given(
    num_samples=st.integers(0, 120),
    batch_size=st.integers(1, 9),
    speeds=st.lists(st.floats(0.05, 20), min_size=1, max_size=5),
    first_cells=st.integers(0, 6),
    recut=st.booleans(),
    can_cut=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=150)
def test_replicas_read_the_same_rounds_in_whatever_order_they_ask(
    num_samples: int,
    batch_size: int,
    speeds: list[float],
    first_cells: int,
    recut: bool,
    can_cut: bool,
    data: st.DataObject,
) -> None:
    lockstep = Lockstep(
        Grid.sequential(num_samples, batch_size),
        len(speeds),
        max_size=batch_size if can_cut else None,
        first_cell=first_cells,
        speeds=speeds,
        recut=recut,
    )
    # each replica has its own view of the speeds, and the one that asks first decides
    for turn in data.draw(st.lists(st.integers(0, len(speeds) - 1), max_size=60)):
        lockstep.measure([speed * (1 + turn / 4) ** (r == turn) for r, speed in enumerate(speeds)], seen_by=turn)
        lockstep.take(turn)
    lockstep.run()

    lockstep.check()


@given(
    st.integers(1, 9),
    st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=5).map(tuple),
    st.none() | st.lists(st.floats(0.01, 1e6), min_size=1, max_size=5).map(tuple),
)
@settings(deadline=None)
def test_a_block_comes_back_from_its_bytes(
    rounds: int, sizes: tuple[int, ...] | None, speeds: tuple[float, ...] | None
) -> None:
    block = Block(rounds, sizes, speeds)

    assert Block.from_bytes(block.to_bytes()) == block


# --- with background threads ----------------------------------------------------------------------------------------


def test_threads_with_boards_of_their_own_cover_every_position_once() -> None:
    speeds = [50.0, 40.0, 10.0]
    lockstep = Lockstep(Grid.sequential(500, 8), 3, max_size=8)
    for me, board in enumerate(lockstep.boards):
        record = ReplicaRecord(replica=me, speed_per_s=speeds[me], step_s=8 / speeds[me])
        board.record, board.recut = replace(record, steps=1), True
        board.start()

    def main(me: int) -> None:
        while lockstep.take(me):
            pass

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(main, range(3), timeout=40))
    for board in lockstep.boards:
        board.close()

    lockstep.check()
    assert [sum(work.size for work in works) for works in lockstep.rounds][2] < 500 / 3
