"""One accelerator's datasheet: peak rates, memory, links, and the source of each figure.

Peaks are for dense matrices (no structured sparsity); the share that a kernel reaches is modelled
in tuner/costs/train. Bandwidths are per device and direction.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from profilers.records import Record

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


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
    """NVIDIA A100."""
    ADA = "ada"
    """NVIDIA L40S, RTX 4090."""
    HOPPER = "hopper"
    """NVIDIA H100, H200, H800, H20."""
    BLACKWELL = "blackwell"
    """NVIDIA B200, B300, GB200, GB300."""
    CDNA3 = "cdna3"
    """AMD MI300X."""
    ASCEND = "ascend"
    """Huawei Ascend 910B."""
    PROCESSOR = "processor"

    @property
    def vendor(self) -> Vendor:
        """Its vendor."""
        match self:
            case Generation.CDNA3:
                return Vendor.AMD
            case Generation.ASCEND:
                return Vendor.HUAWEI
            case Generation.PROCESSOR:
                return Vendor.CPU
            case _:
                return Vendor.NVIDIA


class Datasheet(Record):
    """A vendor's figures for one device."""

    name: str
    """Name in a spec, e.g. `h100-sxm`."""
    aliases: tuple[str, ...] = ()
    """Other names of this device, e.g. `DGX-H100`."""
    generation: Generation
    compute_units: Annotated[int, Field(ge=1)]
    """Streaming multiprocessors, compute units or cube cores."""
    flop_per_s: dict[str, Positive]
    """Dense matmuls by type: `bf16` always; `fp8`, `fp4`, `tf32` where supported."""
    exponential_ratio: Positive = 1.0
    """Exponentials of a unit and clock over those of its generation's other devices."""
    memory_bytes: Annotated[int, Field(ge=1)]
    memory_bytes_per_s: Positive
    scale_up_bytes_per_s: Positive
    """To the other devices of its NVLink-class domain; PCIe where there is none."""
    scale_up_domain: Annotated[int, Field(ge=1)]
    """Devices of one domain in the reference server or rack."""
    devices_per_node: Annotated[int, Field(ge=1)]
    """Devices of the reference server."""
    scale_out_bytes_per_s: Positive
    """The usual NIC of one device."""
    host_bytes_per_s: Positive
    """Bandwidth to host memory, for offloading."""
    sources: dict[str, str]
    """Source of each field that is stated."""

    @model_validator(mode="after")
    def _stated(self) -> "Datasheet":
        if "bf16" not in self.flop_per_s:
            raise ValueError(f"{self.name}: flop_per_s needs bf16")
        return self
