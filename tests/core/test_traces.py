"""Speeds over time, and the shortest time that any schedule could take on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.core.traces import SpeedTrace, lower_bound_s

EIGHTHS = st.integers(1, 64).map(lambda eighths: eighths / 8)
"""Seconds whose sums have no rounding errors."""
SPEEDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
ALIVE = st.sampled_from([0.25, 0.5, 1.0, 3.0, 8.0])


@st.composite
def traces(draw: st.DrawFn, speeds: st.SearchStrategy[float] = SPEEDS) -> SpeedTrace:
    """A trace of up to six pieces."""
    pauses_s = draw(st.lists(EIGHTHS, max_size=5))
    starts_s = tuple(itertools.accumulate(pauses_s, initial=0.0))
    return SpeedTrace(starts_s, tuple(draw(speeds) for _ in starts_s))


def done_between(trace: SpeedTrace, start_s: float, stop_s: float) -> float:
    """The integral of the speed, piece by piece, from what `SpeedTrace.at` says of each."""
    edges = [start_s, *(edge for edge in trace.starts_s if start_s < edge < stop_s), stop_s]
    return sum((b - a) * trace.at(a) for a, b in itertools.pairwise(edges))


# --- constructors ---------------------------------------------------------------------------------------------------


def test_a_constant_trace_has_one_speed_for_ever() -> None:
    assert SpeedTrace.constant(2.5) == SpeedTrace((0.0,), (2.5,))


def test_a_sudden_change_is_a_second_piece() -> None:
    assert SpeedTrace.sudden(1.0, 3.0, 0.25) == SpeedTrace((0.0, 3.0), (1.0, 0.25))


def test_a_failing_device_stands_from_then_on() -> None:
    assert SpeedTrace.failing(4.0, 3.0) == SpeedTrace((0.0, 3.0), (4.0, 0.0))


def test_a_drift_goes_to_its_last_speed_in_equal_steps() -> None:
    assert SpeedTrace.drift(1.0, 3.0, 8.0, steps=4) == SpeedTrace((0.0, 2.0, 4.0, 6.0, 8.0), (1.0, 1.5, 2.0, 2.5, 3.0))


@pytest.mark.parametrize(("speed", "last"), [(1.0, 0.3), (0.3, 1.0), (1.0, 0.0)])
def test_a_drift_ends_at_its_last_speed_and_never_turns_back(speed: float, last: float) -> None:
    trace = SpeedTrace.drift(speed, last, 7.0)

    assert (len(trace.speeds), trace.speeds[0], trace.starts_s[-1]) == (21, speed, 7.0)
    assert trace.speeds[-1] == pytest.approx(last, abs=1e-15)
    assert list(trace.speeds) == sorted(trace.speeds, reverse=last < speed)


def test_a_period_has_each_speed_for_half_of_its_time() -> None:
    assert SpeedTrace.periodic(1.0, 0.5, 4.0, 8.0) == SpeedTrace((0.0, 2.0, 4.0, 6.0, 8.0), (1.0, 0.5, 1.0, 0.5, 1.0))


@pytest.mark.parametrize(("until_s", "last_s"), [(8.0, 8.0), (8.1, 12.0), (0.0, 4.0)])
def test_a_period_is_never_cut(until_s: float, last_s: float) -> None:
    trace = SpeedTrace.periodic(1.0, 0.5, 4.0, until_s)

    assert (trace.starts_s[-1], trace.speeds[-1]) == (last_s, 1.0)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpeedTrace((), ()), "a trace needs one speed per start, got 0 and 0"),
        (lambda: SpeedTrace((0.0, 1.0), (1.0,)), "a trace needs one speed per start, got 1 and 2"),
        (lambda: SpeedTrace((1.0,), (1.0,)), r"starts_s must rise from 0, got \[1.0\]"),
        (lambda: SpeedTrace((0.0, 2.0, 2.0), (1.0, 2.0, 3.0)), r"starts_s must rise from 0, got \[0.0, 2.0, 2.0\]"),
        (lambda: SpeedTrace((0.0, 2.0, 1.0), (1.0, 2.0, 3.0)), r"starts_s must rise from 0, got \[0.0, 2.0, 1.0\]"),
        (lambda: SpeedTrace((math.nan,), (1.0,)), r"starts_s must rise from 0, got \[nan\]"),
        (lambda: SpeedTrace.constant(-1.0), r"speeds\[0\] must be finite and not negative, got -1.0"),
        (lambda: SpeedTrace.constant(math.nan), r"speeds\[0\] must be finite and not negative, got nan"),
        (lambda: SpeedTrace.sudden(1.0, 2.0, math.inf), r"speeds\[1\] must be finite and not negative, got inf"),
        (lambda: SpeedTrace.failing(1.0, 0.0), r"starts_s must rise from 0, got \[0.0, 0.0\]"),
        (lambda: SpeedTrace.sudden(1.0, -2.0, 1.0), r"starts_s must rise from 0, got \[0.0, -2.0\]"),
        (lambda: SpeedTrace.drift(1.0, 2.0, -1.0, steps=1), r"starts_s must rise from 0, got \[-?0.0, -1.0\]"),
    ],
)
def test_what_is_no_trace_is_named_with_the_rule(make: Callable[[], SpeedTrace], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


# --- speeds, ends and work ------------------------------------------------------------------------------------------


def test_a_speed_holds_from_its_start_to_the_next() -> None:
    trace = SpeedTrace((0.0, 2.0, 5.0), (1.0, 3.0, 0.5))

    assert [trace.at(time_s) for time_s in (0.0, 1.99, 2.0, 4.99, 5.0, 1e9)] == [1.0, 1.0, 3.0, 3.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("trace", "start_s", "cost", "end_s"),
    [
        (SpeedTrace.constant(4.0), 1.0, 2.0, 1.5),
        (SpeedTrace.sudden(1.0, 2.0, 4.0), 0.0, 2.0, 2.0),
        (SpeedTrace.sudden(1.0, 2.0, 4.0), 1.0, 5.0, 3.0),
        (SpeedTrace.sudden(1.0, 2.0, 4.0), 2.0, 4.0, 3.0),
        (SpeedTrace.periodic(1.0, 0.0, 2.0, 4.0), 0.5, 1.0, 2.5),  # half of it before the pause, half behind
        (SpeedTrace.sudden(0.0, 5.0, 2.0), 1.0, 4.0, 7.0),
        (SpeedTrace.constant(3.0), 1.5, 0.0, 1.5),
    ],
)
def test_a_step_ends_when_its_cost_is_done(trace: SpeedTrace, start_s: float, cost: float, end_s: float) -> None:
    assert trace.end_s(start_s, cost) == end_s


@pytest.mark.parametrize("start_s", [0.0, 1.0, 7.0])
def test_a_device_that_is_dead_from_the_start_ends_nothing(start_s: float) -> None:
    assert SpeedTrace.constant(0.0).end_s(start_s, 1.0) == math.inf


def test_a_step_that_ends_with_the_device_has_ended_and_a_longer_one_has_not() -> None:
    trace = SpeedTrace.failing(2.0, 3.0)

    assert trace.end_s(1.0, 4.0) == 3.0
    assert trace.end_s(1.0, 4.001) == math.inf
    assert trace.end_s(3.0, 0.001) == math.inf


@given(traces(), EIGHTHS, EIGHTHS)
def test_between_start_and_end_of_a_step_the_device_does_its_cost(
    trace: SpeedTrace, start_s: float, cost: float
) -> None:
    end_s = trace.end_s(start_s, cost)
    if math.isinf(end_s):
        assert trace.speeds[-1] == 0.0
        assert done_between(trace, start_s, max(start_s, trace.starts_s[-1])) < cost
        return

    assert end_s > start_s
    assert done_between(trace, start_s, end_s) == pytest.approx(cost, rel=1e-9)
    assert trace.work(end_s) - trace.work(start_s) == pytest.approx(cost, rel=1e-9)


@given(traces(ALIVE), EIGHTHS, EIGHTHS, EIGHTHS)
def test_a_step_in_two_parts_ends_when_the_whole_does_and_more_cost_ends_later(
    trace: SpeedTrace, start_s: float, first: float, second: float
) -> None:
    middle_s, end_s = trace.end_s(start_s, first), trace.end_s(start_s, first + second)

    assert middle_s < end_s < math.inf
    assert trace.end_s(middle_s, second) == pytest.approx(end_s, rel=1e-9)


def test_work_adds_up_from_the_start() -> None:
    trace = SpeedTrace((0.0, 2.0, 5.0), (1.0, 3.0, 0.0))

    assert [trace.work(until_s) for until_s in (0.0, 1.5, 2.0, 4.0, 5.0, 99.0)] == [0.0, 1.5, 2.0, 8.0, 11.0, 11.0]


# --- the bound ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "speeds", "bound_s"),
    [
        ([1, 2, 3], [2], 3.0),  # one device: the total
        ([1, 1, 1], [1, 1], 1.5),  # more equal cells than devices: the total over all
        ([1, 10], [1, 1], 10.0),  # the largest on the fastest
        ([4, 4, 1], [2, 1], 3.0),  # the total again: 9 over 3
        ([6, 6], [3, 1, 1], 3.0),  # the two largest on the two fastest: 12 over 4, though all together do 12 in 2.4
        ([5], [1, 2, 0], 2.5),
        ([], [1, 2], 0.0),
        ([0, 0], [1, 2], 0.0),
    ],
)
def test_the_bound_of_constant_speeds_is_the_largest_of_all_k(
    costs: Sequence[float], speeds: Sequence[float], bound_s: float
) -> None:
    assert lower_bound_s(costs, [SpeedTrace.constant(speed) for speed in speeds]) == bound_s


@pytest.mark.parametrize(
    ("costs", "devices", "bound_s"),
    [
        ([6.0], [SpeedTrace.sudden(1.0, 2.0, 4.0)], 3.0),
        ([6.0] * 2, [SpeedTrace.failing(1.0, 2.0), SpeedTrace.constant(1.0)], 10.0),
        ([2.0] * 2, [SpeedTrace.failing(1.0, 2.0), SpeedTrace.constant(1.0)], 2.0),
        ([1.0, 2.0], [SpeedTrace.sudden(0.0, 5.0, 1.0)], 8.0),
        ([1.0, 2.0], [SpeedTrace.periodic(1.0, 0.0, 2.0, 10.0)], 5.0),
        ([3.0], [SpeedTrace.failing(1.0, 2.0), SpeedTrace.failing(0.5, 2.0)], 2.0),
        ([], [SpeedTrace.failing(1.0, 2.0)], 0.0),
    ],
)
def test_the_bound_of_changing_speeds_is_when_all_together_have_done_the_total(
    costs: Sequence[float], devices: Sequence[SpeedTrace], bound_s: float
) -> None:
    assert lower_bound_s(costs, devices) == bound_s


def test_no_schedule_ends_where_all_devices_die_too_early() -> None:
    assert lower_bound_s([3.01], [SpeedTrace.failing(1.0, 2.0), SpeedTrace.failing(0.5, 2.0)]) == math.inf


def test_speeds_that_cancel_but_for_rounding_are_none() -> None:
    devices = [SpeedTrace.failing(0.1 * (k + 1), 1.0) for k in range(9)]

    assert lower_bound_s([100.0], devices) == math.inf


@given(st.lists(EIGHTHS, max_size=6), st.lists(traces(ALIVE), min_size=1, max_size=4))
def test_by_the_bound_of_changing_speeds_the_devices_have_done_just_the_total(
    costs: list[float], devices: list[SpeedTrace]
) -> None:
    bound_s = lower_bound_s(costs, devices)

    assert sum(device.work(bound_s) for device in devices) >= sum(costs) * (1 - 1e-9)
    if any(len(device.speeds) > 1 for device in devices):
        assert sum(device.work(bound_s) for device in devices) <= sum(costs) * (1 + 1e-9)


def makespans(costs: Sequence[float], devices: Sequence[SpeedTrace]) -> Iterator[float]:
    """Of every way to give the cells out, without a pause: where speeds change, in every order of the cells too."""
    change = any(len(device.speeds) > 1 for device in devices)
    for ordered in itertools.permutations(costs) if change else [tuple(costs)]:
        for owners in itertools.product(range(len(devices)), repeat=len(costs)):
            ends_s = [0.0] * len(devices)
            for cost, owner in zip(ordered, owners, strict=True):
                ends_s[owner] = devices[owner].end_s(ends_s[owner], cost)
            yield max(ends_s)


@given(st.lists(EIGHTHS, min_size=1, max_size=4), st.lists(traces(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_no_schedule_of_few_cells_is_below_the_bound(costs: list[float], devices: list[SpeedTrace]) -> None:
    if not any(speed > 0 for device in devices for speed in device.speeds):
        return  # nothing ever runs

    assert lower_bound_s(costs, devices) <= min(makespans(costs, devices)) * (1 + 1e-9)


@given(st.lists(EIGHTHS, min_size=1, max_size=6), st.lists(ALIVE, min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_no_schedule_on_constant_speeds_is_below_the_bound_and_equal_cells_come_close(
    costs: list[float], speeds: list[float]
) -> None:
    devices = [SpeedTrace.constant(speed) for speed in speeds]
    bound_s, best_s = lower_bound_s(costs, devices), min(makespans(costs, devices))

    assert bound_s <= best_s * (1 + 1e-9)
    # whoever ends last would end a cell later on any other device too
    assert best_s <= bound_s + max(costs) / min(speeds)


@given(st.lists(EIGHTHS, min_size=1, max_size=5), st.lists(ALIVE, min_size=1, max_size=3))
def test_the_bound_takes_no_notice_of_the_order_of_cells_and_devices(costs: list[float], speeds: list[float]) -> None:
    devices = [SpeedTrace.constant(speed) for speed in speeds]

    backward_s = lower_bound_s(np.array(costs[::-1]), devices[::-1])
    assert lower_bound_s(costs, devices) == pytest.approx(backward_s, rel=1e-12)
