"""What a step changes beside its output, kept before the step and given back when it failed.

A step that ran out of memory may have updated metrics, logged numbers and appended to lists by then; to run it again
would count its samples twice. What is small is kept before every step, in buffers that stay; what is large is kept only
once a step has failed, and until then it is known whether the step has changed it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid.lightning import _compat

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_SMALL_ELEMENTS = 4096
"""A tensor of at most so many elements is copied before every step."""
_SMALL_ENTRIES = 1024
"""A dictionary or set of at most so many entries is copied before every step."""
_PLAIN = (bool, int, float, str, type(None))
_COUNTED = (bool, int, float, str, list, dict, set)
"""Attributes of a module that a step may change, and that are given back."""


class StepState:
    """Metrics, logged numbers and the module's own attributes, as they were when `keep` was called last.

    The metrics are those that the module has when the object is made, in the loop whose steps are run.

    Args:
        trainer: The running Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.keeps_large = False
        """Whether large states are copied too."""
        # asking the Trainer which loop runs takes longer than all else here
        self._results = _compat.results_of(trainer)
        self._module: LightningModule = trainer.lightning_module
        self._metrics = [_Metric(*found) for found in _compat.metric_states(self._module)]
        self._tensors = _Tensors()
        self._lists: dict[int, _List] = {}
        self._logged: dict[str, Any] = {}
        self._own: list[Any] = []
        self._num_own = 0
        self._names: list[str] = []
        self._copies: dict[str, Any] = {}
        self._lists_of_own: list[str] = []
        self._others_of_own: list[str] = []

    def keep(self) -> None:
        """Keeps everything as it is now."""
        tensors: list[torch.Tensor] = []
        for metric in self._metrics:
            metric.keep()
            if metric.read_tensors is not None:
                tensors += metric.read_tensors(metric.attributes)
            for name in metric.lists:
                self._keep_list(metric.attributes[name])
        self._tensors.keep(tensors, everything=self.keeps_large)
        results = self._results
        # a logged number is never changed in place, so that it is enough to remember which tensor it was
        self._logged = {} if results is None else {key: _compat.logged_now(log) for key, log in results.items()}
        self._keep_own()

    def give_back(self) -> bool:
        """Puts everything back; whether it could, which it cannot where a large state was changed in place."""
        is_whole = self._tensors.give_back()
        for metric in self._metrics:
            metric.give_back()
        for kept in self._lists.values():
            kept.give_back()
        results = self._results
        if results is not None:
            for key in results.keys() - self._logged.keys():
                del results[key]
            for key, before in self._logged.items():
                vars(results[key]).update(before)
        return self._give_back_own() and is_whole

    def forget(self) -> None:
        """Lets go of all that is kept."""
        self._tensors, self._lists, self._logged = _Tensors(), {}, {}
        self._own, self._copies, self._num_own = [], {}, 0
        for metric in self._metrics:
            metric.forget()

    def _keep_own(self) -> None:
        own = vars(self._module)
        if len(own) != self._num_own:
            self._num_own = len(own)
            public = [name for name in own if name[0] != "_"]
            self._names = [name for name in public if isinstance(own[name], _COUNTED)]
            self._lists_of_own = [name for name in public if isinstance(own[name], list)]
            self._others_of_own = [name for name in public if isinstance(own[name], dict | set)]
        self._own, self._copies = [own[name] for name in self._names], {}
        for name in self._lists_of_own:
            self._keep_list(own[name])
        for name in self._others_of_own:
            value = own[name]
            self._copies[name] = value.copy() if self.keeps_large or len(value) <= _SMALL_ENTRIES else len(value)

    def _keep_list(self, entries: list[Any]) -> None:
        kept = self._lists.get(id(entries))
        if kept is None or kept.entries is not entries:
            self._lists[id(entries)] = kept = _List(entries)
        kept.keep()

    def _give_back_own(self) -> bool:
        is_whole = True
        own = vars(self._module)
        own.update(zip(self._names, self._own, strict=True))
        for name, copy in self._copies.items():
            value = own[name]
            if isinstance(copy, int):
                is_whole &= len(value) == copy
            else:
                value.clear()
                value.update(copy)
        return is_whole


class _Metric:
    """What a step may change of one metric.

    Before each step its states and counters are read; what else it has, such as its flags, only differs from what it is
    now while the metric is being updated.

    Args:
        attributes: All attributes of the metric.
        states: Names of its states.
        counters: Names of what else an update leaves changed.
    """

    def __init__(self, attributes: dict[str, Any], states: list[str], counters: list[str]) -> None:
        self.attributes = attributes
        numbers = [name for name, value in attributes.items() if name[0] != "_" and type(value) in (int, float)]
        self._names = list(dict.fromkeys([*states, *counters, *numbers]))
        self._between_steps = {k: v for k, v in attributes.items() if isinstance(v, _PLAIN) and k not in self._names}
        self._read, self._kept = _reader(self._names), ()
        self.lists = [name for name in states if isinstance(attributes[name], list)]
        tensors = [name for name in states if isinstance(attributes[name], torch.Tensor)]
        self.read_tensors = _reader(tensors) if tensors else None

    def keep(self) -> None:
        self._kept = self._read(self.attributes)

    def give_back(self) -> None:
        self.attributes.update(self._between_steps)
        self.attributes.update(zip(self._names, self._kept, strict=True))

    def forget(self) -> None:
        self._kept = ()


def _reader(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function that gives the values of ``names``; made once, as it is called before every step."""
    if len(names) == 1:
        return lambda attributes: (attributes[names[0]],)
    read: Callable[[dict[str, Any]], tuple[Any, ...]] = operator.itemgetter(*names)
    return read


class _List:
    """A list that grows at its end: what it held is copied once, and then only what is new."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries
        self._copy: list[Any] = []

    def keep(self) -> None:
        entries, copy = self.entries, self._copy
        if len(copy) > len(entries) or (copy and copy[-1] is not entries[len(copy) - 1]):
            copy.clear()
        if len(copy) < len(entries):
            copy.extend(entries[len(copy) :])

    def give_back(self) -> None:
        self.entries[:] = self._copy


class _Tensors:
    """States that may be changed in place: small ones copied into buffers, of large ones only whether they changed."""

    def __init__(self) -> None:
        self._all: list[torch.Tensor] = []
        self._form: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._copied: list[int] = []
        self._watched: list[int] = []
        self._small: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._large: list[tuple[torch.Tensor, int]] = []

    def keep(self, tensors: list[torch.Tensor], *, everything: bool) -> None:
        if len(tensors) != len(self._all) or not all(map(operator.is_, tensors, self._all)):
            self._look_at(tensors)
        if everything and self._watched:
            self._copy_those(set(range(len(tensors))))
        self._large = [(tensors[i], tensors[i]._version) for i in self._watched]
        if self._small:
            _copy(self._small, self._buffers)

    def give_back(self) -> bool:
        if self._small:
            _copy(self._buffers, self._small)
        return all(tensor._version == version for tensor, version in self._large)

    def _look_at(self, tensors: list[torch.Tensor]) -> None:
        form = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        is_same, self._all, self._form = form == self._form, tensors, form
        if is_same:
            self._small = [tensors[i] for i in self._copied]
            return
        # an inference tensor does not tell whether it was changed, so it is copied whatever its size
        self._copy_those({i for i, t in enumerate(tensors) if t.numel() <= _SMALL_ELEMENTS or t.is_inference()})

    def _copy_those(self, places: set[int]) -> None:
        """Copies the states at these places from now on, and watches the others."""
        self._copied, self._watched = sorted(places), [i for i in range(len(self._all)) if i not in places]
        self._small = [self._all[i] for i in self._copied]
        with torch.inference_mode(False):
            self._buffers = [torch.empty_like(tensor) for tensor in self._small]


def _copy(tensors: list[torch.Tensor], to: list[torch.Tensor]) -> None:
    if not torch.is_grad_enabled():
        torch._foreach_copy_(to, tensors)
        return
    with torch.no_grad():
        torch._foreach_copy_(to, tensors)
