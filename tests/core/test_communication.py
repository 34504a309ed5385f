from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.core.communication import CommunicationState, GroupLink, HostLink, PairLink
from lightning_hybrid.core.errors import ConfigError

KNOWN = st.none() | st.floats(1e-9, 1e12)
LINKS = st.builds(
    PairLink,
    first=st.integers(0, 7),
    second=st.integers(0, 7),
    latency_s=KNOWN,
    bandwidth_bytes_per_s=KNOWN,
    concurrent_bandwidth_bytes_per_s=KNOWN,
)
STATES = st.builds(
    CommunicationState,
    depth=st.sampled_from(["quick", "full"]),
    backend=st.sampled_from(["gloo", "nccl"]),
    device_kind=st.sampled_from(["cpu", "cuda"]),
    pairs=st.lists(LINKS, max_size=5).map(tuple),
    group=st.builds(GroupLink, num_ranks=st.integers(2, 9), all_reduce_latency_s=KNOWN, all_reduce_bytes_per_s=KNOWN),
    hosts=st.lists(st.builds(HostLink, rank=st.integers(0, 7), pinned_bytes_per_s=KNOWN), max_size=3).map(tuple),
    message_bytes=st.integers(1),
    num_exchanges=st.integers(0),
    num_all_reduces=st.integers(0),
    probe_s=KNOWN,
)
STATE = CommunicationState(
    depth="quick",
    backend="gloo",
    device_kind="cpu",
    group=GroupLink(num_ranks=4, all_reduce_bytes_per_s=100.0),
    message_bytes=4096,
    num_exchanges=28,
    num_all_reduces=9,
)


def link(alone: float | None, loaded: float | None, latency_s: float | None = None) -> PairLink:
    return PairLink(
        first=0,
        second=1,
        latency_s=latency_s,
        bandwidth_bytes_per_s=alone,
        concurrent_bandwidth_bytes_per_s=loaded,
    )


@given(STATES)
def test_a_state_comes_back_from_its_json(state: CommunicationState) -> None:
    text = state.to_json()

    assert "\n" not in text
    assert CommunicationState.from_json(text) == state
    assert CommunicationState.from_json(text.encode()) == state


@pytest.mark.parametrize(
    ("change", "field"),
    [({"group": None}, "group"), ({"pairs": [{"first": 1}]}, "pairs[0].second"), ({"hosts": 5}, "hosts")],
)
def test_what_is_no_state_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        CommunicationState.from_dict({**STATE.to_dict(), **change})
    assert error.value.field == field
    with pytest.raises(ConfigError, match="depth must be there"):
        CommunicationState.from_dict({})


@pytest.mark.parametrize(
    ("alone", "loaded", "contention"),
    [(100.0, 40.0, 0.6), (100.0, 100.0, 0.0), (100.0, 120.0, 0.0), (None, 40.0, None), (100.0, None, None)],
)
def test_contention_is_what_is_lost_under_load(alone: float, loaded: float, contention: float | None) -> None:
    assert link(alone, loaded).contention_frac == contention


def test_bus_bandwidth_is_what_the_links_carry() -> None:
    assert STATE.group.bus_bandwidth_bytes_per_s == 150.0
    assert GroupLink(num_ranks=2, all_reduce_bytes_per_s=100.0).bus_bandwidth_bytes_per_s == 100.0
    assert GroupLink(num_ranks=2).bus_bandwidth_bytes_per_s is None


def test_the_group_is_as_its_slowest_pair_and_loses_what_its_pairs_lose_together() -> None:
    state = replace(STATE, pairs=(link(100.0, 50.0, 1e-3), link(300.0, 300.0, 2e-3), link(None, 30.0)))

    assert state.slowest_latency_s == 2e-3
    assert state.slowest_bandwidth_bytes_per_s == 30.0
    assert state.contention_frac == pytest.approx(1 - 350 / 400)


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert STATE.slowest_latency_s is None
    assert STATE.slowest_bandwidth_bytes_per_s is None
    assert STATE.contention_frac is None
