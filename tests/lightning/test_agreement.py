"""What ranks find out together reaches all of them whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from lightning_hybrid.core.errors import CoordinationTimeout, PlanError
from lightning_hybrid.core.plan import Grid
from lightning_hybrid.lightning.agreement import NoExchange, StoreExchange, agree_on_grid, publish, read_published
from lightning_hybrid.runtime.store import InProcessStore
from tests.lightning.scenes import ids
from tests.ranks import run_ranks


def test_a_value_larger_than_a_part_is_read_whole() -> None:
    store = InProcessStore()
    value = np.random.default_rng(0).random(10**6)
    assert read_published(store, "costs/0") is None

    publish(store, "costs/0", value)
    assert (read_published(store, "costs/0") == value).all()
    assert store.get_many(["costs/0/1"]) != [None]


def test_a_rank_alone_finds_everything_itself() -> None:
    exchange = NoExchange()

    assert exchange.once("order", lambda: 3) == 3
    assert exchange.divided("costs", 5, lambda start, stop: (start, stop)) == [(0, 5)]
    exchange.compare("grid", "anything")
    assert agree_on_grid(ids(5), 2, exchange).num_samples == 4


class _Engine:
    """The part of an engine that an exchange looks at."""

    def __init__(self, deadline_s: float) -> None:
        from lightning_hybrid import HybridConfig

        self.config = HybridConfig(claim_deadline_s=deadline_s)


@pytest.mark.parametrize(("num", "parts"), [(7, [(0, 2), (2, 4), (4, 7)]), (1, [(0, 0), (0, 0), (0, 1)])])
def test_ranks_find_consecutive_parts_and_all_hold_the_same(num: int, parts: list[tuple[int, int]]) -> None:
    def rank(r: int) -> tuple[list[tuple[int, int]], int, str | None]:
        dist.init_process_group("gloo", rank=r, world_size=3)
        from lightning_hybrid.runtime.store import open_stores

        exchange = StoreExchange(open_stores("test")("pass"), _Engine(20.0))  # type: ignore[arg-type]
        found = exchange.divided("costs", num, lambda start, stop: (start, stop)), exchange.once("order", lambda: r)
        failed = None
        try:
            exchange.compare("grid", "one" if r == 0 else "other")
        except PlanError as error:
            failed = str(error)
        dist.barrier()
        return *found, failed

    results = run_ranks(rank, 3)
    assert [found[:2] for found in results] == [(parts, 0)] * 3
    assert any("ranks disagree about the loader" in (failed or "") for _, _, failed in results)


def test_a_rank_that_publishes_nothing_is_named() -> None:
    def rank(r: int) -> str:
        dist.init_process_group("gloo", rank=r, world_size=2)
        from lightning_hybrid.runtime.store import open_stores

        exchange = StoreExchange(open_stores("test")("pass"), _Engine(0.2))  # type: ignore[arg-type]
        message = ""
        if r == 1:
            try:
                exchange.once("order", lambda: 0)
            except CoordinationTimeout as error:
                message = str(error)
        dist.barrier()
        return message

    assert run_ranks(rank, 2)[1] == "waited claim_deadline_s for rank 0 to find the order of the samples"


def test_a_random_order_is_drawn_once() -> None:
    grid = agree_on_grid(ids(6, shuffle=True), None, NoExchange())

    assert isinstance(grid, Grid)
    assert sorted(grid.indices(0, 6)) == list(range(6))
