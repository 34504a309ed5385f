from __future__ import annotations

import pytest

from lightning_hybrid.core.device_state import DeviceProcess, DeviceState
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.shared_states import RankStates, StateNote

STATE = DeviceState(
    kind="cuda",
    name="NVIDIA L4",
    uuid="GPU-1",
    power_w=70.0,
    memory_total_bytes=24,
    processes=(DeviceProcess(7, None),),
    unknown={"energy_j": "not supported"},
    timestamp_s=1e9,
)


def note(serial: int, session: str = "mine", state: DeviceState = STATE) -> bytes:
    return StateNote(serial, session, state).to_bytes()


def test_a_note_carries_every_field() -> None:
    assert StateNote.from_bytes(note(3)) == StateNote(3, "mine", STATE)


def test_a_note_of_another_format_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="format of a device's state must be 1, as all ranks run one version, got '2'"
    ):
        StateNote.from_bytes(b"2" + note(1)[1:])


def test_ranks_that_have_not_spoken_are_not_there() -> None:
    known = RankStates([1, 2, 3], "mine", 5.0)

    known.take_in([None, note(1), None], 10.0)

    assert known.states(10.0) == {2: STATE}
    assert (known.age_s(1, 10.0), known.age_s(2, 12.5)) == (None, 2.5)


def test_what_an_earlier_run_has_left_passes_for_nothing() -> None:
    known = RankStates([1], "mine", 5.0)

    known.take_in([note(99, "earlier")], 0.0)
    assert known.states(0.0) == {}

    known.take_in([note(1)], 1.0)
    assert known.states(1.0) == {1: STATE}


def test_a_rank_is_silent_by_the_readers_clock_and_speaks_again() -> None:
    known = RankStates([1, 2], "mine", 5.0)
    # the other machine's clock is years behind: it is not looked at
    behind = DeviceState(kind="cuda", name="NVIDIA L4", power_w=70.0, timestamp_s=3.0)
    for now_s in range(8):
        known.take_in([note(1, state=behind), note(1 + now_s)], float(now_s))

    states = known.states(7.0)
    assert states[2] == STATE
    assert (states[1].name, states[1].power_w, states[1].active) == ("NVIDIA L4", None, None)
    assert states[1].error == "rank 1 has told nothing about its device for more than 5 s"
    assert known.states(7.5)[1] is states[1]

    known.take_in([note(2), note(9)], 8.0)
    assert known.states(8.0)[1] == STATE


def test_the_same_reading_in_a_new_note_is_a_sign_of_life() -> None:
    known = RankStates([1], "mine", 5.0)
    for now_s in (0.0, 4.0, 8.0):
        known.take_in([note(int(now_s))], now_s)

    assert known.states(12.0) == {1: STATE}
