from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_hybrid.core.conductor import Conductor, Pulse
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.planner import QueuePlanner
from lightning_hybrid.core.policies import NoMemoryBounds, Policy, policy_named
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.selector import OFF, Selector
from lightning_hybrid.core.state import DeviceState, ReplicaRecord
from lightning_hybrid.core.statistics import History
from tests.core.claimants import Epoch, costs_of, version_of

QUICK = HybridConfig(
    switch_dwell_s=0.0, switch_settle_s=0.0, switch_trial_s=1.0, switch_trial_steps=0, self_check_s=1.0
)


USUAL = {"step_s": 0.1, "speed_per_s": 10.0}


class Noting:
    """An executor that keeps what it was asked, and answers with ``complaint``."""

    def __init__(self, complaint: str | None = None, *, of_revision: str | None = None) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.revised = 0
        self.complaint, self.of_revision = complaint, of_revision

    def enforce(self, policy: Policy, *, off: bool) -> str | None:
        self.asked.append((policy.name, off))
        return self.complaint

    def revise(self, policy: Policy) -> str | None:
        self.revised += 1
        return self.of_revision


class Scene:
    """Two replicas whose records a test writes, and the conductor on the first."""

    def __init__(self, config: HybridConfig = QUICK, executor: Noting | None = None) -> None:
        self.now_s, self.executor = 0.0, executor or Noting()
        self.peers = Peers(0, 2, lambda: self.now_s)
        self.selector, self.history = Selector(config), History(config)
        self.config = config
        self.conductor = self.begin()

    def begin(self) -> Conductor:
        """An epoch."""
        return Conductor(
            self.peers,
            self.executor,
            policy_named("hybrid" if self.config.policy == "auto" else self.config.policy),
            self.config,
            selector=self.selector,
            history=self.history,
            stage="predict",
        )

    def look(self, at_s: float, samples: int = 0, used_frac: float = 0.1, **fields: object) -> None:
        """The conductor observes records with that many samples each."""
        self.now_s = at_s
        device = DeviceState(kind="cuda", memory_used_bytes=round(1000 * used_frac), memory_total_bytes=1000)
        first, second = (
            ReplicaRecord(replica=r, steps=1, samples=samples, device=device, **({**USUAL, "wall_s": at_s} | fields))  # type: ignore[arg-type]
            for r in range(2)
        )
        self.peers.record = first
        self.peers.take_in({0: Published(record=first), 1: Published(record=second)})
        self.conductor.observe()


def records(samples: Sequence[int], **fields: object) -> list[ReplicaRecord]:
    return [ReplicaRecord(replica=r, samples=n, **fields) for r, n in enumerate(samples)]  # type: ignore[arg-type]


# --- Pulse ----------------------------------------------------------------------------------------------------------


def test_throughput_is_what_was_done_between_two_looks() -> None:
    pulse = Pulse(HybridConfig())
    pulse.take_in(0.0, records([0, 10], cost=100.0))
    assert (pulse.throughput_per_s, pulse.samples_per_s) == (None, None)
    pulse.take_in(2.0, records([20, 30], cost=400.0))

    assert (pulse.throughput_per_s, pulse.samples_per_s, pulse.new_samples) == (300.0, 20.0, 40)


def test_two_looks_at_the_same_time_tell_no_throughput() -> None:
    pulse = Pulse(HybridConfig())
    pulse.take_in(2.0, records([4, 6]))
    pulse.take_in(2.0, records([5, 6]))

    assert (pulse.throughput_per_s, pulse.samples_per_s, pulse.new_samples) == (None, None, 1)


def test_where_costs_are_not_counted_samples_stand_in_for_them() -> None:
    pulse = Pulse(HybridConfig())
    pulse.take_in(10.0, records([4, 6]))
    pulse.take_in(12.0, records([8, 8]))

    assert pulse.throughput_per_s == 3.0


def test_pressures_are_those_of_all_records() -> None:
    pulse = Pulse(HybridConfig(memory_weight=1, compute_weight=0, network_weight=0))
    full, free = (
        ReplicaRecord(replica=r, device=DeviceState(kind="cuda", memory_used_bytes=used, memory_total_bytes=100))
        for r, used in enumerate((90, 30))
    )
    pressures = pulse.pressures([full, free])

    assert (pressures.memory, pressures.performance, pressures.imbalance) == (0.9, None, pytest.approx(0.5))


def test_pressures_that_cannot_be_known_are_not() -> None:
    pressures = Pulse(HybridConfig(target_throughput_per_s=9.0)).pressures(records([1, 1]))

    assert (pressures.memory, pressures.performance, pressures.imbalance) == (None, None, None)


@pytest.mark.parametrize(
    ("speeds", "gain_frac"),
    [((2.0, 2.0), 0.0), ((3.0, 1.0), 0.5), ((1.0, 1.0, 4.0), 0.5), ((2.0,), 0.0), ((2.0, None), None), ((), None)],
)
def test_the_gain_is_the_time_that_equal_shares_would_take_longer(
    speeds: Sequence[float | None], gain_frac: float | None
) -> None:
    known = [ReplicaRecord(replica=r, cost_speed_per_s=speed) for r, speed in enumerate(speeds)]

    assert Pulse.gain_frac(known) == gain_frac


def test_the_overhead_is_that_of_all_loops() -> None:
    first, second = records([1, 1], wall_s=10.0)

    assert Pulse.overhead_frac([replace(first, overhead_s=0.3), replace(second, overhead_s=0.1)]) == pytest.approx(0.02)


def test_a_target_in_samples_is_compared_with_samples() -> None:
    pulse = Pulse(HybridConfig(target_throughput_per_s=100.0))
    pulse.take_in(0.0, records([0], cost=0.0))
    pulse.take_in(1.0, records([50], cost=10_000.0))

    assert pulse.pressures(records([50])).performance == 2.0


def test_costs_that_are_counted_anew_give_no_throughput() -> None:
    pulse = Pulse(HybridConfig())
    pulse.take_in(0.0, records([50], cost=10_000.0))
    pulse.take_in(1.0, records([60], cost=60.0, cost_version=1))
    assert pulse.throughput_per_s is None
    pulse.take_in(2.0, records([70], cost=75.0, cost_version=1))

    assert pulse.throughput_per_s == 15.0


def test_equal_devices_gain_nothing_and_unknown_ones_tell_nothing() -> None:
    assert Pulse.gain_frac(records([1, 1], speed_per_s=5.0)) == 0.0
    assert Pulse.gain_frac(records([1, 1])) is None
    assert Pulse.overhead_frac(records([1, 1])) is None


# --- Conductor ------------------------------------------------------------------------------------------------------


def test_memory_pressure_that_lasts_puts_memory_aware_into_force() -> None:
    scene = Scene()
    for at_s in (0.0, 1.0, 2.0):
        scene.look(at_s, used_frac=0.95)

    assert scene.executor.asked == [("memory_aware", False)]
    assert scene.conductor.policy.name == "memory_aware"
    (switch,) = scene.history.statistics.switches
    assert switch.reason == "memory pressure 0.95 is above 0.80"


def test_without_pressure_the_policy_in_force_is_only_revised() -> None:
    scene = Scene()
    for at_s in range(5):
        scene.look(float(at_s))

    assert (scene.executor.asked, scene.executor.revised) == ([], 5)


def test_nothing_is_decided_before_every_speed_is_known() -> None:
    scene = Scene()
    scene.peers.record = ReplicaRecord(replica=0)
    for at_s in (0.0, 5.0):
        scene.now_s = at_s
        scene.conductor.observe()

    assert (scene.executor.asked, scene.executor.revised) == ([], 0)


def test_the_end_of_an_epoch_is_not_judged() -> None:
    scene = Scene()
    for at_s in range(5):
        scene.look(float(at_s), used_frac=0.95, finished=True)

    assert (scene.executor.asked, scene.executor.revised) == ([], 0)


def test_balancing_that_costs_more_than_it_gains_is_turned_off_for_good() -> None:
    scene = Scene()
    for at_s in range(12):
        scene.look(float(at_s), overhead_s=0.5 * at_s)

    assert scene.executor.asked == [("hybrid", True)]
    assert scene.history.statistics.switches[-1].kind == "off"


def test_after_that_nothing_is_decided_any_more_and_samples_still_count() -> None:
    scene = Scene()
    for at_s in range(40):
        scene.look(float(at_s), samples=2 * at_s, overhead_s=0.5 * at_s, used_frac=0.1 if at_s < 12 else 0.95)

    assert scene.executor.asked == [("hybrid", True)]
    assert scene.executor.revised < 12
    assert scene.history.statistics.num_samples == 2 * 2 * 39
    assert scene.history.statistics.schedules[-1].policy == OFF


def test_what_was_turned_off_in_an_epoch_stays_off_in_the_next() -> None:
    scene = Scene()
    for at_s in range(12):
        scene.look(float(at_s), overhead_s=0.5 * at_s)
    scene.conductor = scene.begin()
    for at_s in range(12, 20):
        scene.look(float(at_s), used_frac=0.95)

    assert scene.executor.asked == [("hybrid", True)] * 2


def test_overhead_that_is_less_than_the_gain_is_paid() -> None:
    scene = Scene()
    slow = Published(record=ReplicaRecord(replica=1, steps=1, wall_s=10.0, overhead_s=1.0, speed_per_s=3.0))
    for at_s in range(20):
        scene.now_s = float(at_s)
        scene.peers.record = ReplicaRecord(replica=0, steps=1, wall_s=10.0, overhead_s=1.0, speed_per_s=9.0)
        scene.peers.take_in({1: slow})
        scene.conductor.observe()

    assert scene.executor.asked == []


def test_a_policy_that_is_fixed_stays() -> None:
    scene = Scene(QUICK.but(policy="load_balanced"))
    for at_s in range(20):
        scene.look(float(at_s), used_frac=0.95)

    assert (scene.executor.asked, scene.executor.revised) == ([], 20)


def test_a_switch_that_does_not_pay_is_taken_back_and_its_effect_noted() -> None:
    scene = Scene()
    samples = 0
    for at_s in range(8):
        samples += 4 if scene.conductor.policy.name == "memory_aware" else 10
        scene.look(float(at_s), samples=samples, used_frac=0.95)

    assert scene.executor.asked == [("memory_aware", False), ("hybrid", False)]
    switch, undo = scene.history.statistics.switches
    assert (switch.policy, switch.kind, switch.before_per_s, switch.after_per_s) == (
        "memory_aware",
        "switch",
        20.0,
        8.0,
    )
    assert (undo.policy, undo.kind, undo.effect_frac) == ("hybrid", "undo", None)


def test_a_policy_of_an_earlier_epoch_waits_for_the_speeds_of_the_next() -> None:
    scene = Scene()
    for at_s in (0.0, 1.0, 2.0):
        scene.look(at_s, used_frac=0.95)
    scene.conductor = scene.begin()
    scene.look(3.0, used_frac=0.95, speed_per_s=None)
    assert len(scene.executor.asked) == 1
    scene.look(4.0, used_frac=0.95)

    assert len(scene.executor.asked) == 2
    assert scene.history.statistics.switches[-1].reason == "in force since an earlier epoch"


def test_what_was_decided_in_an_epoch_is_in_force_in_the_next() -> None:
    scene = Scene()
    for at_s in (0.0, 1.0, 2.0):
        scene.look(at_s, used_frac=0.95)
    scene.conductor = scene.begin()
    scene.look(2.1, used_frac=0.95)

    assert scene.executor.asked == [("memory_aware", False)] * 2


def test_a_policy_whose_answer_cannot_be_used_is_replaced_for_good() -> None:
    scene = Scene(executor=Noting(complaint="PlanError: left out: 3"))
    for at_s in range(6):
        scene.look(float(at_s), used_frac=0.95)

    assert scene.executor.asked == [("memory_aware", False)]
    last = scene.history.statistics.switches[-1]
    assert (last.kind, last.policy) == ("undo", "load_balanced")
    assert last.reason == "memory_aware was refused: PlanError: left out: 3"
    assert scene.conductor.policy.name == "load_balanced"


def test_a_policy_whose_answer_cannot_be_used_any_more_is_replaced_for_good() -> None:
    scene = Scene(executor=Noting(of_revision="PlanError: left out: 3"))
    for at_s in range(6):
        scene.look(float(at_s), used_frac=0.95)

    assert (scene.executor.asked, scene.executor.revised) == ([], 1)
    last = scene.history.statistics.switches[-1]
    assert (last.kind, last.policy, last.reason) == (
        "undo",
        "load_balanced",
        "hybrid was refused: PlanError: left out: 3",
    )


def test_a_policy_that_learns_is_told_the_records() -> None:
    seen: list[int] = []

    class Learning:
        name = "learning"

        def observe(self, record: ReplicaRecord) -> None:
            seen.append(record.replica)

    scene = Scene()
    scene.conductor.policy = Learning()  # type: ignore[assignment]
    scene.look(0.0)

    assert seen == [0, 1]


def test_samples_are_counted_to_the_end() -> None:
    scene = Scene()
    scene.look(0.0, samples=3)
    scene.look(1.0, samples=10)
    scene.conductor.take_stock(records([12, 10]))

    assert scene.history.statistics.num_samples == pytest.approx(22)


# --- with the queue -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [False, True], ids=["no workers", "workers"])
def test_policies_are_switched_undone_and_turned_off_and_every_cell_is_run_once(prefetch: bool) -> None:
    config = HybridConfig(
        publish_period_s=0.5,
        switch_dwell_s=2.0,
        switch_settle_s=0.5,
        switch_trial_s=2.0,
        switch_trial_steps=0,
        switch_retry_s=5.0,
        self_check_s=6.0,
    )
    costs = costs_of([1.0 + cell % 5 for cell in range(400)], [1.0 + cell % 7 for cell in range(400)])
    epoch = Epoch(version_of(range(400), costs, 3), costs, config, prefetch=prefetch).measure(2.0, 2.0, 1.0)
    leader, selector, history = epoch[0], Selector(config), History(config)
    planner = QueuePlanner(leader.claimant, leader, epoch.keys, costs, config, NoMemoryBounds())
    conductor = Conductor(
        leader.view,
        planner,
        policy_named("hybrid", config),
        config,
        selector=selector,
        history=history,
        stage="test",
    )
    for tick in range(400):
        used = 95 if tick % 40 < 20 else 30  # memory is short now and then
        device = DeviceState(kind="cuda", memory_used_bytes=used, memory_total_bytes=100)
        for replica in epoch.replicas:
            overhead_s = 0.4 * tick if tick > 60 else 0.0  # at last balancing costs too much
            replica.view.record = replace(replica.view.record, device=device, wall_s=0.5 * tick, overhead_s=overhead_s)
            if selector.policy == "hybrid" or tick % 3 == replica.me:  # every switch slows things down
                replica.want()
        epoch.exchange()
        conductor.observe()
        epoch.clock.now_s += 0.5

    assert {schedule.kind for schedule in history.statistics.schedules} == {"start", "switch", "undo", "off"}
    assert int(epoch.keys.values["version"]) >= 3
    assert epoch.run_out() == list(range(400))
