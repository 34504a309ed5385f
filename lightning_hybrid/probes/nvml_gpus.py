"""The GPUs that NVML lists, and which of them is a given CUDA device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_hybrid.probes.nvml import Nvml
from lightning_hybrid.probes.values import Unknown
from lightning_hybrid.probes.visible import Gpu, MigSlice, Seen, visible_gpus

_MOST_GPUS = 256


class Located(NamedTuple):
    """A device of NVML: its handle, that of the GPU that it is or is part of, and who they are."""

    handle: Any
    gpu_handle: Any
    seen: Seen


def gpus(nvml: Nvml) -> Any:
    """Every GPU that this process may use with its MIG slices, as a tuple of `Gpu`; `Unknown` without NVML.

    GPUs that the driver counts but does not hand out, as in a container that is given some of them, are passed over.
    """
    number = nvml.call("nvmlDeviceGetCount")
    if isinstance(number, Unknown):
        return number
    listed = (_gpu(nvml, index) for index in range(min(number, _MOST_GPUS)))
    return tuple(gpu for gpu in listed if gpu is not None)


def _gpu(nvml: Nvml, index: int) -> Gpu | None:
    handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
    uuid = handle if isinstance(handle, Unknown) else nvml.call("nvmlDeviceGetUUID", handle)
    if isinstance(uuid, Unknown):
        return Gpu(index, "") if uuid.lost else None
    name = nvml.call("nvmlDeviceGetName", handle)
    return Gpu(index, _text(uuid), "" if isinstance(name, Unknown) else _text(name), slices(nvml, handle))


def slices(nvml: Nvml, gpu_handle: Any) -> tuple[MigSlice, ...]:
    """The MIG slices of a GPU; none where MIG is off or not known."""
    mode = nvml.call("nvmlDeviceGetMigMode", gpu_handle)
    if isinstance(mode, Unknown) or mode[0] != 1:
        return ()
    most = nvml.call("nvmlDeviceGetMaxMigDeviceCount", gpu_handle)
    found = []
    for index in range(0 if isinstance(most, Unknown) else most):
        handle = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu_handle, index)
        if isinstance(handle, Unknown):
            continue
        answers = [
            nvml.call(function, handle)
            for function in ("nvmlDeviceGetUUID", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId")
        ]
        if not any(isinstance(answer, Unknown) for answer in answers):
            found.append(MigSlice(_text(answers[0]), answers[1], answers[2]))
    return tuple(found)


def locate(nvml: Nvml, seen: Seen) -> Any:
    """Handles of a GPU or slice, found by UUID, as `Located`; `Unknown` where the driver does not find them."""
    if not seen.gpu.uuid:
        return Unknown("the GPU was lost before its UUID was known", lost=True)
    gpu_handle = nvml.call("nvmlDeviceGetHandleByUUID", seen.gpu.uuid)
    if isinstance(gpu_handle, Unknown):
        return gpu_handle
    if seen.slice is None:
        return Located(gpu_handle, gpu_handle, seen)
    handle = nvml.call("nvmlDeviceGetHandleByUUID", seen.slice.uuid)
    return handle if isinstance(handle, Unknown) else Located(handle, gpu_handle, seen)


def cuda_device(
    nvml: Nvml, index: int, cuda_uuid: str | None = None, environment: Mapping[str, str] | None = None
) -> Any:
    """The `Seen` that CUDA calls ``index`` in this process, `Unknown` with the reason where that is not certain.

    Args:
        nvml: The session.
        index: The n of ``cuda:n``.
        cuda_uuid: UUID of the device as CUDA itself names it, where CUDA has started; it decides.
        environment: Has ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``; by default that of the process.
    """
    environment = os.environ if environment is None else environment
    listed = gpus(nvml)
    if isinstance(listed, Unknown):
        return listed
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    visible = visible_gpus(setting, environment.get("CUDA_DEVICE_ORDER"), listed)
    if cuda_uuid is not None:
        return _by_cuda_uuid(cuda_uuid, index, listed, visible.seen)
    if index < len(visible.seen):
        return visible.seen[index]
    return Unknown(f"cuda:{index} is no GPU that NVML shows: {visible.reason}")


def _by_cuda_uuid(cuda_uuid: str, index: int, listed: tuple[Gpu, ...], seen: tuple[Seen, ...]) -> Any:
    plain = cuda_uuid.removeprefix("GPU-").removeprefix("MIG-")
    for gpu in listed:
        for each in gpu.slices:
            if each.uuid == f"MIG-{plain}":
                return Seen(gpu, each)
        if gpu.uuid == f"GPU-{plain}":
            # CUDA names the GPU where it means a slice of it
            if gpu.slices and index < len(seen) and seen[index].gpu == gpu:
                return seen[index]
            return Unknown("CUDA does not tell which MIG slice it uses") if gpu.slices else Seen(gpu)
    return Unknown(f"cuda:{index} is the GPU {cuda_uuid}, which NVML does not list")


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
