"""Rows of texts as lines with straight columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], is_left: Sequence[bool]) -> list[str]:
    """One line per row, every column as wide as its longest text.

    Args:
        rows: Texts of every row, the header too; as many in each.
        is_left: By column, whether its texts stand at the left; else they stand at the right.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(is_left))]
    return [
        "  ".join(
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in rows
    ]
