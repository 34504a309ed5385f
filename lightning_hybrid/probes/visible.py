"""Which GPUs a process sees, and in which order: ``CUDA_VISIBLE_DEVICES`` read as CUDA reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class MigSlice(NamedTuple):
    """A MIG slice: its UUID, and the ids of its GPU instance and compute instance."""

    uuid: str
    gpu_instance: int
    compute_instance: int


class Gpu(NamedTuple):
    """A GPU as the driver lists it; one that is lost has no UUID, and keeps its place."""

    number: int
    uuid: str
    name: str = ""
    slices: tuple[MigSlice, ...] = ()


class Seen(NamedTuple):
    """What an index of CUDA stands for: a GPU, or one of its MIG slices."""

    gpu: Gpu
    slice: MigSlice | None = None

    @property
    def uuid(self) -> str:
        """UUID of the slice, else of the GPU."""
        return self.gpu.uuid if self.slice is None else self.slice.uuid


class Visible(NamedTuple):
    """The GPUs by CUDA's index, and why there are no more of them."""

    seen: tuple[Seen, ...]
    reason: str


_NUMBER = re.compile(r"[+-]?\d+")


def visible_gpus(setting: str | None, order: str | None, gpus: Sequence[Gpu]) -> Visible:
    """The GPUs that CUDA shows to a process.

    An entry is an index, or a UUID or the beginning of one (``GPU-``, ``MIG-``, ``MIG-GPU-<uuid>/<gi>/<ci>``); the
    kind of the first entry is that of all. The first entry that fits nothing, or more than one GPU, ends the list, and
    a GPU that is named twice empties it. The rules are those of the CUDA C++ Programming Guide's chapter on
    environment variables, and of torch where that is silent.

    By index a GPU is only known for certain where ``order`` is ``PCI_BUS_ID``, as the driver counts; otherwise CUDA
    puts the fastest first, so numbers are believed where all GPUs are of one model, and nothing is seen where not.

    Args:
        setting: Value of ``CUDA_VISIBLE_DEVICES``, ``None`` where it is not set.
        order: Value of ``CUDA_DEVICE_ORDER``.
        gpus: What the driver lists and this process may use.
    """
    if setting is not None and setting.startswith(("GPU-", "MIG-")):
        return _by_uuid(setting, gpus)
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        return Visible((), "CUDA's order of unlike GPUs is not known before CUDA starts (CUDA_DEVICE_ORDER=PCI_BUS_ID)")
    if setting is None:
        return Visible(tuple(_whole(gpu) for gpu in gpus), f"there are {len(gpus)} GPUs")
    return _by_index(setting, gpus)


def _whole(gpu: Gpu) -> Seen:
    # of a GPU that is cut into slices, CUDA uses the first
    return Seen(gpu, gpu.slices[0] if gpu.slices else None)


def _by_index(setting: str, gpus: Sequence[Gpu]) -> Visible:
    chosen: list[int] = []
    for entry in setting.split(","):
        number = _NUMBER.match(entry.strip())
        index = int(number.group()) if number else -1
        if index in chosen:
            return Visible((), f"CUDA_VISIBLE_DEVICES={setting!r} names GPU {index} twice")
        if not 0 <= index < len(gpus):
            return _seen([_whole(gpus[i]) for i in chosen], f"{setting!r} ends at {entry!r}, which is no GPU here")
        chosen.append(index)
    return _seen([_whole(gpus[i]) for i in chosen], f"{setting!r}")


def _by_uuid(setting: str, gpus: Sequence[Gpu]) -> Visible:
    chosen: list[Seen] = []
    prefix = setting[:4]
    for entry in setting.split(","):
        found = _matching(entry, gpus) if entry.startswith(prefix) else []
        if len(found) != 1:
            what = "fits several GPUs" if found else "is no GPU here"
            return _seen(chosen, f"{setting!r} ends at {entry!r}, which {what}")
        if found[0] in chosen:
            return Visible((), f"CUDA_VISIBLE_DEVICES={setting!r} names {found[0].uuid} twice")
        chosen.append(found[0])
    return _seen(chosen, f"{setting!r}")


def _matching(entry: str, gpus: Sequence[Gpu]) -> list[Seen]:
    if entry.startswith("GPU-"):
        return [_whole(gpu) for gpu in gpus if gpu.uuid.startswith(entry)]
    parent, _, ids = entry.removeprefix("MIG-").partition("/")
    if ids:
        return [
            Seen(gpu, each)
            for gpu in gpus
            if gpu.uuid.startswith(parent)
            for each in gpu.slices
            if ids == f"{each.gpu_instance}/{each.compute_instance}"
        ]
    return [Seen(gpu, each) for gpu in gpus for each in gpu.slices if each.uuid.startswith(entry)]


def _seen(chosen: list[Seen], what: str) -> Visible:
    return Visible(tuple(chosen), f"CUDA_VISIBLE_DEVICES={what}")
