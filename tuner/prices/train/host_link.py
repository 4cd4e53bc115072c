"""Copies between devices and their hosts, and the optimizer on either."""

from typing import Final

from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware
from tuner.prices.train.constants import Constants

HOST_LINK_RATIO: Final = 0.75
"""Share of the peak of the link to the host that large copies from pinned memory reach: 12 of the
16 GB a second of PCIe 3.0 in Rajbhandari et al., ZeRO-Infinity (arXiv:2104.07857)."""
OFFLOAD_BYTES: Final = (4.0 + 4.0) / HOST_LINK_RATIO + 28.0
"""Bytes, in terms of the host link's peak, per parameter whose optimizer state is in host memory:
fp32 gradient down and weight up over the link, one after the other (Megatron-Core's
hybrid_optimizer.py copies both as fp32, and overlaps them with other parameters' only on request),
and fp32 gradient, moments and weight read or written by the host (28), whose memory is taken to be
as fast as the link."""


def host_copy_s(copied_bytes: Numbers, hardware: Hardware) -> Numbers:
    """Seconds to copy bytes to a device's host or back."""
    return copied_bytes / (hardware.host_bytes_per_s * HOST_LINK_RATIO)


def optimizer_s(offload: Numbers, hardware: Hardware, constants: Constants) -> Numbers:
    """Seconds that the optimizer takes for a parameter, a share of whose state is offloaded."""
    on_device_s = constants.optimizer_bytes * (1.0 - offload) / hardware.memory_bytes_per_s
    return on_device_s + OFFLOAD_BYTES * offload / hardware.host_bytes_per_s
