"""What the callbacks of this package share in one Trainer: the sampler of its device, and its loggers' report."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid.probes.base import DeviceProbe
from lightning_hybrid.probes.sampler import Sampler
from lightning_hybrid.probes.torch_device import probe_for
from lightning_hybrid.reports.sinks import LoggerReport

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_STOP_S = 0.2
"""Longest wait for a driver at the end of a run."""

MakeProbe = Callable[[torch.device], DeviceProbe]
LogDevices = Callable[[str, int, bool], None]
"""Logs the devices of all ranks under a stage, at a point of its x axis; whether it is the stage's last point."""


class Shared:
    """What is shared in one Trainer; get it from `shared_in`."""

    def __init__(self) -> None:
        self.log_devices: LogDevices | None = None
        """Who logs the devices; whoever else would, leaves it to him."""
        self.has_epochs: Callable[[], bool] = lambda: False
        """Whether the batches of the present stage are counted, so that its x axis is known better than by a guess."""
        self._periods_s: list[float] = []
        self._sampler: Sampler | None = None
        self._device: torch.device | None = None
        self._loggers: list[Any] = []
        self._report = LoggerReport([])

    def hold_sampler(self, trainer: Trainer, period_s: float) -> Sampler:
        """The sampler of this rank's device, which reads at least every ``period_s`` until `release_sampler`."""
        self._periods_s.append(period_s)
        device = trainer.strategy.root_device
        if self._sampler is None or self._device != device:
            self._sampler, self._device = Sampler(_make_probe(trainer)(device), kind=device.type), device
        self._sampler.period_s = min(self._periods_s)
        return self._sampler

    def release_sampler(self, period_s: float) -> None:
        """Ends the sampler with its last holder; its newest state stays."""
        self._periods_s.remove(period_s)
        if self._sampler is None:
            return
        if self._periods_s:
            self._sampler.period_s = min(self._periods_s)
        else:
            self._sampler.stop(_STOP_S)

    def report_to(self, loggers: list[Any]) -> LoggerReport:
        """What writes to the Trainer's loggers, and remembers what it wrote as long as they are the same."""
        if loggers != self._loggers:
            self._loggers = list(loggers)
            self._report = LoggerReport(self._loggers)
        return self._report


def _make_probe(trainer: Any) -> MakeProbe:
    """What the `DeviceStateMonitor` of the Trainer makes probes with, whichever callback is set up first."""
    given = (getattr(callback, "make_probe", None) for callback in trainer.callbacks)
    return next((make for make in given if make is not None), probe_for)


_SHARED: weakref.WeakKeyDictionary[Any, Shared] = weakref.WeakKeyDictionary()


def shared_in(trainer: Trainer) -> Shared:
    """What is shared in ``trainer``, for its whole life."""
    return _SHARED.setdefault(trainer, Shared())
