"""Attributes of instances that are replaced for the length of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Attributes of instances that were replaced, to be put back."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str]] = []

    def replace(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        """Sets ``owner.name`` on the instance to ``make(original)``."""
        setattr(owner, name, make(getattr(owner, name)))
        self._undo.append((owner, name))

    def undo(self) -> None:
        """Removes every replacement, so that the class's own attributes show again; safe to call twice."""
        while self._undo:
            owner, name = self._undo.pop()
            vars(owner).pop(name, None)
