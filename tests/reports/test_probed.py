from __future__ import annotations

import json

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.reports.probed import probed_json, probed_text

GIB = 2**30
HOST = DeviceState(
    kind="cpu",
    host_cpu_cores=8,
    host_load_average=3.25,
    host_cpu_frac=0.5,
    host_steal_frac=0.0,
    host_memory_used_bytes=3 * GIB,
    host_memory_total_bytes=16 * GIB,
    unknown={"host_cpu_mhz": "the system does not tell"},
)
H200 = DeviceState(
    kind="cuda",
    index=0,
    name="NVIDIA H200",
    memory_used_bytes=20 * GIB,
    memory_total_bytes=140 * GIB,
    utilization_frac=0.9,
    sm_clock_mhz=1980,
    sm_clock_max_mhz=1980,
    temperature_celsius=61,
    power_w=512.4,
    power_limit_w=700.0,
    pcie_generation=5,
    pcie_width=16,
    num_nvlinks=18,
    num_nvlinks_active=17,
    clock_event_reasons=("gpu_idle", "sw_power_cap"),
    xid_events=(31, 31),
    unknown={"energy_j": "not permitted to this user", "sm_active_frac": "not permitted to this user"},
)


def test_a_machine_is_a_line_for_the_host_and_one_for_each_device() -> None:
    lost = DeviceState(kind="cuda", nvml_index=3, error="the GPU is lost", unknown={"energy_j": "the GPU is lost"})

    text = probed_text(HOST, [H200, lost])

    assert text.splitlines() == [
        "host: 8 cores, load 3.2, CPU 50%, RAM 3.0 of 16.0 GiB",
        "",
        "device  model        memory             use  SM MHz     C     W        PCIe  NVLinks  BF16 TFLOP/s  condition",
        "cuda:0  NVIDIA H200  20.0 of 140.0 GiB  90%  1980/1980  61/-  512/700  5x16  17/18    990           "
        "sw_power_cap, XID 31",
        "GPU 3   -            -                  -    -          -     -        -     -        -             "
        "the GPU is lost",
        "",
        "not known:",
        "  host: host_cpu_mhz: the system does not tell",
        "  cuda:0: energy_j, sm_active_frac: not permitted to this user",
        "  GPU 3: energy_j: the GPU is lost",
    ]


def test_devices_that_lack_the_same_share_a_line() -> None:
    states = [DeviceState(kind="cuda", index=n, unknown={"energy_j": "not supported"}) for n in range(2)]

    assert probed_text(DeviceState(kind="cpu"), states).splitlines()[-1] == "  cuda:0, cuda:1: energy_j: not supported"


def test_a_machine_without_accelerators_says_why() -> None:
    text = probed_text(DeviceState(kind="cpu"), [], "NVML's library is not installed")

    assert text.endswith("no accelerator found\nNVIDIA GPUs are not known: NVML's library is not installed")


def test_json_has_everything() -> None:
    found = json.loads(probed_json(HOST, [H200], None))

    assert DeviceState.from_dict(found["devices"][0]) == H200
    assert DeviceState.from_dict(found["host"]) == HOST
    assert found["missing"] is None
