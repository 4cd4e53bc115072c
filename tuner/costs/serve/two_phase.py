"""AFD communication: activations from attention devices to expert devices in two phases, and back.

    B tokens of r bytes    n_a, n_e devices    g, N_e of them in a domain, domains of expert devices
    V = B r g / n_a        bytes of one attention domain
    a, a_nv                latency of half an all-to-all, of one more kernel inside a domain

    inside one domain   a + max(B r, n_e B r / n_a) / W_nv            receiver, sender
    else                phase 1: a_nv + V (g - 1) / (g W_nv), the domain's tokens come together
                        phase 2, the faster of
                          direct   a + max(n_e V / W_a, n_e B r / (N_e W_e))
                          relayed  a + max(N_e V / W_a, B r / W_e) + a_nv + B r / W_nv

W_a and W_e are the NICs of one domain's devices together. A link between two pools carries n_e or
N_e copies of B r besides, and brings its own latency. Gating runs on the expert side, so whole
activations travel and nothing is packed per expert; the way back mirrors the way there.

Source: Janus (arXiv:2512.13525) describes the two phases and both modes of the second; the costs
are Hockney's latency and bandwidth (Parallel Computing 20(3), 1994) of every leg, of which the
slowest end counts. Messages to several receivers are posted without waiting for each other, so
latency counts once. Latency and share of the links are those of the all-to-all around experts
without AFD (all_to_all.py), so that modes are comparable.

Letters: Q query points. Not covered: transfers that hide behind the other half of the batch, NICs
that other traffic uses.
"""

import math
from dataclasses import dataclass

import numpy as np

from tuner.costs.serve.all_to_all import A2A_RATIO, A2A_S
from tuner.costs.serve.curves import Floats
from tuner.costs.serve.machine import LAUNCH_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDevices:
    """Devices of one role."""

    devices: int
    domain: int
    """Devices that reach each other over NVLink-class links."""
    inside_bytes_per_s: float
    """Of one device, to the others of its domain."""
    nic_bytes_per_s: float
    """Of one device's share of the NICs, each direction."""

    @property
    def near(self) -> int:
        """Devices of the role in one domain, the most-loaded."""
        return min(self.devices, self.domain)

    @property
    def domains(self) -> int:
        """That the role takes."""
        return math.ceil(self.devices / self.domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What joins two pools."""

    bytes_per_s: float
    latency_s: float


def two_phase_s(
    tokens_Q: Floats,
    *,
    row_bytes: float,
    attention: RoleDevices,
    experts: RoleDevices,
    wire: Wire | None = None,
) -> Floats:
    """Seconds of one layer's all-to-all, there and back; without a wire both are of one pool."""
    all_Q = tokens_Q * row_bytes
    if wire is None and attention.devices + experts.devices <= attention.domain:
        rate = A2A_RATIO * attention.inside_bytes_per_s
        fan = max(1.0, experts.devices / attention.devices)
        return np.asarray(2.0 * (A2A_S + fan * all_Q / rate))
    gathered_Q = _inside_s(all_Q * (attention.near - 1) / attention.devices, attention)
    direct_Q = _between_s(all_Q, experts.devices, attention, experts, wire)
    relayed_Q = _between_s(all_Q, experts.domains, attention, experts, wire)
    relayed_Q = relayed_Q + _inside_s(all_Q, experts)
    return np.asarray(2.0 * (gathered_Q + np.minimum(direct_Q, relayed_Q)))


def _inside_s(moved_Q: Floats, side: RoleDevices) -> Floats:
    if side.near == 1:
        return np.zeros_like(moved_Q)
    return np.asarray(LAUNCH_S + moved_Q / (A2A_RATIO * side.inside_bytes_per_s))


def _between_s(
    all_Q: Floats, copies: int, attention: RoleDevices, experts: RoleDevices, wire: Wire | None
) -> Floats:
    """Seconds of so many copies of every token between domains."""
    share = A2A_RATIO
    sent_Q = copies * all_Q / (share * attention.devices * attention.nic_bytes_per_s)
    each = copies / experts.domains
    received_Q = each * all_Q / (share * experts.near * experts.nic_bytes_per_s)
    slowest_Q = np.maximum(sent_Q, received_Q)
    if wire is None:
        return np.asarray(A2A_S + slowest_Q)
    return np.asarray(wire.latency_s + np.maximum(slowest_Q, copies * all_Q / wire.bytes_per_s))
