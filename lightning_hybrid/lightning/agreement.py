"""What every replica must hold alike before a pass begins: the grid, and what was found out about the samples."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hybrid.core.errors import CoordinationTimeout, PeerFailed, PlanError
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.engine import Engine
from lightning_hybrid.lightning import loader as live
from lightning_hybrid.runtime.sharedqueue import Alarm, raise_alarm, read_alarm
from lightning_hybrid.runtime.store import Store

_PART_BYTES = 2**22


class Exchange(Protocol):
    """How ranks find something out together, and check that they hold the same."""

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """What ``find`` returns on rank zero, on every rank."""
        ...

    def divided(self, name: str, num: int, find: Callable[[int, int], Any]) -> list[Any]:
        """``find(start, stop)`` of consecutive parts of ``num`` samples, one part per rank, on every rank."""
        ...

    def compare(self, name: str, mine: str) -> None:
        """Raises `PlanError` unless every rank has the same text."""
        ...


class NoExchange:
    """The exchange of a rank that runs all batches of its own loader."""

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """What ``find`` returns."""
        return find()

    def divided(self, name: str, num: int, find: Callable[[int, int], Any]) -> list[Any]:
        """One part."""
        return [find(0, num)]

    def compare(self, name: str, mine: str) -> None:
        """Nothing to compare with."""


class StoreExchange:
    """Ranks tell each other through the pass's store.

    Args:
        store: The store of the pass.
        engine: Has the deadline.
    """

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store, self._config = store, engine.config
        # ranks, not replicas: a replica may have several, and each would draw an order of its own
        joined = dist.is_available() and dist.is_initialized()
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """Published by rank zero."""
        if self._rank > 0:
            return self._await(name, 0)
        found = find()
        publish(self._store, f"{name}/0", found)
        return found

    def divided(self, name: str, num: int, find: Callable[[int, int], Any]) -> list[Any]:
        """Every rank publishes its part."""
        edges = [rank * num // self._world for rank in range(self._world + 1)]
        mine = find(edges[self._rank], edges[self._rank + 1])
        publish(self._store, f"{name}/{self._rank}", mine)
        return [mine if rank == self._rank else self._await(name, rank) for rank in range(self._world)]

    def compare(self, name: str, mine: str) -> None:
        """With what the first rank wrote."""
        agreed = self._store.create(name, mine.encode()).decode()
        if agreed != mine:
            raise PlanError(f"ranks disagree about the loader: one has {agreed}, this one {mine}")

    def _await(self, name: str, rank: int) -> Any:
        deadline_s = time.monotonic() + self._config.claim_deadline_s
        while (found := read_published(self._store, f"{name}/{rank}")) is None:
            alarm = read_alarm(self._store)
            if alarm is not None:
                raise PeerFailed(alarm.reason)
            if time.monotonic() > deadline_s:
                raise CoordinationTimeout(f"waited claim_deadline_s for rank {rank} to find the {name} of the samples")
            time.sleep(self._config.endgame_poll_s)
        return found


def agree_on_grid(loader: DataLoader[Any], num_cells: int | None, exchange: Exchange) -> Grid:
    """The batches of the pass, the same on every replica.

    Where every rank computes them, the hashes are compared; a sampler that may differ between ranks is asked on rank
    zero alone, and the others are told.

    Raises:
        PlanError: ranks hold different datasets or loaders.
        CoordinationTimeout: rank zero did not publish its order within ``claim_deadline_s``.
    """
    if live.is_deterministic(loader):
        grid = live.read_grid(loader, num_cells)
        exchange.compare("grid", f"{grid.num_samples} samples, {grid.num_cells} batches, hash {grid.digest}")
        return grid
    exchange.compare("dataset", f"a dataset of {live.length_of(loader.dataset)} samples")
    order, offsets = exchange.once("order", lambda: _plain(live.read_grid(loader, num_cells)))
    return Grid(order=order, offsets=offsets)


def _plain(grid: Grid) -> tuple[Any, Any]:
    order = np.asarray(grid.order, dtype=np.int64) if isinstance(grid.order, range) else grid.order
    return order, grid.offsets


def tell_the_others(store: Store, replica: int, error: Exception) -> None:
    """Ends the pass on the other replicas too, which may wait for this one."""
    if not isinstance(error, PeerFailed | CoordinationTimeout):
        raise_alarm(store, Alarm.of_failure(replica, error))


def publish(store: Store, name: str, value: Any) -> None:
    """Writes a value to the store, in parts."""
    data = zlib.compress(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), 1)
    parts = [data[i : i + _PART_BYTES] for i in range(0, len(data), _PART_BYTES)]
    for i, part in enumerate(parts):
        store.put(f"{name}/{i}", part)
    store.put(name, str(len(parts)).encode())


def read_published(store: Store, name: str) -> Any:
    """The value that `publish` wrote, ``None`` when it is not there yet."""
    (count,) = store.get_many([name])
    if count is None:
        return None
    parts = store.get_many([f"{name}/{i}" for i in range(int(count))])
    # written by a rank of this job, as everything in its store
    return pickle.loads(zlib.decompress(b"".join(part or b"" for part in parts)))
