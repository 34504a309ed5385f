"""What the replicas of an epoch tell each other through a store.

Nothing here waits or decides; every method is a few requests to the store.

Keys below the epoch's prefix: ``queue/<version>`` is the counter of unclaimed cells of a plan version;
``range/<owner>/<version>.<serial>`` the counter of one claimed range, whose head the owner reserves and whose tail
thieves take; ``version`` the newest plan version, ``version/<n>`` that version and ``version/<n>/owner`` who makes it;
``range/<owner>/<version>.share`` is what a replica owns from the start of a version; ``replica/<r>`` what replica ``r``
publishes; ``orphan/<cell>/<attempt>`` who swept a lost cell; ``block/<n>`` a block of rounds in lockstep mode;
``alarm`` and ``alarm/reason`` that and why the run must end, and ``alarm/seen`` how many replicas know it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.core.published import Published
from lightning_hybrid.runtime.store import Store


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why every replica must end the run: a collective in queue mode, or else the failure of a replica."""

    reason: str
    is_collective: bool

    @classmethod
    def of_failure(cls, replica: int, error: BaseException) -> Alarm:
        """The alarm that a replica raises when it cannot go on; gives the first line of its error."""
        text = str(error).strip().splitlines()
        reason = f"replica {replica} failed with {type(error).__name__}: {text[0] if text else ''}"
        return cls(reason, is_collective=False)

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps([self.reason, self.is_collective]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Alarm:
        """What `to_bytes` wrote."""
        return cls(*json.loads(data))


QUIET = b"-"
"""What is at ``alarm`` as long as there is none."""


def raise_alarm(store: Store, alarm: Alarm) -> Alarm:
    """Makes every replica that looks at the epoch's keys end the run; returns the alarm that was raised first."""
    first = Alarm.from_bytes(store.create("alarm/reason", alarm.to_bytes()))
    store.put("alarm", b"!")
    return first


def read_alarm(store: Store) -> Alarm | None:
    """The alarm that was raised, ``None`` when there is none."""
    (reason,) = store.get_many(["alarm/reason"])
    return None if reason is None else Alarm.from_bytes(reason)


class SharedQueue:
    """One replica's view of what the replicas of one epoch tell each other.

    Args:
        store: Where the keys live, below a prefix of this epoch alone.
        replica: Who this is.
        num_replicas: How many share the epoch.
    """

    def __init__(self, store: Store, replica: int, num_replicas: int) -> None:
        self.store = store
        self._replica, self._num_replicas = replica, num_replicas
        self._has_published = False
        self.alarm: Alarm | None = None
        """Why the run must end, as far as this replica knows."""

    def agree(self, key: str, proposal: bytes) -> bytes:
        """What all replicas hold at ``key``: the first proposal that anyone made."""
        return self.store.create(key, proposal)

    def agreed(self, key: str) -> bytes | None:
        """What was agreed at ``key``, ``None`` when nobody has proposed anything yet."""
        return self.store.get_many([key])[0]

    def publish(self, published: Published) -> None:
        """Replaces what this replica tells the others."""
        if not self._has_published:
            self._has_published = True
            # so that a look finds all of its keys, in one request
            self.store.create("alarm", QUIET)
            self.store.add("version", 0)
        self.store.put(f"replica/{self._replica}", published.to_bytes())

    def look(self, replicas: Sequence[int] | None = None) -> tuple[dict[int, Published | None], int]:
        """What ``replicas`` (all) published last, ``None`` for one that has not spoken, and the newest plan version.

        Notes the alarm of another replica, if there is one, in `alarm`.
        """
        replicas = range(self._num_replicas) if replicas is None else replicas
        *peers, flag, version = self.store.get_many([*(f"replica/{r}" for r in replicas), "alarm", "version"])
        before, self.alarm = self.alarm, None if flag in (None, QUIET) else read_alarm(self.store)
        if before is None and self.alarm is not None:
            self.store.add("alarm/seen", 1)
        published = {r: Published.from_bytes(data) if data else None for r, data in zip(replicas, peers, strict=True)}
        return published, int(version or 0)

    def raise_alarm(self, alarm: Alarm) -> None:
        """Tells every replica to end the run; the first reason given counts."""
        self.alarm = raise_alarm(self.store, alarm)

    def await_seen(self, patience_s: float) -> None:
        """Waits until all other replicas have seen the alarm, but not longer than ``patience_s``."""
        until_s, pause = time.monotonic() + patience_s, threading.Event()
        while self.store.add("alarm/seen", 0) < self._num_replicas - 1 and time.monotonic() < until_s:
            pause.wait(0.02)
