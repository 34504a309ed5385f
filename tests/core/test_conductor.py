from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_hybrid.core.conductor import Conductor, Pulse
from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.peers import Peers
from lightning_hybrid.core.policies import Policy, policy_named
from lightning_hybrid.core.published import Published
from lightning_hybrid.core.selector import Selector
from lightning_hybrid.core.state import DeviceState, ReplicaRecord
from lightning_hybrid.core.statistics import History

QUICK = HybridConfig(
    switch_dwell_s=0.0, switch_settle_s=0.0, switch_trial_s=1.0, switch_trial_steps=0, self_check_s=1.0
)


class Noting:
    """An executor that keeps what it was asked, and answers with ``complaint``."""

    def __init__(self, complaint: str | None = None) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.revised = 0
        self.complaint = complaint

    def enforce(self, policy: Policy, *, off: bool) -> str | None:
        self.asked.append((policy.name, off))
        return self.complaint

    def revise(self, policy: Policy) -> str | None:
        self.revised += 1
        return None


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
            policy_named("hybrid"),
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
            ReplicaRecord(
                replica=r, steps=1, samples=samples, step_s=0.1, speed_per_s=10.0, device=device, wall_s=at_s, **fields
            )  # type: ignore[arg-type]
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
    scene.peers.record = ReplicaRecord(replica=0, samples=12)
    scene.conductor.take_stock()

    assert scene.history.statistics.num_samples == pytest.approx(22)
