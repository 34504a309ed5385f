"""Which errors say that memory ran out, so that a smaller batch may work: the one place that decides it.

The type decides first; a text counts only in errors that libraries raise for want of a better type, and only as the
allocator or library writes it. `ValueError("out of memory of ...")` and errors of shapes are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_TYPES = (torch.OutOfMemoryError, MemoryError)
_TEXTS = re.compile(
    "|".join(
        (
            # the caching allocators of CUDA, HIP, XPU and Gaudi; what the driver says where they are passed by
            r"\b(?:CUDA|HIP|XPU|HPU) out of memory\b",
            r"\bMPS backend out of memory\b",
            r"\b(?:CUDA|HIP|CUDA driver) error: out of memory\b",
            r"\bMODULE:PT_DEVMEM Allocation failed\b",
            # a single buffer that is larger than Metal allows
            r"\AInvalid buffer size: [\d.]+ [KMGT]i?B\b",
            # NCCL and RCCL: with or without the number of the error
            r"\b(?:Cuda|HIP) failure (?:2 )?'out of memory'",
            # workspaces of libraries
            r"\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|HIPSPARSE|HIPSOLVER)_STATUS_ALLOC_FAILED\b",
            r"\bCUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED\b",
            r"\b(?:CU|HIP)FFT_ALLOC_FAILED\b",
            r"\b(?:rocblas_status_memory_error|miopenStatusAllocFailed)\b",
            # Intel's unified runtime, and what it was called before
            r"\b(?:UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b",
            r"\bCL_MEM_OBJECT_ALLOCATION_FAILURE\b",
            # the host: Linux and macOS, Windows, C++
            r"\bDefaultCPUAllocator: (?:can't allocate memory|not enough memory)\b",
            r"\bstd::bad_alloc\b",
        )
    )
)
_SIZE_TEXTS = re.compile(r"\bCUDNN_STATUS_NOT_SUPPORTED\b")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or one that led to it, says that memory of the device or of the host ran out."""
    return any(_says_so(link) for link in _chain(error))


def may_be_size(error: BaseException) -> bool:
    """Whether ``error`` may come from the size of the batch, though it does not say so.

    cuDNN calls a convolution "not supported" when no algorithm's workspace fits, and also when there is none at any
    size: only a smaller batch that works tells which it was.
    """
    return is_out_of_memory(error) or any(
        isinstance(link, RuntimeError) and _SIZE_TEXTS.search(str(link)) for link in _chain(error)
    )


def _says_so(error: BaseException) -> bool:
    if isinstance(error, _TYPES):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, what caused it, and so on, as a traceback shows them; nothing where the user or system stops the run.

    An exception that was being handled when another came up counts like a cause, unless ``from None`` hides it.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while isinstance(link, Exception) and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ if link.__cause__ is not None or link.__suppress_context__ else link.__context__
