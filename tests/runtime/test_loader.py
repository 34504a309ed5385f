from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.runtime.loader import WorkFeed, WorkIterator
from lightning_hybrid.runtime.work import Exhausted, Work
from tests.runtime.replicas import LoaderStandIn

pytestmark = pytest.mark.timeout(60)

NOT_NOW, END = None, "end"
Answer = Work | None | str


def cell(number: int) -> Work:
    return Work(10 * number, 10 * number + 10, number, mode="queue")


def spare(number: int) -> Work:
    return Work(10 * number, 10 * number + 1, spare=True)


class ScriptedSource:
    """Answers with the works of a script; remembers what it was asked. One that may wait is never told "not now"."""

    def __init__(self, script: Iterable[Answer], stolen: Iterable[Work] = ()) -> None:
        self._script, self._stolen = deque(script), set(stolen)
        self.asked: list[bool] = []
        self.begun: list[Work] = []
        self.waits_s: list[float] = []
        self.finished = 0

    def take(self, *, may_wait: bool) -> Work | None:
        self.asked.append(may_wait)
        answer = self._script.popleft() if self._script else END
        while answer is NOT_NOW and may_wait:
            answer = self._script.popleft() if self._script else END
        if isinstance(answer, str):
            self._script.clear()
            raise Exhausted
        return answer

    def begin(self, work: Work) -> bool:
        self.begun.append(work)
        return work not in self._stolen

    def unpack(self, work: Work, loaded: Any) -> Any:
        return loaded

    def note_wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)

    def finish(self) -> None:
        self.finished += 1


def next_of(feed: WorkFeed) -> Work | None:
    """The next work, ``None`` where the loader is told to stop."""
    try:
        return feed.next_work()
    except StopIteration:
        return None


def iterator_of(
    source: ScriptedSource, prime_calls: int, run_ghost: Callable[[Any], None] = lambda _batch: None
) -> WorkIterator:
    feed = WorkFeed(source, prime_calls)
    return WorkIterator(lambda: LoaderStandIn(feed, prime_calls), feed, source, run_ghost)


# --- WorkFeed without workers ---------------------------------------------------------------------------------------


def test_without_workers_every_request_may_wait() -> None:
    source = ScriptedSource([cell(0), NOT_NOW, cell(1), END])
    feed = WorkFeed(source, 0)

    assert [next_of(feed) for _ in range(4)] == [cell(0), cell(1), None, None]
    assert source.asked == [True] * 4


def test_batches_come_out_in_the_order_in_which_their_works_went_in() -> None:
    feed = WorkFeed(ScriptedSource([cell(3), cell(1), cell(2)]), 3)
    for _ in range(3):
        feed.next_work()

    assert [feed.loaded() for _ in range(3)] == [cell(3), cell(1), cell(2)]


# --- WorkFeed with workers ------------------------------------------------------------------------------------------


def test_only_the_first_batch_of_all_is_waited_for_while_workers_are_primed() -> None:
    source = ScriptedSource([NOT_NOW, cell(0), cell(1), cell(2), cell(3)])
    feed = WorkFeed(source, 4)

    assert [next_of(feed) for _ in range(4)] == [cell(0), cell(1), cell(2), cell(3)]
    assert source.asked == [True, False, False, False]


def test_a_priming_that_finds_no_more_work_stops_without_a_spare() -> None:
    source = ScriptedSource([cell(0), NOT_NOW, NOT_NOW])
    feed = WorkFeed(source, 3)

    assert [next_of(feed) for _ in range(3)] == [cell(0), None, None]


def test_a_loader_that_holds_its_last_batch_gets_a_spare_instead_of_a_wait() -> None:
    source = ScriptedSource([cell(0), NOT_NOW, NOT_NOW, cell(1)])
    feed = WorkFeed(source, 2)
    assert [next_of(feed), next_of(feed)] == [cell(0), None]

    # asks with the batch of cell 0 in its hands
    assert next_of(feed) == spare(0)
    assert feed.loaded() == cell(0)
    # asks with the spare in its hands: cell 0 has been run, so now it may wait
    assert next_of(feed) == cell(1)
    assert feed.loaded() == spare(0)
    assert source.asked == [True, False, False, True]


def test_a_loader_with_two_batches_in_flight_is_told_to_ask_again() -> None:
    feed = WorkFeed(ScriptedSource([cell(0), cell(1), NOT_NOW, NOT_NOW]), 2)
    assert [next_of(feed), next_of(feed)] == [cell(0), cell(1)]

    assert next_of(feed) is None
    assert feed.loaded() == cell(0)
    assert next_of(feed) == spare(1)


def test_the_end_is_no_reason_for_a_spare() -> None:
    feed = WorkFeed(ScriptedSource([cell(0), END]), 2)
    assert [next_of(feed), next_of(feed)] == [cell(0), None]

    assert next_of(feed) is None
    assert feed.loaded() == cell(0)


@given(
    st.lists(st.booleans(), max_size=25),
    st.integers(0, 6),
    st.sets(st.integers(0, 24)),
)
@settings(deadline=None, max_examples=200)
def test_every_work_comes_out_once_in_order_whenever_there_is_none_for_a_while(
    has_work: list[bool], prime_calls: int, stolen: set[int]
) -> None:
    script: list[Answer] = [cell(i) if here else NOT_NOW for i, here in enumerate(has_work)]
    works = [answer for answer in script if isinstance(answer, Work)]
    kept = [work for work in works if work.cell not in stolen]
    source = ScriptedSource(script, stolen=[cell(i) for i in stolen])

    assert list(iterator_of(source, prime_calls)) == kept
    assert source.begun == works
    assert source.finished == 1


# --- WorkIterator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prime_calls", [0, 2, 4])
def test_stolen_batches_and_spares_are_skipped(prime_calls: int) -> None:
    script = [cell(0), cell(1), NOT_NOW, NOT_NOW, NOT_NOW, NOT_NOW, NOT_NOW, NOT_NOW, cell(2), cell(3)]
    source = ScriptedSource(script, stolen=[cell(1), cell(3)])

    assert list(iterator_of(source, prime_calls)) == [cell(0), cell(2)]
    assert source.begun == [cell(0), cell(1), cell(2), cell(3)]


def test_a_spare_is_never_begun() -> None:
    source = ScriptedSource([cell(0), NOT_NOW, NOT_NOW, cell(1)])

    assert list(iterator_of(source, 2)) == [cell(0), cell(1)]
    assert [work.spare for work in source.begun] == [False, False]


def test_a_ghost_runs_between_its_neighbours_and_is_not_given_out() -> None:
    ghost = Work(0, 10, 0, mode="lockstep", ghost=True)
    order: list[Any] = []
    iterator = iterator_of(ScriptedSource([cell(0), ghost, cell(1)]), 0, run_ghost=order.append)
    for batch in iterator:
        order.append(batch)

    assert order == [cell(0), ghost, cell(1)]


def test_a_ghost_that_was_voided_is_not_run() -> None:
    ghost = Work(0, 10, 0, mode="lockstep", ghost=True)
    source = ScriptedSource([ghost, cell(0)], stolen=[ghost])
    ran: list[Any] = []

    assert list(iterator_of(source, 0, run_ghost=ran.append)) == [cell(0)]
    assert ran == []


@pytest.mark.parametrize("prime_calls", [0, 3])
def test_the_source_is_told_of_the_end_once(prime_calls: int) -> None:
    source = ScriptedSource([cell(0)])
    iterator = iterator_of(source, prime_calls)
    assert list(iterator) == [cell(0)]

    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    assert source.finished == 1


def test_an_empty_loader_tells_of_its_end_as_well() -> None:
    source = ScriptedSource([])

    assert list(iterator_of(source, 2)) == []
    assert source.finished == 1


def test_every_wait_for_a_batch_is_noted() -> None:
    source = ScriptedSource([cell(0), cell(1)])
    list(iterator_of(source, 0))

    assert len(source.waits_s) == 3
    assert min(source.waits_s) >= 0


def test_an_error_of_the_loader_passes_and_is_not_the_end() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            raise RuntimeError("a sample is broken")

    source = ScriptedSource([cell(0)])
    iterator = WorkIterator(Broken, WorkFeed(source, 0), source, lambda _batch: None)

    with pytest.raises(RuntimeError, match="a sample is broken"):
        next(iterator)
    assert source.finished == 0
    assert len(source.waits_s) == 1


# --- the stand-in asks as torch does --------------------------------------------------------------------------------


class Ids(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


class FedBatchSampler:
    """Yields the indices of the works that the feed gives, and goes on after it was told to stop."""

    def __init__(self, feed: WorkFeed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        work = self._feed.next_work()
        return list(range(work.start, work.stop))


@pytest.mark.parametrize(("workers", "prefetch_factor"), [(0, None), (1, 2), (2, 1), (2, 3)])
def test_a_torch_loader_gives_the_same_batches_as_the_stand_in(workers: int, prefetch_factor: int | None) -> None:
    script = [cell(i) if i % 4 != 3 else NOT_NOW for i in range(30)] + [NOT_NOW] * 9 + [cell(30), NOT_NOW, cell(31)]
    prime_calls = workers * (prefetch_factor or 0)
    source = ScriptedSource(script, stolen=[cell(5), cell(6)])
    feed = WorkFeed(source, prime_calls)
    loader = DataLoader(
        Ids(),
        batch_sampler=FedBatchSampler(feed),  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        multiprocessing_context="fork" if workers else None,
        timeout=30 if workers else 0,
    )
    batches = list(WorkIterator(lambda: iter(loader), feed, source, lambda _batch: None))

    alike = ScriptedSource(script, stolen=[cell(5), cell(6)])
    works = list(iterator_of(alike, prime_calls))
    assert [batch.tolist() for batch in batches] == [list(range(work.start, work.stop)) for work in works]
    assert source.asked == alike.asked
    assert isinstance(batches[0], torch.Tensor)
