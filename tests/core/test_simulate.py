"""One run in virtual time: by the runtime's own objects, in the time that can be worked out, each cell once."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import lightning_hybrid.core.simulate as simulator
import lightning_hybrid.core.simulated as simulated_records
import lightning_hybrid.core.simulated_replica as simulated_replica
from lightning_hybrid import simulation as face
from lightning_hybrid.core import (
    claims,
    conductor,
    cost,
    peers,
    planner,
    policies,
    selector,
    speed,
    statistics,
    versions,
)
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.plan import Grid, arrange
from lightning_hybrid.core.policies import policy_names
from lightning_hybrid.core.selector import Decision, Selector
from lightning_hybrid.core.simulate import Simulation
from lightning_hybrid.core.simulated import SimulatedRun, SimulatedStep, Workload
from lightning_hybrid.core.traces import SpeedTrace
from lightning_hybrid.runtime import board, claimer, dealing, recorder, steering
from lightning_hybrid.runtime.spec import EpochSpec
from tests.core.claimants import costs_of
from tests.simulated import DEALT, HYBRID, STOLEN, run_of

ONE = SpeedTrace.constant(1.0)
DEAD = SpeedTrace.constant(0.0)
LEASE = HybridConfig(lease_s=3.0)


def workload_of(compute: Sequence[float], *traces: SpeedTrace, store_latency_s: float = 0.0, **more: Any) -> Workload:
    memory = more.pop("memory", None)
    return Workload(costs=costs_of(compute, memory), traces=traces, store_latency_s=store_latency_s, **more)


def run(workload: Workload, config: HybridConfig | None = None) -> SimulatedRun:
    return Simulation(workload, config or HybridConfig()).run()


# --- no second implementation ---------------------------------------------------------------------------------------

SHARED = [
    ("Claimant", claims, claimer),
    ("Conductor", conductor, steering),
    ("Costs", cost, None),
    ("History", statistics, steering),
    ("Peers", peers, board),
    ("QueuePlanner", planner, steering),
    ("Selector", selector, steering),
    ("SpeedModel", speed, recorder),
    ("opening_cells", versions, dealing),
    ("opening_version", versions, dealing),
    ("policy_named", policies, steering),
]
"""What decides: its name, where it is written, and what of the runtime uses it."""


@pytest.mark.parametrize(("name", "home", "user"), SHARED, ids=[name for name, *_ in SHARED])
def test_what_decides_is_the_object_that_the_runtime_uses(name: str, home: ModuleType, user: ModuleType | None) -> None:
    assert vars(simulated_replica if name in vars(simulated_replica) else simulator)[name] is getattr(home, name)
    assert user is None or getattr(user, name) is getattr(home, name)


def test_a_simulation_holds_objects_of_just_these_classes() -> None:
    simulation = Simulation(workload_of([3, 2, 1], ONE, ONE), HybridConfig())

    assert type(simulation.selector) is Selector
    for replica in simulation.replicas:
        held = replica.claimant, replica.view, replica.speed
        assert tuple(map(type, held)) == (claimer.Claimant, board.Peers, recorder.SpeedModel)


@pytest.mark.parametrize("costs_known", [True, False])
@pytest.mark.parametrize("compute", [[9, 7, 5, 4, 3, 1], [2, 1, 3, 9, 7, 8]], ids=["heavy first", "in no order"])
def test_the_first_cells_and_the_first_version_are_those_of_the_runtime(
    compute: list[float], costs_known: bool
) -> None:
    costs, config = costs_of(compute), HybridConfig()
    grid = Grid.sequential(6, 1)
    spec = EpochSpec(stage="test", loader_idx=0, epoch=1, grid=grid, costs=costs if costs_known else None)
    simulation = Simulation(Workload(costs=costs, traces=(ONE, ONE), costs_known=costs_known), config)

    first = dealing.first_version(spec, steering.Steering(config).first_policy, 2)
    assert {replica.claimant.version.digest for replica in simulation.replicas} == {first.digest}
    for replica in simulation.replicas:
        works = dealing.probe_works(spec, replica.me, 2)
        assert replica.first_cells == [work.cell for work in works]


def test_every_cell_comes_from_the_claimant_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[tuple[int, int]] = []
    hand_out = claimer.Claimant.hand_out

    def noted(claimant: claimer.Claimant) -> tuple[int, bool] | None:
        found = hand_out(claimant)
        if found is not None:
            handed.append((claimant.me, found[0]))
        return found

    monkeypatch.setattr(claimer.Claimant, "hand_out", noted)
    simulated = run(workload_of(range(40, 0, -1), ONE, SpeedTrace.constant(0.25), ONE))

    first = [(step.replica, step.cell) for step in simulated.steps if step.origin.policy is None]
    assert sorted(first) == [(0, 37), (1, 38), (2, 39)]
    assert sorted(first + handed) == sorted((step.replica, step.cell) for step in simulated.steps)


def test_every_switch_is_a_decision_of_the_selector_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[str] = []
    observe = steering.Selector.observe

    def noted(self: Selector, *args: Any, **kwargs: Any) -> Decision | None:
        decision = observe(self, *args, **kwargs)
        if decision is not None:
            decided.append(decision.policy)
        return decision

    monkeypatch.setattr(steering.Selector, "observe", noted)
    simulation = Simulation(under_changing_pressure(), SWITCHING.but(max_schedules=100))
    simulation.run()

    assert [schedule.policy for schedule in simulation.history.statistics.schedules] == ["hybrid", *decided]
    assert decided


def test_known_costs_of_samples_make_the_cells_of_the_trainer() -> None:
    samples = np.random.default_rng(3).integers(1, 9, 23).astype(float)
    grid, arrangement = arrange(Grid.sequential(23, 4), 4, costs=samples)
    by_the_trainer = [samples[grid.indices(*grid.span(cell))].sum() for cell in range(grid.num_cells)]

    assert arrangement.slots is not None
    simulated = face.simulate("2x1", costs=samples, batch_size=4)
    assert simulated.run.workload.costs.compute.tolist() == by_the_trainer


PARTS_THAT_DECIDE = {
    "holdings",
    "partition",
    "placement",
    "proposals",
    "ranges",
    "reserving",
    "shares",
    "sweep",
    "workqueue",
}
"""Files of the core that the simulator has no business with: those that it drives do."""
DECISIONS = {"adopt", "claim", "declines", "head_claim", "propose", "reserve", "seal", "steal", "tail_claim"}
CHOOSING = {"argmax", "argmin", "argpartition", "argsort", "choice", "searchsorted", "shuffle", "sorted"}
STEMS = "claim", "steal", "thie", "decline", "propos", "reserv", "sweep", "seal", "share", "partition", "switch"


def faults_of(source: str, *, may_sort: bool = False) -> list[str]:
    """What in a source is, or looks like, a decision about who runs which cell when."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            words = ast.unparse(node).replace(".", " ").replace(",", " ").split()
            faults += [f"imports {part}" for part in sorted(PARTS_THAT_DECIDE.intersection(words))]
        elif isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases} - {"NamedTuple", "Protocol"}
            faults += [f"{node.name} is a kind of {base}" for base in sorted(bases)]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in DECISIONS or (name in CHOOSING and not may_sort):
                faults.append(f"calls {name}")
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            faults += [f"defines {node.name}" for stem in STEMS if stem in node.name.lower()]
    return faults


def test_the_simulator_and_its_face_define_no_logic_of_claims_and_policies() -> None:
    for module in (simulator, simulated_replica, simulated_records):
        assert faults_of(inspect.getsource(module)) == []
    # costs are brought into the Trainer's order there; that it is that order, another test says
    assert faults_of(inspect.getsource(face), may_sort=True) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("class Quicker(Claimant):\n    pass", "Quicker is a kind of Claimant"),
        ("def _steal_from(victim):\n    pass", "defines _steal_from"),
        ("won = self.queue.steal(item, 3)", "calls steal"),
        ("cells = np.argsort(-costs)", "calls argsort"),
        ("class Claims:\n    pass", "defines Claims"),
        ("from lightning_hybrid.core.workqueue import head_claim", "imports workqueue"),
        ("from lightning_hybrid.core import sweep, workqueue", "imports sweep"),
        ("import lightning_hybrid.core.shares as by", "imports shares"),
    ],
)
def test_a_second_implementation_would_be_found(source: str, fault: str) -> None:
    assert fault in faults_of(source)
    assert fault in faults_of(inspect.getsource(simulator) + "\n" + source)


# --- times that can be worked out by hand ---------------------------------------------------------------------------


def test_one_replica_takes_the_total_by_its_speed_without_a_gap() -> None:
    simulated = run(workload_of([1, 2, 3], SpeedTrace.constant(2.0)))

    assert simulated.makespan_s == simulated.bound_s == 3.0
    assert simulated.idle_frac == 0.0
    assert [step.start_s for step in simulated.steps[1:]] == [step.end_s for step in simulated.steps[:-1]]


@pytest.mark.parametrize(
    ("compute", "speeds", "makespan_s"),
    [
        ([1, 1, 1, 1], [1, 1], 2.0),
        ([4, 3, 2, 1], [1, 1], 5.0),  # 4 + 1 and 3 + 2
        ([1, 1, 1], [1, 1], 2.0),
        ([1] * 8, [1, 1, 2], 2.0),  # 2, 2 and 4 cells
        ([2], [1, 1], 2.0),
        ([1, 1], [2, 1], 1.0),  # one each, before any speed is known
        ([], [1, 1], 0.0),
        ([0, 0, 0], [1, 1], 0.0),
    ],
)
def test_without_latency_few_cells_take_what_is_worked_out(
    compute: list[float], speeds: list[float], makespan_s: float
) -> None:
    simulated = run(workload_of(compute, *map(SpeedTrace.constant, speeds)))

    assert simulated.makespan_s == makespan_s
    assert simulated.exactly_once_violations == 0


def test_every_replica_begins_at_its_time_and_pauses_between_steps() -> None:
    simulated = run(workload_of([1, 1, 1, 1], ONE, ONE, starts_s=(3.0, 1.0), overheads_s=(0.0, 0.5)))
    first, second = ([step for step in simulated.steps if step.replica == r] for r in (0, 1))

    assert (first[0].start_s, second[0].start_s) == (3.0, 1.0)
    assert all(after.start_s >= before.end_s + 0.5 for before, after in itertools.pairwise(second))
    assert simulated.makespan_s == 5.0  # two cells until 3.5 and one until 4; the fourth takes until 5 on either


def test_a_step_goes_on_at_the_speed_that_its_device_has_meanwhile() -> None:
    simulated = run(workload_of([6], SpeedTrace.sudden(1.0, 2.0, 4.0)))

    assert [(step.start_s, step.end_s) for step in simulated.steps] == [(0.0, 3.0)]


@pytest.mark.parametrize("first_rounds", [1, 2, 3])
def test_as_many_rounds_are_dealt_out_as_was_said(first_rounds: int) -> None:
    simulated = run(workload_of([1] * 20, ONE, ONE, first_rounds=first_rounds))
    dealt = [step for step in simulated.steps if step.origin == DEALT]

    assert sorted(step.replica for step in dealt) == [0] * first_rounds + [1] * first_rounds


def test_a_slow_store_costs_some_requests_and_not_one_per_cell() -> None:
    quick_s, slow_s = (
        run(workload_of([1] * 200, ONE, ONE, store_latency_s=latency_s)).makespan_s for latency_s in (0.0, 0.02)
    )

    assert quick_s == 100.0
    assert quick_s < slow_s < quick_s + 20 * 0.02


@pytest.mark.parametrize("dead", [0, 1])
def test_what_a_replica_dead_from_the_start_was_dealt_is_run_after_the_lease(dead: int) -> None:
    traces = [ONE, ONE]
    traces[dead] = DEAD
    simulated = run(workload_of([1] * 6, *traces), LEASE)
    last = simulated.steps[-1]

    assert [step.replica for step in simulated.steps] == [1 - dead] * 6
    assert last.origin.is_stolen
    assert simulated.steps[-2].end_s == 5.0  # all others without a gap
    # it is missed when the one before the last is begun at the earliest, and at the latest when there is none
    assert 4.0 + LEASE.lease_s + 1.0 <= last.end_s <= 5.0 + LEASE.lease_s + 1.0 + 2 * LEASE.publish_period_s
    assert simulated.exactly_once_violations == 0


def test_without_a_lease_nobody_takes_over_what_the_dead_was_dealt() -> None:
    simulated = run(workload_of([1] * 6, ONE, DEAD))

    assert (simulated.makespan_s, simulated.exactly_once_violations) == (5.0, 1)


def test_a_step_that_its_replica_told_nobody_of_is_run_again_and_counts_once() -> None:
    # its second step ends at 2.1 s; at 2.15 s the device dies, before the next word at 2.2 s
    simulated = run(workload_of([1.05] * 30, ONE, SpeedTrace.failing(1.0, 2.15)), LEASE)
    ((replica, cell),) = simulated.untold

    assert [step.replica for step in simulated.steps if step.cell == cell] == [1, 0]
    assert (replica, len(simulated.steps)) == (1, 31)
    assert simulated.exactly_once_violations == 0


# --- what is told of a run ------------------------------------------------------------------------------------------


def test_bound_busy_and_idle_time_are_those_of_the_steps() -> None:
    told = run_of((0, 0.0, 3.0, DEALT), (1, 0.0, 2.0, DEALT), (0, 3.0, 4.0, HYBRID), (1, 2.5, 4.5, STOLEN))

    assert told.bound_s == 4.0  # 8 on two devices
    assert told.makespan_s == 4.5
    assert told.over_bound == 1.125
    assert told.busy_s.tolist() == [4.0, 4.0]
    assert told.idle_frac == pytest.approx(1 - 8 / 9)
    assert told.exactly_once_violations == 0


def test_a_replica_that_ran_nothing_was_idle() -> None:
    told = run_of((0, 0.0, 2.0, DEALT), (0, 2.0, 4.0, HYBRID), num_replicas=4)

    assert told.busy_s.tolist() == [4.0, 0.0, 0.0, 0.0]
    assert told.idle_frac == 0.75


def test_the_bound_is_that_of_the_real_costs_and_traces() -> None:
    workload = workload_of([6, 6], SpeedTrace.sudden(1.0, 2.0, 4.0), costs_known=False)

    assert run(workload).bound_s == 4.5


@pytest.mark.parametrize(
    ("cells", "violations"),
    [
        ([0, 1, 2, 3], 0),
        ([3, 1, 0, 2], 0),
        ([0, 1, 3], 1),  # one is missing
        ([0, 1, 2, 2, 3], 1),  # one is repeated
        ([0, 1, 1, 1, 3], 2),  # one is missing, one was run three times
        ([0, 0, 1, 1], 4),
        ([], 4),
    ],
)
def test_violations_are_cells_that_are_missing_or_repeated(cells: list[int], violations: int) -> None:
    told = run_of(*[(0, float(n), n + 1.0, DEALT) for n in range(4)])
    steps = [SimulatedStep(n % 2, cell, float(n), n + 1.0, DEALT) for n, cell in enumerate(cells)]

    assert replace(told, steps=steps).exactly_once_violations == violations


def test_a_step_that_nobody_was_told_of_does_not_count_and_must_be_run_again() -> None:
    told = run_of((0, 0.0, 1.0, DEALT), (1, 0.0, 1.0, DEALT))

    assert replace(told, untold=frozenset({(1, 1)})).exactly_once_violations == 1
    again = [*told.steps, SimulatedStep(0, 1, 1.0, 2.0, STOLEN)]
    assert replace(told, steps=again, untold=frozenset({(1, 1)})).exactly_once_violations == 0
    assert replace(told, steps=again).exactly_once_violations == 1


def test_claims_steals_and_requests_are_those_of_the_replicas() -> None:
    # the second one claims by its speed, and then becomes very slow
    workload = workload_of([1] * 80, ONE, SpeedTrace.sudden(1.0, 5.5, 0.02), costs_known=False)
    simulation = Simulation(workload, HybridConfig())
    simulated = simulation.run()
    stolen = sum(step.origin.is_stolen for step in simulated.steps)

    assert simulated.claims == sum(replica.claimant.claims for replica in simulation.replicas) > 0
    assert simulated.cells_stolen == sum(replica.claimant.cells_stolen for replica in simulation.replicas) >= stolen > 0
    assert simulated.store_requests == simulation.keys.requests > simulated.claims


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "seconds", "fits"),
    [
        (0.0, 4.0, True),
        (2.0, 4.0, True),
        (2.001, 10.0, False),  # in two halves: 2.5 times as long
        (4.0, 10.0, False),
        (4.001, 16.0, False),  # in four quarters: 1.5 times as long once more
        (8.0, 16.0, False),
        (16.0, 22.0, False),
    ],
)
def test_a_cell_above_the_memory_is_halved_until_it_fits(memory: float, seconds: float, fits: bool) -> None:
    workload = workload_of([4], ONE, memory=[memory], memory_capacities=(SpeedTrace.constant(2.0),))

    assert workload.step_end_s(0, 0, 1.0) == pytest.approx(1.0 + seconds)
    assert workload.fits(0, 0, 1.0) is fits


@pytest.mark.parametrize(("factor", "seconds"), [(1.0, 4.0), (2.5, 16.0), (4.0, 28.0)])
def test_the_factor_is_paid_for_every_time_that_a_cell_is_halved(factor: float, seconds: float) -> None:
    capacities = (SpeedTrace.constant(2.0),)
    workload = workload_of([4], ONE, memory=[8], memory_capacities=capacities, out_of_memory_factor=factor)

    assert workload.step_end_s(0, 0, 0.0) == seconds


def test_the_memory_of_the_start_of_a_step_counts() -> None:
    capacities = SpeedTrace.sudden(8.0, 5.0, 2.0), SpeedTrace.constant(1.0)
    workload = workload_of([1], ONE, ONE, memory=[4], memory_capacities=capacities)

    assert [workload.step_end_s(0, 0, start_s) for start_s in (0.0, 4.5, 5.0)] == [1.0, 5.5, 7.5]
    assert [workload.fits(1, 0, start_s) for start_s in (0.0, 5.0)] == [False, False]


@pytest.mark.parametrize(("memory", "capacities"), [([9.0], None), (None, (ONE,))])
def test_without_costs_or_capacities_everything_fits(
    memory: list[float] | None, capacities: tuple[SpeedTrace, ...] | None
) -> None:
    workload = workload_of([3], ONE, memory=memory, memory_capacities=capacities)

    assert workload.fits(0, 0, 0.0)
    assert workload.step_end_s(0, 0, 0.0) == 3.0


def test_steps_out_of_memory_are_counted() -> None:
    simulated = run(workload_of([3, 2, 1], ONE, memory=[9, 1, 5], memory_capacities=(SpeedTrace.constant(4.0),)))

    assert simulated.out_of_memory == 2
    assert simulated.makespan_s == 3 * (1 + 1.5 * 2) + 2 + 1 * 2.5


@pytest.mark.parametrize("policy", ["memory_aware", "hybrid"])
def test_cells_that_fit_one_replica_alone_are_run_there(policy: str) -> None:
    memory = [9.0 if cell % 4 == 0 else 1.0 for cell in range(40)]
    capacities = SpeedTrace.constant(4.0), SpeedTrace.constant(10.0)
    workload = workload_of([1] * 40, ONE, ONE, memory=memory, memory_capacities=capacities)
    simulated = run(workload, HybridConfig(policy=policy))

    heavy = [step for step in simulated.steps if step.cell % 4 == 0]
    # before anything is known of the devices, one may be dealt out to the small one or claimed by it
    assert sum(step.replica == 0 for step in heavy) == simulated.out_of_memory <= 2
    assert simulated.makespan_s == pytest.approx(simulated.bound_s, rel=0.15)


# --- the same again -------------------------------------------------------------------------------------------------

SWITCHING = HybridConfig(
    switch_dwell_s=0.5,
    switch_settle_s=0.1,
    switch_trial_s=0.5,
    switch_trial_steps=0,
    switch_retry_s=1.0,
    device_period_s=0.2,
    max_schedules=3,
    trimmed_schedules=2,
)


def under_changing_pressure(num_cells: int = 200) -> Workload:
    """Memory is short at first, and then one device is loaded."""
    cells = np.arange(num_cells)
    return Workload(
        costs=Costs(compute=1.0 + cells % 3, memory=1.0 + cells % 5),
        traces=(ONE, SpeedTrace.periodic(1.0, 0.1, 16.0, 80.0), ONE),
        memory_capacities=(
            SpeedTrace((0.0, 2.0, 20.0), (20.0, 3.0, 20.0)),
            SpeedTrace.constant(20.0),
            SpeedTrace((0.0, 30.0, 60.0), (20.0, 2.0, 20.0)),
        ),
    )


def test_policies_are_switched_in_virtual_time_and_each_cell_is_run_once() -> None:
    simulation = Simulation(under_changing_pressure(), SWITCHING)
    simulated = simulation.run()
    told = simulation.history.statistics

    assert told.num_switches > SWITCHING.max_schedules
    assert {step.origin.policy for step in simulated.steps} >= {None, "hybrid", "memory_aware"}
    assert told.num_samples <= len(simulated.steps) == 200
    assert len(told.schedules) <= SWITCHING.max_schedules
    assert simulated.exactly_once_violations == 0


@pytest.mark.parametrize("store_latency_s", [0.0, 2e-4])
def test_the_same_workload_gives_the_same_steps(store_latency_s: float) -> None:
    workload = replace(under_changing_pressure(), store_latency_s=store_latency_s)
    first, second = (run(workload, SWITCHING) for _ in range(2))

    assert first.steps == second.steps
    assert (first.store_requests, first.claims, first.cells_stolen) == (
        second.store_requests,
        second.claims,
        second.cells_stolen,
    )


def test_of_very_many_replicas_samples_are_drawn_alike_each_time() -> None:
    config = HybridConfig(look_replicas=4)
    workload = workload_of(range(120, 0, -1), *[SpeedTrace.constant(1.0 + r % 3) for r in range(12)])
    first, second = (run(workload, config) for _ in range(2))

    assert first.steps == second.steps
    assert first.exactly_once_violations == 0


# --- any world ------------------------------------------------------------------------------------------------------

LEAST_SPEED, MOST_COST, LEAST_CAPACITY, MOST_MEMORY = 1.0, 2.0, 1.0, 8.0
LONGEST_STEP_S = MOST_COST * (1 + 1.5 * 3) / LEAST_SPEED
"""Where a cell must be halved three times."""


@dataclass(frozen=True, kw_only=True)
class World:
    workload: Workload
    config: HybridConfig

    def __repr__(self) -> str:
        work, memory = self.workload, self.workload.costs.memory
        return (
            f"World(compute={work.costs.compute.tolist()}, memory={None if memory is None else memory.tolist()},"
            f" traces={work.traces}, capacities={work.memory_capacities}, costs_known={work.costs_known},"
            f" store_latency_s={work.store_latency_s}, first_rounds={work.first_rounds}, starts_s={work.starts_s},"
            f" overheads_s={work.overheads_s}, {self.config})"
        )


SPEEDS = st.floats(LEAST_SPEED, 8.0)
TIMES_S = st.floats(0.1, 12.0)
LIVE_TRACES = st.one_of(
    st.builds(SpeedTrace.constant, SPEEDS),
    st.builds(SpeedTrace.drift, SPEEDS, SPEEDS, TIMES_S),
    st.builds(SpeedTrace.sudden, SPEEDS, TIMES_S, SPEEDS),
    st.builds(SpeedTrace.periodic, SPEEDS, SPEEDS, TIMES_S, st.just(40.0)),
)
MORTAL_TRACES = st.one_of(LIVE_TRACES, st.builds(SpeedTrace.failing, SPEEDS, TIMES_S), st.just(DEAD))
CAPACITIES = st.one_of(
    st.builds(SpeedTrace.constant, st.floats(LEAST_CAPACITY, 8.0)),
    st.builds(SpeedTrace.sudden, st.just(8.0), TIMES_S, st.floats(LEAST_CAPACITY, 8.0)),
    st.builds(SpeedTrace.periodic, st.just(8.0), st.just(LEAST_CAPACITY), TIMES_S, st.just(40.0)),
)


@st.composite
def costs_of_cells(draw: st.DrawFn, *, has_memory: bool) -> Costs:
    num_cells = draw(st.one_of(st.integers(0, 24), st.integers(25, 200)))
    kind = draw(st.sampled_from(["equal", "zero", "few values", "any"]))
    random = np.random.default_rng(draw(st.integers(0, 9999)))  # so many cells are too much to draw one by one
    compute = {
        "equal": np.full(num_cells, 0.5),
        "zero": np.zeros(num_cells),
        "few values": random.choice([0.0, 0.125, 0.5, MOST_COST], num_cells),
        "any": random.uniform(0.0, MOST_COST, num_cells),
    }[kind]
    if draw(st.booleans()):
        compute = np.sort(compute)[::-1].copy()
    return Costs(compute=compute, memory=random.uniform(0.1, MOST_MEMORY, num_cells) if has_memory else None)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world, has_memory, some_die = draw(st.integers(1, 12)), draw(st.booleans()), draw(st.booleans())
    # the first one lives: somebody must be left
    rest = st.lists(MORTAL_TRACES if some_die else LIVE_TRACES, min_size=world - 1, max_size=world - 1)
    traces = (draw(LIVE_TRACES), *draw(rest))
    if some_die:
        traces = tuple(draw(st.permutations(traces)))
    workload = Workload(
        costs=draw(costs_of_cells(has_memory=has_memory)),
        traces=traces,
        costs_known=draw(st.booleans()),
        memory_capacities=tuple(draw(CAPACITIES) for _ in traces) if has_memory else None,
        store_latency_s=draw(st.sampled_from([0.0, 2e-4, 0.02])),
        first_rounds=draw(st.integers(1, 2)),
        starts_s=draw(st.none() | st.just(tuple(0.1 * (r % 4) for r in range(world)))),
        overheads_s=draw(st.none() | st.just(tuple(0.02 * (r % 3) for r in range(world)))),
    )
    config = HybridConfig(
        policy=draw(st.sampled_from(["auto", "auto", *policy_names()[:4]])),
        target_throughput_per_s=draw(st.sampled_from([None, 200.0])),
        switch_dwell_s=draw(st.sampled_from([0.0, 0.3, 5.0])),
        switch_settle_s=draw(st.sampled_from([0.0, 0.1])),
        switch_trial_s=draw(st.sampled_from([0.05, 0.5])),
        switch_trial_steps=draw(st.sampled_from([0, 2])),
        switch_retry_s=draw(st.sampled_from([0.0, 2.0])),
        device_period_s=draw(st.sampled_from([0.1, 1.0])),
        max_schedules=draw(st.sampled_from([2, 5, 100])),
        trimmed_schedules=draw(st.sampled_from([1, 50])),
        publish_period_s=draw(st.sampled_from([0.2, 0.5])),
        look_replicas=64 if some_die else draw(st.sampled_from([3, 64])),
        lease_s=LONGEST_STEP_S + 2.0 if some_die else None,
    )
    return World(workload=workload, config=config)


@given(worlds())
@settings(
    deadline=None,
    max_examples=70,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
def test_in_any_world_each_cell_is_run_once_in_its_time_and_nothing_grows_without_bound(world: World) -> None:
    workload, config = world.workload, world.config
    simulation = Simulation(workload, config)
    simulated = simulation.run()
    note(str([tuple(step) for step in simulated.steps]))

    assert simulated.exactly_once_violations == 0
    assert simulated.makespan_s >= simulated.bound_s * (1 - 1e-9)
    assert sorted({step.cell for step in simulated.steps}) == list(range(len(workload.costs)))
    for replica in range(len(workload.traces)):
        check_times([step for step in simulated.steps if step.replica == replica], workload, replica)
    told = simulation.history.statistics
    assert len(told.schedules) <= config.max_schedules
    assert len(told.totals) <= len(policy_names()) + 1
    if config.policy != "auto":
        assert {schedule.policy for schedule in told.schedules} <= {config.policy, "off"}


def check_times(steps: Sequence[SimulatedStep], workload: Workload, replica: int) -> None:
    """One step at a time, each as long as its device takes, none before its replica is free."""
    free_s = 0.0 if workload.starts_s is None else workload.starts_s[replica]
    pause_s = 0.0 if workload.overheads_s is None else workload.overheads_s[replica]
    for step in steps:
        assert step.start_s >= free_s - 1e-9
        assert step.end_s == workload.step_end_s(replica, step.cell, step.start_s)
        free_s = step.end_s + pause_s
