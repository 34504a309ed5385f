from __future__ import annotations

import copy
import doctest
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.step_memory import StepMemoryMeter
from lightning_hybrid.probes import step_memory
from lightning_hybrid.probes.step_memory import CudaMeter, HostMeter, MpsMeter, NoMeter, meter_for
from lightning_hybrid.runtime.oom import is_out_of_memory
from tests import memory_device
from tests.memory_device import Attempt, EmulatedMemory

CUDA_1 = torch.device("cuda", 1)
KIB = 1024


class FakeCuda:
    """Stands where `torch.cuda` does: an allocator that keeps its books as the real one, and says what it was asked."""

    def __init__(self, *, total: int = 1000, others: int = 0) -> None:
        self.total, self.others = total, others
        self.allocated = self.peak = self.reserved = 0
        self.initialized = True
        self.asked: list[str] = []

    def hold(self, change: int) -> None:
        self.allocated += change
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def is_initialized(self) -> bool:
        return self.initialized

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self._note("reset", device)
        self.peak = self.allocated

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        self._note("stats", device)
        if not self.initialized:
            return {}
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}, "small_pool": {"peak": 7}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.reserved}},
            "num_ooms": 0,
        }

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self._note("driver", device)
        return self.total - self.reserved - self.others, self.total

    def _note(self, what: str, device: torch.device) -> None:
        assert device == CUDA_1
        self.asked.append(what)


def cuda_meter(cuda: Any, limit_bytes: int | None = None) -> CudaMeter:
    return CudaMeter(CUDA_1, limit_bytes, module=cuda)


# --- allocators -------------------------------------------------------------------------------------------------------


def test_the_peak_is_above_what_was_there_and_costs_a_reset_and_two_readings() -> None:
    cuda = FakeCuda()
    cuda.hold(900)
    cuda.hold(-500)

    with cuda_meter(cuda).measure() as step:
        cuda.hold(300)
        cuda.hold(-250)
        cuda.hold(100)

    assert step.peak_bytes == 300
    assert cuda.asked == ["reset", "stats", "stats"]


def test_a_step_that_frees_more_than_it_takes_has_no_negative_peak() -> None:
    cuda = FakeCuda()
    cuda.hold(400)

    with cuda_meter(cuda).measure() as step:
        cuda.hold(-300)
        cuda.hold(200)

    assert step.peak_bytes == 0


def test_a_step_that_fails_tells_how_far_it_got() -> None:
    cuda = FakeCuda()

    def fail() -> None:
        cuda.hold(600)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError), cuda_meter(cuda).measure() as step:
        fail()

    assert step.peak_bytes == 600


def test_what_is_cached_is_available_and_what_others_hold_is_not() -> None:
    cuda = FakeCuda(total=1000, others=200)
    cuda.hold(500)
    cuda.hold(-300)

    assert cuda_meter(cuda).available_bytes() == 600  # 300 of the driver and 300 that are cached


def test_the_driver_is_asked_once_and_when_it_must_be_fresh() -> None:
    cuda = FakeCuda()
    meter = cuda_meter(cuda)
    assert meter.available_bytes() == 1000

    cuda.hold(100)
    cuda.others = 250
    assert meter.available_bytes() == 900
    assert cuda.asked.count("driver") == 1
    assert meter.available_bytes(fresh=True) == 650
    assert meter.available_bytes() == 650
    assert cuda.asked.count("driver") == 2


def test_the_limit_bounds_what_is_allocated() -> None:
    cuda = FakeCuda()
    cuda.hold(300)

    assert cuda_meter(cuda, limit_bytes=400).available_bytes() == 100
    assert cuda_meter(cuda, limit_bytes=250).available_bytes() == 0
    assert cuda_meter(cuda, limit_bytes=9000).available_bytes() == 700


def test_the_fraction_of_memory_that_the_process_may_have_is_a_bound() -> None:
    cuda = FakeCuda()
    cuda.hold(300)
    cuda.get_per_process_memory_fraction = lambda device: 0.5  # type: ignore[attr-defined]  # torch 2.6 lacks it

    assert cuda_meter(cuda).available_bytes() == 200


def test_a_device_that_the_process_has_not_used_is_not_woken_up() -> None:
    cuda = FakeCuda()
    cuda.initialized = False
    meter = cuda_meter(cuda, limit_bytes=100)

    with meter.measure() as step:
        pass

    assert (step.peak_bytes, meter.available_bytes(fresh=True)) == (None, None)
    assert {"reset", "driver"}.isdisjoint(cuda.asked)


def test_a_driver_that_does_not_tell_leaves_the_limit() -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("not supported")

    cuda = FakeCuda()
    cuda.mem_get_info = refuse  # type: ignore[assignment,method-assign]  # that is the case
    cuda.hold(100)

    assert cuda_meter(cuda).available_bytes(fresh=True) is None
    assert cuda_meter(cuda, limit_bytes=400).available_bytes(fresh=True) == 300


@pytest.mark.parametrize("function", ["reset_peak_memory_stats", "memory_stats_as_nested_dict"])
def test_an_allocator_without_counters_measures_nothing(function: str) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("the pluggable allocator does not yet support this")

    cuda = FakeCuda()
    setattr(cuda, function, refuse)

    with cuda_meter(cuda, limit_bytes=400).measure() as step:
        pass

    assert step.peak_bytes is None


@pytest.mark.parametrize("module", [torch.cuda, torch.xpu], ids=["cuda", "xpu"])
def test_this_torch_has_the_public_functions_that_are_asked(module: ModuleType) -> None:
    assert set(step_memory._OF_ALLOCATOR) <= set(module.__all__)


def test_this_torch_has_the_functions_of_metal_that_are_asked() -> None:
    assert set(step_memory._OF_METAL) <= set(torch.mps.__all__)


def test_metal_tells_what_is_left_and_no_peak() -> None:
    mps = SimpleNamespace(current_allocated_memory=lambda: 20, recommended_max_memory=lambda: 70)

    with MpsMeter(module=mps).measure() as step:
        pass

    assert step.peak_bytes is None
    assert (MpsMeter(module=mps).available_bytes(), MpsMeter(30, module=mps).available_bytes(fresh=True)) == (50, 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_cuda_device() -> None:
    mib = 2**20
    kept = torch.zeros(mib, device="cuda")
    meter = meter_for(kept.device)

    with meter.measure() as step:
        made = (kept + 1).mul_(2) + 1  # two at once, of 4 MiB
    before_bytes = meter.available_bytes(fresh=True)
    more = torch.zeros(16 * mib, device="cuda")
    after_bytes = meter.available_bytes()

    assert step.peak_bytes is not None
    assert 8 * mib <= step.peak_bytes <= 10 * mib  # the allocator may round up
    assert before_bytes is not None
    assert after_bytes is not None
    assert 64 * mib == more.nbytes <= before_bytes - after_bytes <= 66 * mib
    assert 0 < after_bytes < torch.cuda.mem_get_info()[1]
    assert made.nbytes == kept.nbytes


# --- the host ---------------------------------------------------------------------------------------------------------


def test_the_host_counts_what_steps_make_and_keep() -> None:
    meter = HostMeter(100 * KIB)
    weight = torch.zeros(64, 256)

    with torch.inference_mode(), meter.measure() as first:
        kept = torch.zeros(4, 64) @ weight
    with torch.inference_mode(), meter.measure() as second:
        torch.zeros(8, 64) @ weight

    assert first.peak_bytes == (1 + 4) * KIB
    assert second.peak_bytes == (2 + 8) * KIB
    assert meter.available_bytes() == 96 * KIB
    del kept
    assert meter.available_bytes() == 100 * KIB


def test_a_step_that_fails_on_the_host_tells_how_far_it_got_and_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"), HostMeter(1).measure() as step:
        torch.zeros(4, 64) @ torch.zeros(32, 8)

    assert step.peak_bytes == 2 * KIB
    assert _get_current_dispatch_mode() is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_of_a_step_that_hides_its_operators_nothing_is_known() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.zeros(1, 1, 128, 16)
    meter = HostMeter(KIB)

    with torch.inference_mode(), meter.measure() as hidden:
        flex_attention(q, q, q)
    with meter.measure() as seen:
        q.clone()

    assert (hidden.peak_bytes, seen.peak_bytes) == (None, 8 * KIB)


def test_compiled_code_is_measured_as_it_was_written() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    compiled = torch.compile(copy.deepcopy(net), backend="eager")
    x = torch.zeros(4, 64)
    with torch.inference_mode():
        compiled(x)
        with HostMeter(1).measure() as eager:
            net(x)
        with HostMeter(1).measure() as step:
            compiled(x)

    assert step.peak_bytes == eager.peak_bytes == 2 * KIB


def test_a_torch_that_cannot_run_compiled_code_as_written_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.compiler, "set_stance")
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))

    with HostMeter(1).measure() as step:
        assert _get_current_dispatch_mode() is None

    assert step.peak_bytes is None


# --- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "limit_bytes", "kind"),
    [
        ("cpu", None, NoMeter),
        ("cpu", 100, HostMeter),
        ("cuda:1", None, CudaMeter),
        ("xpu", 100, CudaMeter),
        ("mps", None, MpsMeter),
        ("meta", None, NoMeter),
    ],
)
def test_each_kind_of_device_has_its_meter(device: str, limit_bytes: int | None, kind: type) -> None:
    meter = meter_for(torch.device(device), limit_bytes)

    assert type(meter) is kind
    with meter.measure() as step:
        pass
    assert step.peak_bytes == (0 if kind is HostMeter else None)


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps"])
@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_a_limit_is_positive(device: str, limit_bytes: int) -> None:
    with pytest.raises(ConfigError, match="limit_bytes must be positive"):
        meter_for(torch.device(device), limit_bytes)


def test_where_nothing_can_be_measured_nothing_is_known() -> None:
    with NoMeter().measure() as step:
        pass

    assert (step.peak_bytes, NoMeter().available_bytes(fresh=True)) == (None, None)


# --- the emulated device ----------------------------------------------------------------------------------------------


def test_an_emulated_device_runs_out_of_memory_and_remembers_each_attempt() -> None:
    device = EmulatedMemory(lambda step: 1000 if step < 2 else 300, bytes_per_element=10, fixed_bytes=100)
    meter: StepMemoryMeter = device

    with meter.measure() as first:
        device.allocate({"ids": torch.zeros(4, 20)})
    with meter.measure() as second, pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as error:
        device.allocate({"ids": torch.zeros(5, 20)})
    assert meter.available_bytes() == 300
    with meter.measure() as third, pytest.raises(torch.OutOfMemoryError):
        device.allocate({"ids": torch.zeros(2, 20)})

    assert is_out_of_memory(error.value)
    assert [step.peak_bytes for step in (first, second, third)] == [900, 1000, 300]
    assert device.attempts == [Attempt(0, 4, 80, True), Attempt(1, 5, 100, False), Attempt(2, 2, 40, False)]
    assert device.num_failed == 2


class OnEmulatedDevice(LightningModule):
    def __init__(self, device: EmulatedMemory) -> None:
        super().__init__()
        self.memory = device

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.memory.allocate(batch)
        return batch.sum(1)


def test_the_example_of_memory_device_is_true() -> None:
    assert doctest.testmod(memory_device) == (0, 3)


def test_a_lightning_module_allocates_on_an_emulated_device() -> None:
    device = EmulatedMemory(8 * 6 * 2, bytes_per_element=2)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)

    trainer.predict(OnEmulatedDevice(device), DataLoader(torch.ones(20, 6), batch_size=8))  # type: ignore[arg-type]

    assert device.attempts == [Attempt(0, 8, 48, True), Attempt(1, 8, 48, True), Attempt(2, 4, 24, True)]
    with pytest.raises(torch.OutOfMemoryError):
        trainer.predict(OnEmulatedDevice(device), DataLoader(torch.ones(20, 6), batch_size=9))  # type: ignore[arg-type]
