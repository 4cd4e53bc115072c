"""Messages from one rank to another."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.columns import Numbers

STREAM_RATIO: Final = 0.8
"""Share of the rate of memory or of a link that streams of bytes reach in serving."""
LAUNCH_S: Final = 5e-6
"""Seconds in which a kernel or a message starts."""
NODE_LATENCY_S: Final = 20e-6
"""Latency of a message that leaves the scale-up domain, beyond one inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """Link that carries one message from a rank to another."""

    latency_s: float
    """Seconds of a message without bytes."""
    bytes_per_s: Numbers
    """Rate that a message reaches; where costs of links are relative, their unit a second."""

    def seconds(self, moved_Q: Numbers) -> Floats:
        """Return the seconds of a message of so many bytes, one way."""
        return np.asarray(self.latency_s + moved_Q / self.bytes_per_s)


def peer_link(*, inside_bytes_per_s: float, nic_bytes_per_s: float, is_inside: bool) -> PeerLink:
    """Return the link inside a scale-up domain, or over a device's share of the NICs."""
    rate = inside_bytes_per_s if is_inside else nic_bytes_per_s
    latency_s = LAUNCH_S if is_inside else LAUNCH_S + NODE_LATENCY_S
    return PeerLink(latency_s=latency_s, bytes_per_s=STREAM_RATIO * rate)
