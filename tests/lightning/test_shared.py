from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hybrid.lightning.shared import Shared, shared_in
from tests.lightning.devices import Counting, wait_until


class FakeTrainer(SimpleNamespace):
    """Has a device and callbacks, and nothing else."""

    __hash__ = object.__hash__


def trainer_with(*callbacks: Any) -> Any:
    return FakeTrainer(callbacks=list(callbacks), strategy=SimpleNamespace(root_device=torch.device("cpu")))


def test_one_trainer_has_one_and_it_goes_with_the_trainer() -> None:
    one, other = trainer_with(), trainer_with()
    shared = weakref.ref(shared_in(one))

    assert shared_in(one) is shared()
    assert shared_in(other) is not shared()
    del one
    gc.collect()
    assert shared() is None


def test_the_sampler_reads_as_often_as_its_most_eager_holder_wants_and_ends_with_the_last_one() -> None:
    probe = Counting()
    shared, trainer = Shared(), trainer_with(SimpleNamespace(make_probe=probe))
    first, second = shared.hold_sampler(trainer, 0.5), shared.hold_sampler(trainer, 0.01)
    assert first is second
    assert first.period_s == 0.01
    first.start()
    wait_until(lambda: probe.readings > 1)

    shared.release_sampler(0.01)
    assert (first.period_s, first.is_running) == (0.5, True)
    shared.release_sampler(0.5)
    wait_until(lambda: not first.is_running)

    assert shared.hold_sampler(trainer, 0.2) is first
    shared.release_sampler(0.2)


@pytest.mark.parametrize("callbacks", [(), (SimpleNamespace(),), (SimpleNamespace(make_probe=None),)])
def test_without_a_wish_the_device_is_read_as_well_as_it_can_be(callbacks: tuple[Any, ...]) -> None:
    shared = Shared()
    sampler = shared.hold_sampler(trainer_with(*callbacks), 0.01)
    sampler.start()
    wait_until(lambda: sampler.read().host_cpu_cores is not None)
    shared.release_sampler(0.01)


def test_the_report_remembers_as_long_as_the_loggers_are_the_same() -> None:
    shared, one, other = Shared(), object(), object()

    report = shared.report_to([one])

    assert shared.report_to([one]) is report
    assert shared.report_to([one, other]) is not report
