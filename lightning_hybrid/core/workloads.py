"""Devices and costs to simulate, from short texts and a seed.

=============================  =====================================================================================
speeds                         device
=============================  =====================================================================================
``1.5``                        always this fast, in cost units per second
``1..8``                       always as fast as a number drawn evenly from this range
``drift:1:0.5:30``             from 1 to 0.5 within 30 s
``sudden:1:10:0.25``           1 for 10 s, then 0.25
``periodic:1:0.5:4``           1 and 0.5 in turns, for half of 4 s each
``failing:1:10``               1 for 10 s, then dead
``6x1``                        six devices of the kind behind the ``x``
=============================  =====================================================================================

=============================  =====================================================================================
costs                          cells, with a mean cost of 1
=============================  =====================================================================================
``equal``                      all alike
``uniform:0.5:1.5``            drawn evenly from this range; what the range is in, does not matter
``lognormal:1``                log-normal with this sigma
=============================  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hybrid.core.cost import Costs, FloatArray
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.traces import SpeedTrace

_HORIZON = 10.0
"""Periodic devices change for this many times the shortest run at their first speeds."""
_MOST_PERIODS = 5_000
_MOST_SIGMA = 10.0

TRACES: dict[str, tuple[str, ...]] = {
    "drift": ("speed", "last speed", "seconds"),
    "sudden": ("speed", "seconds", "later speed"),
    "periodic": ("speed", "other speed", "period in seconds"),
    "failing": ("speed", "seconds"),
}
"""The kinds of traces that change, and what stands behind the name of each."""

DISTRIBUTIONS: dict[str, tuple[str, ...]] = {"equal": (), "uniform": ("low", "high"), "lognormal": ("sigma",)}
"""The distributions of costs, and what stands behind the name of each."""

Device = float | str | SpeedTrace
"""A speed, a text as above, or a trace."""


@dataclass(frozen=True, slots=True)
class Periodic:
    """A device with two speeds, for half of ``period_s`` each in turns."""

    speed: float
    other: float
    period_s: float

    def at(self, time_s: float) -> float:
        """Speed at a time."""
        return self.other if time_s % self.period_s >= self.period_s / 2 else self.speed

    def until(self, time_s: float) -> SpeedTrace:
        """The trace to a time, or as far as a trace can go."""
        return SpeedTrace.periodic(self.speed, self.other, self.period_s, min(time_s, self.period_s * _MOST_PERIODS))


def devices(speeds: str | Sequence[Device], *, seed: int) -> list[SpeedTrace | Periodic]:
    """All devices.

    Args:
        speeds: One entry per device, or texts as above, in one string separated by commas.
        seed: Of what is drawn.

    Raises:
        ConfigError: an entry is not what it must be; names it.
    """
    entries = [part.strip() for part in speeds.split(",")] if isinstance(speeds, str) else list(speeds)
    rng = np.random.default_rng(seed)
    found = [device for number, entry in enumerate(entries) for device in _devices(f"speeds[{number}]", entry, rng)]
    if not any(device.at(0.0) > 0 for device in found):
        raise ConfigError("speeds", speeds, "have one that is positive at the start")
    return found


def traces_for(found: Sequence[SpeedTrace | Periodic], total_cost: float) -> tuple[SpeedTrace, ...]:
    """The devices' traces, as long as cells of this cost can take them."""
    until_s = _HORIZON * total_cost / sum(device.at(0.0) for device in found)
    return tuple(device.until(until_s) if isinstance(device, Periodic) else device for device in found)


def drawn_costs(distribution: str, num_cells: int, *, seed: int) -> Costs:
    """Costs of cells, drawn by a distribution as above and scaled to a mean of 1.

    Raises:
        ConfigError: the distribution is none of those, or a number is out of its range.
    """
    if num_cells < 1:
        raise ConfigError("num_cells", num_cells, "be at least 1")
    name, *texts = distribution.split(":")
    names = DISTRIBUTIONS.get(name)
    if names is None or len(texts) != len(names):
        raise ConfigError("costs", distribution, f"be one of {_forms(DISTRIBUTIONS)}")
    numbers = [_number("costs", distribution, what, text) for what, text in zip(names, texts, strict=True)]
    return Costs(compute=_draw(name, numbers, num_cells, np.random.default_rng([seed, 1]), distribution))


def _draw(name: str, numbers: list[float], num_cells: int, rng: np.random.Generator, distribution: str) -> FloatArray:
    if name == "equal":
        return np.ones(num_cells)
    if name == "lognormal":
        if numbers[0] > _MOST_SIGMA:
            raise ConfigError("costs", distribution, f"have a sigma of at most {_MOST_SIGMA:g}")
        drawn = rng.lognormal(0.0, numbers[0], num_cells)
    else:
        low, high = numbers
        if not low <= high or high == 0:
            raise ConfigError("costs", distribution, "have a low end that is not above the high end, which is positive")
        drawn = rng.uniform(low, high, num_cells)
    costs: FloatArray = drawn / drawn.mean()
    return costs


def _devices(field: str, entry: Device, rng: np.random.Generator) -> list[SpeedTrace | Periodic]:
    if isinstance(entry, SpeedTrace):
        return [entry]
    if not isinstance(entry, str):
        return [SpeedTrace.constant(_number(field, entry, "speed", entry))]
    times, kind = _times(field, entry)
    name, *texts = kind.split(":")
    if name not in TRACES and kind[:1] in "0123456789.+-":
        return [SpeedTrace.constant(_speed(field, entry, kind, rng)) for _ in range(times)]
    if name not in TRACES or len(texts) != len(TRACES[name]):
        raise ConfigError(field, entry, f"be a number, LOW..HIGH or one of {_forms(TRACES)}")
    numbers = [_number(field, entry, what, text) for what, text in zip(TRACES[name], texts, strict=True)]
    return [_trace(field, entry, name, numbers)] * times


def _times(field: str, entry: str) -> tuple[int, str]:
    count, x, kind = entry.partition("x")
    if not x:
        return 1, entry
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(field, entry, "have a whole number of at least 1 before the x")
    return int(count), kind


def _speed(field: str, entry: str, kind: str, rng: np.random.Generator) -> float:
    low, dots, high = kind.partition("..")
    if not dots:
        return _number(field, entry, "speed", kind)
    ends = _number(field, entry, "low end", low), _number(field, entry, "high end", high)
    if ends[0] > ends[1]:
        raise ConfigError(field, entry, "have a low end that is not above the high end")
    return float(rng.uniform(*ends))


def _trace(field: str, entry: str, name: str, numbers: list[float]) -> SpeedTrace | Periodic:
    seconds = numbers[1] if name in ("sudden", "failing") else numbers[2]
    if seconds == 0:
        raise ConfigError(field, entry, "have a positive time")
    if name == "drift":
        return SpeedTrace.drift(numbers[0], numbers[1], numbers[2])
    if name == "sudden":
        return SpeedTrace.sudden(numbers[0], numbers[1], numbers[2])
    if name == "failing":
        return SpeedTrace.failing(numbers[0], numbers[1])
    return Periodic(numbers[0], numbers[1], numbers[2])


def _number(field: str, entry: object, what: str, given: object) -> float:
    try:
        number = float(given)  # type: ignore[arg-type]  # whether it can be is the question
    except (TypeError, ValueError) as err:
        raise ConfigError(field, entry, f"have a number as {what}") from err
    if not 0 <= number < math.inf:
        raise ConfigError(field, entry, f"have a {what} that is at least 0 and finite")
    return number


def _forms(known: dict[str, tuple[str, ...]]) -> str:
    forms = ([name, *(part.upper().replace(" ", "_") for part in parts)] for name, parts in known.items())
    return ", ".join(map(":".join, forms))
