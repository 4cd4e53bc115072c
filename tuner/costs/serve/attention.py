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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.costs.serve.curves import Floats
from tuner.costs.serve.decoder import AttentionKind, DecoderAttention, Formats
from tuner.costs.serve.machine import ServingMachine
from tuner.costs.serve.tables import Key


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

    def _gemm_s(self, m_Q: Floats, *, n: float, k: float, dtype: str) -> Floats:
        return self.machine.gemm_s(m_Q, n=n, k=k, dtype=dtype, software=self.software)

    def decode_s(self, n_Q: Floats, past_Q: Floats, *, checked: int = 1) -> Floats:
        """So many new tokens for each of n sequences."""
        match self.attention.kind:
            case _ if checked == 1:
                return self._one_token_s(n_Q, past_Q)
            case AttentionKind.GROUPED:
                return self._one_token_s(n_Q, past_Q) * self._grown(n_Q, past_Q, checked)
            case AttentionKind.LATENT:
                core_Q = self._latent_core_s(n_Q, past_Q)
                more_Q = core_Q * (self._grown(n_Q, past_Q, checked) - 1.0)
                around_Q = self._absorbed_gemms_s(n_Q * checked) - self._absorbed_gemms_s(n_Q)
                return self._one_token_s(n_Q, past_Q) + more_Q + around_Q
            case _:
                return self._one_token_s(n_Q * checked, past_Q)

    def _grown(self, n_Q: Floats, past_Q: Floats, checked: int) -> Floats:
        """Seconds for several tokens of each sequence over those for one, by the datasheet."""
        one_Q, several_Q = (self._core_rated_s(n_Q, past_Q, tokens) for tokens in (1, checked))
        return np.asarray(several_Q / one_Q)

    def _core_rated_s(self, n_Q: Floats, past_Q: Floats, checked: int = 1) -> Floats:
        """Roofline time: the past is read once, whatever the number of query tokens."""
        own, width = self.attention, 1.0 if self.formats.kv == "fp8" else 2.0
        if own.kind is AttentionKind.GROUPED:
            seen_Q = np.minimum(past_Q, own.window) if own.window else past_Q
            moved_Q = n_Q * seen_Q * 2.0 * self.kv_heads * own.head_dim * width
            flop_Q = 4.0 * n_Q * seen_Q * self.heads * own.head_dim
        else:
            moved_Q = n_Q * past_Q * own.kv_elements * width
            flop_Q = 4.0 * n_Q * past_Q * self.heads * own.kv_elements
        return self.machine.roofline_s(checked * flop_Q, moved_Q, dtype="bf16")

    def _one_token_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        match self.attention.kind:
            case AttentionKind.GROUPED:
                return self._grouped_decode_s(n_Q, past_Q)
            case AttentionKind.LATENT:
                return self._latent_decode_s(n_Q, past_Q)
            case AttentionKind.SPARSE_LATENT:
                return self._sparse_decode_s(n_Q, past_Q)
            case AttentionKind.GATED_DELTA:
                return self._delta_s("generation", n_Q)

    def prompt_s(self, s_Q: Floats) -> Floats:
        """One prompt of s tokens from its start."""
        match self.attention.kind:
            case AttentionKind.GROUPED:
                return self._grouped_prompt_s(s_Q)
            case AttentionKind.LATENT:
                return self._latent_prompt_s(s_Q)
            case AttentionKind.SPARSE_LATENT:
                return self._sparse_prompt_s(s_Q)
            case AttentionKind.GATED_DELTA:
                return self._delta_s("context", s_Q)

    def _softwares(self, operation: str) -> list[str]:
        """Engines with measurements, the own one first."""
        if self.machine.tables is None:
            return []
        names = self.machine.tables.softwares(operation)
        return sorted(names, key=lambda name: (name != self.software, name))

    @property
    def _kv(self) -> str:
        return "kv_fp8" if self.formats.kv == "fp8" else ""

    def _planes_s(
        self, operation: str, keys: Sequence[Key], x_Q: Floats, y_Q: Floats
    ) -> list[Floats]:
        if self.machine.tables is None:
            return []
        planes = [self.machine.tables.plane(operation, key) for key in keys]
        return [plane.seconds(x_Q, y_Q) for plane in planes if plane is not None]

    def _grouped_decode_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        if self.attention.window:
            past_Q = np.minimum(past_Q, self.attention.window)
        own = (self.heads, self.kv_heads, self.attention.head_dim)
        for software in self._softwares("decode_attention"):
            for kind in dict.fromkeys((self._kv, "")):
                keys: list[Key] = [(software, kind, "bf16", *own, 0)]
                measured = self._planes_s("decode_attention", keys, n_Q, past_Q)
                if measured:
                    return measured[0]
        self.machine.estimated.add("decode_attention")
        return self._core_rated_s(n_Q, past_Q)

    def _grouped_prompt_s(self, s_Q: Floats) -> Floats:
        if not self.attention.window:
            return self._causal_s(s_Q)
        # A window of w costs s w pairs, as many as s / 2 w prompts of 2 w tokens.
        inside_Q = np.minimum(s_Q, 2.0 * self.attention.window)
        return self._causal_s(inside_Q) * (s_Q / inside_Q)

    def _causal_s(self, s_Q: Floats) -> Floats:
        own = (self.heads, self.kv_heads, self.attention.head_dim)
        for software in self._softwares("attention"):
            keys: list[Key] = [(software, kind, "bf16", *own) for kind in (self._kv, "")]
            curve = self.machine.curve("attention", keys)
            if curve is not None:
                # Beyond the longest prompt measured, attention grows with the square.
                return curve.seconds(s_Q) * np.maximum(s_Q / curve.largest, 1.0)
        self.machine.estimated.add("attention")
        flop = 2.0 * s_Q * s_Q * own[0] * own[2]
        return self.machine.roofline_s(flop, 2.0 * s_Q * own[0] * own[2], dtype="bf16")

    def _absorbed_gemms_s(self, n_Q: Floats) -> Floats:
        """The two batched GEMMs that absorb the up-projections."""
        total_Q = np.zeros_like(n_Q)
        for kind in ("pre", "post"):
            names = self._softwares("latent_product")
            dtype = "fp8" if self.formats.attention.startswith("fp8") else "bf16"
            keys: list[Key] = [
                (name, kind, each, self.heads)
                for each in dict.fromkeys((dtype, "bf16"))
                for name in names
            ]
            curve = self.machine.curve("latent_product", keys)
            if curve is None:
                self.machine.estimated.add("latent_product")
                size = self.attention.kv_rank * self.attention.value_dim * self.heads
                total_Q = total_Q + self.machine.roofline_s(
                    2.0 * n_Q * size, 2.0 * size + 0.0 * n_Q, dtype="bf16"
                )
            else:
                total_Q = total_Q + curve.seconds(n_Q)
        return total_Q

    def _module_kind(self) -> str:
        gemm = "fp8_block" if self.formats.attention.startswith("fp8") else "bf16"
        return "/".join(word for word in ("module", self._kv, f"gemm_{gemm}") if word)

    def _latent_core_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        core = "/".join(word for word in ("core", self._kv) if word)
        keys: list[Key] = [
            (name, core, "bf16", self.heads) for name in self._softwares("latent_decode")
        ]
        cores = self._planes_s("latent_decode", keys, n_Q, past_Q)
        if not cores:
            self.machine.estimated.add("latent_decode")
            return self._core_rated_s(n_Q, past_Q)
        return np.asarray(np.min(cores, axis=0))

    def _latent_decode_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        core_Q = self._latent_core_s(n_Q, past_Q)
        keys: list[Key] = [
            (name, self._module_kind(), "bf16", self.heads)
            for name in self._softwares("latent_decode")
        ]
        modules = self._planes_s("latent_decode", keys, n_Q, past_Q)
        best_Q = core_Q + self._absorbed_gemms_s(n_Q)
        if modules:
            rest_Q = np.min(modules, axis=0) - self.projections_s(n_Q)
            best_Q = np.minimum(best_Q, np.maximum(rest_Q, core_Q))
        return np.asarray(best_Q)

    def _latent_prompt_s(self, s_Q: Floats) -> Floats:
        own = self.attention
        names = self._softwares("latent_attention")
        core = "/".join(word for word in ("core", self._kv) if word)
        nope = own.head_dim - own.rope_dim
        width = self.heads * (nope + own.value_dim)
        up_Q = self._gemm_s(s_Q, n=width, k=own.kv_rank, dtype=self.formats.attention)
        curves = [
            self.machine.curve("latent_attention", [(name, core, "bf16", self.heads)])
            for name in names
        ]
        measured = [
            curve.seconds(s_Q) * np.maximum(s_Q / curve.largest, 1.0)
            for curve in curves
            if curve is not None
        ]
        if not measured:
            self.machine.estimated.add("latent_attention")
            flop = s_Q * s_Q * self.heads * (own.head_dim + own.value_dim)
            measured = [self.machine.roofline_s(flop, 0.0 * s_Q, dtype="bf16")]
        return np.asarray(np.min(measured, axis=0) + up_Q)

    def _sparse_kinds(self) -> list[str]:
        gemm = "fp8_block" if self.formats.attention.startswith("fp8") else "bf16"
        kinds = [
            "/".join(word for word in (self.attention.architecture, kv, f"gemm_{gemm}") if word)
            for kv in (self._kv, "", "kv_fp8")
        ]
        return list(dict.fromkeys(kinds))

    def _sparse_decode_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        for software in self._softwares("sparse_latent_decode"):
            for kind in self._sparse_kinds():
                keys: list[Key] = [(software, kind, "bf16", self.heads)]
                measured = self._planes_s("sparse_latent_decode", keys, n_Q, past_Q)
                if measured:
                    return measured[0]
        self.machine.estimated.add("sparse_latent_decode")
        return self._sparse_estimate_s(n_Q)

    def _sparse_prompt_s(self, s_Q: Floats) -> Floats:
        for software in self._softwares("sparse_latent_attention"):
            keys: list[Key] = [
                (software, kind, "bf16", self.heads) for kind in self._sparse_kinds()
            ]
            curve = self.machine.curve("sparse_latent_attention", keys)
            if curve is not None:
                return curve.seconds(s_Q)
        self.machine.estimated.add("sparse_latent_attention")
        return self._sparse_estimate_s(s_Q)

    def _sparse_estimate_s(self, m_Q: Floats) -> Floats:
        """Projections of MLA; the tokens that the indexer picks are few."""
        own = self.attention
        width = own.query_rank + own.kv_rank + own.rope_dim
        weights = self.hidden * (width + self.heads * own.value_dim)
        weights += own.query_rank * self.heads * own.head_dim
        return self.machine.roofline_s(
            2.0 * m_Q * weights, 1.0 * weights + 0.0 * m_Q, dtype=self.formats.attention
        )

    def _delta_s(self, phase: str, m_Q: Floats) -> Floats:
        """Convolution and recurrence; the state is of fixed size, so the past does not count."""
        tail = ("bf16", self.kv_heads, self.heads)
        for software in self._softwares("gated_delta"):
            if self.machine.tables is None:
                break
            kinds = {
                str(key[1])
                for key in self.machine.tables.shapes("gated_delta")
                if key[0] == software and str(key[1]).startswith(phase) and key[2:] == tail
            }
            keys: list[Key] = [(software, kind, *tail) for kind in sorted(kinds)]
            if len(keys) < 2:
                continue
            if phase == "generation":
                parts = self._planes_s("gated_delta", keys, m_Q, np.ones_like(m_Q))
                return np.asarray(np.sum(parts, axis=0))
            curves = [self.machine.curve("gated_delta", [key]) for key in keys]
            parts = [curve.seconds(m_Q) for curve in curves if curve is not None]
            return np.asarray(np.sum(parts, axis=0))
        self.machine.estimated.add("gated_delta")
        state = 4.0 * self.heads * self.attention.head_dim**2
        moved_Q = 2.0 * state * m_Q if phase == "generation" else 2.0 * state * m_Q / 64.0
        return self.machine.roofline_s(4.0 * state * m_Q, moved_Q, dtype="bf16")
