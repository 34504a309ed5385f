"""Joins the stages: capture, deal, run, measure, publish. Knows no framework.

An `Engine` lives as long as one run of a trainer; an `EpochRun` as long as one pass over one loader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.config import HybridConfig, ModeOption
from lightning_hybrid.core.exchanges import Depth
from lightning_hybrid.core.size_search import SizeSearch
from lightning_hybrid.core.state import DeviceState, Mode
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.probes.base import DeviceProbe
from lightning_hybrid.probes.comm import all_arrive, measure_group, num_measurable_ranks
from lightning_hybrid.runtime.collectives import CollectiveClock
from lightning_hybrid.runtime.sizing import StepSizer
from lightning_hybrid.runtime.spec import EpochSpec, Stage
from lightning_hybrid.runtime.steering import Steering
from lightning_hybrid.runtime.step_sizes import StepSizes
from lightning_hybrid.runtime.store import InProcessStore, Store
from lightning_hybrid.runtime.timing import StepTimer
from lightning_hybrid.runtime.work import Work

if TYPE_CHECKING:
    import torch


class Engine:
    """What a replica keeps for the length of a run.

    Args:
        config: All settings.
        replica: Who this is.
        num_replicas: How many replicas share the work.
        store: Opens a client of the store that they coordinate through, below a prefix.
        probe: Reads the device.
        new_timer: Makes the timer that fits the device.
        mode: ``config.mode`` with what the strategy demands taken into account.
        sizes: How many samples a step may have; any number where it is left out.
        steering: What is decided in the course of the run; by ``config`` alone where it is left out.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        replica: int,
        num_replicas: int,
        store: Callable[[str], Store],
        probe: DeviceProbe,
        new_timer: Callable[[], StepTimer],
        mode: ModeOption,
        sizes: StepSizes | None = None,
        steering: Steering | None = None,
    ) -> None:
        self.sizes = sizes or StepSizes(None, config)
        """How many samples a step may have on this replica."""
        self._searches: dict[Stage, SizeSearch] = {}
        self.steering = steering or Steering(config)
        """What is decided for all replicas in the course of the run."""
        self.config, self.replica, self.num_replicas = config, replica, num_replicas
        self.probe, self.new_timer, self.collectives = probe, new_timer, CollectiveClock()
        self.current: EpochRun | None = None
        """The epoch whose step runs, or ran last."""
        self.when_finished: Callable[[EpochRun], None] = lambda _: None
        """Called when the loop has run out of the work of an epoch."""
        self.epochs: list[EpochRun] = []
        """The epochs of the present run or validation, one per loader."""
        self._store, self._mode = store, mode
        self._decided: dict[Stage, Mode] = {}
        self._passes = Counter[tuple[Stage, int]]()
        self._num_measurements = 0

    def read_device(self) -> DeviceState:
        """The state of the device, and what it has free for steps; for a background thread."""
        self.sizes.refresh()
        return self.probe.read()

    def measure_links(self, depth: Depth, device: torch.device) -> CommunicationState | None:
        """How fast ranks reach each other and this rank its ``device``; every rank calls it, before a step.

        ``None``, on all ranks, where one was not ready within ``comm_probe_patience_s``, where the process group is of
        another kind than gloo or NCCL, or where there is one rank only.

        Raises:
            PeerFailed: a rank ended while they were measured.
            CoordinationTimeout: the store does not answer.
        """
        num_ranks = num_measurable_ranks()
        if num_ranks < 2:
            return None
        self._num_measurements += 1
        store, config = self._store(f"links/{self._num_measurements}"), self.config
        patience_s, poll_s = config.comm_probe_patience_s, config.endgame_poll_s
        if not all_arrive(store, num_ranks, patience_s=patience_s, poll_s=poll_s):
            return None
        return measure_group(depth, device, timeout_s=config.claim_deadline_s)

    def open_store(self, stage: Stage, loader_idx: int) -> tuple[Store, int]:
        """The store of the next pass over a loader, empty, and the number of that pass in this run."""
        self._passes[stage, loader_idx] += 1
        number = self._passes[stage, loader_idx]
        return self._store(f"{stage}/{loader_idx}/{number}/0"), number

    def balanced(self, spec: EpochSpec, store: Store) -> EpochRun:
        """An epoch whose work the replicas share by speed."""
        return self._opened(EpochRun(self, spec, store, self._decided.get(spec.stage, self._mode)))

    def static(self, spec: EpochSpec, works: list[Work]) -> EpochRun:
        """An epoch in which this replica runs exactly ``works``."""
        return self._opened(EpochRun(self, spec, InProcessStore(), "static", works))

    def sizer_of(self, spec: EpochSpec) -> StepSizer | None:
        """Decides how many cells of an epoch are run as one step; ``None`` where each is run alone."""
        if spec.auto is None:
            return None
        if spec.stage not in self._searches:
            self._searches[spec.stage] = SizeSearch(spec.auto.unit, spec.auto.start, spec.auto.most)
        return StepSizer(spec, self._searches[spec.stage], self.sizes, spec.auto.most)

    def decide(self, stage: Stage, mode: Mode) -> None:
        """Fixes the mode of all later epochs of ``stage`` in this run."""
        self._decided[stage] = mode

    def epoch_of(self, loader_idx: int) -> EpochRun | None:
        """The present epoch of a loader, ``None`` where this package does not give out its batches."""
        return next((epoch for epoch in self.epochs if epoch.spec.loader_idx == loader_idx), None)

    def fail(self, error: BaseException) -> None:
        """Tells the other replicas that this one cannot go on."""
        for epoch in self.epochs:
            epoch.fail(error)

    def close(self) -> None:
        """Ends all background threads and takes every patch back; safe to call twice."""
        self.collectives.remove()
        for epoch in self.epochs:
            epoch.close()
        self.current = None

    def _opened(self, epoch: EpochRun) -> EpochRun:
        for other in self.epochs:
            other.finish()
        if any(other.spec.loader_idx >= epoch.spec.loader_idx for other in self.epochs):
            self.epochs = []
        self.epochs.append(epoch)
        epoch.open()
        return epoch
