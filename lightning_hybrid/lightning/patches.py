"""Attributes of instances that are replaced for the length of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes of instances that were replaced, to be put back."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        """Sets ``owner.name`` on the instance to ``make(original)``."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, make(getattr(owner, name)))
        self._undo.append((owner, name, before))

    def undo(self) -> None:
        """Puts everything back, newest first, as it was on the instances; safe to call twice."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)
