"""NVIDIA's Blackwell devices: B200 and B300 in servers of 8, GB200 and GB300 in racks of 72.

Tables for these print most peaks with structured sparsity; halved here, except fp4 of B300 and
GB300, whose dense peak is printed beside and is three quarters of the sparse one or more, not half.
"""

from typing import Final

from tuner.devices.datasheet import Datasheet, Generation
from tuner.units import parse_bytes, parse_bytes_per_s

_HGX: Final = "NVIDIA HGX Platform, specifications of HGX B300 and HGX B200 (NVIDIA, 2025)"
_DGX_B200: Final = "NVIDIA DGX B200 datasheet (NVIDIA, 2024)"
_DGX_B300: Final = "NVIDIA DGX B300 datasheet (NVIDIA, 2025)"
_ULTRA: Final = "NVIDIA Blackwell Ultra datasheet, column HGX B300 (NVIDIA, 2025)"
_GB200: Final = "NVIDIA GB200 NVL72, specifications (NVIDIA, 2024), per rack of 72"
_GB300: Final = "NVIDIA GB300 NVL72, specifications (NVIDIA, 2025), per rack of 72"
_QUERIED: Final = "as CUDA's device query prints on the device"
_SOFTMAX: Final = (
    "Making Softmax More Efficient with NVIDIA Blackwell Ultra (NVIDIA): twice as many"
)

B200: Final = Datasheet(
    name="b200-sxm",
    aliases=("B200", "B200-180GB", "NVIDIA B200", "DGX-B200", "HGX-B200"),
    generation=Generation.BLACKWELL,
    compute_units=148,
    flop_per_s={"bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12, "tf32": 1125e12},
    memory_bytes=parse_bytes("180GiB"),
    memory_bytes_per_s=parse_bytes_per_s("8TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("900GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("400Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("64GB/s"),
    sources={
        "flop_per_s": f"{_HGX}: an eighth of the board, sparse figures halved",
        "compute_units": f"148 SMs {_QUERIED}",
        "memory_bytes": f"{_DGX_B200}: 1,440 GB of 8 GPUs; counted in GiB, as the driver does",
        "memory_bytes_per_s": f"{_DGX_B200}: 64 TB/s of 8 GPUs",
        "scale_up_bytes_per_s": f"{_HGX}: NVLink 1.8 TB/s, both directions together",
        "scale_up_domain": f"{_DGX_B200}: 8 GPUs",
        "devices_per_node": f"{_DGX_B200}: 8 GPUs",
        "scale_out_bytes_per_s": f"{_DGX_B200}: 8 ports of 400 Gb/s",
        "host_bytes_per_s": f"{_DGX_B200}: PCIe Gen5, 16 lanes",
    },
)
B300: Final = Datasheet(
    name="b300-sxm",
    aliases=("B300", "B300-270GB", "NVIDIA B300 SXM6 AC", "NVIDIA B300", "DGX-B300", "HGX-B300"),
    generation=Generation.BLACKWELL,
    compute_units=148,
    flop_per_s={"bf16": 2250e12, "fp8": 4500e12, "fp4": 14000e12, "tf32": 1125e12},
    exponential_ratio=2.0,
    memory_bytes=parse_bytes("268GiB"),
    memory_bytes_per_s=parse_bytes_per_s("8TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("900GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("800Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("64GB/s"),
    sources={
        "flop_per_s": f"{_ULTRA}: fp4 dense 14 PFLOP/s, others sparse and halved",
        "compute_units": f"148 SMs {_QUERIED}",
        "exponential_ratio": _SOFTMAX,
        "memory_bytes": f"{_HGX}: 2.1 TB of 8 GPUs; 275,040 MiB, as the driver prints",
        "memory_bytes_per_s": f"{_DGX_B300}: 8 TB/s",
        "scale_up_bytes_per_s": f"{_HGX}: NVLink 1.8 TB/s, both directions together",
        "scale_up_domain": f"{_DGX_B300}: 8 GPUs",
        "devices_per_node": f"{_DGX_B300}: 8 GPUs",
        "scale_out_bytes_per_s": f"{_DGX_B300}: 8 ports of 800 Gb/s",
        "host_bytes_per_s": f"{_DGX_B300}: Xeon 6 hosts, PCIe Gen5, 16 lanes",
    },
)
GB200: Final = Datasheet(
    name="gb200-nvl72",
    aliases=("GB200", "DGX-GB200", "GB200-186GB", "NVIDIA GB200", "NVL72"),
    generation=Generation.BLACKWELL,
    compute_units=152,
    flop_per_s={"bf16": 2500e12, "fp8": 5000e12, "fp4": 10000e12, "tf32": 1250e12},
    memory_bytes=parse_bytes("185GiB"),
    memory_bytes_per_s=parse_bytes_per_s("8TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("900GB/s"),
    scale_up_domain=72,
    devices_per_node=4,
    scale_out_bytes_per_s=parse_bytes_per_s("400Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("450GB/s"),
    sources={
        "flop_per_s": f"{_GB200}: sparse figures halved",
        "compute_units": f"152 SMs {_QUERIED}",
        "memory_bytes": f"{_GB200}: 13.4 TB; 189,471 MiB each, as the driver prints",
        "memory_bytes_per_s": f"{_GB200}: 576 TB/s",
        "scale_up_bytes_per_s": f"{_GB200}: NVLink 130 TB/s, both directions together",
        "scale_up_domain": f"{_GB200}: 72 GPUs",
        "devices_per_node": f"{_GB200}: trays of 4 GPUs and 2 Grace processors",
        "scale_out_bytes_per_s": "NVIDIA DGX GB200 datasheet (NVIDIA): 72 ports of 400 Gb/s",
        "host_bytes_per_s": "NVIDIA GB200 Grace Blackwell Superchip (NVIDIA): NVLink-C2C 900 GB/s, "
        "both directions together; two GPUs that copy at once share it",
    },
)
GB300: Final = Datasheet(
    name="gb300-nvl72",
    aliases=("GB300", "DGX-GB300", "GB300-279GB", "NVIDIA GB300"),
    generation=Generation.BLACKWELL,
    compute_units=152,
    flop_per_s={"bf16": 2500e12, "fp8": 5000e12, "fp4": 15000e12, "tf32": 1250e12},
    exponential_ratio=2.0,
    memory_bytes=parse_bytes("277GiB"),
    memory_bytes_per_s=parse_bytes_per_s("8TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("900GB/s"),
    scale_up_domain=72,
    devices_per_node=4,
    scale_out_bytes_per_s=parse_bytes_per_s("800Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("450GB/s"),
    sources={
        "flop_per_s": f"{_GB300}: fp4 dense 1,080 PFLOP/s, others sparse and halved",
        "compute_units": f"152 SMs {_QUERIED}",
        "exponential_ratio": _SOFTMAX,
        "memory_bytes": f"{_GB300}: 20 TB; 284,208 MiB each, as the driver prints",
        "memory_bytes_per_s": f"{_GB300}: 576 TB/s",
        "scale_up_bytes_per_s": f"{_GB300}: NVLink 130 TB/s, both directions together",
        "scale_up_domain": f"{_GB300}: 72 GPUs",
        "devices_per_node": f"{_GB300}: trays of 4 GPUs and 2 Grace processors",
        "scale_out_bytes_per_s": "NVIDIA DGX GB300 datasheet (NVIDIA): 72 ports of 800 Gb/s",
        "host_bytes_per_s": "NVIDIA GB300 NVL72 (NVIDIA): NVLink-C2C 900 GB/s, both directions "
        "together; two GPUs that copy at once share it",
    },
)
