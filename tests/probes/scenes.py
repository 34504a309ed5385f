"""What a process does with the scripted NVML; each returns what JSON can carry, and runs in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.probes.base import with_values
from lightning_hybrid.probes.nvml import Nvml, session
from lightning_hybrid.probes.nvml_device import NvmlReader
from lightning_hybrid.probes.nvml_gpus import cuda_device, gpus
from lightning_hybrid.probes.sampler import Sampler
from lightning_hybrid.probes.values import Unknown
from lightning_hybrid.probes.visible import Seen
from tests.probes.nvml_library import gpu, write

DEADLINE_S = 20.0


class Clock:
    """Monotonic seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class GpuProbe:
    """One GPU by NVML alone, by its place in NVML's list or, with ``cuda``, by CUDA's index."""

    def __init__(self, place: int, *, cuda: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        def find(nvml: Nvml) -> Any:
            if cuda:
                return cuda_device(nvml, place)
            listed = gpus(nvml)
            return listed if isinstance(listed, Unknown) else Seen(listed[place])

        self.reader = NvmlReader(find, clock=clock)

    def read(self) -> DeviceState:
        return with_values(DeviceState(kind="cuda"), self.reader.read())


def wait_until(ready: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not ready():
        assert time.monotonic() < until_s, "it did not happen"
        pause.wait(0.005)


@contextlib.contextmanager
def warnings_said() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_hybrid").addHandler(handler)
    yield said


def read(script: str, places: list[int], times: int = 1) -> list[dict[str, Any]]:
    """States of some GPUs, in the last of several readings a second apart."""
    clock = Clock()
    probes = [GpuProbe(place, clock=clock) for place in places]
    states: list[DeviceState] = []
    for _ in range(times):
        states = [probe.read() for probe in probes]
        clock.now_s += 1
    return [state.to_dict() for state in states]


def read_and_change(script: str, changes: list[dict[str, Any]], seconds: float = 1.0) -> list[dict[str, Any]]:
    """States of the first GPU, one before and one after each change of its lines."""
    clock = Clock()
    probe = GpuProbe(0, clock=clock)
    states = [probe.read()]
    for change in changes:
        write(Path(script), gpu(0, **change), gpu(1))
        clock.now_s += seconds
        states.append(probe.read())
    return [state.to_dict() for state in states]


def cuda(script: str, indices: list[int]) -> list[dict[str, Any]]:
    """What the devices that CUDA would number so are, by the process's environment."""
    return [GpuProbe(index, cuda=True).read().to_dict() for index in indices]


def cuda_by_uuid(script: str, index: int, uuid: str, environment: dict[str, str]) -> list[Any]:
    """Number of the GPU and UUID of the device that CUDA says has ``uuid``, or the reason."""
    found = cuda_device(session(), index, uuid, environment)
    return ["unknown", found.reason] if isinstance(found, Unknown) else [found.gpu.number, found.uuid]


def cuda_after_a_change(script: str, before: list[dict[str, Any]], lost: int) -> list[Any]:
    """UUID of CUDA's second device before and after another one is lost."""
    probe = GpuProbe(1, cuda=True)
    first = probe.read()
    write(Path(script), *before, {f"{lost}.lost": 1})
    second = probe.read()
    late = GpuProbe(1, cuda=True).read()
    return [first.uuid, second.uuid, late.to_dict()]


def warn(script: str, times: int) -> list[Any]:
    """What the log says in several readings of two GPUs, and the last state."""
    probes = [GpuProbe(place, cuda=True) for place in range(2)]
    with warnings_said() as said:
        for _ in range(times):
            states = [probe.read() for probe in probes]
    return [said, states[0].to_dict()]


def lose_and_find(script: str) -> dict[str, Any]:
    """The first GPU falls off the bus while both are read, and comes back."""
    with warnings_said() as said:
        probes = [GpuProbe(0), GpuProbe(1)]
        before = [probe.read().to_dict() for probe in probes]
        write(Path(script), gpu(0, lost=1, xid="none 79"), gpu(1))
        during = [[probe.read().to_dict() for probe in probes] for _ in range(3)][-1]
        write(Path(script), gpu(0), gpu(1))
        after = [probe.read().to_dict() for probe in probes]
    return {"before": before, "during": during, "after": after, "said": said}


def shut_down_by_another(script: str) -> list[Any]:
    """Somebody else in the process ends NVML between two readings."""
    import pynvml

    probe = GpuProbe(0)
    first = probe.read().power_w
    pynvml.nvmlShutdown()
    return [first, probe.read().power_w, probe.read().power_w]


def _child(place: int, connection: Any) -> None:
    connection.send(GpuProbe(place).read().to_dict())


def in_children(script: str, method: str) -> list[Any]:
    """A parent that reads, and two children; number of initialisations before and after."""
    probe = GpuProbe(0)
    mine = probe.read().uuid
    context: Any = multiprocessing.get_context(method)
    found: list[Any] = [mine]
    for place in (0, 1):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(place, there))
        child.start()
        assert here.poll(DEADLINE_S), "the child does not answer"
        found.append(here.recv()["uuid"])
        child.join(DEADLINE_S)
    return [*found, probe.read().uuid]


def fork_while_sampling(script: str) -> list[Any]:
    """A child forked while a sampler runs, that goes on with the same sampler and the same probe."""
    sampler = Sampler(GpuProbe(0), kind="cuda", period_s=0.01)
    sampler.start()
    wait_until(lambda: sampler.read().uuid is not None)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            unread = sampler.read().error
            sampler.start()
            wait_until(lambda: sampler.read().uuid is not None)
            os.write(send, f"{unread};{sampler.read().uuid}".encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as told:
        said = told.read()
    os.waitpid(child, 0)
    sampler.stop()
    return [*said.split(";"), sampler.read().uuid]


def hang(script: str, seconds: float) -> dict[str, Any]:
    """A query hangs; how long the snapshot, the end and the other GPU take meanwhile."""
    samplers = [Sampler(GpuProbe(place), kind="cuda", period_s=0.02, overdue_s=0.3) for place in range(2)]
    for sampler in samplers:
        sampler.start()
    wait_until(lambda: all(sampler.read().uuid for sampler in samplers))
    write(Path(script), gpu(0), gpu(1), hang__nvmlDeviceGetPowerUsage=seconds)
    wait_until(lambda: all(sampler.read().active is None for sampler in samplers))
    began_s = time.perf_counter()
    state = samplers[0].read()
    read_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    samplers[0].stop(timeout_s=0.05)
    return {"state": state.to_dict(), "read_s": read_s, "stop_s": time.perf_counter() - began_s}


def hang_and_recover(script: str) -> list[Any]:
    """A query hangs for a second, and the device is read again afterwards."""
    sampler = Sampler(GpuProbe(0), kind="cuda", period_s=0.02, overdue_s=0.2)
    sampler.start()
    wait_until(lambda: sampler.read().active is True)
    write(Path(script), gpu(0), gpu(1), hang__nvmlDeviceGetPowerUsage=1)
    wait_until(lambda: sampler.read().active is None)
    silent = sampler.read()
    write(Path(script), gpu(0, power=99_000), gpu(1))
    wait_until(lambda: sampler.read().power_w == 99)
    sampler.stop()
    return [silent.error, silent.power_w, sampler.read().active]


def steps(script: str, count: int) -> list[Any]:
    """Steps on this thread that read the snapshot; this thread's number."""
    sampler = Sampler(GpuProbe(0), kind="cuda", period_s=0.01)
    sampler.start()
    wait_until(lambda: sampler.read().active is True)
    for _ in range(count):
        sampler.read()
    wait_until(lambda: len(sampler.history()) >= 5)
    sampler.stop()
    return [threading.get_native_id(), len(sampler.history())]


def old_binding(script: str, missing: list[str]) -> dict[str, Any]:
    """An nvidia-ml-py that lacks some functions."""
    import pynvml

    for name in missing:
        delattr(pynvml, name)
    return GpuProbe(0).read().to_dict()


def no_binding(script: str) -> dict[str, Any]:
    """No nvidia-ml-py at all."""
    import sys

    sys.modules["pynvml"] = None  # type: ignore[assignment]
    return GpuProbe(0).read().to_dict()


def cost(script: str, num_gpus: int, times: int) -> float:
    """Seconds of this thread that one reading of all GPUs takes."""
    probes = [GpuProbe(place) for place in range(num_gpus)]
    for probe in probes:
        probe.read()
    began_s = time.thread_time()
    for _ in range(times):
        for probe in probes:
            probe.read()
    return (time.thread_time() - began_s) / times


def read_slices(script: str, times: int) -> list[dict[str, Any]]:
    """The first MIG slice of every GPU, read several times."""

    def reader_of(place: int) -> NvmlReader:
        def find(nvml: Nvml) -> Any:
            return Seen(gpus(nvml)[place], gpus(nvml)[place].slices[0])

        return NvmlReader(find)

    readers = [reader_of(place) for place in range(len(gpus(session())))]
    for _ in range(times):
        states = [with_values(DeviceState(kind="cuda"), reader.read()).to_dict() for reader in readers]
    return states
