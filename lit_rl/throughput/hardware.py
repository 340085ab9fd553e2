"""Accelerators: dense bf16 peak, memory bandwidth and memory, each with its source. No guessing.

Data sheets like to print the rate with 2:4 sparsity, twice the dense one; the figures here are dense, with float32
accumulation. Where a sheet gives only the sparse rate, half of it is entered.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """What a roofline needs to know of one device.

    Args:
        name: Short name, as given to `--gpu`.
        peak_flops: Dense bf16 peak, FLOP/s.
        bandwidth: Memory bandwidth, bytes/s.
        memory: Device memory, bytes.
        source: Where the figures are from.
        date: When that source was published, or inspected where it says so.
        device_names: What `torch.cuda.get_device_name()` reports for it, as a regular expression over the whole
            lower-case name without the vendor: a laptop part or a slice of a device must not pass for the real one.

    Example:
        >>> mine = Accelerator(name="mine", peak_flops=5e14, bandwidth=2e12, memory=64e9, source="own", date="2026")
        >>> find_accelerator(mine).name
        'mine'
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory: float
    source: str = "given by the user"
    date: str = ""
    device_names: str = ""

    def __post_init__(self) -> None:
        for field in ("peak_flops", "bandwidth", "memory"):
            if not getattr(self, field) > 0:
                raise ValueError(f"accelerator {self.name!r}: `{field}` must be > 0, got {getattr(self, field)}")


# name, dense bf16 TFLOP/s, TB/s, GB, regular expression over device names, source, date
_ROWS: list[tuple[str, float, float, float, str, str, str]] = [
    ("a100-40gb", 312, 1.555, 40, r"a100-(sxm4|pcie)-40gb", "NVIDIA A100 data sheet", "2020"),
    ("a100-80gb", 312, 2.039, 80, r"a100-sxm4-80gb", "NVIDIA A100 80GB data sheet", "2021"),
    ("a100-80gb-pcie", 312, 1.935, 80, r"a100 80gb pcie", "NVIDIA A100 80GB data sheet", "2021"),
    ("h100", 989.4, 3.35, 80, r"h100( sxm5?)?( 80gb hbm3)?", "NVIDIA H100 architecture paper, SXM5", "2022"),
    ("h100-pcie", 756, 2.0, 80, r"h100 pcie", "NVIDIA H100 architecture paper, PCIe", "2022"),
    ("h100-nvl", 835.5, 3.9, 94, r"h100 nvl", "NVIDIA H100 NVL data sheet, half the sparse 1,671", "2023"),
    ("h800", 989.4, 3.35, 80, r"h800( sxm5?)?", "NVIDIA H800, compute as H100 SXM5", "2023"),
    ("h20", 148, 4.0, 96, r"h20", "NVIDIA H20 data sheet", "2023"),
    (
        "h200",
        989.4,
        4.8,
        141,
        r"h200( sxm5?)?",
        "NVIDIA H200 data sheet, half the sparse 1,979",
        "inspected 2026-10-13",
    ),
    ("h200-nvl", 835.5, 4.8, 141, r"h200 nvl", "NVIDIA H200 NVL data sheet, half the sparse 1,671", "2024"),
    ("gh200", 989.4, 4.0, 96, r"gh200 480gb", "NVIDIA GH200 data sheet, 96 GB HBM3", "2023"),
    ("b200", 2250, 8.0, 180, r"b200", "NVIDIA HGX B200 data sheet, half the sparse 4,500", "2024"),
    ("gb200", 2500, 8.0, 186, r"gb200", "NVIDIA GB200 NVL72 data sheet, half the sparse 5,000", "2024"),
    ("b300", 2250, 8.0, 270, r"b300( sxm6 ac)?", "NVIDIA HGX B300 data sheet, half the sparse 4,500", "2025"),
    ("a10", 125, 0.6, 24, r"a10", "NVIDIA A10 data sheet", "2021"),
    ("l4", 121, 0.3, 24, r"l4", "NVIDIA L4 data sheet, half the sparse 242", "2023"),
    ("l40s", 362, 0.864, 48, r"l40s", "NVIDIA L40S data sheet", "2023"),
    ("rtx-a6000", 154.8, 0.768, 48, r"rtx a6000", "NVIDIA RTX A6000, Ampere GA102 paper", "2020"),
    ("rtx-3090", 71, 0.936, 24, r"geforce rtx 3090", "NVIDIA Ampere GA102 paper", "2020"),
    ("rtx-4090", 165.2, 1.008, 24, r"geforce rtx 4090", "NVIDIA Ada architecture paper", "2022"),
    ("rtx-5090", 209.5, 1.792, 32, r"geforce rtx 5090", "NVIDIA RTX Blackwell architecture paper", "2025"),
    ("mi250x", 383, 3.277, 128, r"instinct mi250x", "AMD Instinct MI250X data sheet, both dies", "2021"),
    ("mi300x", 1307.4, 5.3, 192, r"instinct mi300x( oam)?", "AMD Instinct MI300X data sheet", "2023"),
    ("mi325x", 1307.4, 6.0, 256, r"instinct mi325x( oam)?", "AMD Instinct MI325X data sheet", "2024"),
    ("mi355x", 2516.6, 8.0, 288, r"instinct mi355x( oam)?", "AMD Instinct MI355X data sheet", "2025"),
    ("tpu-v5e", 197, 0.819, 16, "", "Google Cloud TPU v5e system page", "2023"),
    ("tpu-v5p", 459, 2.765, 95, "", "Google Cloud TPU v5p system page", "2023"),
    ("tpu-v6e", 918, 1.64, 32, "", "Google Cloud TPU v6e system page", "2024"),
]

ACCELERATORS: dict[str, Accelerator] = {
    name: Accelerator(
        name=name,
        peak_flops=tera * 1e12,
        bandwidth=bandwidth * 1e12,
        memory=memory * 1e9,
        source=source,
        date=date,
        device_names=pattern,
    )
    for name, tera, bandwidth, memory, pattern, source, date in _ROWS
}


def known_accelerator(device: str) -> Accelerator | None:
    """The table's entry for a short name or for what the driver calls the device; `None` if there is none.

    Example:
        >>> known_accelerator("NVIDIA H200").peak_flops
        989400000000000.0
        >>> known_accelerator("NVIDIA GeForce RTX 4090 Laptop GPU") is None
        True
    """
    name = re.sub(r"^(nvidia|amd)\s+", "", device.strip().lower())
    if name in ACCELERATORS:
        return ACCELERATORS[name]
    for entry in ACCELERATORS.values():
        if entry.device_names and re.fullmatch(entry.device_names, name):
            return entry
    return None


def find_accelerator(device: str | Accelerator) -> Accelerator:
    """The accelerator of that name, or the one that was given.

    Args:
        device: An `Accelerator`, a short name ("h200"), or a driver's device name ("NVIDIA H100 80GB HBM3").

    Returns:
        The entry with its source and date.

    Raises:
        ValueError: The device is not in the table. The message says how to give the numbers.
    """
    if isinstance(device, Accelerator):
        return device
    found = known_accelerator(device)
    if found is not None:
        return found
    close = difflib.get_close_matches(device.lower(), ACCELERATORS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"unknown accelerator {device!r}{hint}. Known: {', '.join(ACCELERATORS)}. For another one give its dense bf16 "
        "peak, bandwidth and memory: `--peak-tflops 500 --bandwidth-tb 2.0 --memory-gb 64` on the command line, or "
        "`Accelerator(name=..., peak_flops=5e14, bandwidth=2e12, memory=64e9)` in Python"
    )
