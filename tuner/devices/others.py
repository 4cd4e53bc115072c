"""Devices that are not NVIDIA's: AMD MI300X, Huawei Ascend 910B, and processors."""

from typing import Final

from tuner.devices.datasheet import Datasheet, Generation
from tuner.units import parse_bytes, parse_bytes_per_s

_MI300X: Final = "AMD Instinct MI300X Accelerator data sheet (AMD, 2023)"
_PLATFORM: Final = "AMD Instinct MI300X Platform data sheet (AMD, 2023)"
_ATLAS: Final = "Atlas 800T A2 training server, technical specifications (Huawei, 2023)"
_CLOUDMATRIX: Final = (
    "Serving Large Language Models on Huawei CloudMatrix384 (Huawei, arXiv:2506.12708)"
)
_CANN: Final = "platform configuration of Ascend910B2 in the CANN toolkit (Huawei)"

MI300X: Final = Datasheet(
    name="mi300x",
    aliases=("MI300X-192GB", "AMD Instinct MI300X", "AMD Instinct MI300X OAM", "Instinct MI300X"),
    generation=Generation.CDNA3,
    compute_units=304,
    flop_per_s={"bf16": 1307.4e12, "fp8": 2614.9e12, "tf32": 653.7e12},
    memory_bytes=parse_bytes("192GiB"),
    memory_bytes_per_s=parse_bytes_per_s("5.3TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("448GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("400Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("64GB/s"),
    sources={
        "flop_per_s": f"{_MI300X}: without sparsity",
        "compute_units": f"{_MI300X}: 304",
        "memory_bytes": f"{_MI300X}: 192 GB; counted in GiB, as the driver does",
        "memory_bytes_per_s": f"{_MI300X}: 5.3 TB/s",
        "scale_up_bytes_per_s": f"{_PLATFORM}: 7 links of 128 GB/s, both directions together; one "
        "link, 64 GB/s, to each other device",
        "scale_up_domain": f"{_PLATFORM}: 8",
        "devices_per_node": f"{_PLATFORM}: 8",
        "scale_out_bytes_per_s": "AMD Instinct MI300X cluster reference design (AMD): one card of "
        "400 Gb/s per device",
        "host_bytes_per_s": f"{_MI300X}: PCIe Gen5 128 GB/s, both directions together",
    },
)
ASCEND_910B: Final = Datasheet(
    name="ascend-910b",
    aliases=("910B", "Ascend910B", "Ascend910B2", "Ascend 910B2", "Ascend-910B-64GB"),
    generation=Generation.ASCEND,
    compute_units=24,
    flop_per_s={"bf16": 353.9e12},
    memory_bytes=parse_bytes("64GiB"),
    memory_bytes_per_s=parse_bytes_per_s("1.6TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("196GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("200Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("32GB/s"),
    sources={
        "flop_per_s": f"24 cube cores of 16 x 16 x 16 multiply-adds at 1.8 GHz ({_CANN}). The 376 "
        "TFLOP/s that are often quoted count the vector units too",
        "compute_units": f"{_CANN}: 24 cube cores in the 910B2",
        "memory_bytes": f"{_ATLAS}: 64 GB; counted in GiB, as the driver does",
        "memory_bytes_per_s": f"{_CLOUDMATRIX}: 1.6 TB/s for one die",
        "scale_up_bytes_per_s": f"{_ATLAS}: HCCS 392 GB/s, both directions together; 28 GB/s to "
        "each other device",
        "scale_up_domain": f"{_ATLAS}: 8",
        "devices_per_node": f"{_ATLAS}: 8",
        "scale_out_bytes_per_s": f"{_ATLAS}: 8 ports of 200 Gb/s",
        "host_bytes_per_s": f"{_ATLAS}: PCIe Gen4, 16 lanes",
    },
)
CPU: Final = Datasheet(
    name="cpu",
    aliases=("processor",),
    generation=Generation.PROCESSOR,
    compute_units=1,
    flop_per_s={"bf16": 50e9, "fp32": 50e9},
    memory_bytes=parse_bytes("4GiB"),
    memory_bytes_per_s=parse_bytes_per_s("10GB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("1GB/s"),
    scale_up_domain=1,
    devices_per_node=1,
    scale_out_bytes_per_s=parse_bytes_per_s("1GB/s"),
    host_bytes_per_s=parse_bytes_per_s("10GB/s"),
    sources=dict.fromkeys(
        (
            "flop_per_s",
            "compute_units",
            "memory_bytes",
            "memory_bytes_per_s",
            "scale_up_bytes_per_s",
            "scale_up_domain",
            "devices_per_node",
            "scale_out_bytes_per_s",
            "host_bytes_per_s",
        ),
        "a place holder: one core, until a profile says more (tuner/devices/measured.py)",
    ),
)
