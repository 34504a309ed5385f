"""What is read of scripted GPUs through the real nvidia-ml-py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.probes.nvml_device import NVML_FIELDS
from tests.probes import scenes
from tests.probes.nvml_library import GIB, calls, compiled, gpu, slice_of, uuid, write

Play = Callable[..., Any]
U32, U64 = 2**32 - 1, 2**64 - 1


def test_every_field_of_a_gpu(play: Play, script: Path) -> None:
    write(script, gpu(0, gpm=1, gpm__1=91.5, gpm__2=80, gpm__5=40, gpm__10=25, xid="none 31 43", reasons="0x44"))

    state = DeviceState.from_dict(play(scenes.read, [0], 2)[0])

    assert state.unknown == {}
    found = {name: getattr(state, name) for name in NVML_FIELDS if not name.startswith("mig")}
    (own, other) = (each for each in found.pop("processes") if each is not None)
    assert (own.pid, own.memory_bytes, other.memory_bytes) == (4242, 12 * GIB, 8 * GIB)
    assert found == {
        "name": "NVIDIA A100-SXM4-80GB",
        "nvml_index": 0,
        "uuid": uuid(0),
        "pci_bus_id": "00000000:01:00.0",
        "driver_version": "570.86.15",
        "compute_capability": "8.0",
        "memory_used_bytes": 20 * GIB,
        "memory_free_bytes": 80 * GIB - 20 * GIB - GIB // 2,
        "memory_total_bytes": 80 * GIB,
        "memory_driver_reserved_bytes": GIB // 2,
        "memory_process_bytes": 8 * GIB,
        "memory_others_bytes": 12 * GIB,
        "utilization_frac": 0.9,
        "memory_utilization_frac": 0.4,
        "sm_active_frac": 0.8,
        "tensor_active_frac": 0.4,
        "dram_active_frac": 0.25,
        "sm_clock_mhz": 1200,
        "sm_clock_max_mhz": 1410,
        "memory_clock_mhz": 1593,
        "memory_clock_max_mhz": 1593,
        "clock_event_reasons": ("sw_power_cap", "hw_thermal_slowdown"),
        "performance_state": 0,
        "temperature_celsius": 60,
        "temperature_slowdown_celsius": 92,
        "memory_temperature_celsius": 70,
        "power_w": 250.0,
        "power_limit_w": 400.0,
        "energy_j": 0.0,
        "pcie_generation": 4,
        "pcie_generation_max": 4,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_tx_bytes_per_s": 1e6,
        "pcie_rx_bytes_per_s": 2e6,
        "pcie_replays": 0,
        "num_nvlinks": 12,
        "num_nvlinks_active": 12,
        "nvlink_tx_bytes_per_s": 0.0,
        "nvlink_rx_bytes_per_s": 0.0,
        "ecc_corrected": 3,
        "ecc_uncorrected": 0,
        "remapped_rows_corrected": 1,
        "remapped_rows_uncorrected": 0,
        "remapping_pending": False,
        "remapping_failed": False,
        "xid_events": (31, 43),
    }


@pytest.mark.parametrize("num_gpus", [1, 8, 16])
def test_every_gpu_has_its_own_numbers(play: Play, script: Path, num_gpus: int) -> None:
    write(script, *(gpu(n) for n in range(num_gpus)))

    states = play(scenes.read, list(range(num_gpus)))

    assert [state["sm_clock_mhz"] for state in states] == [1200 + n for n in range(num_gpus)]
    assert [state["uuid"] for state in states] == [uuid(n) for n in range(num_gpus)]


ABSURD = {
    "power": (U32, "power_w"),
    "memory.total": (U32 * 2**20, "memory_total_bytes"),
    "memory.used": (U64, "memory_used_bytes"),
    "utilization": (U32, "utilization_frac"),
    "memory_utilization": (101, "memory_utilization_frac"),
    "clock.sm": (U32, "sm_clock_mhz"),
    "temperature": (U32 - 60, "temperature_celsius"),
    "power_limit": (U32, "power_limit_w"),
    "energy": (U64, "energy_j"),
    "pcie.generation": (0, "pcie_generation"),
    "pcie.width": (U32, "pcie_width"),
    "pcie.tx": (U32, "pcie_tx_bytes_per_s"),
    "pcie.replays": (U32, "pcie_replays"),
    "ecc.corrected": (U64, "ecc_corrected"),
    "reasons": (U64, "clock_event_reasons"),
    "pstate": (32, "performance_state"),
    "field.82": (0, "memory_temperature_celsius"),
}


@pytest.mark.parametrize("line", ABSURD)
def test_an_absurd_value_is_unknown_with_its_reason_and_spoils_no_other(play: Play, script: Path, line: str) -> None:
    value, field = ABSURD[line]
    write(script, gpu(0, **{line: value}), gpu(1))

    absurd, sane = (DeviceState.from_dict(state) for state in play(scenes.read, [0, 1], 1))

    assert getattr(absurd, field) is None
    assert absurd.unknown[field]
    assert getattr(sane, field) is not None
    spoilt = {"memory_total_bytes": 6, "memory_used_bytes": 2}.get(field, 1)
    extra = set(absurd.unknown) - set(sane.unknown)
    assert len(extra) <= spoilt, extra
    assert absurd.active is True


def test_a_temperature_below_zero_is_one(play: Play, script: Path) -> None:
    write(script, gpu(0, temperature=U32 - 4))

    assert play(scenes.read, [0])[0]["temperature_celsius"] == -5


@pytest.mark.parametrize(
    ("change", "field", "expected", "reason"),
    [
        ({"energy": 1_300_000}, "energy_j", 300.0, None),
        ({"energy": 500}, "energy_j", None, "the counter went backwards"),
        ({"energy": 10**12}, "energy_j", None, "the counter jumped by 999999000000 mJ"),
        ({"field__138": 3000}, "nvlink_tx_bytes_per_s", 2000 * 1024.0, None),
        ({"field__138": 10}, "nvlink_tx_bytes_per_s", None, "the counter went backwards"),
        ({"field__139": 10**15}, "nvlink_rx_bytes_per_s", None, None),
    ],
)
def test_a_counter_that_wraps_or_jumps_is_unknown(
    play: Play, script: Path, change: dict[str, Any], field: str, expected: float | None, reason: str | None
) -> None:
    write(script, gpu(0), gpu(1))

    _, state = play(scenes.read_and_change, [change])

    assert state.get(field) == expected
    if reason is not None:
        assert state["unknown"][field] == reason


def test_energy_that_went_backwards_stays_unknown_and_a_rate_begins_anew(play: Play, script: Path) -> None:
    write(script, gpu(0), gpu(1))

    states = play(scenes.read_and_change, [{"energy": 5, "field__138": 5}, {"energy": 9, "field__138": 7}])

    assert [state.get("energy_j") for state in states] == [0.0, None, None]
    assert states[2]["nvlink_tx_bytes_per_s"] == 2048.0


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_no_rate_where_the_clock_stood_still_or_stepped_back(play: Play, script: Path, seconds: float) -> None:
    write(script, gpu(0), gpu(1))

    _, state = play(scenes.read_and_change, [{"field__138": 3000}], seconds)

    assert state["unknown"]["nvlink_tx_bytes_per_s"] == "the clock stood still"


def test_what_seldom_changes_is_asked_every_ten_seconds(play: Play, script: Path) -> None:
    write(script, gpu(0), gpu(1))

    states = play(scenes.read_and_change, [{"ecc__corrected": 4, "nvlinks": "10"}] * 3, 5.0)

    assert [state["ecc_corrected"] for state in states] == [3, 3, 4, 4]
    assert [state["num_nvlinks_active"] for state in states] == [12, 12, 1, 1]


def test_links_that_are_down_are_counted(play: Play, script: Path) -> None:
    write(script, gpu(0, nvlinks="1101"), gpu(1, nvlinks=None))

    some, none = play(scenes.read, [0, 1])

    assert (some["num_nvlinks"], some["num_nvlinks_active"]) == (4, 3)
    assert "num_nvlinks" not in none
    assert none["unknown"]["num_nvlinks"] == "not supported by this device or driver"


def test_a_mig_slice_has_its_own_memory_and_the_gpus_heat_but_not_its_power(play: Play, script: Path) -> None:
    write(script, gpu(0, mig=1, gpm=1), slice_of(0, 0), slice_of(0, 1, gpm__1=70, gpm__2=60, memory__used=3 * GIB))

    state = play(scenes.cuda, [0], environment={"CUDA_VISIBLE_DEVICES": "MIG-00000001"})[0]

    assert state["name"] == "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    assert (state["mig_parent_uuid"], state["mig_gpu_instance"], state["mig_compute_instance"]) == (uuid(0), 8, 0)
    assert (state["memory_used_bytes"], state["memory_total_bytes"]) == (3 * GIB, 10 * GIB)
    assert state["memory_others_bytes"] == 2 * GIB
    assert (state["temperature_celsius"], state["sm_clock_mhz"]) == (60, 1200)
    for field in ("power_w", "power_limit_w", "energy_j", "memory_utilization_frac"):
        assert state["unknown"][field] == "measured for the whole GPU only, and this is a MIG slice"


def test_use_of_a_mig_slice_comes_from_gpm_where_the_driver_has_it(play: Play, script: Path) -> None:
    ampere = [gpu(0, mig=1, utilization=0), slice_of(0, 0)]
    hopper = [gpu(1, mig=1, gpm=1, utilization=0), slice_of(1, 0, gpm__1=70, gpm__2=60, gpm__5=50, gpm__10=40)]
    write(script, *ampere, *hopper)

    old, new = (DeviceState.from_dict(state) for state in play(scenes.read_slices, 2))

    assert old.utilization_frac is None
    assert old.unknown["utilization_frac"] == "this GPU has no performance monitoring (GPM)"
    assert (new.utilization_frac, new.sm_active_frac, new.tensor_active_frac) == (0.7, 0.6, 0.5)


def test_gpm_stands_in_where_the_driver_does_not_know_the_use_of_a_whole_gpu(play: Play, script: Path) -> None:
    write(script, gpu(0, utilization=None, gpm=1, gpm__1=35))

    assert play(scenes.read, [0], 2)[0]["utilization_frac"] == 0.35


def test_what_this_process_uses_is_unknown_where_the_driver_does_not_list_it(play: Play, script: Path) -> None:
    write(script, gpu(0, processes="17:4096"), gpu(1, processes=f"self:{U64}"))

    for state in play(scenes.read, [0, 1]):
        assert "memory_process_bytes" not in state
        assert "memory_others_bytes" not in state
        assert state["unknown"]["memory_others_bytes"] == "the driver does not tell what this process uses"


OLD_DRIVER = [
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlGpmQueryDeviceSupport",
    "nvmlDeviceGetRemappedRows",
]


def test_an_old_driver_is_asked_in_its_own_way(play: Play, script: Path, tmp_path: Path) -> None:
    write(script, gpu(0))

    state = DeviceState.from_dict(play(scenes.read, [0], 2, library=compiled(tmp_path / "old", without=OLD_DRIVER))[0])

    assert state.memory_used_bytes == 20 * GIB + GIB // 2
    assert state.unknown["memory_driver_reserved_bytes"] == "drivers before 510 count it as used"
    assert state.memory_process_bytes == 8 * GIB
    assert state.memory_others_bytes is None
    assert state.clock_event_reasons == ("sw_power_cap",)
    assert (state.temperature_celsius, state.power_limit_w) == (60, 400.0)
    assert state.unknown["remapped_rows_corrected"] == "this driver is too old for the question"
    asked = [function for _, function, _ in calls(script.with_suffix(".calls"))]
    assert asked.count("nvmlDeviceGetMemoryInfo") == 2


def test_an_old_binding_without_a_function(play: Play, script: Path) -> None:
    write(script, gpu(0))
    missing = ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetRemappedRows", "nvmlGpmQueryDeviceSupport"]

    state = play(scenes.old_binding, missing)

    assert state["temperature_celsius"] == 60
    assert state["unknown"]["remapping_failed"] == "this nvidia-ml-py has no nvmlDeviceGetRemappedRows"
    assert state["power_w"] == 250.0
