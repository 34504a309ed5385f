"""The key-value store that ranks coordinate through: one interface, in one process or over TCP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store as TorchDistributedStore

from lightning_hybrid.core.errors import CoordinationTimeout
from lightning_hybrid.core.workqueue import Keys

Store = Keys
"""What ranks coordinate through."""


class InProcessStore:
    """A store for one process: for a single device, for tests and for simulation."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        """Adds to the counter at ``key`` and returns its new value."""
        with self._lock:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            return value

    def put(self, key: str, value: bytes) -> None:
        """Writes ``value``."""
        with self._lock:
            self._values[key] = value

    def create(self, key: str, value: bytes) -> bytes:
        """Writes ``value`` unless somebody did before, and returns what is there now."""
        with self._lock:
            return self._values.setdefault(key, value)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values at ``keys``, ``None`` where there is none."""
        with self._lock:
            return [self._values.get(key) for key in keys]


class TorchStore:
    """Any `torch.distributed` store, below a prefix.

    Args:
        store: The store; give each thread that may wait a client of its own.
        prefix: Put before every key, so that a restart or a second run on a shared store starts with fresh keys.

    Raises:
        CoordinationTimeout: from every call, when the store is gone or does not answer.
    """

    def __init__(self, store: TorchDistributedStore, prefix: str) -> None:
        # torch takes and gives bytes, its annotations say str
        self._store: Any = PrefixStore(prefix, store)
        self._known: set[str] = set()  # keys are never deleted: one that was there need not be asked for again

    def add(self, key: str, amount: int) -> int:
        """Adds to the counter at ``key`` and returns its new value."""
        with _Translated("add", key):
            return int(self._store.add(key, amount))

    def put(self, key: str, value: bytes) -> None:
        """Writes ``value``."""
        with _Translated("set", key):
            self._store.set(key, value)

    def create(self, key: str, value: bytes) -> bytes:
        """Writes ``value`` unless somebody did before, and returns what is there now."""
        with _Translated("compare_set", key):
            return bytes(self._store.compare_set(key, "", value))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values at ``keys``, ``None`` where there is none."""
        with _Translated("get", str(list(keys))):
            # one request where all keys are there, as they are in all but the first moments of a run
            if self._known.issuperset(keys) or self._store.check(list(keys)):
                self._known.update(keys)
                return [bytes(value) for value in self._store.multi_get(list(keys))]
            return [bytes(self._store.get(key)) if self._store.check([key]) else None for key in keys]


class _Translated:
    """Turns what torch raises for a lost or silent store into `CoordinationTimeout`."""

    def __init__(self, operation: str, key: str) -> None:
        self._operation, self._key = operation, key

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise CoordinationTimeout(
                f"the store that ranks coordinate through did not answer {self._operation}({self._key}): {error}"
            ) from error


def open_stores(prefix: str) -> Callable[[str], Store]:
    """Makes stores below ``prefix`` on one client of the process group's own store.

    Without a process group every store is an in-process one. The client is opened now, while all ranks are alive: a
    connection to a rank that has ended would wait as long as the process group's timeout.

    Raises:
        CoordinationTimeout: it cannot be opened.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return lambda _: InProcessStore()
    with _Translated("open", prefix):
        client = _own_client(dist.distributed_c10d._get_default_store())
    return lambda name: TorchStore(client, f"{prefix}/{name}")


def _own_client(store: TorchDistributedStore) -> TorchDistributedStore:
    """A client with a connection of its own, so that a wait in one thread never holds up another."""
    clone = getattr(store, "clone", None)
    if clone is None:  # torch before 2.9
        return store
    client: TorchDistributedStore = clone()
    return client
