"""Checks of the fields of a configuration, and how texts become their values."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args, get_origin

from lightning_hybrid.core.errors import ConfigError

POSITIVE = 5e-324
"""As a lower bound: any number above zero."""


def check_type(name: str, value: object, hint: Any) -> None:
    """Checks a value against the type hint of its field.

    Args:
        name: Of the field.
        value: What was given.
        hint: A type, a ``Literal`` of texts, or a union of these and ``None``.

    Raises:
        ConfigError: it does not fit.
    """
    kinds, words = _kinds(hint)
    if (isinstance(value, str) and value in words) or (value is None and type(None) in kinds):
        return
    if words and not kinds:
        raise ConfigError(name, value, f"be one of {', '.join(map(repr, words))}")
    if isinstance(value, bool):
        fits = bool in kinds
    elif isinstance(value, int):
        fits = bool(kinds & {int, float})
    elif isinstance(value, str):
        fits = str in kinds
    else:
        fits = isinstance(value, float) and float in kinds
    if not fits:
        types = sorted("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(name, value, f"be of type {' or '.join([*types, *map(repr, words)])}")


def check_range(name: str, value: float | str | None, low: float, high: float) -> None:
    """Checks that a number is finite and within its bounds; ``None`` and words are.

    Raises:
        ConfigError: it is not.
    """
    if value is None or isinstance(value, str) or (low <= value <= high and value != math.inf):
        return
    bound = "be positive" if low == POSITIVE else f"be at least {low:g}"
    raise ConfigError(name, value, bound + ("" if high == math.inf else f" and at most {high:g}") + " and finite")


def parse(variable: str, text: str, hint: Any) -> Any:
    """The value of a field that is given as a text.

    Args:
        variable: What to call the field in an error.
        text: The text; ``none``, in any case, is ``None``.
        hint: The type hint of the field.

    Raises:
        ConfigError: the text does not parse.
    """
    kinds, words = _kinds(hint)
    word = text.strip().lower()
    if word == "none" and type(None) in kinds:
        return None
    if word in words:
        return word
    if hint is str:
        return text.strip()
    if bool in kinds:
        if word in {"1", "true", "yes", "on"}:
            return True
        if word in {"0", "false", "no", "off"}:
            return False
        raise ConfigError(variable, text, "be 1 or 0")
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(word)
            except ValueError as err:
                raise ConfigError(variable, text, f"parse as {kind.__name__}") from err
    return word


def _kinds(hint: Any) -> tuple[set[Any], tuple[str, ...]]:
    """The types of a hint, and the words that its literals allow."""
    parts = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    return {part for part in parts if get_origin(part) is not Literal}, words
