"""Replicas as processes that meet in a `TCPStore`, and what is left when some of them are killed."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.planner import QueuePlanner
from lightning_hybrid.core.policies import NoMemoryBounds, policy_named, policy_names
from lightning_hybrid.runtime.store import TorchStore
from lightning_hybrid.runtime.work import Work
from tests.ranks import run_ranks
from tests.runtime.replicas import QUICK, Replica
from tests.runtime.servers import StoreServer

pytestmark = pytest.mark.timeout(90)

WORLD, NUM_CELLS = 4, 48
LEASE_S = 0.5
BOTH = pytest.mark.parametrize("prefetch", [0, 4], ids=["no workers", "workers"])
Deaths = dict[int, tuple[str, int]]
"""Which rank kills itself, right after what, and the how manieth time."""


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer()
    yield server
    server.kill()


def die(rank: int, notes: TorchStore) -> None:
    """Ends this process without a word to the other replicas."""
    notes.add(f"died/{rank}", 1)  # answered, unlike a `put`, which may die with the process
    os.kill(os.getpid(), signal.SIGKILL)


def await_notes(keys: list[str], notes: TorchStore) -> None:
    """Returns when all of these have been noted."""
    ends_s = time.monotonic() + 20
    while None in notes.get_many(keys):
        assert time.monotonic() < ends_s, f"one of {keys} does not come"
        time.sleep(0.005)


def await_deaths(deaths: Deaths, notes: TorchStore) -> None:
    """Returns when those are dead who die by their own work, so that they have got some."""
    await_notes([f"died/{rank}" for rank, (what, _) in deaths.items() if what != "adopt"], notes)


def await_survivors(deaths: Deaths, notes: TorchStore) -> None:
    """Returns when all who live on have begun, so that they have cells to be stolen."""
    await_notes([f"began/{rank}" for rank in range(WORLD) if rank not in deaths], notes)


def die_after(replica: Replica, what: str, times: int, notes: TorchStore) -> None:
    """Makes this process kill itself when the queue (or the sweeper) has answered ``what``, before it is spoken of.

    Of several replicas that are to die after their adoption of a cell only the first one does.
    """
    claimant = replica.dealer.claimant
    asked = claimant._sweeper if what == "adopt" else claimant.queue
    ask, count = getattr(asked, what), [0]

    def last(*args: Any, **options: Any) -> Any:
        answer = ask(*args, **options)
        count[0] += answer is not None and (what != "reserve" or answer.size > 0)
        me = str(replica.me).encode()
        if count[0] == times and (what != "adopt" or notes.create("adopter", me) == me):
            die(replica.me, notes)
        return answer

    setattr(asked, what, last)


def share_cells(
    rank: int, port: int, prefetch: int, steps_ms: list[float], deaths: Deaths, lease_s: float | None
) -> list[int]:
    """Runs cells until there are none; notes each one that was run in the store."""
    server = StoreServer.client_of(port)
    notes = TorchStore(server, "notes")
    config = QUICK.but(lease_s=lease_s, claim_deadline_s=10)
    replica = Replica(TorchStore(server, "run"), rank, WORLD, NUM_CELLS, config=config, prefetch=prefetch)
    what, times = deaths.get(rank, ("", 0))
    if what not in ("", "step"):
        die_after(replica, what, times, notes)

    def step(work: Work) -> None:
        if what == "step" and len(replica.ran) + 1 == times:
            die(rank, notes)
        if not replica.ran:
            notes.put(f"began/{rank}", b"")
        if what == "steal" and not replica.ran:
            await_survivors(deaths, notes)
        if what in ("", "adopt") and not replica.ran:
            await_deaths(deaths, notes)
        time.sleep(steps_ms[rank] / 1000)
        notes.add(f"cell/{work.start}", 1)

    return replica.run(step)


COSTS = Costs(
    compute=np.array([1.0 + cell % 5 for cell in range(NUM_CELLS)]),
    memory=np.array([1.0 + cell % 7 for cell in range(NUM_CELLS)]),
)


class Switching:
    """A process that runs cells of unlike costs; rank 0 orders the rest by another policy with each exchange.

    With ``dies`` rank 0 is killed before its first new version is told, or rank 1 when it has followed to one.
    """

    def __init__(self, rank: int, port: int, prefetch: int, dies: str, lease_s: float | None) -> None:
        server = StoreServer.client_of(port)
        self.rank, self.dies = rank, dies
        self.notes, self.keys = TorchStore(server, "notes"), TorchStore(server, "run")
        config = QUICK.but(lease_s=lease_s, claim_deadline_s=10)
        self.replica = Replica(self.keys, rank, WORLD, NUM_CELLS, config=config, prefetch=prefetch, costs=COSTS)
        self.claimant, self.board = self.replica.dealer.claimant, self.replica.board
        self.policies = itertools.cycle(map(policy_named, policy_names()))
        self.planner = QueuePlanner(self.claimant, self.board, self.keys, COSTS, config, NoMemoryBounds())
        if rank == 0:
            self.board.after_exchange.append(self.switch)
        if rank == 0 and dies == "planning":
            self.keys.put = self.put_or_die  # type: ignore[method-assign]

    def switch(self) -> None:
        if self.board.view.knows_all_speeds():
            self.planner.enforce(next(self.policies), off=False)

    def put_or_die(self, key: str, value: bytes) -> None:
        if key.startswith("version/"):
            die(self.rank, self.notes)
        TorchStore.put(self.keys, key, value)

    def step(self, work: Work) -> None:
        if len(self.replica.ran) == 1:
            self.await_switch()
        time.sleep(0.002 * COSTS.compute[work.start] * (3 if self.rank == 3 else 1))
        self.notes.add(f"cell/{work.start}", 1)

    def await_switch(self) -> None:
        """Returns when this replica has followed to a new version, or who is to die has died."""
        mortal = {"planning": 0, "following": 1}.get(self.dies, self.rank)
        ends_s = time.monotonic() + 20
        while self.claimant.version.number == 0 and self.notes.get_many([f"died/{mortal}"]) == [None]:
            self.board.check()
            assert time.monotonic() < ends_s, f"nothing is switched: {self.board.view.published}"
            time.sleep(0.005)
        if self.dies == "following" and self.rank == 1:
            die(self.rank, self.notes)


def share_unlike_cells(rank: int, port: int, prefetch: int, dies: str, lease_s: float | None) -> list[int]:
    """Runs cells until there are none, while policies are switched."""
    process = Switching(rank, port, prefetch, dies, lease_s)
    process.replica.run(process.step)
    process.notes.add("versions", process.claimant.version.number)
    return process.replica.ran


def counts(server: StoreServer) -> list[int]:
    """How often each cell was run, by the living and by the dead."""
    notes = TorchStore(server.client(), "notes").get_many([f"cell/{cell}" for cell in range(NUM_CELLS)])
    return [int(note or b"0") for note in notes]


def survivors_of(
    server: StoreServer, deaths: Deaths, prefetch: int, steps_ms: list[float], *, num_dead: int
) -> list[list[int]]:
    """What each rank ran that was not killed, after all have ended; none of them ran a cell that another one ran."""
    outcomes = run_ranks(
        share_cells, WORLD, server.port, prefetch, steps_ms, deaths, LEASE_S, deadline_s=40, expect_failure=True
    )
    alive = [outcome for outcome in outcomes if outcome != "died without a word"]
    assert [outcome for outcome in alive if isinstance(outcome, str)] == []
    assert len(alive) == WORLD - num_dead
    twice = [cell for cell, times in Counter(cell for ran in alive for cell in ran).items() if times > 1]
    assert twice == []
    return alive


@BOTH
@pytest.mark.parametrize("steps_ms", [[1, 1, 1, 1], [2, 2, 2, 8], [0, 1, 4, 16]], ids=["equal", "one slow", "steep"])
def test_processes_run_every_cell_once(server: StoreServer, prefetch: int, steps_ms: list[float]) -> None:
    outcomes = run_ranks(share_cells, WORLD, server.port, prefetch, steps_ms, {}, None, deadline_s=40)

    assert sorted(cell for ran in outcomes for cell in ran) == list(range(NUM_CELLS))
    assert counts(server) == [1] * NUM_CELLS


@BOTH
def test_a_lease_that_nobody_misses_leaves_every_cell_to_one_process(server: StoreServer, prefetch: int) -> None:
    outcomes = run_ranks(share_cells, WORLD, server.port, prefetch, [1, 1, 1, 4], {}, 8.0, deadline_s=40)

    assert sorted(cell for ran in outcomes for cell in ran) == list(range(NUM_CELLS))


@BOTH
@pytest.mark.parametrize(
    "death",
    [("step", 4), ("claim", 1), ("claim", 2), ("reserve", 3)],
    ids=lambda death: f"after {death[0]} {death[1]}",
)
def test_nothing_is_lost_when_a_process_is_killed(server: StoreServer, prefetch: int, death: tuple[str, int]) -> None:
    survivors_of(server, {1: death}, prefetch, [2, 2, 2, 2], num_dead=1)

    assert min(counts(server)) >= 1


@BOTH
def test_nothing_is_lost_when_a_thief_is_killed_with_its_loot(server: StoreServer, prefetch: int) -> None:
    survivors_of(server, {0: ("steal", 1)}, prefetch, [1, 8, 8, 8], num_dead=1)

    assert min(counts(server)) >= 1


@BOTH
def test_nothing_is_lost_when_all_but_one_are_killed(server: StoreServer, prefetch: int) -> None:
    deaths = {0: ("claim", 1), 1: ("step", 2), 3: ("reserve", 2)}
    (last,) = survivors_of(server, deaths, prefetch, [2, 2, 2, 2], num_dead=3)

    assert min(counts(server)) >= 1
    assert len(last) > NUM_CELLS // 2


def test_nothing_is_lost_when_the_one_that_took_over_is_killed_too(server: StoreServer) -> None:
    adopts = ("adopt", 1)
    survivors_of(server, {0: adopts, 1: ("reserve", 1), 2: adopts, 3: adopts}, 0, [2, 2, 2, 2], num_dead=2)

    assert min(counts(server)) >= 1


# --- while policies are switched ------------------------------------------------------------------------------------


@BOTH
def test_processes_run_every_cell_once_whatever_is_switched(server: StoreServer, prefetch: int) -> None:
    outcomes = run_ranks(share_unlike_cells, WORLD, server.port, prefetch, "", None, deadline_s=40)

    assert sorted(cell for ran in outcomes for cell in ran) == list(range(NUM_CELLS))
    assert counts(server) == [1] * NUM_CELLS
    (versions,) = TorchStore(server.client(), "notes").get_many(["versions"])
    assert int(versions or b"0") >= WORLD  # every replica has followed


@BOTH
@pytest.mark.parametrize("dies", ["planning", "following"])
def test_nothing_is_lost_when_one_is_killed_amid_a_switch(server: StoreServer, prefetch: int, dies: str) -> None:
    outcomes = run_ranks(
        share_unlike_cells, WORLD, server.port, prefetch, dies, LEASE_S, deadline_s=40, expect_failure=True
    )

    assert [outcome for outcome in outcomes if isinstance(outcome, str)] == ["died without a word"]
    assert min(counts(server)) >= 1
