"""What is known of an epoch: live figures while it runs, then who ran what."""

from __future__ import annotations

from dataclasses import replace

from lightning_hybrid.core.failures import SampleFailure
from lightning_hybrid.core.plan import Plan, PlannedCell
from lightning_hybrid.core.state import BalanceSnapshot, Mode, ReplicaRecord
from lightning_hybrid.runtime.board import Board
from lightning_hybrid.runtime.recording import Recording
from lightning_hybrid.runtime.spec import EpochSpec


class EpochFigures:
    """The records of all replicas, as one of them knows them.

    Args:
        spec: The epoch.
        replica: Who this is.
        board: Where the records come from.
    """

    def __init__(self, spec: EpochSpec, replica: int, board: Board) -> None:
        self.spec = spec
        """The epoch; a stream's is replaced when it has been read to its end."""
        self._replica, self._board = replica, board
        self.records: list[ReplicaRecord] | None = None
        """All replicas' final records, once they were exchanged."""
        self.failures: list[SampleFailure] = []
        """Samples that any replica has left out, once that was exchanged."""
        self.plan: Plan | None = None
        """Who ran what, once it was exchanged."""
        self.leaders: list[int] = []
        """The first rank of each replica, once it was exchanged."""
        self.recording: Recording | None = None
        """The steps of all replicas, once they were exchanged; ``None`` where the replicas share nothing."""

    def snapshot(self, mode: Mode) -> BalanceSnapshot:
        """The newest records of all replicas: the final ones once they were exchanged."""
        return BalanceSnapshot(
            stage=self.spec.stage,
            mode=mode,
            loader_idx=self.spec.loader_idx,
            epoch=self.spec.epoch,
            samples_total=self.num_samples,
            samples_reused=self.spec.samples_reused,
            replicas=tuple(self._newest() if self.records is None else self.records),
        )

    def own_record(self) -> ReplicaRecord:
        """This replica's newest record, with its device."""
        return next(record for record in self._newest() if record.replica == self._replica)

    @property
    def num_samples(self) -> int | None:
        """Number of samples, ``None`` for a stream that goes on."""
        stream = self.spec.stream
        return self.spec.grid.num_samples if stream is None or stream.has_ended else None

    def frac_done(self) -> float | None:
        """Share of the samples that all replicas together have finished, as far as is known here, 0..1."""
        total = self.num_samples
        if total is None:
            return None
        return min(1.0, sum(record.samples for record in self._newest()) / total) if total else 1.0

    def steps_done(self) -> int:
        """Steps that all replicas together have finished, as far as is known here."""
        return sum(record.steps for record in self._newest())

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
        mine = self._board.view.record if source is None else source()
        with self._board.changed:
            records = {peer.record.replica: peer.record for peer in self._board.view.published.values()}
        published = records.get(mine.replica)
        records[mine.replica] = replace(mine, device=published.device if published else None)
        return [records[replica] for replica in sorted(records)]
