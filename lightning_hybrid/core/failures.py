"""Samples that could not be run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Where = Literal["dataset", "collate", "step"]
"""What raised: reading the sample, making a batch of it, or the step; a sample that fits into no memory counts too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFailure:
    """A sample that was left out, with ``on_error="skip"``."""

    position: int
    """In the grid that was run."""
    index: Any
    """Dataset index; ``None`` for a stream."""
    where: Where
    error: str
    """Type and text of what was raised."""
    replica: int
    loader_idx: int = 0

    def __str__(self) -> str:
        which = "a sample of a stream" if self.index is None else f"sample {self.index!r}"
        return f"{which} of loader {self.loader_idx}, on replica {self.replica}, in the {self.where}: {self.error}"

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


_MOST_TEXT = 500


def text_of(error: BaseException) -> str:
    """The error's type and text, at most 500 characters."""
    name = type(error).__name__
    try:
        text = f"{name}: {error}"
    except Exception:  # an error of the user's, whose __str__ may be broken as well
        text = f"{name}, whose text cannot be read"
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."


def summary(failures: list[SampleFailure], most: int = 5) -> str:
    """The first failures in words, and how many more there are."""
    shown = "; ".join(map(str, failures[:most]))
    more = len(failures) - most
    return shown if more <= 0 else f"{shown}; and {more} more"
