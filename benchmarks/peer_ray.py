"""Ray Data in a process of its own, so that nothing of Ray is in the process that forks the other systems' ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_device import PeerDevice, StartLine, Step, load_job

START_S, END_S = 120.0, 30.0
"""Longest times that Ray may take to start and to end."""

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySettings:
    """What can be tuned about an actor pool."""

    in_flight_per_actor: int
    concurrent_calls_per_actor: int


BEST_SETTINGS = {
    "equal": RaySettings(in_flight_per_actor=3, concurrent_calls_per_actor=2),
    "slow_rank": RaySettings(in_flight_per_actor=2, concurrent_calls_per_actor=2),
    "midrun": RaySettings(in_flight_per_actor=2, concurrent_calls_per_actor=2),
    "heavy_tail": RaySettings(in_flight_per_actor=4, concurrent_calls_per_actor=4),
}
"""For each case what was best for Ray of all that was tried; README.md has the list."""


class RayDevice:
    """The callable class of `map_batches`: one actor is one device."""

    def __init__(self, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)
        job = load_job(folder)
        line = StartLine(folder, len(job.curves))
        self.device = PeerDevice(job, line.take_device())
        line.wait_for_all()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One step for a block of one row, the index of the batch."""
        (index,) = batch["id"]
        step = self.device.step(int(index))
        return {
            "index": np.array([step.index]),
            "device": np.array([step.device]),
            "start_s": np.array([step.start_s]),
            "end_s": np.array([step.end_s]),
            "outputs": step.outputs[np.newaxis],
        }


class RayServer:
    """A Ray cluster of this host that runs one job after the other, until it is closed."""

    def __init__(self, num_devices: int) -> None:
        self._connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(theirs, self._connection, num_devices))
        self._process.start()
        theirs.close()
        self._receive(START_S)

    def run(self, folder: Path, settings: RaySettings, deadline_s: float) -> tuple[list[Step], float]:
        """The steps of the job in ``folder``, in the order of their arrival, and when the last one was here.

        Raises:
            RuntimeError: Ray failed, or took longer than the deadline.
        """
        self._connection.send((folder, settings))
        outcome: tuple[list[Step], float] = self._receive(deadline_s)
        return outcome

    def close(self) -> None:
        """Ends Ray; what does not end by itself is killed."""
        with suppress(BrokenPipeError):
            self._connection.send(None)
        self._process.join(timeout=END_S)
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.join()

    def _receive(self, deadline_s: float) -> Any:
        if not self._connection.poll(deadline_s):
            raise RuntimeError(f"Ray has not answered for {deadline_s:.0f} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("Ray's driver died without a word") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _serve(connection: Connection, other_end: Connection, num_devices: int) -> None:
    other_end.close()  # held open here, it would never tell that the benchmark has died
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the last line of stdout is the benchmark's
    try:
        _start(num_devices)
        datasets: dict[int, Any] = {}
        connection.send(None)
        while (request := connection.recv()) is not None:
            folder, settings = request
            connection.send(_run(folder, settings, datasets))
    except EOFError:
        pass
    except Exception:
        connection.send(traceback.format_exc())
    finally:
        import ray

        ray.shutdown()


def _start(num_devices: int) -> None:
    # workers are fresh interpreters: they import this package by the same path
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS": "0"}
    import ray

    # steps wait more than they compute: twice the devices, so that Ray's own tasks never queue for a slot
    ray.init(num_cpus=2 * num_devices, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False


def _run(folder: Path, settings: RaySettings, datasets: dict[int, Any]) -> tuple[list[Step], float]:
    import ray.data

    job = load_job(folder)
    num_batches = len(job.batches)
    if num_batches not in datasets:  # one block per batch, made before the loop
        datasets[num_batches] = ray.data.range(num_batches, override_num_blocks=num_batches).materialize()
    results = datasets[num_batches].map_batches(
        RayDevice,
        fn_constructor_args=(folder,),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(
            size=len(job.curves),
            max_tasks_in_flight_per_actor=settings.in_flight_per_actor,
            max_concurrent_calls_per_actor=settings.concurrent_calls_per_actor,
        ),
    )
    steps, done_s = [], 0.0
    for step in _arriving(results):
        steps.append(step)
        done_s = time.monotonic()  # of the last step, not of the pool's end
    return steps, done_s


def _arriving(results: Any) -> Iterator[Step]:
    for block in results.iter_batches(batch_size=None, batch_format="numpy"):
        for row in range(len(block["index"])):
            yield Step(
                index=int(block["index"][row]),
                device=int(block["device"][row]),
                start_s=float(block["start_s"][row]),
                end_s=float(block["end_s"][row]),
                outputs=np.asarray(block["outputs"][row]),
            )
