"""Seconds of one attention layer of one rank: of running sequences and of prompts.

    running sequences   one new token each, over a past of so many tokens
    prompts             A(s) of one prompt of s tokens; q of them after p cost A(p + q) - A(p)
    checked drafts      q tokens of each sequence at once, t(q) = t(1) r(q) / r(1)

r is the datasheet's time of a kernel that reads the past once and computes for q tokens. Layers
that pick what they look at (DSA), or keep a state, are taken to look q times.

Projections are not part of it, except where only whole modules were measured: sparse compressed
attention (DSA). A module of compressed attention (MLA) counts where it is faster than kernel,
batched GEMMs and projections one by one.

Letters: Q query points.
"""

from dataclasses import dataclass, replace

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.ops import Op, gemm
from tuner.costs.serve.curves import Floats
from tuner.costs.serve.decoder import AttentionKind, DecoderAttention, Formats
from tuner.costs.serve.machine import ServingMachine
from tuner.costs.serve.work import work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLayer:
    """One layer on one rank."""

    attention: DecoderAttention
    hidden: int
    formats: Formats
    tensor: int
    """Ranks that share the heads."""
    machine: ServingMachine
    software: str

    @property
    def heads(self) -> int:
        """Query heads of the rank."""
        return max(self.attention.heads // self.tensor, 1)

    @property
    def kv_heads(self) -> int:
        """Key heads of the rank; at least one, copied where there are fewer than ranks."""
        return max(self.attention.kv_heads // self.tensor, 1)

    @property
    def projection_gemms(self) -> tuple[tuple[float, float, str], ...]:
        """Projections as (outputs, inputs, format)."""
        own, hidden = self.attention, self.hidden
        inner, outer = self.formats.attention, self.formats.output
        match own.kind:
            case AttentionKind.SPARSE_LATENT:
                return ()
            case AttentionKind.LATENT:
                down = own.query_rank + own.kv_rank + own.rope_dim
                queries_in = own.query_rank or hidden
                return (
                    (down, hidden, inner),
                    (self.heads * own.head_dim, queries_in, inner),
                    (hidden, self.heads * own.value_dim, outer),
                )
            case AttentionKind.GATED_DELTA:
                width = 2 * (self.heads + self.kv_heads) * own.head_dim
                return (
                    (width, hidden, inner),
                    (2 * self.heads, hidden, "bf16"),
                    (hidden, self.heads * own.head_dim, outer),
                )
            case AttentionKind.GROUPED:
                queries = self.heads * (2 if own.has_gate else 1)
                width = (queries + 2 * self.kv_heads) * own.head_dim
                return ((width, hidden, inner), (hidden, self.heads * own.head_dim, outer))

    def projections_s(self, m_Q: Floats) -> Floats:
        """All of them for m tokens."""
        total_Q = np.zeros_like(m_Q)
        for n, k, dtype in self.projection_gemms:
            total_Q = total_Q + self._gemm_s(m_Q, n=n, k=k, dtype=dtype)
        return total_Q

    def decode_s(self, n_Q: Floats, past_Q: Floats, *, checked: int = 1) -> Floats:
        """So many new tokens for each of n sequences."""
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
        own = self.attention
        match own.kind:
            case AttentionKind.GROUPED:
                # A window of w costs s w pairs, as many as s / 2 w prompts of 2 w tokens.
                inside_Q = np.minimum(s_Q, 2.0 * own.window) if own.window else s_Q
                prompt = self._op(
                    "attention",
                    kind=self._kv,
                    batch=1,
                    sequence=inside_Q,
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                    head_dim=own.head_dim,
                )
                whole_Q = self.machine.seconds(replace(prompt, direction="forward"))
                return whole_Q * (s_Q / inside_Q) if own.window else whole_Q
            case AttentionKind.LATENT:
                width = self.heads * (own.head_dim - own.rope_dim + own.value_dim)
                up_Q = self._gemm_s(s_Q, n=width, k=own.kv_rank, dtype=self.formats.attention)
                core_Q = self._seconds(
                    "latent_attention",
                    kind=_joined("core", self._kv),
                    batch=1,
                    sequence=s_Q,
                    heads=self.heads,
                    head_dim=own.head_dim,
                    value_dim=own.value_dim,
                )
                return np.asarray(core_Q + up_Q)
            case AttentionKind.SPARSE_LATENT:
                return self._sparse_s("sparse_latent_attention", batch=1, past=0, sequence=s_Q)
            case AttentionKind.GATED_DELTA:
                return self._delta_s("context", s_Q)

    def decode_core(self, n_Q: Floats, past_Q: Floats) -> Op:
        """Attention of one new token for each of n sequences, without what surrounds it."""
        own = self.attention
        if own.kind is AttentionKind.GROUPED:
            return self._op(
                "decode_attention",
                kind=self._kv,
                batch=n_Q,
                past=past_Q,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=own.head_dim,
                window=own.window or 0,
            )
        return self._latent_decode(_joined("core", self._kv), n_Q, past_Q)

    def _one_token_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        match self.attention.kind:
            case AttentionKind.GROUPED:
                return self.machine.seconds(self.decode_core(n_Q, past_Q))
            case AttentionKind.LATENT:
                return self._latent_decode_s(n_Q, past_Q)
            case AttentionKind.SPARSE_LATENT:
                return self._sparse_s("sparse_latent_decode", batch=n_Q, past=past_Q)
            case AttentionKind.GATED_DELTA:
                return self._delta_s("generation", n_Q)

    def _grown(self, n_Q: Floats, past_Q: Floats, checked: int) -> Floats:
        """Seconds for several tokens of each sequence over those for one, by the datasheet.

        The past is read once, whatever the number of query tokens.
        """
        flop_Q, bytes_Q = work(self.decode_core(n_Q, past_Q))
        one_Q, several_Q = (
            self.machine.roofline_s(tokens * flop_Q, bytes_Q, dtype="bf16")
            for tokens in (1, checked)
        )
        return np.asarray(several_Q / one_Q)

    def _absorbed_gemms_s(self, n_Q: Floats) -> Floats:
        """The two batched GEMMs that absorb the up-projections."""
        own, total_Q = self.attention, np.zeros_like(n_Q)
        for kind in ("pre", "post"):
            total_Q = total_Q + self._seconds(
                "latent_product",
                kind=kind,
                dtype="fp8" if self.formats.attention.startswith("fp8") else "bf16",
                tokens=n_Q,
                heads=self.heads,
                elements=own.kv_rank * own.value_dim * self.heads,
            )
        return total_Q

    def _latent_decode_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        core_Q = self.machine.seconds(self.decode_core(n_Q, past_Q))
        module = _joined("module", self._kv, f"gemm_{self._gemm_format}")
        module_Q = self.machine.measured_s(self._latent_decode(module, n_Q, past_Q))
        best_Q = core_Q + self._absorbed_gemms_s(n_Q)
        if module_Q is not None:
            rest_Q = module_Q - self.projections_s(n_Q)
            best_Q = np.minimum(best_Q, np.maximum(rest_Q, core_Q))
        return np.asarray(best_Q)

    def _latent_decode(self, kind: str, n_Q: Floats, past_Q: Floats) -> Op:
        return self._op(
            "latent_decode",
            kind=kind,
            batch=n_Q,
            past=past_Q,
            heads=self.heads,
            kv_elements=self.attention.kv_elements,
        )

    def _sparse_s(self, operation: str, **sizes: Numbers) -> Floats:
        own = self.attention
        width = own.query_rank + own.kv_rank + own.rope_dim
        weights = self.hidden * (width + self.heads * own.value_dim)
        weights += own.query_rank * self.heads * own.head_dim
        return self._seconds(
            operation,
            kind=_joined(own.architecture, self._kv, f"gemm_{self._gemm_format}"),
            dtype=self.formats.attention,
            heads=self.heads,
            weights=weights,
            **sizes,
        )

    def _delta_s(self, phase: str, m_Q: Floats) -> Floats:
        return self._seconds(
            "gated_delta",
            kind=phase,
            tokens=m_Q,
            key_heads=self.kv_heads,
            value_heads=self.heads,
            head_dim=self.attention.head_dim,
        )

    @property
    def _kv(self) -> str:
        return "kv_fp8" if self.formats.kv == "fp8" else ""

    @property
    def _gemm_format(self) -> str:
        return "fp8_block" if self.formats.attention.startswith("fp8") else "bf16"

    def _gemm_s(self, m_Q: Floats, *, n: float, k: float, dtype: str) -> Floats:
        return self.machine.seconds(replace(gemm(m_Q, n, k, dtype=dtype), software=self.software))

    def _seconds(
        self, operation: str, *, kind: str = "", dtype: str = "", **axes: Numbers
    ) -> Floats:
        return self.machine.seconds(self._op(operation, kind=kind, dtype=dtype, **axes))

    def _op(self, operation: str, *, kind: str = "", dtype: str = "", **axes: Numbers) -> Op:
        return Op(operation=operation, kind=kind, dtype=dtype, axes=axes, software=self.software)


def _joined(*words: str) -> str:
    return "/".join(word for word in words if word)
