"""What is kept of samples that raise alone or together, and how many calls that takes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_hybrid.runtime.salvage import Salvage, salvage

BAD = -1


class OneKind:
    """Takes samples of one kind; a bad one raises alone."""

    def __init__(self, kinds: list[int], most: int | None = None) -> None:
        self._kinds, self._most = kinds, most

    def __call__(self, places: list[int]) -> list[int]:
        assert places
        assert places == sorted(set(places))
        kinds = [self._kinds[place] for place in places]
        if BAD in kinds:
            raise ValueError("bad")
        if len(set(kinds)) > 1:
            raise TypeError("unlike")
        if self._most is not None and len(places) > self._most:
            raise OverflowError("too many")
        return places

    def salvaged(self) -> Salvage:
        found = salvage(self, len(self._kinds), "the first error")
        assert (found.result or []) == found.kept
        assert sorted([*found.kept, *found.errors]) == list(range(len(self._kinds)))
        assert list(found.errors) == sorted(found.errors)
        assert found.num_calls <= 4 * len(self._kinds)
        return found


def test_one_bad_sample_among_32_takes_few_calls() -> None:
    found = OneKind([0] * 20 + [BAD] + [0] * 11).salvaged()

    assert found.kept == [*range(20), *range(21, 32)]
    assert found.errors == {20: "ValueError: bad"}
    assert found.num_calls == 12  # all, two for each of five levels, all the others


def test_a_single_sample_is_not_tried_again() -> None:
    found = OneKind([BAD]).salvaged()

    assert found.kept == []
    assert found.errors == {0: "the first error"}
    assert found.num_calls == 1


def test_when_all_are_bad_nothing_is_kept() -> None:
    found = OneKind([BAD] * 6).salvaged()

    assert found.kept == []
    assert found.result is None
    assert set(found.errors.values()) == {"ValueError: bad"}


@pytest.mark.parametrize("odd", range(8))
def test_one_of_another_kind_is_left_out(odd: int) -> None:
    found = OneKind([int(place == odd) for place in range(8)]).salvaged()

    assert found.errors == {odd: "TypeError: unlike"}


@pytest.mark.parametrize(
    "kinds",
    [
        [1, 2, 3] + [0] * 29,
        [1, 2, 3] + [0, 4, 0] * 9,
        [0, 1] * 16 + [0],
        [0, 1, 2] * 10 + [0],
        [1, BAD, 1, 0, 0, BAD, 0, 2],
        [0] * 15 + [1] * 17,
    ],
)
def test_the_most_frequent_kind_is_kept_wherever_it_lies(kinds: list[int]) -> None:
    commonest = Counter(kind for kind in kinds if kind != BAD).most_common(1)[0][0]

    assert OneKind(kinds).salvaged().kept == [place for place, kind in enumerate(kinds) if kind == commonest]


def test_when_all_are_unlike_one_is_kept() -> None:
    assert len(OneKind(list(range(32))).salvaged().kept) == 1


@pytest.mark.parametrize("most", [1, 3, 5, 7, 11])
def test_as_many_are_kept_as_are_taken(most: int) -> None:
    assert len(OneKind([0] * 12, most).salvaged().kept) == most


def test_a_call_that_raises_only_once_loses_nothing() -> None:
    assert OneKind([0] * 7).salvaged().errors == {}


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_exactly_the_bad_ones_are_left_out_in_calls_of_the_order_of_k_log_n(case: tuple[int, set[int]]) -> None:
    num_samples, bad = case
    found = OneKind([BAD if place in bad else 0 for place in range(num_samples)]).salvaged()

    assert found.kept == [place for place in range(num_samples) if place not in bad]
    assert found.num_calls <= 2 + 2 * len(bad) * math.ceil(math.log2(num_samples))


@given(st.lists(st.integers(BAD, 3), min_size=1, max_size=40))
@settings(max_examples=300)
def test_of_any_mixture_one_whole_kind_is_kept_or_none_is_good(kinds: list[int]) -> None:
    assume(BAD in kinds or len(set(kinds)) > 1)
    found = OneKind(kinds).salvaged()
    good = {kind for kind in kinds if kind != BAD}

    assert len({kinds[place] for place in found.kept}) == min(1, len(good))
    assert all(kinds[place] != BAD for place in found.kept)


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=3))
def test_a_few_of_other_kinds_never_cost_one_of_the_many(num_same: int, odd: set[int]) -> None:
    assume(odd or num_same > 1)
    kinds = [0] * num_same
    for kind, place in enumerate(sorted(odd), start=1):
        kinds.insert(min(place, len(kinds)), kind)
    found = OneKind(kinds).salvaged()

    if num_same > 3:
        assert found.kept == [place for place, kind in enumerate(kinds) if kind == 0]


@given(st.lists(st.integers(BAD, 2), min_size=1, max_size=24), st.integers(1, 6))
def test_no_limit_of_any_function_is_exceeded(kinds: list[int], most: int) -> None:
    OneKind(kinds, most).salvaged()


def test_an_interrupt_is_not_an_error_of_a_sample() -> None:
    def interrupted(_places: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        salvage(interrupted, 4, "the first error")
