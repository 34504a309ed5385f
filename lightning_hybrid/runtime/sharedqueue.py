"""The shared work queue on a store: claims, reservations, thefts and what replicas publish about themselves.

Nothing here waits or decides; every method is one or two requests to the store.

Keys below the epoch's prefix: ``queue`` is the counter of unclaimed cells; ``range/<owner>/<serial>`` the counter of
one claimed range, whose head the owner reserves and whose tail thieves take; ``replica/<r>`` what replica ``r``
publishes; ``orphan/<cell>`` who swept a lost cell; ``alarm`` and ``alarm/reason`` that and why the run must end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_hybrid.core import workqueue
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.workqueue import TAIL_UNIT, Span
from lightning_hybrid.runtime.store import Store


@dataclass(frozen=True, slots=True)
class RangeKey:
    """A range of cells that a replica claimed: where its counter is, its first cell and its size."""

    key: str
    start: int
    size: int


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


@dataclass(frozen=True, slots=True)
class Published:
    """What a replica tells the others.

    ``reserved`` counts the cells that it reserved so far, ``ranges`` are those that may hold cells to steal. Only
    where claims can expire, ``done`` are the spans of cells that it finished and ``held`` those that it still has.
    """

    record: ReplicaRecord
    reserved: int = 0
    ranges: tuple[RangeKey, ...] = ()
    done: tuple[Span, ...] = ()
    held: tuple[Span, ...] = ()
    recut: bool | None = None
    """Whether this replica's batches may be cut anew; ``None`` before its first step."""

    def to_bytes(self) -> bytes:
        """One line of JSON."""
        ranges = [[item.key, item.start, item.size] for item in self.ranges]
        head = {
            "reserved": self.reserved,
            "ranges": ranges,
            "done": self.done,
            "held": self.held,
            "recut": self.recut,
        }
        return (json.dumps(head, separators=(",", ":")) + "\n" + self.record.to_json()).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Published:
        """What `to_bytes` wrote."""
        first, _, second = data.decode().partition("\n")
        head = json.loads(first)
        return cls(
            record=ReplicaRecord.from_json(second),
            reserved=head["reserved"],
            ranges=tuple(RangeKey(*item) for item in head["ranges"]),
            done=tuple(Span(*span) for span in head["done"]),
            held=tuple(Span(*span) for span in head["held"]),
            recut=head["recut"],
        )


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
    """One replica's view of the queue of one epoch.

    Args:
        store: Where the counters live, below a prefix of this epoch alone.
        replica: Who this is.
        num_replicas: How many share the queue.
        first_cell: The queue holds cells from here ...
        num_cells: ... to here.
    """

    def __init__(self, store: Store, replica: int, num_replicas: int, first_cell: int, num_cells: int) -> None:
        if num_cells > workqueue.MAX_CELLS:
            raise ValueError(f"num_cells must be at most {workqueue.MAX_CELLS}, got {num_cells}")
        self._store = store
        self._replica = replica
        self._peer_keys = [f"replica/{r}" for r in range(num_replicas)]
        self.first_cell = first_cell
        self._size = max(0, num_cells - first_cell)
        self._serial = 0
        self._has_published = False
        self.alarm: Alarm | None = None
        """Why the run must end, as far as this replica knows."""
        self.unclaimed = self._size
        """Cells that nobody had claimed when this replica last looked."""

    @property
    def size(self) -> int:
        """Cells that the queue held at the start."""
        return self._size

    def claim(self, size: int) -> RangeKey | None:
        """Claims up to ``size`` cells from the head with one atomic add, ``None`` when the queue is used up."""
        if self.unclaimed == 0:
            return None
        value = self._store.add("queue", size)
        self.unclaimed = workqueue.remaining(value, self._size)
        won = workqueue.head_claim(value, size, self._size)
        return self._own(self.first_cell + won.start, won.size) if won.size else None

    def reserve(self, owned: RangeKey, size: int) -> Span:
        """Puts the next ``size`` cells of an own range out of thieves' reach.

        The returned cells are this replica's; fewer than ``size`` mean that thieves took all the others.
        """
        won = workqueue.head_claim(self._store.add(owned.key, size), size, owned.size)
        return Span(owned.start + won.start, owned.start + won.stop)

    def steal(self, victim: RangeKey, size: int) -> RangeKey | None:
        """Takes up to ``size`` cells from the tail of somebody's range, ``None`` when nothing was left there."""
        won = workqueue.tail_claim(self._store.add(victim.key, size * TAIL_UNIT), size, victim.size)
        return self._own(victim.start + won.start, won.size) if won.size else None

    def unreserved(self, ranges: Iterable[RangeKey]) -> list[int]:
        """How many cells of each range neither its owner nor a thief has taken."""
        ranges = list(ranges)
        values = self._store.get_many([item.key for item in ranges]) if ranges else []
        return [workqueue.remaining(int(value or b"0"), item.size) for value, item in zip(values, ranges, strict=True)]

    def adopt_orphan(self, cell: int, attempt: int = 0) -> bool:
        """Whether this replica is the one that takes over a lost cell."""
        mine = str(self._replica).encode()
        return self._store.create(f"orphan/{cell}/{attempt}", mine) == mine

    def agree(self, key: str, proposal: bytes) -> bytes:
        """What all replicas hold at ``key``: the first proposal that anyone made."""
        return self._store.create(key, proposal)

    def agreed(self, key: str) -> bytes | None:
        """What was agreed at ``key``, ``None`` when nobody has proposed anything yet."""
        return self._store.get_many([key])[0]

    def publish(self, published: Published) -> None:
        """Replaces what this replica tells the others."""
        if not self._has_published:
            self._has_published = True
            self._store.create("alarm", QUIET)  # so that a look finds all of its keys, in one request
        self._store.put(self._peer_keys[self._replica], published.to_bytes())

    def look(self) -> list[Published | None]:
        """What each replica published last, ``None`` for one that has not spoken yet.

        Notes the alarm of another replica, if there is one, in `alarm`.
        """
        *peers, flag = self._store.get_many([*self._peer_keys, "alarm"])
        self.alarm = None if flag in (None, QUIET) else read_alarm(self._store)
        return [Published.from_bytes(data) if data else None for data in peers]

    def raise_alarm(self, alarm: Alarm) -> None:
        """Tells every replica to end the run; the first reason given counts."""
        self.alarm = raise_alarm(self._store, alarm)

    def _own(self, start: int, size: int) -> RangeKey:
        key = f"range/{self._replica}/{self._serial}"
        self._serial += 1
        return RangeKey(key, start, size)
