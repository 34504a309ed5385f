"""Errors of real allocators, as they raise or write them, and errors that only mention memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_hybrid.runtime.oom import is_out_of_memory, may_be_size

TRUE = {
    "type with text": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "type without text": torch.OutOfMemoryError(),
    "type of the cuda module": torch.cuda.OutOfMemoryError("x"),
    "host": MemoryError(),
    "driver": torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "driver before 2.8": RuntimeError("CUDA error: out of memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn 8": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cudnn 9": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cusolver": RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    "cufft": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "nccl": RuntimeError(
        "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
    ),
    "nccl before 2.20": RuntimeError("ncclUnhandledCudaError: Last error:\nCuda failure 'out of memory'"),
    "hip": RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.98 GiB"),
    "hip driver": RuntimeError("HIP error: out of memory"),
    "hipblas": RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 17.57 GB, max allowed: 18.13 GB)."),
    "mps buffer": RuntimeError("Invalid buffer size: 19.38 GiB"),
    "xpu": RuntimeError("XPU out of memory. Tried to allocate 3.00 GiB."),
    "level zero": RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "level zero resources": RuntimeError("UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    "xpu before 2.5": RuntimeError("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"),
    "gaudi": RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::4096"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "cpu of windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
    "c++": RuntimeError("std::bad_alloc"),
}

FALSE = {
    "shape": RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    "size of a tensor": RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    "value": ValueError("out of memory of the cell: 3 steps kept"),
    "value like an allocator": ValueError("CUDA out of memory"),
    "prose": RuntimeError("the replay buffer ran out of memory slots"),
    "key": KeyError("memory"),
    "memory format": RuntimeError("unsupported memory format option Preserve"),
    "illegal access": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "shared memory of a kernel": RuntimeError("out of resource: shared memory, Required: 131072, limit: 101376"),
    "nccl with another error": RuntimeError("Last error:\nCuda failure 1 'invalid argument'"),
    "disk": OSError(28, "No space left on device"),
    "not supported": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    "interrupt": KeyboardInterrupt(),
    "exit": SystemExit("CUDA out of memory"),
}


@pytest.mark.parametrize("error", TRUE.values(), ids=TRUE)
def test_memory_ran_out(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert may_be_size(error)


@pytest.mark.parametrize("error", FALSE.values(), ids=FALSE)
def test_memory_did_not_run_out(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_only_cudnns_refusal_may_be_the_size_without_saying_so() -> None:
    assert [name for name, error in FALSE.items() if may_be_size(error)] == ["not supported"]


def test_what_the_allocator_of_the_host_really_raises() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(10**15)
    with pytest.raises(MemoryError) as numpys:
        np.empty(10**16)

    assert is_out_of_memory(torchs.value)
    assert is_out_of_memory(numpys.value)


def test_what_is_too_large_to_be_counted_is_no_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as overflow:
        torch.empty(2**62)

    assert not is_out_of_memory(overflow.value)


def raised(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    """``outer`` as it comes out of a handler of ``inner``."""
    try:
        try:
            raise inner
        except BaseException as caught:
            if how == "cause":
                raise outer from caught
            if how == "hidden":
                raise outer from None
            raise outer  # noqa: B904  # it is this chain that is looked at
    except BaseException as result:
        return result


@pytest.mark.parametrize(("how", "counts"), [("cause", True), ("context", True), ("hidden", False)])
def test_what_led_to_an_error_counts_as_in_a_traceback(how: str, counts: bool) -> None:
    wrapped = raised(ValueError("the step failed"), torch.OutOfMemoryError(), how)

    assert is_out_of_memory(wrapped) is counts
    assert is_out_of_memory(raised(RuntimeError("again"), wrapped, "cause")) is counts


def test_a_user_who_stops_the_run_while_memory_is_short_stops_it() -> None:
    assert not is_out_of_memory(raised(KeyboardInterrupt(), torch.OutOfMemoryError(), "context"))


def test_errors_that_name_each_other_as_their_cause_come_to_an_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert not is_out_of_memory(first)
