"""Operations of real modules against numbers computed by hand, and what a count must never do to a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from lightning_hybrid.probes import flops as probe
from lightning_hybrid.probes.flops import FlopCount, counting_flops


def counted(module: nn.Module, *args: Any, grad: Callable[[], Any] = torch.inference_mode, **kwargs: Any) -> FlopCount:
    with grad(), counting_flops(module) as count:
        module(*args, **kwargs)
    return count


@pytest.fixture
def slow_path() -> Any:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


GRADS = [torch.inference_mode, torch.no_grad, torch.enable_grad]


def encoder_layer(tokens: int, width: int, hidden: int) -> int:
    projections = 2 * tokens * (3 * width * width + width * width + 2 * width * hidden)
    return projections + 2 * 2 * tokens * tokens * width


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize(
    ("module", "shape", "flops"),
    [
        (nn.Linear(8, 3), (5, 8), 2 * 5 * 8 * 3),
        (nn.Linear(8, 3, bias=False), (2, 5, 8), 2 * 10 * 8 * 3),
        (nn.Conv1d(4, 6, 3), (2, 4, 10), 2 * 2 * 6 * 8 * 4 * 3),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 8, 8), 2 * 2 * 6 * 64 * 2 * 9),
        (nn.Conv2d(4, 6, 3), (4, 8, 8), 2 * 6 * 36 * 4 * 9),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4), 2 * 3 * 27 * 2 * 8),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 5, 5), 2 * 2 * 4 * 25 * 6 * 4),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Softmax(-1)), (2, 4), 2 * 2 * 4 * 4),
        (nn.LSTM(32, 48, batch_first=True), (2, 10, 32), 2 * 20 * 4 * 48 * (32 + 48)),
        (nn.LSTM(32, 48, 2, bidirectional=True), (10, 2, 32), 2 * 20 * 2 * 4 * 48 * (32 + 48 + 96 + 48)),
        (nn.GRU(32, 48), (10, 2, 32), 2 * 20 * 3 * 48 * (32 + 48)),
        (nn.Embedding(10, 4), None, 0),
    ],
)
def test_the_count_is_what_is_computed_by_hand(
    module: nn.Module, shape: tuple[int, ...] | None, flops: int, grad: Callable[[], Any]
) -> None:
    count = counted(module, torch.tensor([[1, 2]]) if shape is None else torch.randn(shape), grad=grad)

    assert count.reason is None
    assert count.total == flops
    assert count.by_dtype == ({"float32": flops} if flops else {})


@pytest.mark.parametrize("grad", GRADS)
def test_a_transformer_layer_counts_its_attention_on_the_fast_path(grad: Callable[[], Any]) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()

    assert counted(layer, torch.randn(2, 16, 64), grad=grad).total == 2 * encoder_layer(16, 64, 128)


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("grad", GRADS)
def test_a_transformer_layer_counts_the_same_on_the_slow_path(grad: Callable[[], Any]) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()

    assert counted(layer, torch.randn(2, 16, 64), grad=grad).total == 2 * encoder_layer(16, 64, 128)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_padding_that_the_fast_path_leaves_out_does_not_count() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
    padding = torch.arange(16).expand(2, 16) >= torch.tensor([[10], [16]])

    count = counted(encoder, torch.randn(2, 16, 64), src_key_padding_mask=padding)

    assert count.total == 2 * (encoder_layer(10, 64, 128) + encoder_layer(16, 64, 128))


def test_self_attention_counts_on_the_fast_path() -> None:
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True).eval(), torch.randn(2, 16, 64)

    assert counted(attention, x, x, x, need_weights=False).total == 2 * (2 * 16 * 4 * 64 * 64 + 4 * 16 * 16 * 64)


def test_a_packed_sequence_counts_its_steps_only() -> None:
    lengths = torch.tensor([10, 4])
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 10, 32), lengths, batch_first=True)

    assert counted(nn.LSTM(32, 48), packed).total == 2 * 14 * 4 * 48 * (32 + 48)


def test_grouped_query_attention_counts_every_query_head() -> None:
    query, key = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 7, 16)
    with torch.inference_mode(), counting_flops() as count:
        F.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    assert count.total == 2 * 2 * 2 * 8 * 5 * 7 * 16


@pytest.mark.parametrize("grad", GRADS)
def test_the_count_is_torchs_own_where_torch_knows_all_operators(grad: Callable[[], Any]) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    x = torch.randn(4, 3, 8, 8)
    with grad(), FlopCounterMode(display=False) as torchs:
        module(x)

    assert counted(module, x, grad=grad).total == torchs.get_total_flops()


def test_the_backward_pass_counts_too() -> None:
    module, x = nn.Linear(8, 3), torch.randn(5, 8, requires_grad=True)
    with counting_flops(module) as count:
        module(x).sum().backward()

    assert count.total == 3 * 2 * 5 * 8 * 3


# --- types ------------------------------------------------------------------------------------------------------------


def test_operations_go_by_the_type_that_is_computed_in() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).double())
    with torch.inference_mode(), counting_flops() as count:
        hidden = module[0](torch.randn(3, 4))
        module[1](hidden.double())
        with torch.autocast("cpu", torch.bfloat16):
            module[0](torch.randn(3, 4))

    assert count.by_dtype == {"float32": 96, "float64": 48, "bfloat16": 96}


def test_rounding_to_tfloat32_follows_the_settings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe._allows_tfloat32("aten.convolution") is True
    assert probe._allows_tfloat32("aten._cudnn_rnn") is True
    assert probe._allows_tfloat32("aten.addmm") is False
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    assert probe._allows_tfloat32("aten.addmm") is True
    torch.set_float32_matmul_precision(before)


# --- what is not known ------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: torch.linalg.solve(x, x), "aten._linalg_solve_ex"),
        (lambda x: torch.fft.rfft(x), "aten._fft_r2c"),
        (lambda x: F.bilinear(x, x, torch.ones(3, 3, 3)), "aten._trilinear"),
        (lambda x: torch.sparse.mm(x.to_sparse(), x), "_sparse"),
    ],
)
def test_an_operator_without_a_formula_makes_the_count_unknown(
    function: Callable[[torch.Tensor], torch.Tensor], operator: str
) -> None:
    count = counted(nn.Sequential(nn.Linear(3, 3), Calls(function)), torch.eye(3))

    assert count.total is None
    assert count.by_dtype is None
    assert operator in (count.reason or "")


def test_a_custom_operator_makes_the_count_unknown() -> None:
    with torch.library._scoped_library("lh_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        count = counted(Calls(torch.ops.lh_test.twice), torch.ones(3))

    assert count.reason == "lh_test.twice is an operator without a formula"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.normalize(x),
        lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
        lambda x: x.sort().values.cumsum(0).clamp(0).softmax(0),
        lambda x: F.cosine_similarity(x, x),
        lambda x: F.grid_sample(x[None, None], torch.zeros(1, 2, 2, 2), align_corners=False),
        lambda x: torch.linalg.vector_norm(x),
        lambda x: F.layer_norm(x, (3,)),
    ],
)
def test_what_multiplies_no_matrices_is_passed_over(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for grad in GRADS:
        assert (counted(Calls(function), torch.eye(3), grad=grad).total, grad) == (0, grad)


def test_a_formula_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("odd shapes")

    monkeypatch.setitem(probe.MORE_FORMULAS, torch.ops.aten.linear, broken)
    count = counted(nn.Linear(2, 2), torch.ones(1, 2))

    assert count.reason == "the formula of aten.linear failed: AssertionError: odd shapes"


def test_reasons_are_bounded() -> None:
    count = FlopCount()
    for number in range(100):
        count.refuse(f"reason {number}")

    assert len(count.reasons) == 8


def test_nothing_is_computed_on_the_meta_device() -> None:
    assert counted(nn.Linear(4, 4, device="meta"), torch.ones(2, 4, device="meta")).total == 0


def test_data_parallel_is_not_counted() -> None:
    assert "DataParallel" in (counted(nn.DataParallel(nn.Linear(2, 2)), torch.ones(1, 2)).reason or "")


# --- what is compiled -------------------------------------------------------------------------------------------------


def test_a_compiled_module_is_run_as_always_and_not_counted() -> None:
    calls: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(_get_current_dispatch_mode())
        return graph.forward

    module = torch.compile(nn.Linear(2, 2), backend=backend)
    count = counted(nn.Sequential(module), torch.ones(1, 2))

    assert count.reason == "OptimizedModule is compiled"
    assert calls == [None]


def test_modules_compiled_in_place_or_by_method_are_seen() -> None:
    in_place = nn.Linear(2, 2)
    in_place.compile(backend="eager")
    by_method = nn.Linear(2, 2)
    by_method.forward = torch.compile(by_method.forward, backend="eager")  # type: ignore[method-assign]

    for module in (in_place, by_method):
        assert counted(module, torch.ones(1, 2)).reason == "Linear is compiled"


def test_other_compiled_functions_run_uncompiled_while_they_are_counted() -> None:
    compiled = torch.compile(lambda x: x @ x, fullgraph=True, backend="eager")

    assert counted(Calls(lambda x: compiled(x)), torch.eye(3)).total == 2 * 27


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval(),
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 7), nn.GELU(), nn.Linear(7, 2)),
    ],
)
def test_results_are_those_without_counting(module: nn.Module) -> None:
    x = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        alone = module(x)
        with counting_flops(module):
            watched = module(x)

    assert torch.equal(alone, watched)


def test_an_exception_leaves_nothing_behind() -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the step's own")

    with pytest.raises(RuntimeError, match="the step's own"), counting_flops():
        failing(torch.ones(1))

    assert _get_current_dispatch_mode() is None
    assert counted(nn.Linear(2, 2), torch.ones(1, 2)).total == 8
