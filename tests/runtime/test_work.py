from __future__ import annotations

import pytest

from lightning_hybrid.runtime.work import Exhausted, StaticDealer, Work


def test_the_size_of_a_work_is_its_number_of_samples() -> None:
    assert Work(3, 8).size == 5
    assert Work(3, 3).size == 0


@pytest.mark.parametrize("may_wait", [True, False])
def test_fixed_works_come_in_order_and_then_no_more(may_wait: bool) -> None:
    works = [Work(0, 4, 0), Work(8, 12, 2)]
    dealer = StaticDealer(works)

    assert [dealer.take(may_wait=may_wait) for _ in works] == works
    for _ in range(2):
        with pytest.raises(Exhausted):
            dealer.take(may_wait=may_wait)


def test_fixed_works_cannot_be_stolen() -> None:
    dealer = StaticDealer([Work(0, 4, 0)])
    work = dealer.take(may_wait=True)

    assert dealer.begin(work)
    dealer.done(work)
    dealer.finish()
