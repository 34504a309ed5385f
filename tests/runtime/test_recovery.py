"""Steps that fail, run again in parts: what is tried in which order, what is given back, and what ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_hybrid.core.errors import BatchError, SampleTooLarge
from lightning_hybrid.runtime.recovery import Cut, Ran, Recovery

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


class Sizes:
    """As many samples as fitted last."""

    is_watching = False

    def __init__(self, most: int = 1000) -> None:
        self.limit = most
        self.failures: list[int] = []

    def most(self, samples: int, elements: int | None) -> int:
        return min(samples, self.limit)

    @contextmanager
    def measuring(self, samples: int, elements: int | None) -> Iterator[None]:
        yield

    def failed(self, samples: int, elements: int | None) -> None:
        self.failures.append(samples)
        self.limit = max(1, samples // 2)


class State:
    """Counts; what it counts may be beyond repair."""

    keeps_large = False

    def __init__(self, *, can_give_back: bool = True) -> None:
        self.kept = self.given_back = 0
        self._can_give_back = can_give_back

    def keep(self) -> None:
        self.kept += 1

    def give_back(self) -> bool:
        self.given_back += 1
        return self._can_give_back


class Task:
    """A batch of whole numbers; its step raises what ``raises`` tells of it."""

    def __init__(self, size: int, raises: Callable[[list[int]], Exception | None]) -> None:
        self.batch, self.size, self._raises = list(range(size)), size, raises
        self.elements: int | None = None
        self.tried: list[int] = []
        self.logged: list[int] = []
        self.torn = self.uncuttable = False

    def step(self, batch: list[int]) -> list[int]:
        self.tried.append(len(batch))
        error = self._raises(batch)
        if error is not None:
            raise error
        return batch

    def cut(self) -> Cut:
        if self.uncuttable:
            raise BatchError("nobody knows how")
        return lambda start, stop: self.batch[start:stop]

    def name(self, place: int) -> str:
        return f"sample {place}"

    def logs(self) -> Any:
        return self

    def begin(self, part: Any) -> None:
        pass

    def end(self, size: int) -> None:
        self.logged.append(size)

    def is_torn(self) -> bool:
        return self.torn


def _run(task: Task, *, skips: bool = False, sizes: Sizes | None = None, state: State | None = None) -> Ran:
    return Recovery(sizes or Sizes(), state or State(), skips=skips).run(task)


def _larger_than(most: int) -> Callable[[list[int]], Exception | None]:
    return lambda batch: torch.OutOfMemoryError("CUDA out of memory") if len(batch) > most else None


def _with(bad: set[int]) -> Callable[[list[int]], Exception | None]:
    return lambda batch: ValueError("bad") if bad & set(batch) else None


def test_a_step_that_runs_is_called_once() -> None:
    task = Task(8, lambda _: None)
    ran = _run(task)

    assert (ran.outputs, ran.sizes, ran.bad, ran.is_short) == ([list(range(8))], [8], {}, False)
    assert task.tried == [8]


def test_a_step_that_does_not_fit_is_run_in_parts_that_do() -> None:
    task, state, sizes = Task(8, _larger_than(2)), State(), Sizes()
    ran = _run(task, state=state, sizes=sizes)

    assert task.tried == [8, 4, 2, 2, 2, 2]
    assert ran.sizes == task.logged == [2, 2, 2, 2]
    assert ran.is_short
    assert sizes.failures == [8, 4]
    assert (state.kept, state.given_back, state.keeps_large) == (6, 2, True)


@pytest.mark.parametrize("bad", [{0}, {7}, {3}, {2, 3}, {0, 5, 7}, set(range(8))])
def test_bad_samples_are_found_and_the_others_run(bad: set[int]) -> None:
    task = Task(8, _with(bad))
    ran = _run(task, skips=True)

    assert [value for part in ran.outputs for value in part] == [value for value in range(8) if value not in bad]
    assert ran.bad == dict.fromkeys(sorted(bad), "ValueError: bad")
    assert not ran.is_short
    assert len(task.tried) <= 1 + 2 * len(bad) * 3 + len(bad)


def test_a_bad_sample_ends_the_run_where_none_is_left_out() -> None:
    with pytest.raises(ValueError, match="bad"):
        _run(Task(4, _with({2})))


def test_a_single_sample_that_does_not_fit_is_named() -> None:
    with pytest.raises(SampleTooLarge, match="sample 2 does not fit into memory"):
        _run(Task(4, lambda batch: torch.OutOfMemoryError("CUDA out of memory") if 2 in batch else None))


def test_or_left_out() -> None:
    ran = _run(Task(4, lambda batch: torch.OutOfMemoryError("out") if 2 in batch else None), skips=True)

    assert list(ran.bad) == [2]


@pytest.mark.parametrize("hindrance", ["torn", "uncuttable"])
def test_what_cannot_be_run_again_raises_what_it_raised_with_the_reason(hindrance: str) -> None:
    task = Task(4, _larger_than(2))
    setattr(task, hindrance, True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _run(task)

    assert task.tried == [4]
    assert "not run again in parts" in caught.value.__notes__[0]


def test_nor_what_has_changed_more_than_was_kept() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _run(Task(4, _larger_than(2)), state=State(can_give_back=False))

    assert "large metric" in caught.value.__notes__[0]


def test_an_unclear_error_of_the_size_is_tried_smaller_and_raised_if_that_does_not_help() -> None:
    def raises(batch: list[int]) -> Exception | None:
        return RuntimeError("CUDNN_STATUS_NOT_SUPPORTED") if len(batch) > 1 else None

    assert _run(Task(4, raises)).sizes == [1, 1, 1, 1]
    with pytest.raises(RuntimeError, match="CUDNN"):
        _run(Task(4, lambda _: RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")))


def test_errors_that_are_not_about_data_end_the_run() -> None:
    recovery = Recovery(Sizes(), State(), skips=True, ends_run=lambda error: isinstance(error, KeyError))
    with pytest.raises(KeyError):
        recovery.run(Task(4, lambda _: KeyError("a fault")))
    with pytest.raises(NotImplementedError):
        recovery.run(Task(4, lambda _: NotImplementedError()))


def test_a_learnt_size_is_used_from_the_start() -> None:
    task = Task(7, _larger_than(3))
    ran = _run(task, sizes=Sizes(3))

    assert task.tried == ran.sizes == [3, 3, 1]


def test_a_batch_that_cannot_be_cut_is_run_whole_all_the_same() -> None:
    task = Task(7, lambda _: None)
    task.uncuttable = True

    assert _run(task, sizes=Sizes(3)).sizes == [7]
