"""Replicas that share the keys of one epoch in one thread, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_hybrid.core.claims import Claimant
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.versions import QueueVersion
from lightning_hybrid.core.workqueue import Span


class DictKeys:
    """The shared keys, in a dictionary; remembers what was asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.asked: list[tuple[str, Any]] = []
        self.before: Callable[[], None] = lambda: None
        """Called before every request, when others may come in between."""

    def add(self, key: str, amount: int) -> int:
        self._ask("add", key)
        value = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(value).encode()
        return value

    def put(self, key: str, value: bytes) -> None:
        self._ask("put", key)
        self.values[key] = value

    def create(self, key: str, value: bytes) -> bytes:
        assert value
        self._ask("create", key)
        return self.values.setdefault(key, value)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._ask("get_many", tuple(keys))
        return [self.values.get(key) for key in keys]

    def _ask(self, what: str, keys: Any) -> None:
        self.before()
        self.asked.append((what, keys))


class ScriptedClock:
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class NoLock:
    """Stands in for a lock where there is one thread; counts its holders, who must not hold it twice."""

    def __init__(self) -> None:
        self.is_held = False

    def __enter__(self) -> None:
        assert not self.is_held, "the lock is not reentrant"
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        self.is_held = False

    def notify_all(self) -> None:
        assert self.is_held, "the lock must be held to notify"


class Epoch:
    """What the replicas of one epoch share, and the replicas.

    Args:
        first: The first plan version.
        costs: Of all cells of the grid.
        config: Of all of them.
        options: What `Claimant` takes beside.
    """

    def __init__(self, first: QueueVersion, costs: Costs, config: HybridConfig | None = None, **options: Any) -> None:
        self.keys, self.clock, self.costs = DictKeys(), ScriptedClock(), costs
        self.config = config or HybridConfig(publish_period_s=0.01)
        self.published: dict[int, Published] = {}
        self.replicas = [StandIn(self, me, first, options) for me in range(len(first.ends))]

    def __repr__(self) -> str:
        first, speeds = self.replicas[0].claimant.versions[0], [replica.speed for replica in self.replicas]
        memory = None if self.costs.memory is None else self.costs.memory.tolist()
        return (
            f"Epoch(compute={self.costs.compute.tolist()}, memory={memory}, bounds={first.memory_bounds},"
            f" ends={first.ends}, speeds={speeds}, records={[replica.view.record for replica in self.replicas]},"
            f" prefetch={self.replicas[0].is_prefetching}, {self.config})"
        )

    def __getitem__(self, replica: int) -> StandIn:
        return self.replicas[replica]

    def measure(self, *speeds: float | None, step_s: float = 1.0) -> Epoch:
        """Replicas have run a step, at these speeds in cost units per second, and all know it."""
        for replica, speed in zip(self.replicas, speeds, strict=True):
            replica.measured(speed, step_s=step_s)
        self.exchange()
        return self

    def exchange(self) -> None:
        """Everybody publishes, and then looks."""
        for replica in self.replicas:
            replica.publish()
        for replica in self.replicas:
            replica.look()

    def adopt(self, version: QueueVersion) -> None:
        """Everybody goes on with this version, and publishes it."""
        for replica in self.replicas:
            replica.claimant.adopt(version)
        self.exchange()

    def run_out(self, most_rounds: int = 3000) -> list[int]:
        """All cells that were run, sorted, after the replicas ran all that is left; time goes on meanwhile."""
        for _ in range(most_rounds):
            if all(replica.is_exhausted() for replica in self.replicas):
                return self.ran
            for replica in self.replicas:
                replica.want()
            self.exchange()
            self.clock.now_s += 0.5
        ends = [(replica.ran, replica.claimant.ranges.open(), replica.is_exhausted()) for replica in self.replicas]
        raise AssertionError(f"{len(self.ran)} cells were run, and the replicas do not come to an end: {ends}")

    @property
    def ran(self) -> list[int]:
        """All cells that were run, sorted."""
        return sorted(cell for replica in self.replicas for cell in replica.ran)


class StandIn:
    """One replica: the `Board` of its claimant, without threads, and a loop that runs cells in no time."""

    def __init__(self, epoch: Epoch, me: int, first: QueueVersion, options: dict[str, Any]) -> None:
        self.epoch, self.me = epoch, me
        self.changed = NoLock()
        config, world = epoch.config, len(first.ends)
        self.view = Peers(me, world, epoch.clock, look_replicas=config.look_replicas, overdue_s=config.publish_period_s)
        self.claimant = Claimant(self, epoch.keys, first, epoch.costs, config, **({"prefetch": False} | options))
        self.is_prefetching = bool(options.get("prefetch"))
        self.ran: list[int] = []
        """Cells that were run, in order."""
        self.speed: float | None = None
        """What the first step of the loop shows, in cost units per second."""

    # --- as a board ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        self.epoch.keys.before()
        published = {r: self.epoch.published.get(r) for r in self.view.to_look_at()}
        version = int(self.epoch.keys.values.get("version", 0))
        with self.changed:
            self.view.take_in(published, version)

    def publish(self) -> None:
        with self.changed:
            told = self.claimant.describe(self.view.record)
        self.epoch.keys.before()
        # what is read is a copy of what was written
        self.epoch.published[self.me] = Published.from_bytes(told.to_bytes())

    # --- as a replica -------------------------------------------------------------------------------------------

    def measured(self, speed: float | None, *, step_s: float = 1.0) -> None:
        """Notes a finished step, a speed in cost units per second, and what a usual step lasts."""
        if speed is not None:
            self._note(steps=self.view.record.steps + 1, cost_speed_per_s=speed, speed_per_s=speed, step_s=step_s)

    def take(self) -> int | None:
        """Hands the next cell to the loop, which runs it unless it loads ahead; ``None`` when there is none now."""
        with self.changed:
            handed = self.claimant.hand_out()
        if handed is None:
            return None
        self.claimant.is_starving = False
        if not self.is_prefetching:
            self._run(handed[0])
        return handed[0]

    def begin(self) -> bool | None:
        """Begins the next loaded cell, where the loader loads ahead: whether it was run; ``None``: not settled."""
        claimant = self.claimant
        with self.changed:
            is_mine = claimant.is_mine() if claimant.loading else None
            if is_mine is None:
                return None
            owned, position = claimant.loading[0]
            claimant.begin()
        claimant.is_starving = False
        if is_mine:
            self._run(owned.cell_at(position))
        return is_mine

    def settle(self, most_turns: int = 500) -> StandIn:
        """Lets the background thread work until it has nothing to do at once."""
        for _ in range(most_turns):
            if self.claimant.turn() > 0:
                return self
        raise AssertionError("it does not come to rest")

    def starve(self) -> StandIn:
        """The loop waits for work from now on."""
        self.claimant.is_starving = True
        return self

    def want(self, most_turns: int = 500) -> int | None:
        """What an idle loop runs next, once the background thread has come to rest; ``None``: nothing now."""
        before = len(self.ran)
        self.starve()
        for _ in range(most_turns):
            self.take()
            while self.begin() is False:  # it was stolen while it was loaded
                pass
            if len(self.ran) > before:
                return self.ran[-1]
            self.starve()
            if self.claimant.turn() > 0:
                break
        else:
            raise AssertionError("it does not come to rest")
        self.take()
        self.begin()
        return self.ran[-1] if len(self.ran) > before else None

    def is_exhausted(self) -> bool:
        """Whether the loop would end now."""
        with self.changed:
            return (
                not self.claimant.loading
                and self.claimant.ranges.next_to_hand() is None
                and self.claimant.is_exhausted()
            )

    def _run(self, cell: int) -> None:
        with self.changed:
            self.claimant.done(cell)
        self.ran.append(cell)
        record = self.view.record
        cost = float(self.epoch.costs.compute[cell])
        self._note(samples=record.samples + 1, steps=record.steps + 1, cost=(record.cost or 0.0) + cost)
        if record.cost_speed_per_s is None:
            self.measured(self.speed)

    def _note(self, **fields: Any) -> None:
        self.view.record = replace(self.view.record, **fields)


def version_of(cells: Sequence[int], costs: Costs, world: int, *, number: int = 0, **others: Any) -> QueueVersion:
    """A plan version: the cells in this order, everybody from the head, without limits."""
    order, nothing = np.asarray(cells, dtype=np.int64), (None,) * world
    given: dict[str, Any] = {
        "number": number,
        "policy": "load_balanced",
        "cells": order,
        "costs": costs.take(order),
        "ends": ("head",) * world,
        "max_claim_costs": nothing,
        "memory_bounds": nothing,
    }
    return QueueVersion(**(given | others))


def costs_of(compute: Sequence[float], memory: Sequence[float] | None = None) -> Costs:
    """Costs of cells, from lists."""
    return Costs(
        compute=np.array(compute, dtype=np.float64),
        memory=None if memory is None else np.array(memory, dtype=np.float64),
    )


def spans_of(*edges: tuple[int, int]) -> tuple[Span, ...]:
    """Spans, from pairs."""
    return tuple(Span(*edge) for edge in edges)


def said(replica: int, record: dict[str, Any] | None = None, **work: Any) -> Published:
    """What a replica told, with these fields of its record."""
    return Published(record=ReplicaRecord(replica=replica, **(record or {})), **work)
