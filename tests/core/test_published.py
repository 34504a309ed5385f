from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.published import Published
from lightning_hybrid.core.state import DeviceState, ReplicaRecord
from lightning_hybrid.core.workqueue import RangeKey, Span

FINITE = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, 99)
SPANS = st.lists(st.builds(Span, COUNTS, COUNTS), max_size=4).map(tuple)
RANGES = st.lists(st.builds(RangeKey, st.text(), COUNTS, st.integers(1, 99), COUNTS), max_size=4).map(tuple)
PUBLISHED = st.builds(
    Published,
    record=st.builds(
        ReplicaRecord,
        replica=st.integers(0, 7),
        step_s=st.none() | FINITE,
        device=st.none() | st.builds(DeviceState, kind=st.just("cuda"), name=st.none() | st.text()),
    ),
    reserved=COUNTS,
    ranges=RANGES,
    done=SPANS,
    held=SPANS,
    recut=st.none() | st.booleans(),
    reserved_cost=FINITE,
    unreserved=COUNTS,
    unreserved_cost=FINITE,
    ahead_cost=FINITE,
    version=COUNTS,
    policy=st.none() | st.text(),
    learnt=st.none() | st.text(),
    stream_end=st.none() | COUNTS,
)


@given(PUBLISHED)
@settings(deadline=None)
def test_what_a_replica_tells_comes_back_from_its_bytes(published: Published) -> None:
    again = Published.from_bytes(published.to_bytes())

    assert again == published
    assert all(type(item) is RangeKey for item in again.ranges)
    assert all(type(span) is Span for span in (*again.done, *again.held))


def test_a_word_is_two_lines_of_json() -> None:
    record = ReplicaRecord(replica=1, steps=3)
    word = Published(record=record, reserved=2, ranges=(RangeKey("range/1/0.0", 4, 6, 2),), held=(Span(4, 10),))
    head, line = word.to_bytes().decode().split("\n")

    assert json.loads(head)["ranges"] == [["range/1/0.0", 4, 6, 2]]
    assert json.loads(head)["held"] == [[4, 10]]
    assert ReplicaRecord.from_json(line) == record


@pytest.mark.parametrize("text", ["\n", "a\nb", '"\\'])
def test_line_ends_in_names_do_not_end_the_line(text: str) -> None:
    word = Published(
        record=ReplicaRecord(replica=0, device=DeviceState(kind="cuda", name=text)), policy=text, learnt=text
    )

    assert Published.from_bytes(word.to_bytes()) == word
