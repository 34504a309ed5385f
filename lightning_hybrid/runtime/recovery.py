"""Runs a step in parts when it cannot be run as a whole: because memory runs out, or because of a bad sample."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.utils._pytree import tree_leaves

from lightning_hybrid.core.errors import BatchError, HybridError, SampleTooLarge
from lightning_hybrid.core.failures import text_of
from lightning_hybrid.runtime.costs import batch_elements
from lightning_hybrid.runtime.oom import is_out_of_memory, may_be_size

Cut = Callable[[int, int], Any]
"""Gives samples ``start`` to ``stop`` of a batch."""
Reason = Literal["memory", "size", "sample"]
"""Why a step failed: for want of memory, perhaps because of its size, or because of what is in it."""


class Sizes(Protocol):
    """Knows how many samples a step may have, and learns from those that were run."""

    @property
    def is_watching(self) -> bool:
        """Whether it wants to know how many elements batches have."""
        ...

    def most(self, samples: int, elements: int | None) -> int:
        """How many samples of a batch to run at once, 1 to ``samples``."""
        ...

    def measuring(self, samples: int, elements: int | None) -> AbstractContextManager[object]:
        """Around a step: learns that it fitted, and what memory it took, unless it raised."""
        ...

    def failed(self, samples: int, elements: int | None) -> None:
        """A step of this size ran out of memory, and nothing of it is alive any more."""
        ...


class StateKeeper(Protocol):
    """Keeps what a step changes beside its output."""

    keeps_large: bool
    """Whether large states are kept too."""

    def keep(self) -> None:
        """Keeps everything as it is now."""
        ...

    def give_back(self) -> bool:
        """Puts everything back; whether it could."""
        ...


class PartLogs(Protocol):
    """Makes what the parts of a batch log the same as what the whole would have logged."""

    def begin(self, part: Any) -> None:
        """The next part is about to be run; again when it failed."""
        ...

    def end(self, size: int) -> None:
        """It was run."""
        ...


class Task(Protocol):
    """A batch whose step is due."""

    batch: Any
    size: int
    """Samples of the batch."""
    elements: int | None
    """Elements of the batch, where they were counted already."""

    def step(self, batch: Any) -> Any:
        """Runs the user's step on the batch, or on a part of it."""
        ...

    def cut(self) -> Cut:
        """The function that cuts the batch.

        Raises:
            BatchError: it cannot be cut.
        """
        ...

    def name(self, place: int) -> str:
        """What to call a sample in a message."""
        ...

    def logs(self) -> PartLogs:
        """What stands in for the logs of the whole batch; asked where it is run in parts."""
        ...

    def is_torn(self) -> bool:
        """Whether the step has issued a collective, so that it cannot be run again without the other ranks."""
        ...


@dataclass
class Ran:
    """What became of a batch: outputs and sizes of its parts, one part where it was run as a whole, and bad samples."""

    outputs: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)
    """Places of the samples that could not be run, and their errors."""
    is_short: bool = False
    """Whether there are several parts for want of memory."""


class Recovery:
    """Runs steps so that neither a lack of memory nor a bad sample need end the run.

    Args:
        sizes: How many samples a step may have.
        state: What a step changes beside its output.
        skips: Whether a sample that raises alone is left out.
        ends_run: Tells errors that no smaller batch helps against.
        say: Tells the user something, once.
    """

    def __init__(
        self,
        sizes: Sizes,
        state: StateKeeper,
        *,
        skips: bool = False,
        ends_run: Callable[[Exception], bool] = lambda error: False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._sizes, self._state, self._skips, self._ends_run, self._say = sizes, state, skips, ends_run, say

    def run(self, task: Task) -> Ran:
        """Runs the step of a batch, as a whole or in parts.

        Raises:
            SampleTooLarge: a single sample does not fit into memory.
            Exception: what the step raised, where nothing helps against it; a note says why.
        """
        elements = self._elements(task.batch) if task.elements is None else task.elements
        window = self._sizes.most(task.size, elements)
        if window < task.size:
            try:
                cut = task.cut()
            except BatchError as why:
                self._say(f"batches are run as they are: {why}")
            else:
                return self._run_parts(task, cut, window)
        self._state.keep()
        outcome = self._attempt(task, task.batch, 0, task.size, elements)
        if not isinstance(outcome, _Stumble):
            return Ran([outcome], [task.size])
        if task.size == 1:
            return Ran(bad={0: outcome.text})
        is_suspect = outcome.reason == "sample"
        return self._run_parts(task, task.cut(), self._next_window(outcome, task.size), is_suspect=is_suspect)

    def _run_parts(self, task: Task, cut: Cut, window: int, *, is_suspect: bool = False) -> Ran:
        ran, logs, start = Ran(is_short=not is_suspect), task.logs(), 0
        suspect_stop = task.size if is_suspect else 0  # one of the samples before this place is bad
        while start < task.size:
            size = min(window, task.size - start)
            part = cut(start, start + size)
            elements = self._elements(part)
            self._state.keep()
            logs.begin(part)
            outcome = self._attempt(task, part, start, size, elements)
            del part
            if isinstance(outcome, _Stumble) and size > 1:
                window = self._next_window(outcome, size)
                ran.is_short |= outcome.reason != "sample"
                suspect_stop = start + size if outcome.reason == "sample" else suspect_stop
                continue
            if isinstance(outcome, _Stumble):
                ran.bad[start] = outcome.text
                suspect_stop = 0
            else:
                ran.outputs.append(outcome)
                ran.sizes.append(size)
                logs.end(size)
            start += size
            left = task.size - start
            if left:
                if task.is_torn():
                    raise BatchError("a step that issues collectives was run in parts, of which no other rank knows")
                window = self._sizes.most(left, None if elements is None else elements * left // size)
                if start < suspect_stop:
                    window = min(window, (suspect_stop - start + 1) // 2)
        return ran

    def _next_window(self, stumble: _Stumble, size: int) -> int:
        half = -(-size // 2)
        return half if stumble.reason != "memory" else min(size - 1, self._sizes.most(size, stumble.elements))

    def _attempt(self, task: Task, part: Any, start: int, size: int, elements: int | None) -> Any:
        """The output of the step, or why it is to be run in smaller parts, or to be left out if it has one sample."""
        try:
            with self._sizes.measuring(size, elements):
                return task.step(part)
        except Exception as error:
            reason = self._reason(error)
            if reason is None:
                raise
            if size == 1 and not self._skips:
                if reason != "memory":
                    raise
                where = f"{task.name(start)} does not fit into memory (shapes {_shapes_of(part)})"
                raise SampleTooLarge(f"{where}: {text_of(error)}") from error
            hindrance = self._hindrance(task, size)
            if hindrance is not None:
                _add_note(error, f"lightning_hybrid: the step was not run again in parts: {hindrance}")
                raise
            stumble = _Stumble(reason, text_of(error), batch_elements(part))
            _let_go(error)
        gc.collect(1)  # what the failed attempt made and only refers to itself
        self._state.keeps_large = True
        if stumble.reason != "sample":
            self._sizes.failed(size, stumble.elements)
        return stumble

    def _elements(self, batch: Any) -> int | None:
        return batch_elements(batch) if self._sizes.is_watching else None

    def _reason(self, error: Exception) -> Reason | None:
        if isinstance(error, HybridError) or self._ends_run(error):
            return None
        if is_out_of_memory(error):
            return "memory"
        if may_be_size(error):
            return "size"
        is_broken = isinstance(error, torch.AcceleratorError | NotImplementedError)
        return "sample" if self._skips and not is_broken else None

    def _hindrance(self, task: Task, size: int) -> str | None:
        """Why a step that failed must not be run again; otherwise everything it changed is put back."""
        if task.is_torn():
            return "it had issued a collective, which the other ranks would have to repeat"
        if size > 1:
            try:
                task.cut()
            except BatchError as why:
                self._say(f"batches cannot be run in parts: {why}")
                return str(why)
        return None if self._state.give_back() else "it had changed a large metric already"


@dataclass(frozen=True, slots=True)
class _Stumble:
    """A step that failed, without what the failure held on to."""

    reason: Reason
    text: str
    elements: int | None


def _shapes_of(batch: Any) -> str:
    """Shapes of all tensors in a batch, for messages."""
    leaves = tree_leaves(batch)
    return ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)) or "of no tensor"


def _add_note(error: BaseException, text: str) -> None:
    # as `add_note` of Python 3.11 does it, where it is shown too
    vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), text]


def _let_go(error: BaseException) -> None:
    """Clears what the frames of an error, and of those that led to it, hold on to."""
    for link in list(_links(error)):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = link.__context__ = link.__cause__ = None


def _links(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set()
    while waiting:
        link = waiting.pop()
        if id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [other for other in (link.__cause__, link.__context__) if other is not None]
