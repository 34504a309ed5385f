"""Runs of all systems on all cases, in turns, and their medians."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from types import TracebackType
from typing import Any

from benchmarks.cases import Case
from benchmarks.peer_ray import RayServer
from benchmarks.peer_runs import PeerRun, System, measure
from tests.ranks import RankFailed

NUM_DEVICES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One run that was tried; ``run`` is ``None`` when it failed."""

    case: str
    system: System
    repetition: int
    run: PeerRun | None


class PeerBench:
    """Makes runs; one that fails is noted, and the others go on.

    Ray is up while it runs alone: on a host of two cores its daemons, idle, take 1.3 % off the speed of the others.
    """

    def __init__(self, systems: Sequence[System]) -> None:
        self.systems = tuple(systems)
        self.failures: list[str] = []
        self.attempts: list[Attempt] = []
        self._ray: RayServer | None = None

    def __enter__(self) -> PeerBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_ray()

    def run_all(self, repetitions: Sequence[Case]) -> None:
        """Runs every repetition of a case; the systems take turns, so that a slow drift of the host hits all of them.

        Shares that are fixed beforehand take the same time every time, up to three times as long as the others: where
        devices or costs differ, Accelerate runs once.
        """
        for repetition, case in enumerate(repetitions):
            turn = list(self.systems)
            if repetition > 0 and case.name != "equal" and "accelerate" in turn:
                turn.remove("accelerate")
            for system in turn if repetition % 2 == 0 else reversed(turn):
                self._run(case, system, repetition)

    def loop_s(self, case: str, system: System) -> float | None:
        """Loop time of a system on a case, the median of the runs."""
        return _median([run.loop_s for run in self._runs(case, system)])

    def over_ideal(self, case: str, system: System) -> float | None:
        """Loop time of a system over the ideal, the median of the runs."""
        return _median([run.loop_s / run.ideal_s for run in self._runs(case, system)])

    def median_run(self, case: str, system: System) -> PeerRun | None:
        """The run in the middle, by loop time."""
        ordered = sorted(self._runs(case, system), key=lambda run: run.loop_s)
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def valid(self) -> bool:
        """Whether every run was; one that failed was not."""
        return all(attempt.run is not None and attempt.run.valid for attempt in self.attempts)

    def records(self) -> list[dict[str, Any]]:
        """Every run in the order in which it was made, as plain data."""
        return [asdict(attempt) for attempt in self.attempts]

    def _runs(self, case: str, system: System) -> list[PeerRun]:
        made = [attempt for attempt in self.attempts if (attempt.case, attempt.system) == (case, system)]
        return [attempt.run for attempt in made if attempt.run is not None]

    def _run(self, case: Case, system: System, repetition: int) -> None:
        label = f"{case.name} {system} #{repetition + 1}"
        started_s = time.monotonic()
        run: PeerRun | None = None
        if system != "ray":
            self._end_ray()
        elif self._ray is None:
            self._start_ray()
        try:
            run = measure(system, case, self._ray)
        except (RankFailed, RuntimeError, OSError):  # OSError: a pipe to Ray whose other end has died
            self.failures.append(label)
            traceback.print_exc(file=sys.stderr)
            self._end_ray()
        self.attempts.append(Attempt(case=case.name, system=system, repetition=repetition, run=run))
        print(f"{label}: {time.monotonic() - started_s:.1f} s", file=sys.stderr, flush=True)

    def _start_ray(self) -> None:
        try:
            self._ray = RayServer(NUM_DEVICES)
        except RuntimeError:
            traceback.print_exc(file=sys.stderr)

    def _end_ray(self) -> None:
        if self._ray is not None:
            self._ray.close()
            self._ray = None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
