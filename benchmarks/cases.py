"""The cases of the balance benchmark: which devices, which work, how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.devices import SpeedCurve, Workload, constant
from benchmarks.runs import Mode, RunSpec

BATCH_SIZE = 16
STEP_S = 0.1
SHORT_STEP_S = 0.02
CASE_NAMES = ("equal", "slow_rank", "midrun", "recover", "heavy_tail", "workers", "equal_20ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Devices and work that stock and ours are both given.

    ``factor_from`` names the case of equal ranks whose stock run says what a stock loop takes beyond its steps.
    """

    name: str
    curves: tuple[SpeedCurve, ...]
    workload: Workload
    modes: tuple[Mode, ...] = ("queue",)
    num_workers: int = 0
    repeats: int = 3
    stock_repeats: int = 1
    factor_from: str = "equal"

    def spec(self, mode: Mode | None, repetition: int) -> RunSpec:
        """The run of this case under ``mode``; ``None`` is the stock Trainer."""
        return RunSpec(
            curves=self.curves,
            workload=self.workload,
            num_workers=self.num_workers,
            mode=mode,
            repetition=repetition,
        )


def build_cases(*, steps: int, seed: int, repeats: int, short_repeats: int) -> dict[str, Case]:
    """Every case by name; ``steps`` are what each replica would do of equal shares, ``repeats`` the runs of ours.

    The short equal steps take ``short_repeats`` runs of stock and of ours, twice as long each: one step more or less
    on one rank is then below 1 %. Equal ranks run stock ``repeats`` times: that is in every bound.
    """
    nominal_s = steps * STEP_S
    one, third = constant(1.0), constant(1 / 3)
    slows_down = SpeedCurve(changes=((0.0, 1.0), (0.5 * nominal_s, 1 / 3)))
    dips = SpeedCurve(changes=((0.0, 1.0), (0.25 * nominal_s, 1 / 3), (0.6 * nominal_s, 1.0)))
    recovers = SpeedCurve(changes=((0.0, 1 / 3), (0.5 * nominal_s, 1.0)))
    even = Workload(num_samples=4 * steps * BATCH_SIZE, sample_cost=STEP_S / BATCH_SIZE, batch_size=BATCH_SIZE)
    heavy = replace(even, sigma=1.75, seed=seed)
    short = replace(even, num_samples=2 * even.num_samples, sample_cost=SHORT_STEP_S / BATCH_SIZE)
    equal, slow_rank = (one, one, one, one), (one, one, one, third)
    cases = (
        Case(name="equal", curves=equal, workload=even, repeats=1, stock_repeats=repeats),
        Case(name="slow_rank", curves=slow_rank, workload=even, repeats=repeats, modes=("queue", "lockstep")),
        Case(name="midrun", curves=(one, one, one, slows_down), workload=even, repeats=repeats),
        Case(name="recover", curves=(one, one, dips, recovers), workload=even, repeats=repeats),
        Case(name="heavy_tail", curves=equal, workload=heavy, repeats=repeats),
        Case(name="workers", curves=slow_rank, workload=even, repeats=repeats, num_workers=2),
        Case(
            name="equal_20ms",
            curves=equal,
            workload=short,
            repeats=short_repeats,
            stock_repeats=short_repeats,
            factor_from="equal_20ms",
        ),
    )
    assert tuple(case.name for case in cases) == CASE_NAMES
    return {case.name: case for case in cases}
