"""Peak arithmetic of devices by the names that their drivers give them, from the vendors' data sheets.

Numbers are *dense*: data sheets that give them "with sparsity" give twice these. Half precision is with 32 bit
accumulation, which is what torch asks for; consumer boards do it at half the speed of the other kind. Figures are for
matrix units where the device has them, except ``float32``, and for one device as torch counts them: one chip of a
board of several. What a data sheet does not give is left out rather than derived.
"""

from __future__ import annotations

from typing import NamedTuple

_TERA = 1e12
_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "int8")


class Hardware(NamedTuple):
    """Peak operations per second of a model, by type of number, and where they are printed."""

    source: str
    peaks: dict[str, float]


def peak_flops_per_s(name: str | None, dtype: str) -> float | None:
    """Dense peak operations per second of a device, ``None`` where the device or its figure is not known.

    Args:
        name: The device's name as its driver gives it (`torch.cuda.get_device_name`, ``nvidia-smi -L``). Only a whole
            name counts: boards of one family differ by a factor of two, and laptop and cut-down models by more. A MIG
            slice's name is not known, as no data sheet has its figures.
        dtype: ``float64``, ``float32``, ``tfloat32``, ``bfloat16``, ``float16``, ``float8`` or ``int8``; torch's own
            names, with or without ``torch.``, stand for these.

    Example:
        >>> peak_flops_per_s("NVIDIA L40S", "torch.bfloat16")
        362050000000000.0
        >>> peak_flops_per_s("NVIDIA L40S Turbo", "bfloat16") is None
        True
    """
    hardware = _BY_NAME.get(_plain(name or ""))
    return None if hardware is None else hardware.peaks.get(_kind(dtype))


def known_names() -> tuple[str, ...]:
    """Every device name of the table."""
    return tuple(name for names, _, _ in _TABLE for name in names)


def source_of(name: str) -> str | None:
    """The data sheet that a device's figures are from."""
    hardware = _BY_NAME.get(_plain(name))
    return None if hardware is None else hardware.source


def _kind(dtype: str) -> str:
    kind = dtype.removeprefix("torch.")
    return "float8" if kind.startswith("float8_") else {"half": "float16", "float": "float32"}.get(kind, kind)


def _plain(name: str) -> str:
    # older drivers leave the maker out, newer ones the brand
    plain = " ".join(name.casefold().split())
    for prefix in ("nvidia ", "tesla "):
        plain = plain.removeprefix(prefix)
    return plain


_X = None
_H100, _H200 = "NVIDIA H100 Tensor Core GPU data sheet", "NVIDIA H200 Tensor Core GPU data sheet"
_BLACKWELL = "NVIDIA Blackwell data sheet, individual GPU"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_ADA, _BLACKWELL_RTX = "NVIDIA Ada GPU architecture white paper", "NVIDIA RTX Blackwell GPU architecture white paper"
_GA102, _TURING = "NVIDIA Ampere GA102 GPU architecture white paper", "NVIDIA Turing GPU architecture white paper"
_V100, _P100 = "NVIDIA V100 Tensor Core GPU data sheet", "NVIDIA Tesla P100 data sheet"

_Peaks = tuple[float | None, ...]
_TABLE: tuple[tuple[tuple[str, ...], _Peaks, str], ...] = (
    # names, then 1e12 operations per second of float64, float32, tfloat32, bfloat16, float16, float8, int8, then source
    (("NVIDIA B200",), (37, 75, 1100, 2250, 2250, 4500, 4500), _BLACKWELL + ", HGX B200"),
    (("NVIDIA GB200",), (40, 80, 1250, 2500, 2500, 5000, 5000), _BLACKWELL + ", GB200 NVL72"),
    (("NVIDIA B300 SXM6 AC",), (1.25, 75, 1125, 2250, 2250, 4500, _X), "NVIDIA HGX B300 data sheet, one of eight"),
    (("NVIDIA H200",), (67, 67, 494.5, 989.5, 989.5, 1979, 1979), _H200),
    (("NVIDIA H200 NVL",), (60, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5), _H200),
    (("NVIDIA H100 80GB HBM3",), (67, 67, 494.5, 989.5, 989.5, 1979, 1979), _H100),
    (("NVIDIA H100 NVL",), (60, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5), _H100),
    (("NVIDIA H100 PCIe",), (51, 51, 378, 756.5, 756.5, 1513, 1513), _H100 + ", PCIe edition"),
    (
        ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "NVIDIA GH200 144G HBM3e"),
        (67, 67, 494.5, 989.5, 989.5, 1979, 1979),
        "NVIDIA GH200 Grace Hopper Superchip data sheet",
    ),
    (
        (
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
        ),
        (19.5, 19.5, 156, 312, 312, _X, 624),
        _A100,
    ),
    (("NVIDIA A30",), (10.3, 10.3, 82, 165, 165, _X, 330), "NVIDIA A30 data sheet"),
    (("NVIDIA A40",), (_X, 37.4, 74.8, 149.7, 149.7, _X, 299.3), "NVIDIA A40 data sheet"),
    (("NVIDIA A10",), (_X, 31.2, 62.5, 125, 125, _X, 250), "NVIDIA A10 data sheet"),
    (("NVIDIA A10G",), (_X, 31.52, 35, 70, 70, _X, 140), "NVIDIA A10G data sheet for Amazon Web Services"),
    (("NVIDIA A16",), (_X, 4.5, 9, _X, 17.9, _X, 35.9), "NVIDIA A16 data sheet, one of four"),
    (("NVIDIA A2",), (_X, 4.5, 9, 18, 18, _X, 36), "NVIDIA A2 data sheet"),
    (("NVIDIA L40S",), (_X, 91.6, 183, 362.05, 362.05, 733, 733), "NVIDIA L40S data sheet"),
    (("NVIDIA L40",), (_X, 90.5, 90.5, 181.05, 181.05, 362, 362), "NVIDIA L40 data sheet"),
    (("NVIDIA L4",), (_X, 30.3, 60, 121, 121, 242.5, 242.5), "NVIDIA L4 data sheet"),
    (("NVIDIA RTX 6000 Ada Generation",), (_X, 91.1, _X, _X, _X, 728.5, _X), "NVIDIA RTX 6000 Ada data sheet"),
    (("NVIDIA RTX 5000 Ada Generation",), (_X, 65.3, _X, _X, _X, 522.2, _X), "NVIDIA RTX 5000 Ada data sheet"),
    (("NVIDIA RTX 4500 Ada Generation",), (_X, 39.6, _X, _X, _X, 317, _X), "NVIDIA RTX 4500 Ada data sheet"),
    (("NVIDIA RTX 4000 Ada Generation",), (_X, 26.7, _X, _X, _X, 213.8, _X), "NVIDIA RTX 4000 Ada data sheet"),
    (("NVIDIA RTX 4000 SFF Ada Generation",), (_X, 19.2, _X, _X, _X, 153.4, _X), "NVIDIA RTX 4000 SFF Ada data sheet"),
    (("NVIDIA RTX 2000 Ada Generation",), (_X, 12, _X, _X, _X, 95.95, _X), "NVIDIA RTX 2000 Ada data sheet"),
    (("NVIDIA RTX A6000",), (_X, 38.7, 77.4, 154.8, 154.8, _X, 309.7), _GA102),
    (("NVIDIA RTX A5000",), (_X, 27.8, _X, _X, 111.1, _X, _X), "NVIDIA RTX A5000 data sheet"),
    (("NVIDIA RTX A4500",), (_X, 23.7, _X, _X, 94.6, _X, _X), "NVIDIA RTX A4500 data sheet"),
    (("NVIDIA RTX A4000",), (_X, 19.2, _X, _X, 76.7, _X, _X), "NVIDIA RTX A4000 data sheet"),
    (("NVIDIA GeForce RTX 5090",), (_X, 104.8, 104.8, 209.5, 209.5, 419, 838), _BLACKWELL_RTX),
    (("NVIDIA GeForce RTX 5080",), (_X, 56.3, 56.3, 112.6, 112.6, 225.1, 450.2), _BLACKWELL_RTX),
    (("NVIDIA GeForce RTX 4090",), (_X, 82.6, 82.6, 165.2, 165.2, 330.3, 660.6), _ADA),
    (("NVIDIA GeForce RTX 4080",), (_X, 48.7, 48.7, 97.5, 97.5, 194.9, 389.9), _ADA),
    (("NVIDIA GeForce RTX 3090 Ti",), (_X, 40, 40, 80, 80, _X, 320), _ADA),
    (("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"), (_X, 35.6, 35.6, 71, 71, _X, 284), _GA102),
    (("NVIDIA GeForce RTX 3080", "GeForce RTX 3080"), (_X, 29.8, 29.8, 59.5, 59.5, _X, 238), _GA102),
    (("NVIDIA GeForce RTX 3070", "GeForce RTX 3070"), (_X, 20.3, 20.3, 40.6, 40.6, _X, 162.6), _GA102),
    (("NVIDIA GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti"), (_X, 13.4, _X, _X, 53.8, _X, 215.2), _TURING),
    (("NVIDIA TITAN RTX", "TITAN RTX"), (_X, 16.3, _X, _X, 130.5, _X, 261), _TURING),
    (("Quadro RTX 8000", "Quadro RTX 6000"), (_X, 16.3, _X, _X, 130.5, _X, 261), _TURING),
    (("Quadro RTX 5000",), (_X, 11.2, _X, _X, 89.2, _X, 178.4), _TURING),
    (("Tesla T4",), (_X, 8.1, _X, _X, 65, _X, 130), "NVIDIA T4 Tensor Core GPU data sheet"),
    (("NVIDIA T1000", "NVIDIA T1000 8GB"), (_X, 2.5, _X, _X, _X, _X, _X), "NVIDIA T1000 data sheet"),
    (("NVIDIA T400", "NVIDIA T400 4GB"), (_X, 1.094, _X, _X, _X, _X, _X), "NVIDIA T400 data sheet"),
    (("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), (7.8, 15.7, _X, _X, 125, _X, _X), _V100),
    (("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"), (7, 14, _X, _X, 112, _X, _X), _V100),
    (("Tesla V100S-PCIE-32GB",), (8.2, 16.4, _X, _X, 130, _X, _X), _V100),
    (("Tesla P100-SXM2-16GB",), (5.3, 10.6, _X, _X, 21.2, _X, _X), _P100),
    (("Tesla P100-PCIE-16GB", "Tesla P100-PCIE-12GB"), (4.7, 9.3, _X, _X, 18.7, _X, _X), _P100),
    (("Tesla P40",), (_X, 12, _X, _X, _X, _X, 47), "NVIDIA Tesla P40 data sheet"),
    (("Tesla P4",), (_X, 5.5, _X, _X, _X, _X, 22), "NVIDIA Tesla P4 data sheet"),
    (("AMD Instinct MI300X",), (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9), "AMD Instinct MI300X data sheet"),
    (("AMD Instinct MI210",), (45.3, 45.3, _X, 181, 181, _X, 181), "AMD Instinct MI210 data sheet"),
)

_BY_NAME = {
    _plain(name): Hardware(
        source, {kind: tera * _TERA for kind, tera in zip(_DTYPES, peaks, strict=True) if tera is not None}
    )
    for names, peaks, source in _TABLE
    for name in names
}
