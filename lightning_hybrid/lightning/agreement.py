"""The grid of a pass, the same on every replica."""

from __future__ import annotations

import pickle
import time
import zlib
from typing import Any

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


def agree_on_grid(loader: DataLoader[Any], num_cells: int | None, store: Store, engine: Engine) -> Grid:
    """The grid of the pass, the same on every replica.

    Where every rank computes it, the hashes are compared; a sampler that may differ between ranks is asked on replica
    zero alone, and the others are told.

    Raises:
        PlanError: ranks hold different datasets or loaders.
        CoordinationTimeout: replica zero did not publish its order within ``claim_deadline_s``.
    """
    if live.is_deterministic(loader):
        grid = live.read_grid(loader, num_cells)
        _compare(store, "grid", f"{grid.num_samples} samples, {grid.num_cells} batches, hash {grid.digest}")
        return grid
    _compare(store, "dataset", f"a dataset of {live.length_of(loader.dataset)} samples")
    # a replica may have several ranks, and each would draw an order of its own
    if not dist.is_initialized() or dist.get_rank() == 0:
        grid = live.read_grid(loader, num_cells)
        publish_grid(store, grid)
        return grid
    return _await_grid(store, engine)


def tell_the_others(store: Store, replica: int, error: Exception) -> None:
    """Ends the pass on the other replicas too, which may wait for this one."""
    if not isinstance(error, PeerFailed | CoordinationTimeout):
        raise_alarm(store, Alarm.of_failure(replica, error))


def publish_grid(store: Store, grid: Grid) -> None:
    """Writes a grid to the store, in parts."""
    order = np.asarray(grid.order, dtype=np.int64) if isinstance(grid.order, range) else grid.order
    data = zlib.compress(pickle.dumps((order, grid.offsets), protocol=pickle.HIGHEST_PROTOCOL), 1)
    parts = [data[i : i + _PART_BYTES] for i in range(0, len(data), _PART_BYTES)]
    for i, part in enumerate(parts):
        store.put(f"order/{i}", part)
    store.put("order", str(len(parts)).encode())


def read_published_grid(store: Store) -> Grid | None:
    """The grid that `publish_grid` wrote, ``None`` when it is not there yet."""
    (count,) = store.get_many(["order"])
    if count is None:
        return None
    parts = store.get_many([f"order/{i}" for i in range(int(count))])
    # written by a rank of this job, as everything in its store
    order, offsets = pickle.loads(zlib.decompress(b"".join(part or b"" for part in parts)))
    return Grid(order=order, offsets=offsets)


def _await_grid(store: Store, engine: Engine) -> Grid:
    deadline_s = time.monotonic() + engine.config.claim_deadline_s
    while (grid := read_published_grid(store)) is None:
        alarm = read_alarm(store)
        if alarm is not None:
            raise PeerFailed(alarm.reason)
        if time.monotonic() > deadline_s:
            raise CoordinationTimeout("waited claim_deadline_s for replica 0 to draw the order of the loader's samples")
        time.sleep(engine.config.endgame_poll_s)
    return grid


def _compare(store: Store, key: str, mine: str) -> None:
    agreed = store.create(key, mine.encode()).decode()
    if agreed != mine:
        raise PlanError(f"ranks disagree about the loader: one has {agreed}, this one {mine}")
