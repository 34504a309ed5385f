from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import CoordinationTimeout, PlanError
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.selector import OFF
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.workqueue import Span
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.lockstep import Block, LockstepDealer, ghost_work
from lightning_hybrid.runtime.sharedqueue import SharedQueue
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
        stop_cell: int | None = None,
        speeds: Speeds | None = None,
        recut: bool = True,
        config: HybridConfig = CONFIG,
        policy: str | None = None,
        caps: Sequence[int | None] | None = None,
    ) -> None:
        store = InProcessStore()
        self.grid, self.recut, self.policy = grid, recut, policy
        stop_cell = grid.num_cells if stop_cell is None else stop_cell
        self.cells = Span(min(first_cell, stop_cell), stop_cell)
        self.queues = [SharedQueue(store, me, world) for me in range(world)]
        self.boards = [Board(queue, me, world, config) for me, queue in enumerate(self.queues)]
        self.dealers = [
            LockstepDealer(
                board,
                queue,
                grid,
                config,
                cells=self.cells,
                max_size=max_size,
                caps=None if caps is None else lambda: list(caps),
            )
            for board, queue in zip(self.boards, self.queues, strict=True)
        ]
        self.rounds: list[list[Work]] = [[] for _ in range(world)]
        if speeds is not None:
            self.measure(speeds)

    def measure(self, speeds: Speeds, *, seen_by: int | None = None, **record: Any) -> None:
        """What the boards know of every replica's speed."""
        for board in self.boards if seen_by is None else [self.boards[seen_by]]:
            board.view.published = {
                r: Published(
                    record=ReplicaRecord(
                        replica=r, speed_per_s=speed, step_s=None if speed is None else 1 / speed, **record
                    ),
                    recut=self.recut,
                    policy=self.policy if r == 0 else None,
                )
                for r, speed in enumerate(speeds)
            }

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
        """Every position of the cells is dealt out once, in order, in as many steps on every replica."""
        at = int(self.grid.offsets[self.cells.start])
        for works in zip(*self.rounds, strict=True):
            for work in works:
                assert work.mode == "lockstep"
                if work.ghost:
                    assert (work.start, work.stop) == self.grid.span(0)
                    continue
                assert work.start == at < work.stop
                at = work.stop
            assert not all(work.ghost for work in works)
        assert at == int(self.grid.offsets[self.cells.stop])


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


@pytest.mark.parametrize("max_size", [None, 4])
def test_cells_behind_the_last_of_the_rounds_are_not_dealt_out(max_size: int | None) -> None:
    # the lightest cells come last, and were run first
    lockstep = Lockstep(Grid.sequential(40, 4), 2, max_size=max_size, stop_cell=8, speeds=[1.0, 0.7])
    rounds = lockstep.run()

    assert max(work.stop for works in rounds for work in works) == 32
    lockstep.check()


def test_sizes_follow_speeds_in_cost_units_where_they_are_known() -> None:
    lockstep = Lockstep(Grid.sequential(1000, 16), 2, max_size=16)
    for board in lockstep.boards:
        board.view.published = {
            r: Published(
                record=ReplicaRecord(replica=r, speed_per_s=10.0, cost_speed_per_s=speed, step_s=1.0), recut=True
            )
            for r, speed in enumerate([50.0, 25.0])
        }

    assert lockstep.sizes(1) == [[16, 8]]


@pytest.mark.parametrize(("error_frac", "sizes"), [(0.05, [16, 12]), (0.2, [16, 16])])
def test_what_may_be_chance_moves_no_sizes(error_frac: float, sizes: list[int]) -> None:
    lockstep = Lockstep(Grid.sequential(1000, 16), 2, max_size=16)
    lockstep.measure([10.0, 7.7], cost_speed_error_frac=error_frac)

    assert lockstep.sizes(1) == [sizes]


# --- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        ("memory_aware", [10, 6]),
        ("hybrid", [10, 6]),
        ("load_balanced", [16, 16]),
        ("performance_optimized", [16, 16]),
        (None, [16, 16]),
    ],
)
def test_policies_that_mind_memory_keep_within_what_fits(policy: str | None, sizes: list[int]) -> None:
    lockstep = Lockstep(Grid.sequential(1000, 16), 2, max_size=16, speeds=[10.0, 10.0], policy=policy, caps=[None, 6])

    assert lockstep.sizes(2) == [sizes] * 2
    rounds = lockstep.run()
    assert max(works[1].size for works in rounds) == sizes[1]  # in the last round too, where there is room elsewhere
    lockstep.check()


def test_turned_off_from_the_start_the_batches_are_the_users() -> None:
    lockstep = Lockstep(Grid.sequential(100, 10), 2, max_size=10, speeds=[10.0, 1.0], policy=OFF)

    assert [[work.cell for work in works] for works in lockstep.run()] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_turned_off_between_two_blocks_every_replica_gets_the_same_size() -> None:
    lockstep = Lockstep(Grid.sequential(1000, 16), 2, max_size=16, speeds=[10.0, 5.0], policy="hybrid")
    assert lockstep.sizes(1) == [[16, 8]]
    lockstep.policy = OFF
    lockstep.measure([10.0, 5.0])

    assert lockstep.sizes(3)[1:] == [[16, 16]] * 3
    lockstep.run()
    lockstep.check()


def test_a_block_tells_by_which_policy_it_was_cut() -> None:
    lockstep = Lockstep(Grid.sequential(1000, 16), 2, max_size=16, speeds=[10.0, 5.0], policy="memory_aware")
    lockstep.sizes(1)
    agreed = lockstep.queues[1].agreed("block/0")

    assert agreed is not None
    assert Block.from_bytes(agreed) == Block(1, (16, 8), (10.0, 5.0), "memory_aware")


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
    st.none() | st.text(),
)
@settings(deadline=None)
def test_a_block_comes_back_from_its_bytes(
    rounds: int, sizes: tuple[int, ...] | None, speeds: tuple[float, ...] | None, policy: str | None
) -> None:
    block = Block(rounds, sizes, speeds, policy)

    assert Block.from_bytes(block.to_bytes()) == block


def test_a_block_that_does_not_hold_what_its_hash_says_is_refused() -> None:
    data = Block(4, (16, 8), (2.0, 1.0), "hybrid").to_bytes()

    with pytest.raises(PlanError, match="a block of rounds has hash"):
        Block.from_bytes(data.replace(b"[16, 8]", b"[8, 16]"))


# --- with background threads ----------------------------------------------------------------------------------------


def test_threads_with_boards_of_their_own_cover_every_position_once() -> None:
    speeds = [50.0, 40.0, 10.0]
    lockstep = Lockstep(Grid.sequential(500, 8), 3, max_size=8)
    for me, board in enumerate(lockstep.boards):
        record = ReplicaRecord(replica=me, speed_per_s=speeds[me], step_s=8 / speeds[me])
        board.view.record, board.recut = replace(record, steps=1), True
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
