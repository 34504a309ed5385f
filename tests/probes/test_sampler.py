from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.probes.base import DeviceProbe, FakeProbe
from lightning_hybrid.probes.sampler import Sampler

DEADLINE_S = 20.0


class Counting:
    """Numbers its readings."""

    def __init__(self) -> None:
        self.readings = 0
        self.closed = threading.Event()

    def read(self) -> DeviceState:
        self.readings += 1
        return DeviceState(kind="cuda", name="GPU", active=True, performance_state=self.readings)

    def close(self) -> None:
        self.closed.set()


class Gated(Counting):
    """A reading lasts until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def read(self) -> DeviceState:
        self.begun.release()
        assert self.go_on.acquire(timeout=DEADLINE_S)
        return super().read()


@pytest.fixture
def start() -> Iterator[Callable[..., Sampler]]:
    started: list[Sampler] = []

    def make(probe: DeviceProbe, **options: float) -> Sampler:
        sampler = Sampler(probe, kind="cuda", **{"period_s": 0.005} | options)  # type: ignore[arg-type]
        started.append(sampler)
        sampler.start()
        return sampler

    yield make
    for sampler in started:
        sampler.stop()


def wait_until(ready: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not ready():
        assert time.monotonic() < until_s, "it did not happen"
        pause.wait(0.002)


def test_the_newest_state_is_there_without_waiting(start: Callable[..., Sampler]) -> None:
    sampler = start(Counting())

    wait_until(lambda: (sampler.read().performance_state or 0) >= 3)

    assert sampler.read().active is True


def test_before_the_first_reading_nothing_is_known() -> None:
    state = Sampler(Counting(), kind="cuda").read()

    assert (state.kind, state.active, state.error) == ("cuda", None, "not read yet")


def test_the_newest_states_are_kept_and_no_more(start: Callable[..., Sampler]) -> None:
    sampler = start(Counting(), kept=3, period_s=0.001)

    wait_until(lambda: (sampler.read().performance_state or 0) > 10)
    sampler.stop()

    numbers = [state.performance_state for state in sampler.history()]
    assert len(numbers) == 3
    assert numbers == list(range(numbers[0] or 0, (numbers[0] or 0) + 3))


def test_it_ends_with_the_loop_and_gives_back_what_it_took(start: Callable[..., Sampler]) -> None:
    probe = Counting()
    sampler = start(probe)
    wait_until(lambda: probe.readings > 2)

    sampler.stop()

    assert not sampler.is_running
    assert probe.closed.is_set()
    readings = probe.readings
    assert sampler.read().performance_state == readings
    sampler.stop()


def test_it_can_be_started_again(start: Callable[..., Sampler]) -> None:
    probe = Counting()
    sampler = start(probe)
    wait_until(lambda: probe.readings > 0)
    sampler.stop()
    before = probe.readings

    sampler.start()
    sampler.start()

    wait_until(lambda: probe.readings > before)
    assert sum(thread.name == "lightning_hybrid-sampler" for thread in threading.enumerate()) == 1


def test_a_new_period_holds_at_once(start: Callable[..., Sampler]) -> None:
    probe = Counting()
    sampler = start(probe, period_s=1000.0)
    wait_until(lambda: probe.readings == 1)

    sampler.period_s = 0.001

    wait_until(lambda: probe.readings > 3)
    assert sampler.period_s == 0.001


def test_a_reading_that_hangs_is_not_waited_for(start: Callable[..., Sampler]) -> None:
    probe = Gated()
    sampler = start(probe, overdue_s=0.05)
    probe.go_on.release()
    wait_until(lambda: sampler.read().performance_state == 1)

    wait_until(lambda: sampler.read().error is not None)

    state = sampler.read()
    assert (state.name, state.active, state.error) == ("GPU", None, "the driver does not answer")
    assert state.performance_state is None
    assert sampler.read() is state
    probe.go_on.release()
    wait_until(lambda: sampler.read().performance_state == 2)
    sampler.stop(timeout_s=0.01)
    probe.go_on.release(5)


def test_a_new_thread_waits_for_one_that_still_hangs(start: Callable[..., Sampler]) -> None:
    probe = Gated()
    sampler = start(probe, overdue_s=0.05)
    assert probe.begun.acquire(timeout=DEADLINE_S)
    sampler.stop(timeout_s=0.01)

    sampler.start()

    wait_until(lambda: sampler.read().error == "the driver does not answer")
    assert not probe.begun.acquire(blocking=False)
    probe.go_on.release()
    assert probe.begun.acquire(timeout=DEADLINE_S)
    sampler.stop(timeout_s=0.01)
    probe.go_on.release(5)


def test_a_probe_that_raises_does_not_end_the_sampler(
    start: Callable[..., Sampler], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Counting):
        def read(self) -> DeviceState:
            state = super().read()
            if state.performance_state in (2, 3, 4):
                raise RuntimeError("lost")
            return state

    probe = Failing()
    seen: list[DeviceState] = []
    sampler = Sampler(probe, kind="cuda", period_s=0.001)
    sampler.after.append(seen.append)
    sampler.start()
    wait_until(lambda: probe.readings > 6)
    sampler.stop()

    assert [state.error for state in seen[:5]] == [None, *["the probe failed: RuntimeError: lost"] * 3, None]
    assert seen[1].name == "GPU"
    assert len(caplog.records) == 1


def test_every_state_is_handed_on(start: Callable[..., Sampler]) -> None:
    seen: list[DeviceState] = []
    sampler = Sampler(FakeProbe([DeviceState(kind="cuda", sm_clock_mhz=n) for n in (1, 2, 3)]), period_s=0.001)
    sampler.after.append(seen.append)

    sampler.start()
    wait_until(lambda: len(seen) >= 3)
    sampler.stop()

    assert [state.sm_clock_mhz for state in seen[:3]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "value"), [("period_s", 0.0), ("period_s", float("nan")), ("kept", 0), ("overdue_s", -1.0)]
)
def test_what_makes_no_sense_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be positive and finite"):
        Sampler(Counting(), **{name: value})  # type: ignore[arg-type]


def test_a_period_that_makes_no_sense_is_refused() -> None:
    sampler = Sampler(Counting())
    with pytest.raises(ConfigError, match="period_s must be positive"):
        sampler.period_s = 0.0


def test_reading_the_snapshot_costs_microseconds(start: Callable[..., Sampler]) -> None:
    sampler = start(Counting(), period_s=1000.0)
    wait_until(lambda: sampler.read().active is True)

    best_s = min(_seconds_per_read(sampler, 200) for _ in range(20))

    assert best_s < 20e-6


def _seconds_per_read(sampler: Sampler, times: int) -> float:
    began_s = time.perf_counter()
    for _ in range(times):
        sampler.read()
    return (time.perf_counter() - began_s) / times


def test_a_probe_that_gives_no_state_counts_as_failed(start: Callable[..., Sampler]) -> None:
    class Nothing:
        def read(self) -> None:
            return None

    sampler = start(Nothing())
    wait_until(lambda: sampler.read().error != "not read yet")
    assert "must give a DeviceState, got NoneType" in (sampler.read().error or "")
