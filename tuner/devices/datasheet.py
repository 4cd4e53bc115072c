"""One accelerator as its vendor describes it: peak rates, memory, links, and where each is stated.

Peaks are of dense matrices (no structured sparsity) and are never reached; what share of them a
kernel reaches is the business of tuner/costs/analytic. Bandwidths are per device and direction.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from profilers.records import Record

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Vendor(StrEnum):
    """Who makes a device: decides container, resource, connectors and all-to-all kernels."""

    NVIDIA = "nvidia"
    AMD = "amd"
    HUAWEI = "huawei"


class Generation(StrEnum):
    """Devices that reach alike shares of their peaks."""

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

    @property
    def vendor(self) -> Vendor:
        """Who makes it."""
        match self:
            case Generation.CDNA3:
                return Vendor.AMD
            case Generation.ASCEND:
                return Vendor.HUAWEI
            case _:
                return Vendor.NVIDIA


class Datasheet(Record):
    """What a vendor states about one device."""

    name: str
    """What a spec calls it, e.g. `h100-sxm`."""
    aliases: tuple[str, ...] = ()
    """Other spellings that mean this device, e.g. `DGX-H100`."""
    generation: Generation
    compute_units: Annotated[int, Field(ge=1)]
    """Streaming multiprocessors, compute units or cube cores: what runs one tile at a time."""
    flop_per_s: dict[str, Positive]
    """Dense matrix products by type: `bf16` always; `fp8`, `fp4`, `tf32` where there are units."""
    memory_bytes: Annotated[int, Field(ge=1)]
    memory_bytes_per_s: Positive
    scale_up_bytes_per_s: Positive
    """To the other devices of its NVLink-class domain; PCIe where there is none."""
    scale_up_domain: Annotated[int, Field(ge=1)]
    """Devices of one domain in the usual server or rack."""
    devices_per_node: Annotated[int, Field(ge=1)]
    """Devices of the usual server."""
    scale_out_bytes_per_s: Positive
    """The network card that usually goes with one device."""
    host_bytes_per_s: Positive
    """To host memory, for offloading."""
    sources: dict[str, str]
    """Per field: the document that states it."""

    @model_validator(mode="after")
    def _stated(self) -> "Datasheet":
        if "bf16" not in self.flop_per_s:
            raise ValueError(f"{self.name}: flop_per_s needs bf16")
        return self
