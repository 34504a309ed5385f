from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid.probes.visible import Gpu, MigSlice, Seen, visible_gpus
from tests.probes import scenes
from tests.probes.nvml_library import GIB, gpu, slice_of, uuid, write

ORDER = "PCI_BUS_ID"
A, B, C = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932f938-aaaa", "GPU-1b1b1b1b-bbbb"
SLICES = (MigSlice("MIG-377e0049-1", 1, 0), MigSlice("MIG-377e0050-2", 2, 1))
GPUS = (Gpu(0, A, "L40S"), Gpu(1, B, "L40S"), Gpu(2, C, "A100", SLICES))


def seen(setting: str | None, order: str | None = ORDER, gpus: tuple[Gpu, ...] = GPUS) -> list[str]:
    return [each.uuid for each in visible_gpus(setting, order, gpus).seen]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [A, B, "MIG-377e0049-1"]),
        ("1", [B]),
        ("1,0", [B, A]),
        (" 1 , 0", [B, A]),
        ("+1", [B]),
        ("0,-1,1", [A]),
        ("-1", []),
        ("", []),
        (",0", []),
        ("0,0", []),
        ("NoDevFiles", []),
        ("none", []),
        ("0,3,1", [A]),
        ("1gpu2,0x", [B, A]),
        ("2", ["MIG-377e0049-1"]),
        ("0,GPU-1b", [A]),
        (A, [A]),
        ("GPU-8932f937", [A]),
        ("GPU-8932f93", []),
        (f"GPU-8932f938,GPU-8932f937,{C}", [B, A, "MIG-377e0049-1"]),
        ("GPU-8932f937,GPU-8932f9,GPU-8932f938", [A]),
        ("GPU-8932f937,nonsense,GPU-8932f938", [A]),
        ("GPU-8932f937,1", [A]),
        (f"GPU-8932f937,{A}", []),
        ("GPU-00000000", []),
        ("MIG-377e0050", ["MIG-377e0050-2"]),
        ("MIG-377e00", []),
        ("MIG-377e0050,MIG-377e0049", ["MIG-377e0050-2", "MIG-377e0049-1"]),
        (f"MIG-{C}/2/1", ["MIG-377e0050-2"]),
        (f"MIG-{C}/2/0", []),
        (f"MIG-{A}/1/0", []),
        ("MIG-377e0050,GPU-8932f937", ["MIG-377e0050-2"]),
    ],
)
def test_the_setting_is_read_as_cuda_reads_it(setting: str | None, expected: list[str]) -> None:
    assert seen(setting) == expected


@pytest.mark.parametrize("setting", [None, "0", "1,0"])
def test_numbers_of_unlike_gpus_are_not_believed_when_the_fastest_comes_first(setting: str | None) -> None:
    visible = visible_gpus(setting, None, GPUS)

    assert visible.seen == ()
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in visible.reason


def test_numbers_of_like_gpus_are() -> None:
    assert seen("1", None, GPUS[:2]) == [B]


def test_uuids_do_not_depend_on_the_order() -> None:
    assert seen(f"{C},GPU-8932f937", None) == ["MIG-377e0049-1", A]


def test_why_there_are_no_more_is_told() -> None:
    assert visible_gpus("0,7", ORDER, GPUS).reason == ("CUDA_VISIBLE_DEVICES='0,7' ends at '7', which is no GPU here")
    assert "fits several GPUs" in visible_gpus("GPU-8932", ORDER, GPUS).reason
    assert visible_gpus("0,0", ORDER, GPUS).reason == "CUDA_VISIBLE_DEVICES='0,0' names GPU 0 twice"


def test_a_slice_goes_by_its_own_uuid() -> None:
    assert Seen(GPUS[2], SLICES[1]).uuid == "MIG-377e0050-2"
    assert Seen(GPUS[2]).uuid == C


@pytest.mark.parametrize(
    ("setting", "totals"), [("1", [8]), ("1,0", [8, 24]), (" 1 , 0", [8, 24]), ("0,-1,1", [24, None]), ("0,0", [None])]
)
def test_a_cuda_device_never_gets_another_cards_memory(
    play: Callable[..., Any], script: Path, setting: str, totals: list[int | None]
) -> None:
    write(
        script, gpu(0, memory__total=24 * GIB, name="big"), gpu(1, memory__total=8 * GIB, memory__used=1, name="small")
    )
    environment = {"CUDA_VISIBLE_DEVICES": setting, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    states = play(scenes.cuda, list(range(len(totals))), environment=environment)

    assert [state.get("memory_total_bytes") for state in states] == [total and total * GIB for total in totals]
    for state, total in zip(states, totals, strict=True):
        assert (state.get("name") is None) == (total is None)
        assert ("memory_total_bytes" in state["unknown"]) == (total is None)


def test_what_cuda_itself_names_decides_over_every_setting(play: Callable[..., Any], script: Path) -> None:
    write(script, gpu(0, name="slow"), gpu(1, name="fast"), gpu(2, mig=1), slice_of(2, 0), slice_of(2, 1))
    fastest_first: dict[str, str] = {}

    by_cuda = [play(scenes.cuda_by_uuid, 0, found, fastest_first) for found in (uuid(1), uuid(1)[4:])]
    stranger = play(scenes.cuda_by_uuid, 0, "GPU-ffffffff", fastest_first)
    piece = play(scenes.cuda_by_uuid, 0, uuid(2), {"CUDA_VISIBLE_DEVICES": "MIG-00020001"})
    unclear = play(scenes.cuda_by_uuid, 0, uuid(2), fastest_first)
    named = play(scenes.cuda_by_uuid, 0, "MIG-00020000-e6c0-5b4e-9a63-7a7e5d5c1e6a", fastest_first)

    assert by_cuda == [[1, uuid(1)], [1, uuid(1)]]
    assert stranger == ["unknown", "cuda:0 is the GPU GPU-ffffffff, which NVML does not list"]
    assert piece[1].startswith("MIG-00020001")
    assert unclear == ["unknown", "CUDA does not tell which MIG slice it uses"]
    assert named[1].startswith("MIG-00020000")
