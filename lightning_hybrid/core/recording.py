"""What a run of the Trainer left of its steps, and the workload that it makes for the simulator."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import PlanError
from lightning_hybrid.core.paces import Pace, by_known_costs, by_usual_steps
from lightning_hybrid.core.simulated import Workload
from lightning_hybrid.core.state import Mode
from lightning_hybrid.core.traces import SpeedTrace

FORMAT = 1
"""Of the text form; a reader refuses what it does not know."""

_LEAST_S = 1e-9
"""A step takes at least this long."""

R = TypeVar("R", bound="RecordedRun")
KeptSteps = tuple[list["RecordedStep"], int]
"""The newest steps of one replica, oldest first, and how many older ones it has not kept."""


class RecordedStep(NamedTuple):
    """One step: positions ``start`` to ``stop`` of the grid on ``replica``."""

    replica: int
    start: int
    stop: int
    start_s: float
    """When the loop's thread began it, on a clock that all replicas share."""
    seconds: float
    """Inside the user's step, without waiting."""
    waited_s: float = 0.0
    """Between the step before and this one: how long the loop waited for other replicas or the store."""
    cost: float | None = None
    """What the user said that it costs, or what was learnt; ``None``: not known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRun:
    """The steps of all replicas in one pass over one loader.

    Where every replica kept only its newest steps, those are left out that began before all of them were kept.

    Raises:
        PlanError: two steps hold the same position, a step belongs to no replica, or its times are no times; names it.
    """

    stage: str
    mode: Mode
    num_replicas: int
    steps: tuple[RecordedStep, ...]
    """In order of positions."""
    loader_idx: int = 0
    steps_left_out: int = 0
    """Older steps that were not kept."""
    costs_given: bool = False
    """Whether the user said what samples cost, so that the scheduler knew."""
    first_rounds: int = 1
    """Steps of every replica that were dealt out before it was known how to deal."""
    config: HybridConfig = field(default_factory=HybridConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(sorted(self.steps, key=lambda step: step.start)))
        for step in self.steps:
            _check(step, self.num_replicas)
        for step, later in zip(self.steps, self.steps[1:], strict=False):
            if later.start < step.stop:
                raise PlanError(f"two recorded steps hold position {later.start}: {tuple(step)} and {tuple(later)}")

    @property
    def policy(self) -> str:
        """The policy of the run, or ``auto``."""
        return self.config.policy

    @property
    def num_samples(self) -> int:
        """Samples of the recorded steps."""
        return sum(step.stop - step.start for step in self.steps)

    @property
    def makespan_s(self) -> float:
        """From the first step's begin to the last one's end."""
        runs = self._runs()
        return max(run[-1].end_s for run in runs.values()) - _first_s(runs) if runs else 0.0

    # --- as text ------------------------------------------------------------------------------------------------

    def to_lines(self) -> str:
        """The recording as lines of JSON: one object, then one list per step."""
        defaults = HybridConfig()
        settings = {
            item.name: getattr(self.config, item.name)
            for item in fields(HybridConfig)
            if getattr(self.config, item.name) != getattr(defaults, item.name)
        }
        names = [item.name for item in fields(RecordedRun) if item.name not in ("steps", "config")]
        head = {"recording": FORMAT, **{name: getattr(self, name) for name in names}, "config": settings}
        return "".join(f"{json.dumps(line)}\n" for line in (head, *self.steps))

    @classmethod
    def from_lines(cls: type[R], text: str) -> R:
        """What `to_lines` wrote.

        Raises:
            PlanError: the text is no recording; names the line.
        """
        lines = text.splitlines()
        head = _parsed(1, lines[0] if lines else "", dict)
        if head.pop("recording", None) != FORMAT:
            raise PlanError(f"line 1 must begin a recording of format {FORMAT}, got {lines[0][:80] if lines else ''!r}")
        steps = [_step(number, line) for number, line in enumerate(lines[1:], start=2) if line.strip()]
        try:
            return cls(**(head | {"steps": tuple(steps), "config": HybridConfig(**head.get("config", {}))}))
        except TypeError as err:
            raise PlanError(f"line 1 does not hold the fields of a recording: {err}") from err

    # --- as a workload ------------------------------------------------------------------------------------------

    def to_workload(self, *, store_latency_s: float = 2e-4) -> Workload:
        """Cells, devices and times between steps such that the run can be simulated.

        Where costs are known, a device was over a few steps as fast as these were together. Where they are not, it was
        as fast as the median of these, and a step that took longer is a heavier cell: who is slow for long is a slow
        device, who is slow once had more to do.

        Args:
            store_latency_s: Seconds of one request to the store, which no recording tells.

        Raises:
            PlanError: there is no step.
        """
        if not self.steps:
            raise PlanError("the recording holds no step")
        runs = self._runs()
        first_s = _first_s(runs)
        knows_costs = any(step.cost for step in self.steps) and all(step.cost is not None for step in self.steps)
        costs: dict[int, float] = {}
        traces: dict[int, SpeedTrace] = {}
        for replica, run in runs.items():
            paces = [timed.pace(first_s, knows_costs=knows_costs) for timed in run]
            if knows_costs:
                traces[replica], found = by_known_costs(paces), [pace.size for pace in paces]
            else:
                traces[replica], found = by_usual_steps(paces)
            costs.update(zip((timed.step.start for timed in run), found, strict=True))
        usual = SpeedTrace.constant(statistics.median(trace.speeds[-1] for trace in traces.values()))
        replicas = range(self.num_replicas)
        return Workload(
            costs=Costs(compute=np.array([costs[step.start] for step in self.steps])),
            traces=tuple(traces.get(r, usual) for r in replicas),
            costs_known=self.costs_given and knows_costs,
            store_latency_s=store_latency_s,
            first_rounds=self.first_rounds,
            starts_s=tuple(runs[r][0].begin_s - first_s if r in runs else 0.0 for r in replicas),
            overheads_s=tuple(_overhead_s(runs.get(r, ())) for r in replicas),
        )

    def _runs(self) -> dict[int, list[_Timed]]:
        by_replica: dict[int, list[RecordedStep]] = {}
        for step in sorted(self.steps, key=lambda step: step.start_s):
            by_replica.setdefault(step.replica, []).append(step)
        return {replica: list(_timed(steps)) for replica, steps in by_replica.items()}


class _Timed(NamedTuple):
    """A step on its device, which may run it later than the host asked for it."""

    step: RecordedStep
    begin_s: float
    end_s: float
    idle_s: float
    """Between the step before and this one, without waiting for others."""

    def pace(self, first_s: float, *, knows_costs: bool) -> Pace:
        """The step with what it is measured by."""
        step = self.step
        size = step.cost if knows_costs and step.cost is not None else step.stop - step.start
        return Pace(self.begin_s - first_s, self.end_s - self.begin_s, float(size))


def _timed(steps: Sequence[RecordedStep]) -> Iterator[_Timed]:
    before_s: float | None = None
    for step in steps:
        begin_s = step.start_s if before_s is None else max(step.start_s, before_s)
        idle_s = 0.0 if before_s is None else max(0.0, begin_s - before_s - step.waited_s)
        before_s = begin_s + max(step.seconds, _LEAST_S)
        yield _Timed(step, begin_s, before_s, idle_s)


def _overhead_s(run: Sequence[_Timed]) -> float:
    return sum(timed.idle_s for timed in run) / (len(run) - 1) if len(run) > 1 else 0.0


def _first_s(runs: Mapping[int, Sequence[_Timed]]) -> float:
    return min(run[0].begin_s for run in runs.values())


def since_all_kept(kept: Sequence[KeptSteps]) -> tuple[tuple[RecordedStep, ...], int]:
    """The steps of all replicas since the time from which each has kept them, and how many are left out.

    The first of them begins at 0.
    """
    since_s = max((steps[0].start_s for steps, left_out in kept if steps and left_out), default=-math.inf)
    found = [step for steps, _ in kept for step in steps if step.start_s >= since_s]
    first_s = min((step.start_s for step in found), default=0.0)
    shifted = tuple(step._replace(start_s=step.start_s - first_s) for step in found)
    return shifted, sum(len(steps) + left_out for steps, left_out in kept) - len(found)


def _check(step: RecordedStep, num_replicas: int) -> None:
    times_s = step.start_s, step.seconds, step.waited_s
    is_right = (
        0 <= step.replica < num_replicas
        and 0 <= step.start < step.stop
        and all(map(math.isfinite, times_s))
        and min(times_s[1:]) >= 0
        and (step.cost is None or 0 <= step.cost < math.inf)
    )
    if not is_right:
        raise PlanError(f"a recorded step is out of range ({num_replicas} replicas): {tuple(step)}")


def _parsed(number: int, line: str, kind: type) -> Any:
    try:
        value = json.loads(line)
    except ValueError as err:
        raise PlanError(f"line {number} must be JSON, got {line[:80]!r}") from err
    if not isinstance(value, kind):
        raise PlanError(f"line {number} must hold a JSON {'object' if kind is dict else 'list'}, got {line[:80]!r}")
    return value


def _step(number: int, line: str) -> RecordedStep:
    values = _parsed(number, line, list)
    is_step = (
        len(values) == len(RecordedStep._fields)
        and all(type(value) is int for value in values[:3])
        and all(type(value) in (int, float) for value in values[3:6])
        and type(values[6]) in (int, float, type(None))
    )
    if not is_step:
        raise PlanError(f"line {number} must hold a step {RecordedStep._fields}, got {line[:80]!r}")
    return RecordedStep(*values)
