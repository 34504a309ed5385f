"""How many samples a step may have, on a device whose memory can be read and on one whose cannot."""

from __future__ import annotations

import pytest
import torch

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.runtime.step_sizes import StepSizes
from tests.memory_device import EmulatedMemory

CONFIG = HybridConfig()


def _run(sizes: StepSizes, device: EmulatedMemory, samples: int, width: int = 1) -> bool:
    """Whether a step of so many samples ran."""
    batch = torch.zeros(samples, width)
    try:
        with sizes.measuring(samples, samples * width):
            device.allocate(batch)
    except torch.OutOfMemoryError:
        sizes.failed(samples, samples * width)
        return False
    return True


def test_without_a_meter_and_a_failure_nothing_is_watched() -> None:
    sizes = StepSizes(None, CONFIG)

    assert not sizes.is_watching
    assert sizes.most(64, None) == 64


def test_a_failure_without_a_meter_halves_and_is_counted() -> None:
    sizes = StepSizes(None, CONFIG)
    sizes.failed(64, None)

    assert sizes.is_watching
    assert sizes.num_failures == 1
    assert sizes.most(64, None) == 32
    assert sizes.fitting(64, None) == 32


def test_elements_decide_where_they_are_known() -> None:
    sizes = StepSizes(None, CONFIG)
    sizes.failed(8, 800)

    assert sizes.fitting(8, 800) == 4
    assert sizes.fitting(8, 80) == 8


def test_what_is_free_bounds_the_next_step_before_it_fails() -> None:
    device = EmulatedMemory(1000, bytes_per_element=10)
    sizes = StepSizes(device, CONFIG)
    for samples in (10, 20, 40):
        assert _run(sizes, device, samples)
    fitting = sizes.fitting(200, 200)

    assert 0.8 * 90 <= fitting <= 90  # nine tenths of what is free
    assert sizes.most(200, 200) == -(-200 // -(-200 // fitting))  # parts are about equal
    assert device.num_failed == 0


def test_more_is_used_when_others_give_memory_back() -> None:
    free = [400]
    device = EmulatedMemory(lambda _: free[0], bytes_per_element=10)
    sizes = StepSizes(device, CONFIG)
    for samples in (10, 20, 30):
        _run(sizes, device, samples)
    assert sizes.fitting(64, 64) < 40
    free[0] = 4000
    sizes.refresh()

    assert sizes.fitting(64, 64) >= 55


def test_after_a_failure_that_was_not_foreseen_sizes_are_smaller() -> None:
    free = [1000]
    device = EmulatedMemory(lambda _: free[0], bytes_per_element=10)
    sizes = StepSizes(device, CONFIG)
    for samples in (20, 40, 80):
        _run(sizes, device, samples)
    free[0] = 300
    assert not _run(sizes, device, 80)

    assert sizes.fitting(80, 80) <= 30
    assert _run(sizes, device, sizes.most(80, 80))


@pytest.mark.parametrize("samples", [0, 1])
def test_a_single_sample_is_never_cut(samples: int) -> None:
    sizes = StepSizes(None, CONFIG)
    sizes.failed(1, None)

    assert sizes.most(samples, None) == samples
