"""Seconds of one attention layer of one rank: of running sequences and of prompts.

    running sequences   one new token each, over a past of so many tokens
    prompts             A(s) of one prompt of s tokens; q of them after p cost A(p + q) - A(p)
    checked drafts      q tokens of each sequence at once, t(q) = t(1) r(q) / r(1)

r is the datasheet's time of a kernel that reads the past once and computes for q tokens. Layers
that pick what they look at (DSA), merge it (DeepSeek-V4), or keep a state, are taken to look q
times.

Projections are not part of it, except of sparse compressed attention (DSA), which was measured as
whole modules: where no table has one, its parts stand for it, the projections among them. A module
of compressed attention (MLA) counts where it is faster than kernel, batched GEMMs and projections
one by one. Gated delta rules count as measured where a table has them. Everything else is the sum
of what mixer_ops.py lists.

Letters: Q query points.

Not covered: kernels of shared keys compute 64 heads at least (vLLM 0.33.0, models/deepseek_v4/
nvidia/flashmla.py), whatever a rank has.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.serve.decoder import AttentionKind
from tuner.costs.serve.mixer_ops import Gemm, MixerOps, join_words
from tuner.prices.ops import Op, gemm
from tuner.prices.peer_link import LAUNCH_S
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import ServingMachine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLayer(MixerOps):
    """One layer on one rank, and the machine that prices it."""

    machine: ServingMachine
    indexer_launches: float = 0.0
    """Kernels of an indexer beside its GEMMs and scores (`EngineTraits.indexer_kernels`)."""

    @property
    def projection_gemms(self) -> tuple[Gemm, ...]:
        """Projections that attention's own seconds leave out."""
        return () if self.attention.kind is AttentionKind.SPARSE_LATENT else self.gemms

    def projections_s(self, m_Q: Floats) -> Floats:
        """All of them for m tokens."""
        return self._gemms_s(self.projection_gemms, m_Q)

    def decode_s(self, n_Q: Floats, past_Q: Floats, *, checked: int = 1) -> Floats:
        """Price so many new tokens for each of n sequences."""
        match self.attention.kind:
            case _ if checked == 1:
                return self._one_token_s(n_Q, past_Q)
            case AttentionKind.GROUPED:
                return self._one_token_s(n_Q, past_Q) * self._grown(n_Q, past_Q, checked)
            case AttentionKind.LATENT:
                core_Q = self.machine.seconds(self.decode_core(n_Q, past_Q))
                more_Q = core_Q * (self._grown(n_Q, past_Q, checked) - 1.0)
                around_Q = self._absorbed_gemms_s(n_Q * checked) - self._absorbed_gemms_s(n_Q)
                return self._one_token_s(n_Q, past_Q) + more_Q + around_Q
            case _:
                return self._one_token_s(n_Q * checked, past_Q)

    def prompt_s(self, s_Q: Floats) -> Floats:
        """One prompt of s tokens from its start."""
        match self.attention.kind:
            case AttentionKind.NONE:
                return np.zeros_like(s_Q)
            case AttentionKind.LATENT:
                core_Q = self._ops_s(self.prompt_ops(s_Q))
                return core_Q + self._gemms_s(self.up_gemms, s_Q)
            case AttentionKind.SPARSE_LATENT:
                measured_Q = self._sparse_s("sparse_latent_attention", past=0, sequence=s_Q)
                if measured_Q is None:
                    return self._sparse_parts_s(s_Q, self.prompt_ops(s_Q))
            case AttentionKind.GATED_DELTA:
                measured_Q = self._delta_s("context", s_Q)
            case _:
                measured_Q = None
        return self._ops_s(self.prompt_ops(s_Q)) if measured_Q is None else measured_Q

    def _one_token_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        match self.attention.kind:
            case AttentionKind.NONE:
                return np.zeros_like(n_Q)
            case AttentionKind.LATENT:
                return self._latent_decode_s(n_Q, past_Q)
            case AttentionKind.SPARSE_LATENT:
                measured_Q = None
                if self.context == 1:
                    measured_Q = self._sparse_s("sparse_latent_decode", batch=n_Q, past=past_Q)
                if measured_Q is None:
                    return self._sparse_parts_s(n_Q, self.decode_ops(n_Q, past_Q))
            case AttentionKind.GATED_DELTA:
                measured_Q = self._delta_s("generation", n_Q)
            case _:
                measured_Q = None
        return self._ops_s(self.decode_ops(n_Q, past_Q)) if measured_Q is None else measured_Q

    def _grown(self, n_Q: Floats, past_Q: Floats, checked: int) -> Floats:
        """Seconds for several tokens of each sequence over those for one, by the datasheet.

        The past is read once, whatever the number of query tokens.
        """
        core = self.decode_core(n_Q, past_Q)
        several_Q = self.machine.rated_attention_s(core, checked=checked)
        return np.asarray(several_Q / self.machine.rated_attention_s(core))

    def _absorbed_gemms_s(self, n_Q: Floats) -> Floats:
        """The two batched GEMMs that absorb the up-projections."""
        attention, total_Q = self.attention, np.zeros_like(n_Q)
        for kind in ("pre", "post"):
            product = self._op(
                "latent_product",
                kind=kind,
                dtype="fp8" if self.formats.attention.startswith("fp8") else "bf16",
                tokens=n_Q,
                heads=self.heads,
                elements=attention.kv_rank * attention.value_dim * self.heads,
            )
            total_Q = total_Q + self.machine.seconds(product)
        return total_Q

    def _latent_decode_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        core_Q = self.machine.seconds(self.decode_core(n_Q, past_Q))
        module = join_words("module", self._kv, f"gemm_{self._gemm_format}")
        module_Q = self.machine.measured_s(self._latent_decode(module, n_Q, past_Q))
        best_Q = core_Q + self._absorbed_gemms_s(n_Q)
        if module_Q is not None and self.context == 1:
            rest_Q = module_Q - self.projections_s(n_Q)
            best_Q = np.minimum(best_Q, np.maximum(rest_Q, core_Q))
        return np.asarray(best_Q)

    def _sparse_s(self, operation: str, **sizes: Numbers) -> Floats | None:
        """Return a whole module as measured; None where no table has it."""
        kind = join_words(self.attention.architecture, self._kv, f"gemm_{self._gemm_format}")
        dtype = self.formats.attention
        op = self._op(operation, kind=kind, dtype=dtype, heads=self.heads, **sizes)
        return self.machine.measured_s(op)

    def _sparse_parts_s(self, m_Q: Floats, parts: Iterable[Op]) -> Floats:
        """Sum the parts of a module for m tokens: projections, and those of attention."""
        around_Q = self._gemms_s(self.gemms, m_Q) + self._absorbed_gemms_s(m_Q)
        if self.attention.own_indexer is not None:
            around_Q = around_Q + self.indexer_launches * LAUNCH_S
        return np.asarray(sum((self.machine.seconds(op) for op in parts), start=around_Q))

    def _delta_s(self, phase: str, m_Q: Floats) -> Floats | None:
        """Return a gated delta rule and its convolution as measured; None where no table has it."""
        linear = self.linear
        if linear.key_head_dim != linear.value_head_dim:
            return None
        op = self._op(
            "gated_delta",
            kind=phase,
            tokens=m_Q,
            key_heads=linear.num_key_heads,
            value_heads=linear.num_value_heads,
            head_dim=linear.key_head_dim,
        )
        return self.machine.measured_s(op)

    @property
    def _gemm_format(self) -> str:
        return "fp8_block" if self.formats.attention.startswith("fp8") else "bf16"

    def _gemms_s(self, gemms: Iterable[Gemm], m_Q: Floats) -> Floats:
        total_Q = np.zeros_like(m_Q)
        for n, k, dtype in gemms:
            product = replace(gemm(m_Q, n, k, dtype=dtype), software=self.software)
            total_Q = total_Q + self.machine.seconds(product)
        return total_Q

    def _ops_s(self, ops: Iterable[Op]) -> Floats:
        return np.asarray(sum(self.machine.seconds(op) for op in ops))
