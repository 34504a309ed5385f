"""How a replica was doing when it was read, and what is said of the cause when it is slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.core.state import DeviceState, ReplicaRecord


class Evidence(NamedTuple):
    """One reading behind a cause."""

    field: str
    """Of `DeviceState`, or ``wait_frac``."""
    value: float | str
    limit: float | None
    """Where it begins to be bad, or what the fast replicas have; ``None`` for a reading that is bad by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why a replica is slow; ``unknown`` has no evidence."""

    name: str
    evidence: tuple[Evidence, ...] = ()

    def format(self) -> str:
        """The cause in words, with its numbers.

        Example:
            >>> Cause(name="host_steal", evidence=(Evidence("host_steal_frac", 0.31, 0.05),)).format()
            'host steal (host_steal_frac 0.31, limit 0.05)'
        """
        parts = [
            f"{field} {_text(value)}" + ("" if limit is None else f", limit {_text(limit)}")
            for field, value, limit in self.evidence
        ]
        return self.name.replace("_", " ") + (f" ({'; '.join(parts)})" if parts else "")


UNKNOWN = Cause(name="unknown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """How fast a replica is, or was at some time, and what was read of it then."""

    speed_per_s: float | None
    """In any unit of work that all replicas share, per second inside the step."""
    devices: tuple[DeviceState, ...] = ()
    """Of its ranks, or several readings of one; the worst one counts."""
    wait_frac: float | None = None
    """Share of the wall time in which the loop waited for a batch, 0..1."""

    @classmethod
    def of(cls, record: ReplicaRecord, speed_per_s: float | None) -> Condition:
        """What a replica's record tells, with its speed in units that all replicas share."""
        return cls(
            speed_per_s=speed_per_s,
            devices=() if record.device is None else (record.device,),
            wait_frac=min(1.0, record.wait_s / record.wall_s) if record.wall_s > 0 else None,
        )

    @property
    def delivered_per_s(self) -> float | None:
        """The speed with the waiting counted in."""
        return None if self.speed_per_s is None else self.speed_per_s * (1.0 - (self.wait_frac or 0.0))


def _text(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
