"""Seconds of one host and its device, each reading and multiplying what lies in its memory."""

from dataclasses import dataclass
from typing import Final

CORE_FLOP_PER_S: Final = 60e9
"""FLOP/s of a core on quantized matrices; assumed, AVX2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAndDevice:
    """Rates of one host with one device, or with none."""

    device_bytes_per_s: float
    """Rate at which the device reads its memory in decode; 0: there is no device."""
    host_bytes_per_s: float
    """Rate at which the host's threads read experts, one a core."""
    link_bytes_per_s: float
    """Rate of copies from the host to the device."""
    flop_per_s: float
    """FLOP/s of the device in prefill."""
    cores: int
    """Physical cores of the host."""

    def device_read_s(self, num_bytes: float) -> float:
        """Return the seconds in which the device reads; 0 without one."""
        return num_bytes / self.device_bytes_per_s if self.device_bytes_per_s else 0.0

    def host_read_s(self, num_bytes: float, *, threads: int) -> float:
        """Return the seconds in which so many threads read; more than one a core add nothing."""
        return num_bytes / (self.host_bytes_per_s * min(threads, self.cores) / self.cores)

    def copied_s(self, num_bytes: float) -> float:
        """Return the seconds of a copy from the host to the device."""
        return num_bytes / self.link_bytes_per_s

    def device_work_s(self, flop: float) -> float:
        """Return the seconds of the device's matrices in prefill."""
        return flop / self.flop_per_s

    def host_work_s(self, flop: float, *, threads: int) -> float:
        """Return the seconds of the host's matrices with so many threads."""
        return flop / (CORE_FLOP_PER_S * min(threads, self.cores))
