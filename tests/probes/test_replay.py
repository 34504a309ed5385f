"""What is recorded comes back, whatever happened to the file, and is played back by a clock."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.system_state import ParallelConfig, SystemState
from lightning_hybrid.probes.base import DeviceProbe
from lightning_hybrid.probes.replay import ReplayProbe, StateRecorder, device_key, load_states
from lightning_hybrid.probes.sampler import Sampler


def state(time_s: float | None, index: int = 0, **values: Any) -> DeviceState:
    return DeviceState(kind="cuda", index=index, timestamp_s=time_s, **values)


def record(path: Path, *states: DeviceState | SystemState, max_bytes: int = 2**20) -> None:
    with StateRecorder(path, max_bytes=max_bytes) as recorder:
        for each in states:
            recorder.record(each)


# --- recording --------------------------------------------------------------------------------------------------------


def test_states_come_back_by_device_in_order_of_time(tmp_path: Path) -> None:
    system = SystemState(
        devices=(state(2.0), state(2.5, index=1)), parallel=ParallelConfig(world_size=2), timestamp_s=3
    )
    record(tmp_path / "states", state(4.0), system, state(1.0), state(5.0, index=1))
    found = load_states(tmp_path / "states")

    assert found.systems == (system,)
    assert found.devices == {
        ("cuda", "0"): (state(1.0), state(2.0), state(4.0)),
        ("cuda", "1"): (state(2.5, index=1), state(5.0, index=1)),
    }


def test_everything_of_a_state_comes_back(tmp_path: Path) -> None:
    full = state(1.0, clock_event_reasons=("gpu_idle",), unknown={"power_w": "line\nbreak"}, name="é\u2028")
    record(tmp_path / "states", full)

    assert load_states(tmp_path / "states").devices == {("cuda", "0"): (full,)}


def test_a_state_without_a_time_stays_where_it_was_recorded(tmp_path: Path) -> None:
    record(tmp_path / "states", state(1.0), state(None), state(2.0))

    assert [each.timestamp_s for each in load_states(tmp_path / "states").devices["cuda", "0"]] == [1.0, None, 2.0]


@pytest.mark.parametrize(
    ("made", "key"),
    [
        (DeviceState(kind="cpu"), ("cpu", "")),
        (DeviceState(kind="cuda", index=1, nvml_index=3), ("cuda", "1")),
        (DeviceState(kind="cuda", nvml_index=3), ("cuda", "3")),
        (DeviceState(kind="cuda", index=1, uuid="GPU-1"), ("cuda", "GPU-1")),
    ],
)
def test_devices_go_by_uuid_or_index(made: DeviceState, key: tuple[str, str]) -> None:
    assert device_key(made) == key


def test_a_recording_goes_on_where_it_ended(tmp_path: Path) -> None:
    record(tmp_path / "states", state(1.0))
    record(tmp_path / "states", state(2.0))

    assert len(load_states(tmp_path / "states").devices["cuda", "0"]) == 2


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_last_line_that_was_cut_off_is_lost_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "states"
    record(path, state(1.0), state(2.0))
    path.write_bytes(path.read_bytes()[:-cut])

    assert load_states(path).devices == {("cuda", "0"): (state(1.0),)}
    record(path, state(3.0))
    assert load_states(path).devices == {("cuda", "0"): (state(1.0), state(3.0))}


def test_a_file_with_nothing_but_a_cut_line_is_an_empty_recording(tmp_path: Path) -> None:
    (tmp_path / "states").write_bytes(b'{"device":{"ki')

    assert load_states(tmp_path / "states").devices == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"nonsense", "Expecting value"),
        (b"[]", "line must be an object"),
        (b"{}", "'device'"),
        (b'{"device":{}}', r"devices\[0\]\.kind must be the type of the device"),
        (b'{"system":{"timestamp_s":-1}}', "timestamp_s must be finite and at least 0, got -1"),
        (b'{"device":{"kind":"cpu","processes":3}}', "not iterable"),
        (b"\xff", "codec"),
    ],
)
def test_a_line_that_is_no_state_is_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "states"
    record(path, state(1.0))
    path.write_bytes(path.read_bytes() + line + b"\n")

    with pytest.raises(ConfigError, match=rf"states line 2 must be .*{why}"):
        load_states(path)


def test_a_recording_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_states(tmp_path / "states")


@given(num_states=st.integers(1, 80), max_bytes=st.integers(200, 4000))
@settings(deadline=None, max_examples=20)
def test_a_recording_keeps_the_newest_within_its_bound(
    tmp_path_factory: pytest.TempPathFactory, num_states: int, max_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("bound")
    record(directory / "states", *(state(float(number)) for number in range(num_states)), max_bytes=max_bytes)
    times_s = [each.timestamp_s for each in load_states(directory / "states").devices.get(("cuda", "0"), ())]

    assert sum(file.stat().st_size for file in directory.iterdir()) <= max_bytes
    assert times_s == [float(number) for number in range(num_states)][num_states - len(times_s) :]
    assert len(times_s) >= min(num_states, max_bytes // 2 // 60)


def test_a_state_that_is_larger_than_half_of_the_bound_is_left_out(tmp_path: Path) -> None:
    record(tmp_path / "states", state(1.0), state(2.0, name="x" * 200), state(3.0), max_bytes=300)

    assert load_states(tmp_path / "states").devices == {("cuda", "0"): (state(1.0), state(3.0))}


def test_a_bound_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes must be at least 2, got 1"):
        StateRecorder(tmp_path / "states", max_bytes=1)


def test_a_full_disk_is_said_once_and_ends_only_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, line: bytes) -> None:
            raise OSError(errno.ENOSPC, "no space left")

    recorder = StateRecorder(tmp_path / "states")
    recorder._file.close()
    recorder._file = Full()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            recorder.record(state(float(number)))
    recorder.close()

    assert [each.getMessage() for each in caplog.records] == [
        f"states are not recorded in {tmp_path / 'states'} any more: [Errno {errno.ENOSPC}] no space left"
    ]


def test_what_is_recorded_after_the_end_is_dropped(tmp_path: Path) -> None:
    recorder = StateRecorder(tmp_path / "states")
    recorder.close()
    recorder.record(state(1.0))
    recorder.close()

    assert load_states(tmp_path / "states").devices == {}


def test_a_sampler_records_every_reading(tmp_path: Path) -> None:
    class Ends:
        def __init__(self) -> None:
            self.time_s = 0.0

        def read(self) -> DeviceState:
            self.time_s += 1.0
            return state(self.time_s)

    sampler = Sampler(Ends(), kind="cuda", period_s=60.0)
    with StateRecorder(tmp_path / "states") as recorder:
        sampler.after.append(recorder.record)
        sampler.after.append(lambda _: sampler.stop())
        sampler.start()
        sampler._thread.join(10.0)  # type: ignore[union-attr]

    assert load_states(tmp_path / "states").devices == {("cuda", "0"): (state(1.0),)}


# --- replaying --------------------------------------------------------------------------------------------------------


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_states_are_given_by_the_time_that_has_passed() -> None:
    clock = Clock()
    probe: DeviceProbe = ReplayProbe([state(13.0), state(10.0), state(11.5)], clock)
    found = []
    for passed_s in (0.0, 1.0, 1.5, 2.9, 3.0, 1e9):
        clock.now_s = 100.0 + passed_s
        found.append(probe.read().timestamp_s)

    assert found == [10.0, 10.0, 11.5, 11.5, 13.0, 13.0]


def test_time_begins_with_the_first_reading() -> None:
    clock = Clock()
    probe = ReplayProbe([state(10.0), state(11.0)], clock)
    clock.now_s = 500.0

    assert probe.read().timestamp_s == 10.0


def test_a_clock_that_steps_back_gives_the_first_state_again() -> None:
    clock = Clock()
    probe = ReplayProbe([state(10.0), state(11.0)], clock)
    probe.read()
    clock.now_s = 50.0

    assert probe.read().timestamp_s == 10.0


def test_a_file_is_replayed(tmp_path: Path) -> None:
    record(tmp_path / "states", state(10.0, power_w=100.0), state(20.0, power_w=300.0))
    clock = Clock()
    probe = ReplayProbe(load_states(tmp_path / "states").devices["cuda", "0"], clock)
    first = probe.read()
    clock.now_s += 10.0

    assert (first.power_w, probe.read().power_w) == (100.0, 300.0)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "states must hold at least one state"),
        ([state(1.0), state(None)], r"states must all have a timestamp_s, got \[1.0, None\]"),
    ],
)
def test_what_cannot_be_replayed_is_refused(states: list[DeviceState], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayProbe(states)
