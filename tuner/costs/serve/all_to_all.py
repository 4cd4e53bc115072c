"""Dispatch and combine of one MoE layer: tokens of attention-DP ranks to their experts and back.

    gathered     every rank gathers all m d rows of h elements; results are summed and scattered
    dispatched   copies travel, in fp8 to the experts and in bf16 back: as measured for DeepEP, else
                 2 a + m c h (1 + 2) / (0.6 W)     c = min(k, R - 1) copies of R ranks, W the link;
                 beyond a domain of N ranks c (1 - N / R) of them
                 normal kernels beyond a domain: c = (D - 1) (1 - (1 - 1 / D)^k) of D domains, as
                 copies to one share a message and are passed on inside it (DeepEP's README)

Letters: Q query points. Not covered: uneven expert loads; group-limited routing.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.catalog.serve_rules.manifest import LARGEST_DISPATCH_TOKENS
from tuner.costs.serve.engine import A2aBackend
from tuner.costs.serve.ops import collective
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import ServingMachine

ELEMENT_BYTES: Final = 2.0
DISPATCH_BYTES: Final = 1.0
"""Bytes of an element that is dispatched in fp8."""
A2A_S: Final = 15e-6
A2A_RATIO: Final = 0.6
"""Seconds of latency of half an all-to-all by low-latency kernels, and the share of the link's
bandwidth that they reach."""
NORMAL_A2A_S: Final = 37e-6
NORMAL_A2A_OUTSIDE_S: Final = 71e-6
"""Seconds of latency of half an all-to-all by normal kernels, inside a domain and beyond it: mean
of dispatch and combine of one token on 8 and 16 H200 in aiconfigurator's tables."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTraffic:
    """The all-to-all of one layer."""

    machine: ServingMachine
    hidden: int
    top_k: float
    """Copies of a token that are dispatched, mean."""
    ranks: int
    """Ranks that share the experts."""
    a2a_backend: A2aBackend
    software: str

    def seconds(self, m_Q: Floats, *, together_Q: Floats) -> Floats:
        """Dispatch and combine, for m tokens of a rank and the tokens of all ranks together."""
        if self.a2a_backend in (A2aBackend.NORMAL, A2aBackend.LOW_LATENCY):
            return self._deepep_s(m_Q)
        gathered_Q = self._collective_s("all_gather", together_Q)
        whole_Q = gathered_Q + self._collective_s("reduce_scatter", together_Q)
        if self.a2a_backend is A2aBackend.ALLGATHER:
            return whole_Q
        measured_Q = self.machine.all_to_all_s(
            m_Q, hidden=self.hidden, top_k=self.top_k, ranks=self.ranks
        )
        if measured_Q is None:
            low_Q = self._sent_s(m_Q, half_s=A2A_S)
            measured_Q = np.minimum(low_Q, self._normal_s(m_Q))
        return np.minimum(whole_Q, measured_Q)

    def _deepep_s(self, m_Q: Floats) -> Floats:
        """Price dispatch and combine with the chosen DeepEP kernels."""
        normal_Q, low_Q = self.machine.deepep_s(
            m_Q, hidden=self.hidden, top_k=self.top_k, ranks=self.ranks
        )
        if normal_Q is None:
            normal_Q = self._normal_s(m_Q)
        if self.a2a_backend is A2aBackend.NORMAL:
            return normal_Q
        if low_Q is None:
            low_Q = self._sent_s(m_Q, half_s=A2A_S)
            low_Q = np.where(m_Q > LARGEST_DISPATCH_TOKENS, np.inf, low_Q)
        return np.where(np.isfinite(low_Q), low_Q, normal_Q)

    def _normal_s(self, m_Q: Floats) -> Floats:
        """Kernels for many tokens, by the links alone."""
        if self._is_inside:
            return self._sent_s(m_Q, half_s=NORMAL_A2A_S)
        sheet = self.machine.sheet
        domains = self.ranks / sheet.scale_up_domain
        reached = float((domains - 1.0) * (1.0 - (1.0 - 1.0 / domains) ** self.top_k))
        moved_Q = m_Q * reached * self.hidden * (DISPATCH_BYTES + ELEMENT_BYTES)
        return 2.0 * NORMAL_A2A_OUTSIDE_S + self.machine.outside_s(moved_Q, ratio=A2A_RATIO)

    @property
    def _is_inside(self) -> bool:
        return self.ranks <= self.machine.sheet.scale_up_domain

    def _sent_s(self, m_Q: Floats, *, half_s: float) -> Floats:
        """Both halves by the links alone."""
        sheet, copies = self.machine.sheet, float(min(self.top_k, self.ranks - 1))
        if not self._is_inside:
            # Those to the own domain go beside and are faster.
            copies *= 1.0 - sheet.scale_up_domain / self.ranks
        moved_Q = m_Q * copies * self.hidden * (DISPATCH_BYTES + ELEMENT_BYTES)
        rate = sheet.scale_up_bytes_per_s if self._is_inside else sheet.scale_out_bytes_per_s
        return 2.0 * half_s + moved_Q / (A2A_RATIO * rate)

    def _collective_s(self, kind: str, m_Q: Floats) -> Floats:
        moved_Q = ELEMENT_BYTES * m_Q * self.hidden
        return self.machine.seconds(
            collective(kind, moved_Q, ranks=self.ranks, software=self.software)
        )
