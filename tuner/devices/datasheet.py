"""One accelerator's datasheet: peak rates, memory, links, and the source of each figure.

Peaks are for dense matrices (no structured sparsity); the share that a kernel reaches is modelled
in tuner/costs/train. Bandwidths are per device and direction.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, model_validator

from profilers.records import Record
from tuner.units import parse_bytes, parse_bytes_per_s

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


_LEAST: Final = 1_000_000
"""Bytes, and bytes a second, below which a number in a file must have lost its unit."""


def _parsed(parse: Callable[[str], float], example: str) -> BeforeValidator:
    def read(value: Any) -> Any:
        if isinstance(value, str):
            return parse(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < _LEAST:
            raise ValueError(f"{value!r} has no unit; write it like {example!r}")
        return value

    return BeforeValidator(read)


Size = Annotated[int, Field(ge=1, le=2**63), _parsed(parse_bytes, "80GiB")]
"""Bytes; text with its unit, such as `80GiB`, too."""
Rate = Annotated[Positive, _parsed(parse_bytes_per_s, "450GB/s")]
"""Bytes per second; text with its unit, such as `450GB/s` or `400Gbit/s`, too."""


class Vendor(StrEnum):
    """Vendor of a device: determines container, resource, connectors and all-to-all kernels."""

    NVIDIA = "nvidia"
    AMD = "amd"
    HUAWEI = "huawei"
    CPU = "cpu"
    """Processors of any make, which their own profile describes."""


class Generation(StrEnum):
    """Devices that reach similar shares of their peaks."""

    AMPERE = "ampere"
    """NVIDIA A100, A800, A40, RTX A6000, RTX 3090."""
    ADA = "ada"
    """NVIDIA L40S, L20, L4, RTX 6000 Ada, RTX 4090."""
    HOPPER = "hopper"
    """NVIDIA H100, H200, H800, H20, GH200."""
    BLACKWELL = "blackwell"
    """NVIDIA B200, B300, GB200, GB300."""
    BLACKWELL_RTX = "blackwell-rtx"
    """NVIDIA RTX 5090, RTX PRO 6000, GB10: compute capability 12.x, whose tensor cores, and so
    whose kernels, are not those of B200."""
    CDNA3 = "cdna3"
    """AMD MI300X, MI325X."""
    CDNA4 = "cdna4"
    """AMD MI350X, MI355X."""
    ASCEND = "ascend"
    """Huawei Ascend 910B, 910C."""
    PROCESSOR = "processor"

    @property
    def vendor(self) -> Vendor:
        """Vendor of the devices."""
        match self:
            case Generation.CDNA3 | Generation.CDNA4:
                return Vendor.AMD
            case Generation.ASCEND:
                return Vendor.HUAWEI
            case Generation.PROCESSOR:
                return Vendor.CPU
            case _:
                return Vendor.NVIDIA


class Datasheet(Record):
    """A vendor's figures for one device: a file in `sheets/`, or `device` in a spec."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    """Name in a spec, e.g. `h100-sxm`."""
    aliases: tuple[str, ...] = ()
    """Other names of this device, e.g. `DGX-H100`."""
    generation: Generation
    """Generation whose kernels it runs."""
    compute_units: Annotated[int, Field(ge=1)]
    """Streaming multiprocessors, compute units or cube cores."""
    flop_per_s: dict[str, Positive]
    """Dense matmuls by type: `bf16` always; `fp8`, `fp4`, `tf32` where supported; `fp32`
    without tensor cores, where stated."""
    reached_ratio: dict[str, Share] = Field(default_factory=dict)
    """Share of `flop_per_s` that GEMMs of a model's sizes sustain in serving, by type; of a type
    that is left out 0.7, as on H100 and H200 (tuner/prices/datasheet.py)."""
    exponential_ratio: Positive = 1.0
    """Exponentials of a unit and clock over those of its generation's other devices."""
    matrix_ratio: Positive = 1.0
    """Dense matmuls of a unit and clock over those of its generation's other devices."""
    memory_bytes: Size
    """Memory of one device."""
    memory_bytes_per_s: Rate
    """Bandwidth of that memory."""
    scale_up_bytes_per_s: Rate
    """Bandwidth, in one direction, from a device to the others of its NVLink-class domain; of PCIe
    where there is none."""
    scale_up_domain: Annotated[int, Field(ge=1)] = 1
    """Devices of one domain in the reference server or rack."""
    devices_per_node: Annotated[int, Field(ge=1)] = 1
    """Devices of the reference server."""
    has_peer_copies: bool = True
    """The driver copies between devices of one server without the host's memory."""
    scale_out_bytes_per_s: Rate
    """The usual NIC of one device."""
    host_bytes_per_s: Rate
    """Bandwidth to host memory, for offloading."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Source of each field that is stated."""

    @model_validator(mode="after")
    def _stated(self) -> "Datasheet":
        if "bf16" not in self.flop_per_s:
            raise ValueError(f"{self.name}: flop_per_s needs bf16")
        return self
