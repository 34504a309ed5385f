"""Bytes of real tensors against numbers computed by hand."""

from __future__ import annotations

import doctest
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from lightning_hybrid.probes import live_bytes
from lightning_hybrid.probes.flops import counting_flops
from lightning_hybrid.probes.live_bytes import LiveBytes

KIB = 1024
GRADS = [torch.inference_mode, torch.no_grad]


def kib(num_kib: int = 1) -> torch.Tensor:
    return torch.zeros(256 * num_kib)


@pytest.fixture(params=GRADS, ids=lambda grad: grad.__name__)
def live(request: pytest.FixtureRequest) -> Any:
    with request.param(), LiveBytes() as live:
        yield live


def test_the_example_of_live_bytes_is_true() -> None:
    assert doctest.testmod(live_bytes) == (0, 3)


def test_what_is_dropped_is_taken_off_and_the_peak_stays(live: LiveBytes) -> None:
    x = kib()
    y = x + 1
    z = y * 2
    del y
    assert (live.live_bytes, live.peak_bytes) == (2 * KIB, 3 * KIB)

    del z
    x = kib(4)

    assert (live.live_bytes, live.peak_bytes) == (4 * KIB, 5 * KIB)
    assert x.numel() == 1024


def test_a_chain_that_drops_each_link_holds_two_at_a_time(live: LiveBytes) -> None:
    x = kib()
    for _ in range(50):
        x = x + 1

    assert (live.live_bytes, live.peak_bytes) == (KIB, 2 * KIB)


def test_what_was_there_before_does_not_count_whatever_view_of_it_is_taken() -> None:
    weight, freed = kib(4), kib(8)
    with LiveBytes() as live:
        views = [weight.t(), weight.view(4, 256), weight[1:], weight.detach(), weight.reshape(2, 512), weight.float()]
        weight.add_(1).relu_()
        del freed

    assert (live.live_bytes, live.peak_bytes, len(views)) == (0, 0, 6)


def test_views_share_one_storage_and_the_last_one_frees_it(live: LiveBytes) -> None:
    x = kib(4)
    parts = x.chunk(4)
    part = parts[3]
    del x, parts
    assert live.live_bytes == 4 * KIB

    del part

    assert live.live_bytes == 0


def test_each_of_several_outputs_counts(live: LiveBytes) -> None:
    values, places = kib(2).sort()
    kept = torch._foreach_add([values, values], 1)

    assert (places.dtype, len(kept)) == (torch.int64, 2)
    assert (live.live_bytes, live.peak_bytes) == ((2 + 4 + 2 * 2) * KIB, (2 + 4 + 2 * 2) * KIB)


def test_a_storage_counts_with_what_it_grew_by(live: LiveBytes) -> None:
    x = kib()
    x.resize_(512)
    assert (live.live_bytes, live.peak_bytes) == (2 * KIB, 2 * KIB)

    out = torch.empty(0)
    torch.add(x, 1, out=out)
    assert live.live_bytes == 4 * KIB

    del x, out

    assert live.live_bytes == 0


def test_a_resident_storage_counts_with_its_growth_alone() -> None:
    x = kib(4)
    with LiveBytes() as live:
        x.resize_(5 * 256)
        x.resize_(6 * 256)
        x.add_(1)
        assert (live.live_bytes, live.peak_bytes) == (2 * KIB, 2 * KIB)
        del x

    assert live.live_bytes == 0


def test_tensors_of_python_numbers_count_and_memory_of_numpy_does_not(live: LiveBytes) -> None:
    listed = torch.tensor([0.0] * 256)
    array = torch.from_numpy(kib(2).numpy())

    assert len(listed) == 256
    assert live.live_bytes == 3 * KIB  # the one that numpy shows is still there
    del array
    assert live.live_bytes == KIB


def test_bytes_are_those_of_the_type(live: LiveBytes) -> None:
    x = kib()
    kept = (x.half(), x.double(), x > 0)

    assert live.live_bytes == (256 * (4 + 2 + 8 + 1))
    assert len(kept) == 3


def test_other_devices_do_not_count(live: LiveBytes) -> None:
    x = torch.empty(256, device="meta") + 1

    assert (x.device.type, live.peak_bytes) == ("meta", 0)


def test_sparse_tensors_do_not_fail(live: LiveBytes) -> None:
    x = torch.eye(16).to_sparse()

    assert torch.equal((x @ torch.eye(16)), torch.eye(16))


def test_what_composite_operators_hold_for_each_other_is_seen(live: LiveBytes) -> None:
    # log_softmax and nll_loss in one operator, the first of which makes a tensor of the input's size
    loss = F.cross_entropy(torch.zeros(64, 256), torch.zeros(64, dtype=torch.int64))

    assert loss.ndim == 0
    assert live.peak_bytes >= 2 * 64 * KIB


def test_the_scores_of_attention_that_is_not_fused_are_seen(live: LiveBytes) -> None:
    q = torch.zeros(1, 2, 128, 8)
    bias = torch.zeros(128, 128)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias)

    assert live.peak_bytes >= 2 * 128 * 128 * 4


@pytest.mark.parametrize("grad", GRADS)
def test_a_transformer_takes_more_for_more(grad: Callable[[], Any]) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        peaks = [peak_of(layer, torch.randn(batch, 16, 64), grad) for batch in (1, 2, 4, 8, 8, 8)]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)

    assert peaks == sorted(peaks)
    assert len(set(peaks[3:])) == 1
    assert peaks[3] > 1.9 * peaks[2]


def peak_of(module: nn.Module, x: torch.Tensor, grad: Callable[[], Any]) -> int:
    with grad(), LiveBytes() as live:
        module(x)
    return live.peak_bytes


def test_autocast_counts_the_copies_that_it_makes() -> None:
    layer, x = nn.Linear(256, 256, bias=False), torch.zeros(4, 256)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), LiveBytes() as live:
        y = layer(x)

    # the weight, the input and the output, each in two bytes
    assert (y.dtype, live.peak_bytes) == (torch.bfloat16, 2 * (256 * 256 + 2 * 4 * 256))


@pytest.mark.parametrize("grad", GRADS)
def test_other_dispatch_modes_and_this_one_see_the_same_inside_each_other(grad: Callable[[], Any]) -> None:
    layer, x = nn.Linear(64, 32), torch.randn(8, 64)
    alone = peak_of(layer, x, grad)
    with grad(), LiveBytes() as outer, FlopCounterMode(display=False) as flops:
        layer(x)
    with grad(), counting_flops() as count, LiveBytes() as inner:
        layer(x)

    assert (outer.peak_bytes, inner.peak_bytes) == (alone, alone)
    assert flops.get_total_flops() == count.total == 2 * 8 * 64 * 32


def test_gradients_are_those_without_counting_and_count_themselves() -> None:
    layer, x = nn.Linear(8, 4), torch.randn(2, 8)
    alone = torch.autograd.grad(layer(x).sum(), layer.weight)[0]

    with LiveBytes() as live:
        watched = torch.autograd.grad(layer(x).sum(), layer.weight)[0]

    assert torch.allclose(watched, alone)
    assert live.live_bytes == 4 * 8 * 4


def test_tensor_subclasses_count_by_what_they_hold() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with LiveBytes() as live:
        pair = TwoTensor(kib(), kib()) + 1

    assert isinstance(pair, TwoTensor)
    assert live.live_bytes == 2 * KIB
    assert live.peak_bytes == 4 * KIB


def test_freeing_on_another_thread_and_after_the_block_counts() -> None:
    held = []
    with LiveBytes() as live:
        held.append(kib())
        held.append(kib())
    thread = threading.Thread(target=held.pop)
    thread.start()
    thread.join()
    assert live.live_bytes == KIB

    held.clear()

    assert live.live_bytes == 0


def test_cycles_of_tensors_are_taken_off_once_they_are_collected(live: LiveBytes) -> None:
    cycle: list[Any] = [kib()]
    cycle.append(cycle)
    del cycle
    gc.collect()

    assert live.live_bytes == 0


def test_addresses_that_are_used_again_are_not_mixed_up(live: LiveBytes) -> None:
    kept = []
    for index in range(500):
        x = kib()
        if index % 10 == 0:
            kept.append(x)
        del x

    assert live.live_bytes == 50 * KIB == len(kept) * KIB
    assert live.peak_bytes == 51 * KIB


def test_the_block_can_be_entered_again_and_the_peak_restarted() -> None:
    live = LiveBytes()
    with live:
        x = kib(4)
    assert live.restart() == 4 * KIB
    with live:
        y = x + 1
        del x

    assert (live.live_bytes, live.peak_bytes) == (4 * KIB, 8 * KIB)
    assert y.numel() == KIB


def test_an_exception_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError), LiveBytes() as live:
        kib() @ kib(2)

    assert _get_current_dispatch_mode() is None
    assert live.peak_bytes == 3 * KIB
