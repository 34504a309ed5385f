from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import ReplicaRecord
from lightning_hybrid.runtime.sharedqueue import Alarm, SharedQueue, raise_alarm, read_alarm
from lightning_hybrid.runtime.store import InProcessStore
from tests.core.claimants import DictKeys

pytestmark = pytest.mark.timeout(60)

FIRE = Alarm("replica 0 is on fire", is_collective=False)


def queues(world: int) -> list[SharedQueue]:
    store = InProcessStore()
    return [SharedQueue(store, replica, world) for replica in range(world)]


def steps_of(replica: int, steps: int) -> Published:
    return Published(record=ReplicaRecord(replica=replica, steps=steps))


# --- words ----------------------------------------------------------------------------------------------------------


def test_replicas_read_what_each_said_last() -> None:
    first, second, third = queues(3)
    newest = Published(record=ReplicaRecord(replica=0, steps=2), reserved=3)
    first.publish(steps_of(0, 1))
    first.publish(newest)
    third.publish(steps_of(2, 0))

    assert second.look() == ({0: newest, 1: None, 2: steps_of(2, 0)}, 0)
    assert second.alarm is None


def test_a_look_reads_those_that_it_is_told_to() -> None:
    first, second, third = queues(3)
    for replica, queue in enumerate((first, second, third)):
        queue.publish(steps_of(replica, replica))

    assert first.look([2, 1]) == ({2: steps_of(2, 2), 1: steps_of(1, 1)}, 0)
    assert first.look([]) == ({}, 0)


def test_before_anybody_has_spoken_a_look_finds_nothing() -> None:
    first, _ = queues(2)

    assert first.look() == ({0: None, 1: None}, 0)
    assert first.alarm is None


def test_a_look_tells_the_newest_version_of_the_plan() -> None:
    first, second = queues(2)
    first.publish(steps_of(0, 1))
    first.store.add("version", 2)
    second.publish(steps_of(1, 1))  # the first word of a replica changes no version

    assert first.look()[1] == second.look()[1] == 2


def test_a_word_is_one_request_after_the_first_and_so_is_a_look() -> None:
    keys = DictKeys()
    queue = SharedQueue(keys, 0, 2)
    queue.publish(steps_of(0, 0))
    del keys.asked[:]
    queue.publish(steps_of(0, 1))
    queue.look()

    assert keys.asked == [("put", "replica/0"), ("get_many", ("replica/0", "replica/1", "alarm", "version"))]


# --- alarms ---------------------------------------------------------------------------------------------------------


def test_an_alarm_reaches_every_replica_and_the_first_reason_counts() -> None:
    first, second, third = queues(3)
    first.raise_alarm(FIRE)
    second.raise_alarm(Alarm("replica 1 issued a collective", is_collective=True))
    third.look()

    assert [queue.alarm for queue in (first, second, third)] == [FIRE] * 3


@pytest.mark.parametrize("has_spoken", [True, False])
def test_an_alarm_stays_whatever_is_said_later(has_spoken: bool) -> None:
    first, second = queues(2)
    if has_spoken:
        second.publish(steps_of(1, 0))
    first.raise_alarm(FIRE)
    second.publish(steps_of(1, 1))
    first.publish(steps_of(0, 1))
    second.look()

    assert second.alarm == FIRE


def test_an_alarm_is_raised_and_read_by_who_has_no_queue() -> None:
    store = InProcessStore()
    assert read_alarm(store) is None

    assert raise_alarm(store, FIRE) == FIRE
    assert raise_alarm(store, Alarm("too late", is_collective=True)) == FIRE
    assert read_alarm(store) == FIRE


@given(st.text(), st.booleans())
@settings(deadline=None)
def test_an_alarm_comes_back_from_its_bytes(reason: str, is_collective: bool) -> None:
    alarm = Alarm(reason, is_collective)

    assert Alarm.from_bytes(alarm.to_bytes()) == alarm


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("mask"), "replica 3 failed with KeyError: 'mask'"),
        (RuntimeError("first line\nsecond line"), "replica 3 failed with RuntimeError: first line"),
        (ValueError(), "replica 3 failed with ValueError: "),
    ],
)
def test_a_failure_is_told_by_its_first_line(error: BaseException, reason: str) -> None:
    assert Alarm.of_failure(3, error) == Alarm(reason, is_collective=False)


# --- agreement ------------------------------------------------------------------------------------------------------


def test_the_first_proposal_is_what_all_hold() -> None:
    first, second = queues(2)

    assert second.agreed("block/0") is None
    assert first.agree("block/0", b"mine") == b"mine"
    assert second.agree("block/0", b"yours") == b"mine"
    assert second.agreed("block/0") == b"mine"
