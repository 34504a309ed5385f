"""What is known of an epoch: live figures while it runs, then who ran what."""

from __future__ import annotations

from dataclasses import replace

from lightning_hybrid.core.plan import Plan, PlannedCell
from lightning_hybrid.core.state import BalanceSnapshot, Mode, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.dealing import EpochSpec


class EpochFigures:
    """The records of all replicas, as one of them knows them.

    Args:
        spec: The epoch.
        replica: Who this is.
        board: Where the records come from.
    """

    def __init__(self, spec: EpochSpec, replica: int, board: Board) -> None:
        self._spec, self._replica, self._board = spec, replica, board
        self.records: list[ReplicaRecord] | None = None
        """All replicas' final records, once they were exchanged."""
        self.plan: Plan | None = None
        """Who ran what, once it was exchanged."""

    def snapshot(self, mode: Mode) -> BalanceSnapshot:
        """The newest records of all replicas: the final ones once they were exchanged."""
        return BalanceSnapshot(
            stage=self._spec.stage,
            mode=mode,
            loader_idx=self._spec.loader_idx,
            epoch=self._spec.epoch,
            samples_total=self._spec.grid.num_samples,
            replicas=tuple(self._newest() if self.records is None else self.records),
        )

    def own_record(self) -> ReplicaRecord:
        """This replica's newest record, with its device."""
        return next(record for record in self._newest() if record.replica == self._replica)

    def frac_done(self) -> float:
        """Share of the samples that all replicas together have finished, as far as is known here, 0..1."""
        total = self._spec.grid.num_samples
        return min(1.0, sum(record.samples for record in self._newest()) / total) if total else 1.0

    def conclude(self, records: list[ReplicaRecord], works: list[list[tuple[int, int]]]) -> Plan:
        """Takes in every replica's final record and works, so that all hold the same plan and statistics."""
        self.records = records
        cells = [
            PlannedCell(record.replica, start, stop)
            for record, spans in zip(records, works, strict=True)
            for start, stop in spans
        ]
        self.plan = Plan(tuple(sorted(cells, key=lambda cell: (cell.start, cell.replica))))
        return self.plan

    def _newest(self) -> list[ReplicaRecord]:
        source = self._board.source
        mine = self._board.record if source is None else source()
        with self._board.changed:
            records = {peer.record.replica: peer.record for peer in self._board.peers if peer is not None}
        published = records.get(mine.replica)
        records[mine.replica] = replace(mine, device=published.device if published else None)
        return [records[replica] for replica in sorted(records)]
