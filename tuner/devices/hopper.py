"""NVIDIA's Hopper devices: one chip with different memories, links and numbers of SMs."""

from typing import Final

from tuner.devices.datasheet import Datasheet, Generation
from tuner.units import parse_bytes, parse_bytes_per_s

_H100: Final = "NVIDIA H100 Tensor Core GPU datasheet (NVIDIA, 2023), column SXM"
_PAPER: Final = "NVIDIA H100 Tensor Core GPU Architecture, white paper (NVIDIA, 2022)"
_DGX: Final = "NVIDIA DGX H100/H200 datasheet (NVIDIA): 8 GPUs, 8 cards of 400 Gb/s"
_H200: Final = "NVIDIA H200 Tensor Core GPU datasheet (NVIDIA, 2024), column SXM"
_GRAND_TETON: Final = (
    "Llama 3 on H100 with torchtitan, performance notes (PyTorch, 2024): Grand Teton hosts"
)
_DEEPSEEK: Final = "DeepSeek-V3 Technical Report (DeepSeek-AI, arXiv:2412.19437), section 3.1"
_H20: Final = "NVIDIA H20 specification sheet for partners (NVIDIA, 2023), as reprinted by vendors"
_FIELDS: Final = {
    "flop_per_s": f"{_H100}: printed with sparsity, halved here",
    "compute_units": f"{_PAPER}: 132 SMs in SXM5",
    "memory_bytes": f"{_H100}; counted in GiB, as the driver does",
    "memory_bytes_per_s": _H100,
    "scale_up_bytes_per_s": f"{_H100}: NVLink 900 GB/s, both directions together",
    "scale_up_domain": _DGX,
    "devices_per_node": _DGX,
    "scale_out_bytes_per_s": _DGX,
    "host_bytes_per_s": f"{_H100}: PCIe Gen5 128 GB/s, both directions together",
}
_PEAKS: Final = {"bf16": 989.4e12, "fp8": 1978.9e12, "tf32": 494.7e12}

H100: Final = Datasheet(
    name="h100-sxm",
    aliases=(
        "H100",
        "H100-80GB",
        "H100-SXM5",
        "H100-SXM-80GB",
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3",
        "DGX-H100",
        "HGX-H100",
    ),
    generation=Generation.HOPPER,
    compute_units=132,
    flop_per_s=_PEAKS,
    memory_bytes=parse_bytes("80GiB"),
    memory_bytes_per_s=parse_bytes_per_s("3.35TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("450GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("400Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("64GB/s"),
    sources=_FIELDS,
)
H100_HBM2E: Final = Datasheet(
    name="h100-96gb-hbm2e",
    aliases=("H100-96GB-HBM2e-500W", "H100-96GB"),
    generation=Generation.HOPPER,
    compute_units=132,
    flop_per_s=_PEAKS,
    memory_bytes=parse_bytes("96GiB"),
    memory_bytes_per_s=parse_bytes_per_s("2.4TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("450GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("400Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("64GB/s"),
    sources={
        **_FIELDS,
        "flop_per_s": f"{_H100}: printed with sparsity, halved here. {_GRAND_TETON} are limited to "
        "500 W of 700 W, which lowers clocks under load and not the peak",
        "memory_bytes": f"{_GRAND_TETON}: 96 GB HBM2e",
        "memory_bytes_per_s": f"{_GRAND_TETON}: 2.4 TB/s",
        "scale_out_bytes_per_s": f"{_GRAND_TETON}: 400 Gb/s per GPU",
        "scale_up_domain": f"{_GRAND_TETON}: 8 GPUs joined by NVLink",
        "devices_per_node": f"{_GRAND_TETON}: 8 GPUs",
    },
)
H200: Final = Datasheet(
    name="h200-sxm",
    aliases=("H200", "H200-141GB", "H200-SXM5", "NVIDIA H200", "DGX-H200", "HGX-H200"),
    generation=Generation.HOPPER,
    compute_units=132,
    flop_per_s=_PEAKS,
    memory_bytes=parse_bytes("141GiB"),
    memory_bytes_per_s=parse_bytes_per_s("4.8TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("450GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("400Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("64GB/s"),
    sources={
        **_FIELDS,
        "flop_per_s": f"{_H200}: printed with sparsity, halved here",
        "memory_bytes": f"{_H200}: 141 GB; counted in GiB, as the driver does",
        "memory_bytes_per_s": _H200,
        "scale_up_bytes_per_s": f"{_H200}: NVLink 900 GB/s, both directions together",
        "host_bytes_per_s": f"{_H200}: PCIe Gen5 128 GB/s, both directions together",
    },
)
H800: Final = Datasheet(
    name="h800-sxm",
    aliases=("H800", "H800-80GB", "H800-SXM5", "NVIDIA H800"),
    generation=Generation.HOPPER,
    compute_units=132,
    flop_per_s=_PEAKS,
    memory_bytes=parse_bytes("80GiB"),
    memory_bytes_per_s=parse_bytes_per_s("3.35TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("200GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("400Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("64GB/s"),
    sources={
        **_FIELDS,
        "scale_up_bytes_per_s": "Insights into DeepSeek-V3 (DeepSeek-AI, arXiv:2505.09343): "
        "NVLink reduced from 900 to 400 GB/s, both directions together",
        "scale_up_domain": f"{_DEEPSEEK}: 8 GPUs joined by NVLink",
        "devices_per_node": f"{_DEEPSEEK}: 8 GPUs",
        "scale_out_bytes_per_s": "Insights into DeepSeek-V3 (DeepSeek-AI, arXiv:2505.09343): "
        "8 cards of 400 Gb/s",
    },
)
H20: Final = Datasheet(
    name="h20-sxm",
    aliases=("H20", "H20-96GB", "NVIDIA H20", "HGX-H20"),
    generation=Generation.HOPPER,
    compute_units=78,
    flop_per_s={"bf16": 148e12, "fp8": 296e12, "tf32": 74e12},
    memory_bytes=parse_bytes("96GiB"),
    memory_bytes_per_s=parse_bytes_per_s("4.0TB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("450GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("400Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("64GB/s"),
    sources={
        "flop_per_s": f"{_H20}: without sparsity",
        "compute_units": "Geekbench 6 result of an H20 (Primate Labs, 2024): 78 compute units",
        "memory_bytes": f"{_H20}: 96 GB HBM3; counted in GiB, as the driver does",
        "memory_bytes_per_s": f"{_H20}: 4.0 TB/s",
        "scale_up_bytes_per_s": f"{_H20}: NVLink 900 GB/s, both directions together",
        "scale_up_domain": f"{_H20}: HGX, 8 GPUs",
        "devices_per_node": f"{_H20}: HGX, 8 GPUs",
        "scale_out_bytes_per_s": f"as {_DGX}",
        "host_bytes_per_s": f"{_H20}: PCIe Gen5 128 GB/s, both directions together",
    },
)
