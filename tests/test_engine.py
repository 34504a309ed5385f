from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from lightning_hybrid import epoch as epoch_module
from lightning_hybrid.core.conductor import Pulse
from lightning_hybrid.core.config import HybridConfig, ModeOption
from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.errors import CollectiveInQueueMode, PeerFailed
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.engine import Engine
from lightning_hybrid.epoch import EpochRun
from lightning_hybrid.probes.base import FakeProbe, NullProbe
from lightning_hybrid.runtime.loader import WorkFeed, WorkIterator
from lightning_hybrid.runtime.spec import EpochSpec
from lightning_hybrid.runtime.store import InProcessStore, Store
from lightning_hybrid.runtime.timing import EventTimer, HostTimer, StepTimer
from lightning_hybrid.runtime.work import Work
from tests.runtime.replicas import LoaderStandIn

pytestmark = pytest.mark.timeout(60)

QUICK = HybridConfig(publish_period_s=0.02, endgame_poll_s=0.002, claim_deadline_s=4)
Step = Callable[[Work], object]


class NoCollectives:
    """Stands in for the clock of collectives, which is one for the process, where replicas are threads."""

    waited_s = 0.0

    def install(self) -> None:
        """Nothing to count."""

    def remove(self) -> None:
        """Nothing to put back."""


class HostEvent:
    """An event of a device that works at once."""

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """It has been reached."""

    def elapsed_time(self, end: HostEvent) -> float:
        return 1000 * (end.at_s - self.at_s)


def asynchronous() -> StepTimer:
    """As for CUDA: the time of a step is known two steps later."""
    return EventTimer(2, HostEvent)


TIMERS = pytest.mark.parametrize("new_timer", [HostTimer, asynchronous], ids=["host", "asynchronous"])
WORKERS = pytest.mark.parametrize("prime_calls", [0, 4], ids=["no workers", "workers"])


class Stores:
    """The stores of all replicas, one per prefix."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()

    def __call__(self, prefix: str) -> Store:
        with self._lock:
            return self._stores.setdefault(prefix, InProcessStore())


def engine_of(
    *,
    replica: int = 0,
    num_replicas: int = 1,
    config: HybridConfig = QUICK,
    stores: Stores | None = None,
    mode: ModeOption = "queue",
    new_timer: Callable[[], StepTimer] = HostTimer,
) -> Engine:
    engine = Engine(
        config,
        replica=replica,
        num_replicas=num_replicas,
        store=stores or Stores(),
        probe=NullProbe(),
        new_timer=new_timer,
        mode=mode,
    )
    engine.collectives = NoCollectives()  # type: ignore[assignment]
    return engine


def spec_of(
    num_samples: int,
    batch_size: int = 4,
    *,
    stage: Literal["predict", "validate"] = "predict",
    loader_idx: int = 0,
    prime_calls: int = 0,
    max_size: int | None = None,
) -> EpochSpec:
    return EpochSpec(
        stage=stage,
        loader_idx=loader_idx,
        epoch=1,
        grid=Grid.sequential(num_samples, batch_size),
        prime_calls=prime_calls,
        max_size=max_size,
    )


def run_batches(epoch: EpochRun, step: Step) -> tuple[list[Work], list[Work]]:
    """The works that were run as batches, and as ghosts, when the loader has run out."""
    ran: list[Work] = []
    ghosts: list[Work] = []

    def run(work: Work) -> None:
        epoch.run_step(lambda: step(work), lambda _epoch, _output, _size: True)

    def run_ghost(work: Work) -> None:
        ghosts.append(work)
        run(work)

    feed = WorkFeed(epoch, epoch.spec.prime_calls)
    for work in WorkIterator(lambda: LoaderStandIn(feed, epoch.spec.prime_calls), feed, epoch, run_ghost):
        run(work)
        ran.append(work)
    return ran, ghosts


def run_replicas(
    steps: Sequence[Step], spec: EpochSpec, *, engines: Sequence[Engine] | None = None, **options: Any
) -> list[tuple[list[Work], list[Work]]]:
    """What each replica ran, one per step, as threads of this process."""
    stores = Stores()
    engines = engines or [
        engine_of(replica=r, num_replicas=len(steps), stores=stores, **options) for r in range(len(steps))
    ]

    def main(engine: Engine, step: Step) -> tuple[list[Work], list[Work]]:
        try:
            store, _ = engine.open_store(spec.stage, spec.loader_idx)
            return run_batches(engine.balanced(spec, store), step)
        finally:
            engine.close()

    with ThreadPoolExecutor(len(steps)) as pool:
        return list(pool.map(main, engines, steps, timeout=40))


def positions(outcomes: Sequence[tuple[list[Work], list[Work]]]) -> list[int]:
    return sorted(at for ran, _ in outcomes for work in ran for at in range(work.start, work.stop))


def lasting(seconds: float) -> Step:
    return lambda work: time.sleep(seconds * work.size)


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Issues a collective of this thread's replica."""
    issued = threading.local()

    def issue() -> None:
        issued.count = getattr(issued, "count", 0) + 1

    monkeypatch.setattr(epoch_module, "CollectiveCounter", lambda: lambda: getattr(issued, "count", 0))
    return issue


# --- every position once --------------------------------------------------------------------------------------------


@TIMERS
@WORKERS
@pytest.mark.parametrize("mode", ["auto", "queue", "lockstep"])
@pytest.mark.parametrize("max_size", [None, 4], ids=["batches kept", "batches cut anew"])
def test_three_unequal_replicas_run_every_position_once(
    mode: ModeOption, prime_calls: int, max_size: int | None, new_timer: Callable[[], StepTimer]
) -> None:
    steps = [lasting(0.0002), lasting(0.0002), lasting(0.001)]
    spec = spec_of(203, prime_calls=prime_calls, max_size=max_size)
    outcomes = run_replicas(steps, spec, mode=mode, new_timer=new_timer)

    assert positions(outcomes) == list(range(203))
    if mode == "lockstep":
        assert len({len(ran) + len(ghosts) for ran, ghosts in outcomes}) == 1


@TIMERS
@WORKERS
@pytest.mark.parametrize("mode", ["auto", "queue", "lockstep"])
@pytest.mark.parametrize("num_samples", [0, 1, 5, 8, 9])
def test_few_samples_are_run_once_and_who_has_none_runs_ghosts(
    mode: ModeOption, prime_calls: int, num_samples: int, new_timer: Callable[[], StepTimer]
) -> None:
    spec = spec_of(num_samples, prime_calls=prime_calls, max_size=4)
    outcomes = run_replicas([lasting(0.0002)] * 3, spec, mode=mode, new_timer=new_timer)

    assert positions(outcomes) == list(range(num_samples))
    # whatever the mode, every replica runs the first step
    assert all(bool(ran or ghosts) == (num_samples > 0) for ran, ghosts in outcomes)


@TIMERS
@WORKERS
def test_a_lease_that_nobody_misses_changes_nothing(prime_calls: int, new_timer: Callable[[], StepTimer]) -> None:
    spec = spec_of(80, prime_calls=prime_calls)
    outcomes = run_replicas([lasting(0.0002)] * 2, spec, config=QUICK.but(lease_s=30), new_timer=new_timer)

    assert positions(outcomes) == list(range(80))


@WORKERS
def test_a_step_that_issues_collectives_is_run_in_lockstep(prime_calls: int, collectives: Callable[[], None]) -> None:
    def step(work: Work) -> None:
        collectives()
        time.sleep(0.0002 * work.size)

    outcomes = run_replicas([step] * 3, spec_of(203, prime_calls=prime_calls, max_size=4), mode="auto")

    assert positions(outcomes) == list(range(203))
    assert len({len(ran) + len(ghosts) for ran, ghosts in outcomes}) == 1
    assert {work.mode for ran, _ in outcomes for work in ran} == {"static", "lockstep"}


# --- policies -------------------------------------------------------------------------------------------------------

SWITCHING = QUICK.but(
    switch_dwell_s=0.0,
    switch_settle_s=0.0,
    switch_trial_s=0.05,
    switch_trial_steps=0,
    device_period_s=0.01,
    overhead_tolerated_frac=1.0,
)


def unlike(num_samples: int, batch_size: int = 4, **options: Any) -> EpochSpec:
    """A pass over batches that cost 1 to 5 and take 1 to 7 of memory, in no order."""
    spec = spec_of(num_samples, batch_size, **options)
    cells = np.arange(spec.grid.num_cells)
    return replace(spec, costs=Costs(compute=1.0 + 3 * cells % 5, memory=1.0 + 5 * cells % 7))


def by_cost(spec: EpochSpec, seconds: float) -> Step:
    """A step that lasts ``seconds`` per cost unit."""
    return lambda work: time.sleep(seconds * (spec.cost_of(work) or 0.0))


@WORKERS
@pytest.mark.parametrize("mode", ["auto", "queue", "lockstep"])
@pytest.mark.parametrize("policy", ["auto", "load_balanced", "performance_optimized", "memory_aware", "hybrid"])
def test_cells_of_unlike_costs_are_run_once_by_every_policy(policy: str, mode: ModeOption, prime_calls: int) -> None:
    spec = unlike(203, prime_calls=prime_calls, max_size=4 if mode == "lockstep" else None)
    steps = [by_cost(spec, 0.0002), by_cost(spec, 0.0002), by_cost(spec, 0.001)]
    outcomes = run_replicas(steps, spec, mode=mode, config=QUICK.but(policy=policy))

    assert positions(outcomes) == list(range(203))


@WORKERS
@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_a_switch_while_the_loop_runs_costs_no_position(mode: ModeOption, prime_calls: int) -> None:
    spec, stores = unlike(603, prime_calls=prime_calls, max_size=4 if mode == "lockstep" else None), Stores()
    engines = [engine_of(replica=r, num_replicas=3, stores=stores, mode=mode, config=SWITCHING) for r in range(3)]
    for engine in engines:
        engine.probe = FakeProbe([DeviceState(kind="cuda", memory_used_bytes=95, memory_total_bytes=100)])
    outcomes = run_replicas([by_cost(spec, 0.001)] * 3, spec, engines=engines)

    assert positions(outcomes) == list(range(603))
    statistics = engines[0].steering.statistics
    start, switch = statistics.schedules[:2]
    assert (start.policy, start.kind) == ("hybrid", "start")
    assert (switch.policy, switch.kind, switch.reason) == (
        "memory_aware",
        "switch",
        "memory pressure 0.95 is above 0.80",
    )
    if mode == "queue":  # in lockstep nobody waits for the others' last words
        assert statistics.num_samples == 603
    # the others decide nothing
    assert [engine.steering.statistics.num_schedules for engine in engines[1:]] == [0, 0]


@WORKERS
@pytest.mark.parametrize("mode", ["queue", "lockstep"])
def test_balancing_that_does_not_pay_is_turned_off_and_costs_no_position(
    mode: ModeOption, prime_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pulse, "gain_frac", staticmethod(lambda _records: 0.0))
    config = SWITCHING.but(overhead_tolerated_frac=0.0, self_check_s=0.05)
    spec, stores = unlike(603, prime_calls=prime_calls, max_size=4 if mode == "lockstep" else None), Stores()
    engines = [engine_of(replica=r, num_replicas=2, stores=stores, mode=mode, config=config) for r in range(2)]

    outcomes = run_replicas([by_cost(spec, 0.001)] * 2, spec, engines=engines)

    assert positions(outcomes) == list(range(603))
    assert [schedule.kind for schedule in engines[0].steering.statistics.schedules] == ["start", "off"]


# --- modes ----------------------------------------------------------------------------------------------------------


def test_a_step_without_collectives_is_run_from_a_queue_and_stays_so() -> None:
    engine = engine_of(mode="auto")
    for number in (1, 2):
        store, passes = engine.open_store("predict", 0)
        epoch = engine.balanced(spec_of(20), store)
        assert passes == number
        run_batches(epoch, lasting(0))
        assert epoch.mode == "queue"
    engine.close()


def test_a_collective_that_appears_later_in_queue_mode_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    issued = [0]
    monkeypatch.setattr(epoch_module, "CollectiveCounter", lambda: lambda: issued[0])
    engine = engine_of(mode="auto")

    def step(work: Work) -> None:
        issued[0] += work.start >= 8

    epoch = engine.balanced(spec_of(20), engine.open_store("predict", 0)[0])
    with pytest.raises(CollectiveInQueueMode, match=r'samples 8 to 11 of the loader.*mode="lockstep"'):
        run_batches(epoch, step)
    engine.close()


def test_an_error_of_a_collective_in_queue_mode_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    issued = [0]
    monkeypatch.setattr(epoch_module, "CollectiveCounter", lambda: lambda: issued[0])
    engine = engine_of(mode="queue")

    def step(work: Work) -> None:
        if work.start == 8:
            issued[0] += 1
            raise RuntimeError("connection closed by peer")

    epoch = engine.balanced(spec_of(20), engine.open_store("predict", 0)[0])
    with pytest.raises(CollectiveInQueueMode, match="replica 0 issued a collective in the predict step") as caught:
        run_batches(epoch, step)
    assert str(caught.value.__cause__) == "connection closed by peer"
    engine.close()


def test_an_error_of_the_users_step_passes_as_it_is() -> None:
    engine = engine_of()

    def step(work: Work) -> None:
        raise KeyError("mask")

    epoch = engine.balanced(spec_of(20), engine.open_store("predict", 0)[0])
    with pytest.raises(KeyError, match="mask"):
        run_batches(epoch, step)
    engine.close()


@WORKERS
@pytest.mark.parametrize("mode", ["auto", "queue"])
def test_the_failure_of_a_replica_ends_the_run_of_the_others(mode: ModeOption, prime_calls: int) -> None:
    stores = Stores()
    engines = [
        engine_of(replica=r, num_replicas=2, stores=stores, mode=mode, config=QUICK.but(claim_deadline_s=20))
        for r in range(2)
    ]
    spec = spec_of(400, prime_calls=prime_calls)

    def main(engine: Engine) -> None:
        def step(work: Work) -> None:
            time.sleep(0.001)
            if engine.replica == 1 and len(epoch.done) == 3:
                raise KeyError("mask")

        epoch = engine.balanced(spec, engine.open_store("predict", 0)[0])
        try:
            run_batches(epoch, step)
        except Exception as error:
            engine.fail(error)
            raise
        finally:
            engine.close()

    with ThreadPoolExecutor(2) as pool:
        other, failing = (pool.submit(main, engine) for engine in engines)
        with pytest.raises(KeyError, match="mask"):
            failing.result(timeout=30)
        with pytest.raises(PeerFailed, match="replica 1 failed with KeyError: 'mask'"):
            other.result(timeout=30)


# --- fixed works ----------------------------------------------------------------------------------------------------


@WORKERS
def test_fixed_works_are_run_as_they_are(prime_calls: int) -> None:
    engine = engine_of(replica=1, num_replicas=2)
    works = [Work(4, 8, 1), Work(12, 16, 3)]
    epoch = engine.static(spec_of(16, prime_calls=prime_calls), works)

    assert run_batches(epoch, lasting(0)) == (works, [])
    assert not epoch.is_balanced
    assert epoch.done == works
    record = epoch.figures.own_record()
    assert (record.replica, record.samples, record.steps, record.finished) == (1, 8, 2, True)


# --- what is known --------------------------------------------------------------------------------------------------


def test_the_slow_replica_runs_fewer_samples() -> None:
    # long enough steps to tell the two apart on a busy machine
    outcomes = run_replicas([lasting(0.0005), lasting(0.004)], spec_of(400), mode="queue")
    fast, slow = (sum(work.size for work in ran) for ran, _ in outcomes)

    assert slow < fast / 2


def test_a_finished_epoch_knows_what_was_done() -> None:
    engine = engine_of()
    epoch = engine.balanced(spec_of(22), engine.open_store("predict", 0)[0])
    assert epoch.figures.frac_done() == 0
    ran, _ = run_batches(epoch, lasting(0.0005))

    snapshot = epoch.snapshot()
    assert (snapshot.stage, snapshot.mode, snapshot.samples_total, snapshot.samples_done) == (
        "predict",
        "queue",
        22,
        22,
    )
    assert epoch.figures.frac_done() == 1
    assert [work.start for work in epoch.done] == [work.start for work in ran] == [0, 4, 8, 12, 16, 20]
    (record,) = snapshot.replicas
    assert record.finished
    assert 0 < record.busy_s <= record.wall_s
    epoch.figures.conclude([record], [[(work.start, work.stop) for work in epoch.done]])
    assert epoch.figures.plan is not None
    epoch.figures.plan.validate(22)
    engine.close()


def test_loaders_of_one_run_are_kept_and_a_new_run_begins_anew() -> None:
    engine = engine_of()
    for loader_idx in (0, 1):
        run_batches(
            engine.balanced(spec_of(8, loader_idx=loader_idx), engine.open_store("validate", loader_idx)[0]), lasting(0)
        )
    assert [epoch.spec.loader_idx for epoch in engine.epochs] == [0, 1]
    engine.balanced(spec_of(8), engine.open_store("validate", 0)[0])

    assert [epoch.spec.loader_idx for epoch in engine.epochs] == [0]
    engine.close()


def test_each_pass_has_a_store_of_its_own() -> None:
    engine = engine_of()
    prefixes: list[str] = []

    def open_store(prefix: str) -> Store:
        prefixes.append(prefix)
        return InProcessStore()

    engine = Engine(
        QUICK, replica=0, num_replicas=1, store=open_store, probe=NullProbe(), new_timer=HostTimer, mode="queue"
    )
    numbers = [engine.open_store(*which)[1] for which in (("predict", 0), ("predict", 1), ("predict", 0), ("test", 0))]

    assert numbers == [1, 1, 2, 1]
    assert len(set(prefixes)) == 4


def test_the_device_is_part_of_the_final_record() -> None:
    state = DeviceState(kind="cuda", utilization_frac=0.5)
    engine = engine_of()
    engine.probe = FakeProbe([state])
    epoch = engine.balanced(spec_of(8), engine.open_store("predict", 0)[0])
    run_batches(epoch, lasting(0))

    assert epoch.figures.own_record().device == state
    engine.close()


def test_no_background_thread_is_left_when_the_engine_is_closed() -> None:
    engine = engine_of()
    for loader_idx in (0, 1):
        engine.balanced(spec_of(8, loader_idx=loader_idx), engine.open_store("predict", loader_idx)[0])
        engine.epochs[-1].take(may_wait=True)
        if loader_idx == 0:
            engine.epochs[-1].finish()
    engine.close()
    engine.close()

    assert [thread.name for thread in threading.enumerate() if thread.name == "lightning_hybrid-board"] == []
