"""Every device of this machine, whether this process uses it or not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.probes.base import DeviceProbe, with_values
from lightning_hybrid.probes.host import HostProbe
from lightning_hybrid.probes.nvml import session
from lightning_hybrid.probes.nvml_device import NvmlReader
from lightning_hybrid.probes.nvml_gpus import gpus
from lightning_hybrid.probes.sampler import Sampler
from lightning_hybrid.probes.torch_device import TorchDeviceProbe
from lightning_hybrid.probes.values import Unknown
from lightning_hybrid.probes.visible import Gpu, Seen, visible_gpus


class NvmlProbe:
    """Reads a GPU or MIG slice from NVML alone; CUDA is not started.

    Args:
        seen: Which one.
        index: What CUDA calls it in this process, ``None`` where it does not see it or that is not certain.
    """

    def __init__(self, seen: Seen, index: int | None = None) -> None:
        self._index = index
        self._reader = NvmlReader(lambda _: seen)

    def read(self) -> DeviceState:
        """The state now."""
        return with_values(DeviceState(kind="cuda", index=self._index, timestamp_s=time.time()), self._reader.read())

    def close(self) -> None:
        """Gives everything back to the driver."""
        self._reader.close()


class Machine:
    """Samples the host and all devices of this machine in the background.

    Args:
        period_s: Seconds from one reading to the next.
        deadline_s: Longest wait for a driver to list its devices.

    Raises:
        ConfigError: ``period_s`` is not positive.
    """

    def __init__(self, period_s: float = 1.0, deadline_s: float = 10.0) -> None:
        self._host = Sampler(HostProbe(), period_s=period_s)
        answer = _within(deadline_s, lambda: gpus(session()), Unknown("NVML does not answer"))
        self.missing: str | None = answer.reason if isinstance(answer, Unknown) else None
        """Why no NVIDIA GPU is listed, ``None`` where the driver could be asked."""
        listed: tuple[Gpu, ...] = () if isinstance(answer, Unknown) else answer
        probes = [*_nvidia(listed), *_others()]
        self._devices = [Sampler(probe, kind=kind, period_s=period_s) for kind, probe in probes]

    def start(self) -> None:
        """Begins to read."""
        for sampler in self._samplers:
            sampler.start()

    def wait(self, readings: int, timeout_s: float) -> None:
        """Waits until every device was read ``readings`` times, at most ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while time.monotonic() < until_s and any(len(each.history()) < readings for each in self._samplers):
            pause.wait(0.01)

    def stop(self) -> None:
        """Ends the reading, without waiting for a driver that does not answer."""
        for sampler in self._samplers:
            sampler.stop()

    def read(self) -> tuple[DeviceState, tuple[DeviceState, ...]]:
        """The newest states of the host and of the devices."""
        return self._host.read(), tuple(sampler.read() for sampler in self._devices)

    @property
    def _samplers(self) -> list[Sampler]:
        return [self._host, *self._devices]


def _within(deadline_s: float, ask: Callable[[], Any], otherwise: Any) -> Any:
    """What ``ask`` returns, or ``otherwise`` where that takes too long; it then goes on by itself."""
    answers = [otherwise]
    asking = threading.Thread(target=lambda: answers.append(ask()), name="lightning_hybrid-look", daemon=True)
    asking.start()
    asking.join(deadline_s)
    return answers[-1]


def _nvidia(listed: tuple[Gpu, ...]) -> list[tuple[str, DeviceProbe]]:
    visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"), listed)
    numbers = {seen.uuid: index for index, seen in enumerate(visible.seen)}
    every = [Seen(gpu, part) for gpu in listed for part in (gpu.slices or (None,))]
    return [("cuda", NvmlProbe(seen, numbers.get(seen.uuid))) for seen in every]


class _Alone:
    """A device's own state, without its host's."""

    def read(self) -> DeviceState:
        return DeviceState(kind="cpu", timestamp_s=time.time())


def _others() -> list[tuple[str, DeviceProbe]]:
    """What torch sees that is not NVIDIA's."""
    kinds = [("mps", torch.mps.device_count()), ("xpu", torch.xpu.device_count())]
    if torch.version.hip:
        kinds.append(("cuda", torch.cuda.device_count()))
    return [
        (kind, TorchDeviceProbe(torch.device(kind, index), module=getattr(torch, kind), host=_Alone()))
        for kind, count in kinds
        for index in range(count)
    ]
