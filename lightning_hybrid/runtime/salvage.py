"""What can be kept of a list of samples that a function does not take as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.core.failures import text_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Salvage:
    """The part of the samples that was kept, by their places in the list."""

    kept: list[int]
    """In order; empty when each sample raises alone."""
    result: Any
    """What the function gave for these; ``None`` when there are none."""
    errors: dict[int, str]
    """Why each of the others was left out."""
    num_calls: int
    """How often the function was called, its first failure included."""


def salvage(call: Callable[[list[int]], Any], num_samples: int, error: str) -> Salvage:
    """Leaves out the samples because of which ``call`` raised for all of them.

    Halves are tried, and halves of those that raise, so that samples which raise alone are found in O(k log n) calls.
    When the rest still raise together, as one odd shape among many does, the largest parts that are taken gather more
    parts, largest first, into groups; the largest group is kept. A sample that is taken alone is thus left out only
    for a larger group. This is no proof of the largest group of all, which would need exponentially many calls.

    Args:
        call: Takes places of samples in ascending order, and raises when it cannot do with these.
        num_samples: How many there are; ``call`` is called at most 4 times as often.
        error: What ``call`` raised for all places, as text.
    """
    search = _Search(call, num_samples, error)
    best = search.largest_group(search.parts(list(range(num_samples))))
    lost = sorted(set(range(num_samples)) - set(best.places))
    errors = {place: search.errors[place] for place in lost}
    return Salvage(kept=best.places, result=best.result, errors=errors, num_calls=search.num_calls)


@dataclass(frozen=True, slots=True)
class _Group:
    places: list[int]
    result: Any


class _Search:
    """Calls within the limit, and what the newest failure of each sample said."""

    def __init__(self, call: Callable[[list[int]], Any], num_samples: int, error: str) -> None:
        self._call, self._num_samples = call, num_samples
        self.errors = dict.fromkeys(range(num_samples), error)
        self.num_calls = 1
        self._max_calls = 4 * num_samples

    def parts(self, places: list[int]) -> list[_Group]:
        """The largest halves of halves that are taken; ``places`` raise. At most ``2 n - 2`` calls."""
        if len(places) == 1:
            return []
        middle = len(places) // 2
        found = []
        for half in (places[:middle], places[middle:]):
            group = self._try(half, blamed=half)
            found += self.parts(half) if group is None else [group]
        return found

    def largest_group(self, parts: Sequence[_Group]) -> _Group:
        """As many of the parts as are taken together."""
        if len(parts) < 2:
            return parts[0] if parts else _Group([], None)
        places = [place for part in parts for place in part.places]
        if len(places) < self._num_samples and (everything := self._try(places, blamed=())) is not None:
            return everything
        best = max(self._gathered(parts), key=_size)
        for place in places:
            if place not in best.places and self.num_calls < self._max_calls:
                best = self._joined(best, _Group([place], None)) or best
        return best

    def _gathered(self, parts: Sequence[_Group]) -> list[_Group]:
        groups: list[_Group] = []  # newest first, so that many small parts of few kinds find their kind soon
        for num_seen, part in enumerate(sorted(parts, key=_size, reverse=True), start=1):
            limit = self._max_calls - (len(parts) - num_seen)  # each later part can be tried with the largest group
            for group in sorted(groups, key=_size, reverse=True):
                if self.num_calls >= limit:
                    break
                if (joined := self._joined(group, part)) is not None:
                    groups.remove(group)
                    part = joined
                    break
            groups.insert(0, part)
        return groups

    def _joined(self, group: _Group, part: _Group) -> _Group | None:
        return self._try(sorted(group.places + part.places), blamed=part.places)

    def _try(self, places: list[int], blamed: Sequence[int]) -> _Group | None:
        self.num_calls += 1
        try:
            return _Group(places, self._call(places))
        except Exception as error:  # whatever a user's function raises
            self.errors.update(dict.fromkeys(blamed, text_of(error)))
            return None


def _size(group: _Group) -> int:
    return len(group.places)
