"""NVIDIA's A100 in two sizes, and the Ada cards L40S and RTX 4090 that have no NVLink."""

from typing import Final

from tuner.devices.datasheet import Datasheet, Generation
from tuner.units import parse_bytes, parse_bytes_per_s

_A100: Final = "NVIDIA A100 Tensor Core GPU datasheet (NVIDIA, 2021)"
_A100_PAPER: Final = "NVIDIA A100 Tensor Core GPU Architecture, white paper V1.0 (NVIDIA, 2020)"
_DGX_A100: Final = "NVIDIA DGX A100 datasheet (NVIDIA): 8 GPUs, 8 cards of 200 Gb/s"
_A100_FIELDS: Final = {
    "flop_per_s": f"{_A100}: without sparsity, accumulated in fp32",
    "compute_units": f"{_A100_PAPER}: 108 SMs",
    "memory_bytes": f"{_A100}; counted in GiB, as the driver does",
    "memory_bytes_per_s": _A100,
    "scale_up_bytes_per_s": f"{_A100}: NVLink 600 GB/s, both directions together",
    "scale_up_domain": _DGX_A100,
    "devices_per_node": _DGX_A100,
    "scale_out_bytes_per_s": _DGX_A100,
    "host_bytes_per_s": f"{_A100}: PCIe Gen4 64 GB/s, both directions together",
}
_L40S: Final = "NVIDIA L40S GPU Accelerator datasheet (NVIDIA, 2023)"
_ADA_PAPER: Final = "NVIDIA Ada GPU Architecture, white paper V2.1 (NVIDIA, 2023)"
_PCIE: Final = "PCI Express 4.0, 16 lanes: 32 GB/s per direction before encoding (PCI-SIG)"

A100_40: Final = Datasheet(
    name="a100-40gb-sxm",
    aliases=("A100-40GB", "A100-40", "A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", "DGX-A100-40GB"),
    generation=Generation.AMPERE,
    compute_units=108,
    flop_per_s={"bf16": 312e12, "tf32": 156e12},
    memory_bytes=parse_bytes("40GiB"),
    memory_bytes_per_s=parse_bytes_per_s("1555GB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("300GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("200Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("32GB/s"),
    sources=_A100_FIELDS,
)
A100_80: Final = Datasheet(
    name="a100-80gb-sxm",
    aliases=(
        "A100",
        "A100-80GB",
        "A100-80",
        "A100-SXM",
        "A100-SXM4-80GB",
        "NVIDIA A100-SXM4-80GB",
        "DGX-A100",
        "DGX-A100-80GB",
        "Ampere (A100-class)",
    ),
    generation=Generation.AMPERE,
    compute_units=108,
    flop_per_s={"bf16": 312e12, "tf32": 156e12},
    memory_bytes=parse_bytes("80GiB"),
    memory_bytes_per_s=parse_bytes_per_s("2039GB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("300GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("200Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("32GB/s"),
    sources=_A100_FIELDS,
)
L40S: Final = Datasheet(
    name="l40s",
    aliases=("NVIDIA L40S", "L40S-48GB"),
    generation=Generation.ADA,
    compute_units=142,
    flop_per_s={"bf16": 362.05e12, "fp8": 733e12, "tf32": 183e12},
    memory_bytes=parse_bytes("45GiB"),
    memory_bytes_per_s=parse_bytes_per_s("864GB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("32GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("200Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("32GB/s"),
    sources={
        "flop_per_s": f"{_L40S}: the figures without sparsity",
        "compute_units": f"{_L40S}: 18,176 CUDA cores, 128 to an SM",
        "memory_bytes": f"{_L40S}: 48 GB with error correction, which takes a sixteenth of GDDR6",
        "memory_bytes_per_s": _L40S,
        "scale_up_bytes_per_s": f"{_L40S}: no NVLink; {_PCIE}",
        "scale_up_domain": f"{_L40S}: no NVLink; the cards of one server share its PCIe",
        "devices_per_node": "NVIDIA-Certified Systems, servers of 8 PCIe cards (NVIDIA)",
        "scale_out_bytes_per_s": "NVIDIA Enterprise Reference Architectures, 2-8-5-200 (NVIDIA): "
        "200 Gb/s per GPU",
        "host_bytes_per_s": f"{_L40S}; {_PCIE}",
    },
)
RTX_4090: Final = Datasheet(
    name="rtx-4090",
    aliases=("RTX4090", "4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
    generation=Generation.ADA,
    compute_units=128,
    flop_per_s={"bf16": 165.2e12, "fp8": 330.3e12, "tf32": 82.6e12},
    memory_bytes=parse_bytes("24GiB"),
    memory_bytes_per_s=parse_bytes_per_s("1008GB/s"),
    scale_up_bytes_per_s=parse_bytes_per_s("32GB/s"),
    scale_up_domain=8,
    devices_per_node=8,
    scale_out_bytes_per_s=parse_bytes_per_s("12.5Gbit/s"),
    host_bytes_per_s=parse_bytes_per_s("32GB/s"),
    sources={
        "flop_per_s": f"{_ADA_PAPER}, appendix A: without sparsity, accumulated in fp32",
        "compute_units": f"{_ADA_PAPER}, appendix A: 128 SMs",
        "memory_bytes": f"{_ADA_PAPER}, appendix A: 24 GB; counted in GiB, as the driver does",
        "memory_bytes_per_s": f"{_ADA_PAPER}, appendix A",
        "scale_up_bytes_per_s": f"{_ADA_PAPER}: no NVLink; {_PCIE}",
        "scale_up_domain": f"{_ADA_PAPER}: no NVLink; the cards of one server share its PCIe",
        "devices_per_node": "assumed: no reference server exists; 8 is the most that is sold",
        "scale_out_bytes_per_s": "assumed: no reference server exists; one card of 100 Gb/s for 8 "
        "devices. Say `nic` and `nics_per_node` in the pool",
        "host_bytes_per_s": f"{_ADA_PAPER}; {_PCIE}",
    },
)
