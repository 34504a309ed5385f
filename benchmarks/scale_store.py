"""A real `TCPStore` and many client processes that claim from one queue as fast as they can."""

from __future__ import annotations

import time
from typing import Any

from torch.distributed import TCPStore

from lightning_hybrid.core.workqueue import CellQueue
from lightning_hybrid.runtime.store import TorchStore
from tests.ranks import run_ranks
from tests.runtime.servers import StoreServer

CLIENTS = 64
CELLS = 200_000
_CLAIM = 16
"""Cells of one claim."""
_DEADLINE_S = 120.0


class _Counting(TorchStore):
    """A store that counts what is asked of it."""

    def __init__(self, store: TCPStore, prefix: str) -> None:
        super().__init__(store, prefix)
        self.requests = 0

    def add(self, key: str, amount: int) -> int:
        self.requests += 1
        return super().add(key, amount)


def _claim_all(rank: int, port: int, clients: int, cells: int) -> tuple[list[tuple[int, int]], int, float, float]:
    """The ranges that one client won, its requests, and when it began and ended."""
    store = _Counting(StoreServer.client_of(port), "scale")
    queue = CellQueue(store, rank, cells)
    ready = store.add("ready", 1)
    while ready < clients:
        time.sleep(0.01)
        ready = store.add("ready", 0)
    before, won = store.requests, []
    start_s = time.monotonic()
    while (claim := queue.claim(_CLAIM)) is not None:
        won.append((claim.start, claim.size))
    return won, store.requests - before, start_s, time.monotonic()


def figures(clients: int = CLIENTS, cells: int = CELLS) -> dict[str, Any]:
    """Claims per second of all clients together, requests per claim, and whether every cell was won once."""
    server = StoreServer()
    try:
        found = run_ranks(_claim_all, clients, server.port, clients, cells, deadline_s=_DEADLINE_S)
    finally:
        server.kill()
    ranges = sorted(won for each, *_ in found for won in each)
    at = 0
    violations = 0
    for start, size in ranges:
        violations += start != at
        at = start + size
    claims = len(ranges)
    seconds = max(end for *_, end in found) - min(start for *_, start, _ in found)
    return {
        "tcpstore_clients": clients,
        "tcpstore_claims_per_s": claims / seconds,
        # a little above 1: the last request of a client may find the queue used up
        "tcpstore_requests_per_claim": sum(requests for _, requests, *_ in found) / claims,
        "tcpstore_violations": violations + (at != cells),
    }
