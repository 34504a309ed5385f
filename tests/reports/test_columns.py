"""Rows of texts as lines."""

from __future__ import annotations

from lightning_hybrid.reports.columns import aligned


def test_every_column_is_as_wide_as_its_longest_text_and_lines_end_with_one() -> None:
    assert aligned([["name", "n", "note"], ["a", "100", ""]], [True, False, True]) == ["name    n  note", "a     100"]
