"""What a replica tells the others about itself and its work."""

from __future__ import annotations

import json
from dataclasses import dataclass

from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.core.workqueue import RangeKey, Span


@dataclass(frozen=True, slots=True)
class Published:
    """What a replica tells the others.

    ``reserved`` and ``reserved_cost`` sum up the cells that it reserved so far, ``ranges`` are those that may hold
    cells to steal. Only where claims can expire, ``done`` are the spans of cells that it finished and ``held`` those
    that it still has.
    """

    record: ReplicaRecord
    reserved: int = 0
    ranges: tuple[RangeKey, ...] = ()
    done: tuple[Span, ...] = ()
    held: tuple[Span, ...] = ()
    recut: bool | None = None
    """Whether this replica's batches may be cut anew; ``None`` before its first step."""
    reserved_cost: float = 0.0
    ahead_cost: float = 0.0
    """Cost of the cells that it has reserved and not begun."""
    unreserved: int = 0
    """Cells in its ranges that it has not reserved."""
    unreserved_cost: float = 0.0
    version: int = 0
    """The newest plan version that it knows."""
    policy: str | None = None
    """The policy in force in lockstep mode; told by the replica that decides."""
    learnt: str | None = None
    """What a step costs: hash and JSON of `CostParameters`; told by the replica that decides."""
    stream_end: int | None = None
    """Number of batches of a stream, once it has been read to its end."""

    def to_bytes(self) -> bytes:
        """One line of JSON for the work, one for the record."""
        head = {
            "reserved": self.reserved,
            "ranges": [[item.key, item.start, item.size, item.version] for item in self.ranges],
            "done": self.done,
            "held": self.held,
            "recut": self.recut,
            "reserved_cost": self.reserved_cost,
            "ahead_cost": self.ahead_cost,
            "unreserved": self.unreserved,
            "unreserved_cost": self.unreserved_cost,
            "version": self.version,
            "policy": self.policy,
            "learnt": self.learnt,
            "stream_end": self.stream_end,
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
            reserved_cost=head["reserved_cost"],
            ahead_cost=head["ahead_cost"],
            unreserved=head["unreserved"],
            unreserved_cost=head["unreserved_cost"],
            version=head["version"],
            policy=head["policy"],
            learnt=head["learnt"],
            stream_end=head["stream_end"],
        )
