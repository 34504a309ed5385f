from __future__ import annotations

import pytest

from lightning_hybrid.core.hardware import known_names, peak_flops_per_s, source_of


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA B200", "tfloat32", 1100),
        ("NVIDIA GB200", "float8", 5000),
        ("NVIDIA B300 SXM6 AC", "float8", 4500),
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA GH200 480GB", "float16", 989.5),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("A100-SXM4-40GB", "tfloat32", 156),
        ("NVIDIA A100 80GB PCIe", "float64", 19.5),
        ("A100-PCIE-40GB", "int8", 624),
        ("NVIDIA A30", "bfloat16", 165),
        ("NVIDIA A40", "bfloat16", 149.7),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA A16", "float16", 17.9),
        ("NVIDIA A2", "bfloat16", 18),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA L40", "bfloat16", 181.05),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA RTX 6000 Ada Generation", "float8", 728.5),
        ("NVIDIA RTX 4000 Ada Generation", "float32", 26.7),
        ("NVIDIA RTX 4000 SFF Ada Generation", "float32", 19.2),
        ("NVIDIA RTX A6000", "bfloat16", 154.8),
        ("NVIDIA RTX A4000", "float16", 76.7),
        ("NVIDIA GeForce RTX 5090", "bfloat16", 209.5),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA GeForce RTX 3090", "float32", 35.6),
        ("NVIDIA GeForce RTX 3090 Ti", "float32", 40),
        ("GeForce RTX 2080 Ti", "float16", 53.8),
        ("TITAN RTX", "float16", 130.5),
        ("Quadro RTX 6000", "float16", 130.5),
        ("Tesla T4", "float16", 65),
        ("NVIDIA T400 4GB", "float32", 1.094),
        ("NVIDIA T1000 8GB", "float32", 2.5),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("Tesla V100-PCIE-32GB", "float16", 112),
        ("Tesla V100S-PCIE-32GB", "float16", 130),
        ("Tesla P100-SXM2-16GB", "float16", 21.2),
        ("Tesla P40", "float32", 12),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("AMD Instinct MI210", "bfloat16", 181),
    ],
)
def test_a_real_name_has_its_data_sheets_dense_figure(name: str, dtype: str, tera: float) -> None:
    assert peak_flops_per_s(name, dtype) == pytest.approx(tera * 1e12)
    assert source_of(name)


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "cpu",
        "NVIDIA",
        "NVIDIA A1",
        "NVIDIA A100",
        "NVIDIA A1000",
        "NVIDIA A10M",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100",
        "NVIDIA H20",
        "NVIDIA H800",
        "NVIDIA B300",
        "NVIDIA L4 Tensor",
        "NVIDIA L40G",
        "NVIDIA L2",
        "Tesla T40",
        "NVIDIA T4G",
        "NVIDIA T600",
        "NVIDIA RTX 4000",
        "NVIDIA RTX 6000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 3080 Ti",
        "Tesla V100",
        "Tesla V100-SXM3-32GB-H",
        "Tesla P4000",
        "Quadro P400",
        "GRID A100X-40C",
        "AMD Instinct MI300A",
    ],
)
def test_a_name_that_only_resembles_one_is_unknown(name: str | None) -> None:
    assert all(peak_flops_per_s(name, dtype) is None for dtype in ("float32", "bfloat16", "float16", "float8"))


@pytest.mark.parametrize(
    ("dtype", "tera"),
    [
        ("torch.bfloat16", 989.5),
        ("float16", 989.5),
        ("torch.half", 989.5),
        ("float", 67),
        ("torch.float8_e4m3fn", 1979),
        ("float8_e5m2", 1979),
        ("int8", 1979),
        ("complex64", None),
        ("float4_e2m1fn_x2", None),
    ],
)
def test_types_go_by_torchs_names(dtype: str, tera: float | None) -> None:
    peak = peak_flops_per_s("NVIDIA H200", dtype)

    assert peak is None if tera is None else peak == pytest.approx(tera * 1e12)


def test_what_the_data_sheet_does_not_give_is_not_known() -> None:
    assert peak_flops_per_s("Tesla V100-SXM2-32GB", "bfloat16") is None
    assert peak_flops_per_s("Tesla T4", "bfloat16") is None
    assert peak_flops_per_s("NVIDIA A16", "bfloat16") is None


def test_every_name_stands_once_and_has_a_source() -> None:
    names = known_names()

    assert len(names) >= 60
    assert all(source_of(name) for name in names)
    assert all(peak_flops_per_s(name, "float32") for name in names)


def test_half_precision_is_never_slower_than_single_and_eight_bits_than_half() -> None:
    for name in known_names():
        single, half, eighth = (peak_flops_per_s(name, dtype) for dtype in ("float32", "float16", "float8"))
        assert half is None or (single or 0) < half
        assert None in (half, eighth) or (half or 0) < (eighth or 0)


def test_case_and_spaces_do_not_matter() -> None:
    assert peak_flops_per_s("  nvidia   l40s ", "bfloat16") == peak_flops_per_s("NVIDIA L40S", "bfloat16")
