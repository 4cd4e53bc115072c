"""Seconds of a collective whose ranks lie in several scale-up domains.

Engines have their own all-reduce kernels inside a domain only (vLLM and SGLang,
`custom_all_reduce.py`: disabled where a group spans nodes); beyond it NCCL serves, whose latency is
that of hops: n - 1 inside a domain of n ranks, and those between D domains.

    tree    t = b + 2 ((n - 1) h + ceil(log2 D) H)               all-reduce
    ring    t = b + (D (n - 1)) h + (D - 1) H                    all-gather, reduce-scatter
    b, h, H    base, hop by NVLink and by the network, of a protocol: LL, LL128 or Simple

The fastest protocol counts: LL and LL128 pass small messages in flagged words at the rates below,
Simple whole ones at the rates of the links.

Source: constants of NCCL 2.23 to 2.28, src/graph/tuning.cc (`baseLatencies`, `hwLatencies`); the
    rates from a tuning log of 2 x 8 H100 (github.com/NVIDIA/nccl/issues/1453: 37.8 us for 64 KiB by
    LL, 51.6 us for 128 KiB by LL128).
Error: against nccl-tests of 2 x 8 devices, 8 B to 16 MiB, in
    tests/tuner/costs/serve/test_network_collectives.py: within a third on InfiniBand; plugins that
    copy by the host (GPUDirect-TCPXO: 138 us for 16 KiB) are slower.

Letters: Q query points.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.prices.serve.curves import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way of NCCL to pass messages: seconds of its base and of its hops."""

    base_s: float
    inside_s: float
    outside_s: float
    bytes_per_s: float = math.inf
    """Rate of an all-reduced buffer; infinite: that of the links."""


START_S: Final = 15e-6
"""Launch of the kernel, and its proxy thread's first message: what small all-reduces of 16 devices
take beyond NCCL's own constants (0 to 20 us on A100 with HDR, 21 us on H20 with NDR InfiniBand)."""
TREE: Final = (
    Protocol(base_s=6.8e-6, inside_s=0.6e-6, outside_s=5.0e-6, bytes_per_s=5.2e9),
    Protocol(base_s=14.0e-6, inside_s=1.25e-6, outside_s=8.5e-6, bytes_per_s=42e9),
    Protocol(base_s=8.4e-6, inside_s=4.0e-6, outside_s=14.0e-6),
)
RING: Final = (
    Protocol(base_s=6.6e-6, inside_s=0.6e-6, outside_s=2.7e-6, bytes_per_s=5.2e9),
    Protocol(base_s=14.0e-6, inside_s=1.9e-6, outside_s=4.0e-6, bytes_per_s=42e9),
    Protocol(base_s=8.4e-6, inside_s=3.4e-6, outside_s=14.0e-6),
)


def network_collective_s(
    bytes_Q: Floats, moved_Q: Floats, *, kind: str, domain: int, domains: int
) -> Floats:
    """Return the seconds of one collective by NCCL's fastest protocol.

    Args:
        bytes_Q: the larger buffer of a rank.
        moved_Q: seconds of its bytes on the links alone.
        kind: `all_reduce`, `all_gather` or `reduce_scatter`.
        domain: ranks inside one scale-up domain.
        domains: number of domains.
    """
    reduces = kind == "all_reduce"
    inside, outside = domains * (domain - 1), domains - 1
    if reduces:
        inside, outside = 2 * (domain - 1), 2 * math.ceil(math.log2(domains))
    # A gathered buffer passes every link once, a reduced one twice.
    passes = 1.0 if reduces else 0.5
    by_protocol = [
        protocol.base_s
        + inside * protocol.inside_s
        + outside * protocol.outside_s
        + np.maximum(passes * bytes_Q / protocol.bytes_per_s, moved_Q)
        for protocol in (TREE if reduces else RING)
    ]
    return np.asarray(START_S + np.min(by_protocol, axis=0))
