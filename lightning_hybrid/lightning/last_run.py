"""What the last run left, for the user to look at."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import ResultsError
from lightning_hybrid.core.failures import SampleFailure
from lightning_hybrid.core.plan import Grid, Plan
from lightning_hybrid.core.run_state import state_of_run
from lightning_hybrid.core.state import BalanceSnapshot
from lightning_hybrid.core.system_state import ModelInfo, SystemState
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.runtime.assembly import Outputs
from lightning_hybrid.runtime.recording import Recording


class LastRun:
    """The part of the callback that answers questions about the last run."""

    config: HybridConfig

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[int, Outputs] = {}
        self._snapshots: list[BalanceSnapshot] = []
        self._plans: list[Plan] = []
        self._grids: list[Grid] = []
        self._recordings: list[Recording] = []
        self._failures: list[SampleFailure] = []
        self._communication: CommunicationState | None = None
        self._system_state: SystemState | None = None

    @property
    def statistics(self) -> BalanceSnapshot | None:
        """Final records of all replicas for the last loader that was run, ``None`` before the first run."""
        return self._snapshots[-1] if self._snapshots else None

    @property
    def plan(self) -> Plan | None:
        """Who ran which samples of the last loader that was run, ``None`` before the first run."""
        return self._plans[-1] if self._plans else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Who ran which samples, one plan for each loader of the last run."""
        return tuple(self._plans)

    @property
    def grid(self) -> Grid | None:
        """The grid that the cells of `plan` lie in: ``grid.indices(start, stop)`` are a cell's dataset indices."""
        return self._grids[-1] if self._grids else None

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids that the cells of `plans` lie in."""
        return tuple(self._grids)

    @property
    def recording(self) -> Recording | None:
        """The steps of all replicas in the last loader that they shared, ``None`` before the first such run.

        ``recording.save(path)`` keeps it; `lightning_hybrid.replay` runs it again under another policy.
        """
        return self._recordings[-1] if self._recordings else None

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """The same, one for each loader of the last run."""
        return tuple(self._recordings)

    @property
    def system_state(self) -> SystemState | None:
        """Devices, model, performance, memory and communication after the last loader that was run.

        ``None`` before the first run. Latency is that of the steps of all replicas, as far as they were kept.
        """
        return self._system_state

    @property
    def failures(self) -> tuple[SampleFailure, ...]:
        """The samples that the last run left out (``on_error="skip"``), of all replicas, loader by loader."""
        return tuple(self._failures)

    @property
    def communication(self) -> CommunicationState | None:
        """How fast ranks reach each other, as last measured; ``None`` before, and where it is not (`comm_probe`)."""
        return self._communication

    def rows(self, dataloader_idx: int = 0) -> list[Any]:
        """One result per sample of the last `trainer.predict`, in the order that ``order`` names.

        With ``gather="rank_zero"`` or ``"none"`` the other ranks hold only the samples that they ran themselves.

        Raises:
            ResultsError: no predictions were kept, or they do not have the samples as first dimension.
        """
        return self._outputs_of(dataloader_idx, "rows").rows(self.config.order)

    def indices(self, dataloader_idx: int = 0) -> list[list[Any]]:
        """Dataset indices of every entry of the list that the last `trainer.predict` returned for a loader.

        Raises:
            ResultsError: no predictions were kept.
        """
        return self._outputs_of(dataloader_idx, "indices").indices()

    def _outputs_of(self, dataloader_idx: int, asked: str) -> Outputs:
        if dataloader_idx not in self._outputs:
            raise ResultsError(
                f"{asked}() has no predictions of loader {dataloader_idx}: none was run in this process with"
                " return_predictions (launchers that fork or spawn return none)"
            )
        return self._outputs[dataloader_idx]

    def _keep(self, epochs: Sequence[EpochRun], model: ModelInfo) -> None:
        if epochs:
            last = epochs[-1]
            recording = last.figures.recording
            is_alone = not (dist.is_available() and dist.is_initialized())
            self._system_state = state_of_run(
                last.snapshot(),
                last.recorder.kept()[0] if recording is None else recording.steps,
                world_size=1 if is_alone else dist.get_world_size(),
                backend=None if is_alone else dist.get_backend(),
                model=model,
                communication=self._communication,
                timestamp_s=time.time(),
            )
        self._snapshots = [epoch.snapshot() for epoch in epochs] or self._snapshots
        planned = [(epoch.figures.plan, epoch.spec.grid) for epoch in epochs if epoch.figures.plan is not None]
        if planned:
            self._plans, self._grids = [plan for plan, _ in planned], [grid for _, grid in planned]
        self._failures = [failure for epoch in epochs for failure in epoch.figures.failures]
        recordings = [epoch.figures.recording for epoch in epochs]
        self._recordings = [recording for recording in recordings if recording is not None] or self._recordings
