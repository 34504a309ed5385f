"""What runs for `DeviceStateMonitor` from a Trainer's `setup` to its `teardown` or exception."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import CoordinationTimeout
from lightning_hybrid.lightning import _compat
from lightning_hybrid.lightning.shared import Shared
from lightning_hybrid.runtime.state_exchange import StateExchange
from lightning_hybrid.runtime.store import open_stores

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_log = logging.getLogger(__name__)

_FIRST_READING_S = 0.5
"""Longest wait, once in a run, for a first reading that has not come when a stage is over."""

_STOP_S = 0.2
"""Longest wait for the store at the end of a run."""


class Watch:
    """Reads this rank's device, tells rank zero, and logs there.

    Args:
        trainer: The Trainer, with its process group set up.
        shared: What the callbacks in it share.
        period_s: Seconds from one reading to the next.
        most_overhead_frac: Largest share of the loop's time that logging may take.
    """

    def __init__(self, trainer: Trainer, shared: Shared, period_s: float, most_overhead_frac: float) -> None:
        kwargs: dict[str, int] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self.num_replicas = kwargs.get("num_replicas", 1)
        """Groups of ranks that run batches of their own."""
        self._trainer, self._shared, self._period_s = trainer, shared, period_s
        self._sampler = shared.hold_sampler(trainer, period_s)
        self._rank, self._num_ranks = trainer.global_rank, trainer.world_size
        self._changed = threading.Condition()
        self._has_waited = False
        self._most_overhead_frac, self._not_before_s = most_overhead_frac, 0.0
        self._exchange = self._open_exchange()
        shared.log_devices = self.log
        self._sampler.after.append(self._read)
        self._sampler.start()

    @property
    def logs(self) -> bool:
        """Whether this rank logs, and has where to."""
        return self._rank == 0 and bool(self._trainer.loggers)

    @property
    def is_led(self) -> bool:
        """Whether somebody who knows the x axis better has the devices logged now."""
        return self._shared.has_epochs()

    def states(self) -> dict[int, DeviceState]:
        """The newest state by rank; see `StateExchange.states`."""
        return {self._rank: self._sampler.read()} if self._exchange is None else self._exchange.states()

    def wake(self) -> None:
        """Has this rank tell its state now."""
        if self._exchange is not None:
            self._exchange.wake()

    def log(self, stage: str, x: int, is_last: bool = False) -> None:
        """Logs each rank's state that was not logged under ``stage`` before, at ``x`` of its axis.

        At the ``is_last`` point of a stage every rank's newest state is logged, after a moment for the first ones where
        there are none yet. Before it, and at the end of a validation inside `fit`, nothing is logged where logging
        would take too much of the loop's time.
        """
        ends_run = is_last and (stage == "fit" or not _compat.in_fit(self._trainer))
        if not self.logs or (time.perf_counter() < self._not_before_s and not ends_run):
            return
        if is_last and not self._has_waited:
            self._has_waited = True
            with self._changed:
                self._changed.wait_for(self._is_known, _FIRST_READING_S)
        report = self._shared.report_to(self._trainer.loggers)
        began_s = time.perf_counter()
        if report.log_devices(self.states(), x, stage=stage, again=is_last):
            ended_s = time.perf_counter()
            self._not_before_s = ended_s + (ended_s - began_s) * (1 / self._most_overhead_frac - 1)

    def stop(self) -> None:
        """Ends the threads; a driver or a store that does not answer is waited for a moment, and then left."""
        self._shared.log_devices = None
        self._sampler.after.remove(self._read)
        if self._exchange is not None:
            self._exchange.stop(_STOP_S)
        self._shared.release_sampler(self._period_s)

    def _is_known(self) -> bool:
        states = self.states()
        return len(states) == self._num_ranks and all(
            state.error is None or state.timestamp_s is not None for state in states.values()
        )

    def _read(self, _: DeviceState) -> None:
        self.wake()
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _open_exchange(self) -> StateExchange | None:
        if self._num_ranks == 1 or not (dist.is_available() and dist.is_initialized()):
            return None
        try:
            store = open_stores("lightning_hybrid")("states")
            exchange = StateExchange(store, self._rank, self._num_ranks, self._sampler.read, period_s=self._period_s)
            exchange.after.append(self._notify)
            exchange.start()
        except CoordinationTimeout as err:
            _log.warning("the states of the other ranks' devices are not known: %s", err)
            return None
        return exchange
