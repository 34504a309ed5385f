"""Every threshold, weight, period, window, deadline and bound, in one frozen record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from lightning_hybrid.core.errors import ConfigError

ModeOption = Literal["auto", "queue", "lockstep"]
OrderOption = Literal["loader", "dataset"]
GatherOption = Literal["all", "rank_zero", "none"]
IterableOption = Literal["stock", "sharded"]

ENVIRONMENT_PREFIX = "LIGHTNING_HYBRID_"


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    """Settings of the whole package; the callback's keyword arguments are its common fields.

    Raises:
        ConfigError: a field has the wrong type or is out of its range; names the field, the value and the rule.
    """

    enabled: bool = True
    """``False`` leaves the Trainer exactly as it is."""
    mode: ModeOption = "auto"
    """``queue``: replicas claim work as they go. ``lockstep``: equal step counts, sizes by speed."""
    order: OrderOption = "loader"
    """Order of `rows()`: the loader's, or by dataset index."""
    gather: GatherOption = "all"
    """Which ranks get the whole list from `trainer.predict`; ``none`` leaves each rank its own share."""
    iterable: IterableOption = "stock"
    """``stock``: every rank sees a whole `IterableDataset`, and is told so. ``sharded``: the dataset shards itself."""
    max_micro_batch_size: int | None = None
    """Most samples of one step where lockstep cuts batches anew; ``None``: the loader's batch size."""
    batch_dependent: bool | None = None
    """``True``: the step's result depends on the whole batch, so batches are never cut anew."""

    memory_weight: float = 0.4
    compute_weight: float = 0.4
    network_weight: float = 0.2
    """Weights of the load score that stands in for a speed before the first measurement."""

    claim_frac: float = 0.5
    """Part of its fair share of the unclaimed cells that a replica claims at once (guided self-scheduling)."""
    reserve_frac: float = 0.25
    """Part of the time left that a replica may hold as cells which cannot be stolen."""
    reserve_ahead_s: float = 0.25
    """Most seconds of work that a replica holds as cells which cannot be stolen; one cell may last longer."""
    publish_period_s: float = 0.2
    """How often a replica publishes its record and reads the others'."""
    endgame_poll_s: float = 0.01
    """How often a replica without work looks for some; more often where steps are shorter than ten times this."""
    claim_deadline_s: float = 1800.0
    """Longest wait during which no replica finishes a step; as long as a process group of torch waits by default."""
    lease_s: float | None = None
    """Claims of a replica whose progress stands still this long are taken over; ``None``: never."""

    speed_window_steps: int = 5
    """Steps whose median is the current speed."""
    speed_change_frac: float = 0.1
    """Lockstep shares move only when a speed differs by more than this from the one they were cut for."""
    in_flight_steps: int = 2
    """Most steps that run ahead of an asynchronous device."""
    lockstep_block_rounds: int = 8
    """Rounds that one published plan of lockstep covers once speeds are known."""

    gather_chunk_bytes: int = 16 * 2**20
    """Most bytes of results that one rank sends in one piece."""
    device_period_s: float = 1.0
    """How often the state of the device is read."""
    straggler_threshold_frac: float = 0.25
    """How much slower than the median of the others a replica must be to be called a straggler."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), hints[field.name])
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)

    def but(self, **given: Any) -> HybridConfig:
        """This config with other values for the fields in ``given``."""
        return replace(self, **given)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **given: Any) -> HybridConfig:
        """A config with ``LIGHTNING_HYBRID_<FIELD>`` of ``environment`` for the fields that ``given`` leaves out.

        Values are parsed by the field's type; ``none`` (any case) is ``None``.

        Raises:
            ConfigError: a variable names no field, or its text does not parse.
        """
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(ENVIRONMENT_PREFIX):
                continue
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name not in hints:
                raise ConfigError(variable, text, f"name a field of HybridConfig ({', '.join(sorted(hints))})")
            values[name] = _parse(variable, text, hints[name])
        return cls(**(values | given))


_POSITIVE = 5e-324
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_micro_batch_size", 1, math.inf),
    ("memory_weight", 0, math.inf),
    ("compute_weight", 0, math.inf),
    ("network_weight", 0, math.inf),
    ("claim_frac", _POSITIVE, 1),
    ("reserve_frac", 0, 1),
    ("reserve_ahead_s", 0, math.inf),
    ("publish_period_s", _POSITIVE, math.inf),
    ("endgame_poll_s", _POSITIVE, math.inf),
    ("claim_deadline_s", _POSITIVE, math.inf),
    ("lease_s", _POSITIVE, math.inf),
    ("speed_window_steps", 1, math.inf),
    ("speed_change_frac", 0, math.inf),
    ("in_flight_steps", 1, math.inf),
    ("lockstep_block_rounds", 1, math.inf),
    ("gather_chunk_bytes", 1, math.inf),
    ("device_period_s", _POSITIVE, math.inf),
    ("straggler_threshold_frac", 0, math.inf),
)


def _check_type(name: str, value: object, hint: Any) -> None:
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        if value not in choices:
            raise ConfigError(name, value, f"be one of {', '.join(map(repr, choices))}")
        return
    kinds = set(choices or (hint,))
    if value is None and type(None) in kinds:
        return
    if isinstance(value, bool):
        fits = bool in kinds
    elif isinstance(value, int):
        fits = bool(kinds & {int, float})
    else:
        fits = isinstance(value, float) and float in kinds
    if not fits:
        rule = " or ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))
        raise ConfigError(name, value, f"be of type {rule}")


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None or (low <= value <= high and value != math.inf):
        return
    bound = "be positive" if low == _POSITIVE else f"be at least {low:g}"
    raise ConfigError(name, value, bound + ("" if high == math.inf else f" and at most {high:g}") + " and finite")


def _parse(variable: str, text: str, hint: Any) -> Any:
    kinds = set(get_args(hint) or (hint,))
    word = text.strip().lower()
    if word == "none" and type(None) in kinds:
        return None
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
