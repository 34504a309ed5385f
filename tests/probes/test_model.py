"""What is read of real modules."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

from lightning_hybrid.core.system_state import ModelInfo
from lightning_hybrid.probes.flops import FlopCount, counting_flops
from lightning_hybrid.probes.model import model_info


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.output = nn.Linear(16, 100, bias=False)
        self.output.weight = self.embedding.weight


def test_a_plain_module() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    module[0].weight.requires_grad_(False)

    assert model_info(module) == ModelInfo(
        name="Sequential",
        num_parameters=8 * 16 + 16 + 32,
        num_trainable_parameters=48,
        num_local_parameters=176,
        num_meta_parameters=0,
        num_buffers=33,
        parameter_bytes=704,
        buffer_bytes=32 * 4 + 8,
        num_parameters_by_dtype={"float32": 176},
        parameter_bytes_by_dtype={"float32": 704},
        unknown={"flops_per_sample": "the operations of a sample were not counted"},
    )


def test_tied_weights_count_once() -> None:
    found = model_info(Tied())

    assert (found.num_parameters, found.parameter_bytes) == (1600, 6400)


def test_two_parameters_of_the_same_memory_count_once() -> None:
    module = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    module[1].weight = nn.Parameter(module[0].weight.data)

    assert model_info(module).num_parameters == 16


def test_rows_of_one_memory_count_each() -> None:
    memory = torch.zeros(2, 4)
    module = nn.ParameterList([nn.Parameter(memory[0]), nn.Parameter(memory[1])])

    assert model_info(module).num_parameters == 8


def test_types_are_told_apart() -> None:
    module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2, bias=False).bfloat16(), nn.Linear(1, 1).double()])
    found = model_info(module)

    assert found.num_parameters_by_dtype == {"float32": 20, "bfloat16": 8, "float64": 2}
    assert found.parameter_bytes_by_dtype == {"float32": 80, "bfloat16": 16, "float64": 16}
    assert found.parameter_bytes == 112


def test_a_module_on_the_meta_device_has_numbers_and_no_memory() -> None:
    found = model_info(nn.TransformerEncoderLayer(64, 4, 128, device="meta"))

    assert found.num_parameters == found.num_meta_parameters == 4 * 64 * 65 + 64 * 128 * 2 + 128 + 64 + 4 * 64
    assert found.parameter_bytes == 4 * (found.num_parameters or 0)


def test_tied_weights_count_once_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        module = Tied()

    assert model_info(module).num_parameters == 1600


def test_a_module_without_parameters() -> None:
    found = model_info(nn.ReLU())

    assert (found.num_parameters, found.parameter_bytes, found.num_buffers) == (0, 0, 0)
    assert found.num_parameters_by_dtype == {}


def test_a_lazy_module_is_not_known_before_its_first_step() -> None:
    module = nn.LazyLinear(4)
    found = model_info(nn.Sequential(module))

    assert found.num_parameters is None
    assert found.parameter_bytes is None
    assert found.unknown["num_parameters"] == "LazyLinear has no shape before its first step"
    module(torch.ones(1, 3))
    assert model_info(module).num_parameters == 16


# --- quantised --------------------------------------------------------------------------------------------------------


class Int8Tensor(torch.Tensor):
    """Stands for 32 bit numbers and holds 8 bit ones and a scale for each row, as torchao's tensors do."""

    @staticmethod
    def __new__(cls: Any, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, shape: Any, stride: Any) -> Int8Tensor:
        return cls(inner["numbers"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].scales)
        if func is torch.ops.aten.t.default:
            return args[0].numbers.t() * args[0].scales
        plain = [arg.numbers * arg.scales[:, None] if isinstance(arg, Int8Tensor) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def quantised() -> nn.Module:
    module = nn.Linear(8, 4, bias=False)
    held = Int8Tensor(torch.ones(4, 8, dtype=torch.int8), torch.ones(4))
    module.weight = nn.Parameter(held, requires_grad=False)
    return module


def test_a_quantised_tensor_counts_what_it_stands_for_and_the_bytes_that_it_holds() -> None:
    found = model_info(quantised())

    assert found.num_parameters == 32
    assert found.num_parameters_by_dtype == {"float32": 32}
    assert found.parameter_bytes_by_dtype == {"int8": 32, "float32": 16}
    assert found.num_trainable_parameters == 0


def test_operations_of_a_quantised_tensor_are_those_on_what_it_holds() -> None:
    module = quantised()
    with torch.no_grad(), counting_flops(module) as count:
        module(torch.ones(2, 8))

    assert (count.total, count.reason) == (2 * 2 * 8 * 4, None)


def test_packed_four_bit_parameters_count_the_elements_that_they_stand_for() -> None:
    module = nn.Linear(8, 4, bias=False)
    packed = nn.Parameter(torch.zeros(16, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(shape=torch.Size([4, 8]))  # type: ignore[attr-defined]
    module.weight = packed

    found = model_info(module)
    assert (found.num_parameters, found.parameter_bytes) == (32, 16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_weights_that_torch_ao_hides_are_not_known() -> None:
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    found = model_info(module)

    assert found.num_parameters is None
    assert found.parameter_bytes is None
    assert "hides packed weights" in found.unknown["num_parameters"]


# --- sharded ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    """A process group of two in which the other rank answers nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_sharded_module_counts_whole_in_number_and_in_part_in_bytes(two_ranks: Any) -> None:
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    parallelize_module(module, two_ranks, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    found = model_info(module)

    assert found.num_parameters == 2 * 8 * 16
    assert found.num_local_parameters == 8 * 16
    assert found.parameter_bytes == 4 * 8 * 16


def test_operations_of_a_sharded_module_are_those_of_this_rank(two_ranks: Any) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    parallelize_module(module, two_ranks, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with torch.no_grad(), counting_flops(module) as count:
        out = module(torch.ones(4, 8))
        out.wait()

    assert (count.total, count.reason) == (2 * 4 * 8 * 16, None)


def test_flat_shards_do_not_tell_what_they_are_part_of() -> None:
    module = nn.Linear(4, 4, bias=False)
    module.weight._is_flat_param = True  # type: ignore[assignment]
    found = model_info(module)

    assert found.num_parameters is None
    assert found.num_parameters_by_dtype == {}
    assert found.unknown["num_parameters"] == "FSDP1 holds flat shards of the parameters"
    assert (found.num_local_parameters, found.parameter_bytes) == (16, 64)


# --- operations -------------------------------------------------------------------------------------------------------


def test_operations_are_those_of_one_sample() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    with torch.inference_mode(), counting_flops(module) as count:
        module(torch.ones(5, 8))
    found = model_info(module, count, num_samples=5)

    assert found.flops_per_sample == 2 * (8 * 4 + 4 * 2)
    assert found.flops_per_sample_by_dtype == {"float32": 80.0}
    assert not found.unknown


def test_why_operations_are_not_known_is_kept() -> None:
    count = FlopCount()
    count.refuse("Net is compiled")

    assert model_info(nn.ReLU(), count, num_samples=5).unknown == {"flops_per_sample": "Net is compiled"}


def test_reading_a_module_changes_nothing() -> None:
    module = Tied()
    before = tree_map(torch.clone, module.state_dict())
    model_info(module)

    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module.output.weight is module.embedding.weight
