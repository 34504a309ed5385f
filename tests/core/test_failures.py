"""Samples that could not be run, in words."""

from __future__ import annotations

import pytest

from lightning_hybrid.core.failures import SampleFailure, summary, text_of


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_type_and_text() -> None:
    assert text_of(KeyError("x")) == "KeyError: 'x'"


def test_an_error_without_a_readable_text() -> None:
    assert text_of(Unreadable()) == "Unreadable, whose text cannot be read"


def test_a_long_text_is_cut() -> None:
    text = text_of(ValueError("a" * 10_000))

    assert len(text) == 500
    assert text.endswith("aaa...")


def _failure(index: int | None) -> SampleFailure:
    return SampleFailure(position=index or 0, index=index, where="step", error="ValueError: bad", replica=1)


@pytest.mark.parametrize(("index", "named"), [(3, "sample 3 of loader 0"), (None, "a sample of a stream of loader 0")])
def test_a_failure_names_its_sample_and_its_replica(index: int | None, named: str) -> None:
    assert str(_failure(index)) == f"{named}, on replica 1, in the step: ValueError: bad"


def test_the_first_failures_are_named_and_the_others_counted() -> None:
    assert summary([_failure(i) for i in range(7)], most=2).endswith("; and 5 more")
    assert summary([_failure(0)]) == str(_failure(0))
