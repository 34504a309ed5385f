"""Frozen records that check their own values, and their exact form in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.errors import ConfigError

R = TypeVar("R", bound="Record")

_PLAIN = {bool: "true or false", int: "a whole number of at least 0", float: "finite and at least 0", str: "text"}


class Record:
    """A frozen dataclass whose fields hold what their types say, and whose numbers are finite and never negative.

    Fields may be numbers, texts, literals, other records, `DeviceState`, tuples of these and mappings from text to
    these, or ``None`` where the type says so. A subclass is a keyword-only dataclass.

    Raises:
        ConfigError: at construction, if a field holds something else; names the field, down to the entry.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), kind))

    def to_dict(self) -> dict[str, Any]:
        """What is known, under the fields' names, for JSON; what is ``None`` or empty is left out."""
        values = {each.name: (getattr(self, each.name), _is_required(each)) for each in fields(self)}
        empty: tuple[Any, ...] = (None, (), {})
        return {name: _plain(value) for name, (value, required) in values.items() if required or value not in empty}

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls: type[R], found: Mapping[str, Any]) -> R:
        """The record that `to_dict` wrote; names of another version of this package are passed over.

        Raises:
            ConfigError: a field is missing or holds what it cannot; names the field, its value and the rule.
        """
        return cls._parse("", found)

    @classmethod
    def from_json(cls: type[R], text: str | bytes) -> R:
        """The record that `to_json` wrote.

        Raises:
            ConfigError: ``text`` is no JSON, or a field is missing or holds what it cannot.
        """
        try:
            found = json.loads(text)
        except ValueError as err:
            raise ConfigError("text", text[:80], "be JSON") from err
        return cls._parse("", found)

    @classmethod
    def _parse(cls: type[R], path: str, found: Any) -> R:
        if not isinstance(found, Mapping):
            raise ConfigError(path or cls.__name__, found, "be an object of fields")
        values = {}
        for each in fields(cls):
            name = f"{path}.{each.name}" if path else each.name
            if each.name in found:
                values[each.name] = _parsed(name, found[each.name], _kinds(cls)[each.name])
            elif _is_required(each):
                raise ConfigError(name, None, "be there")
        return cls(**values)


_KINDS: dict[type[Record], dict[str, Any]] = {}


def _kinds(cls: type[Record]) -> dict[str, Any]:
    """The types of a record's fields, which are looked up once."""
    if cls not in _KINDS:
        hints = get_type_hints(cls)
        _KINDS[cls] = {each.name: hints[each.name] for each in fields(cls)}
    return _KINDS[cls]


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _parsed(name: str, value: Any, kind: Any) -> Any:
    """The value of a field from its form in JSON; what does not fit is refused here, under its full name."""
    kind = _known(kind, value)
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind._parse(name, value)
    if kind is DeviceState:
        return _device(name, value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_parsed(f"{name}[{i}]", each, get_args(kind)[0]) for i, each in enumerate(value))
    return _checked(name, value, kind)


def _device(name: str, value: Any) -> DeviceState:
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, "be an object of fields")
    try:
        return DeviceState.from_dict(value)
    except ConfigError as err:
        raise ConfigError(f"{name}.{err.field}", err.value, err.rule) from err


def _checked(name: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind``; whole numbers become floats where these are meant.

    Raises:
        ConfigError: it is no ``kind``.
    """
    kind = _known(kind, value)
    origin = get_origin(kind)
    if kind is type(None):
        return None
    if origin is tuple:
        entries = tuple(value) if isinstance(value, tuple | list) else None
        if entries is None:
            raise ConfigError(name, value, "be a sequence")
        return tuple(_checked(f"{name}[{i}]", each, get_args(kind)[0]) for i, each in enumerate(entries))
    if origin is not None and origin is not Literal:
        return _checked_mapping(name, value, get_args(kind)[1])
    if origin is Literal:
        if value not in get_args(kind):
            raise ConfigError(name, value, f"be one of {', '.join(map(repr, get_args(kind)))}")
        return value
    return _checked_plain(name, value, kind)


def _checked_mapping(name: str, value: Any, kind: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(name, value, "be a mapping from text")
    return {key: _checked(f"{name}.{key}", each, kind) for key, each in value.items()}


def _checked_plain(name: str, value: Any, kind: Any) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(name, value, f"be {_PLAIN.get(kind) or f'a {kind.__name__}'}")
    if kind in (int, float) and not (math.isfinite(value) and value >= 0):
        raise ConfigError(name, value, f"be {_PLAIN[kind]}")
    return value


def _known(kind: Any, value: Any) -> Any:
    """The one alternative of ``kind | None`` that ``value`` must be."""
    if get_origin(kind) in (UnionType, Union):
        return type(None) if value is None else next(each for each in get_args(kind) if each is not type(None))
    return kind


def _plain(value: Any) -> Any:
    if isinstance(value, Record | DeviceState):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value
