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
one by one.

Linear attention reads and writes its state for every new token, in fp32, and reads prompts in
chunks; its short convolution does so with its last inputs (tuner/spec/linear_attention.py). Gated
delta rules count as measured where a table has them.

Shared keys (DeepSeek-V4) are one kernel over the tokens of a window and the entries of the layer's
compressor, behind an indexer's scores where it has one; projections are separate, those of
compressors and indexers whole on every rank. A compressor writes every token's keys and gates to
the open entries, in fp32, and reads a whole entry of them when it closes.

Letters: Q query points.

Not covered: kernels of shared keys compute 64 heads at least (vLLM 0.33.0, models/deepseek_v4/
nvidia/flashmla.py), whatever a rank has.
"""

from dataclasses import dataclass, replace

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.ops import Op, gemm, linear_scan, memory_bound
from tuner.costs.serve.curves import Floats
from tuner.costs.serve.decoder import AttentionKind, DecoderAttention, Formats
from tuner.costs.serve.machine import ServingMachine
from tuner.costs.serve.work import (
    CONV_STATE_BYTES,
    INDEX_KEY_BYTES,
    STATE_BYTES,
    entry_bytes,
    work,
)
from tuner.spec.linear_attention import LINEAR_KINDS, LinearAttention, LinearName


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
            case AttentionKind.SPARSE_LATENT | AttentionKind.NONE:
                return ()
            case AttentionKind.LATENT:
                return self._latent_gemms
            case AttentionKind.COMPRESSED:
                return self._shared_gemms
            case AttentionKind.GATED_DELTA | AttentionKind.MAMBA2 | AttentionKind.KDA:
                return self._linear_gemms
            case AttentionKind.GROUPED:
                queries = self.heads * (2 if own.has_gate else 1)
                width = (queries + 2 * self.kv_heads) * own.head_dim
                return ((width, hidden, inner), (hidden, self.heads * own.head_dim, outer))

    @property
    def _latent_gemms(self) -> tuple[tuple[float, float, str], ...]:
        own, hidden = self.attention, self.hidden
        inner, outer = self.formats.attention, self.formats.output
        down = own.query_rank + own.kv_rank + own.rope_dim
        return (
            (down, hidden, inner),
            (self.heads * own.head_dim, own.query_rank or hidden, inner),
            (hidden, self.heads * own.value_dim, outer),
        )

    @property
    def _shared_gemms(self) -> tuple[tuple[float, float, str], ...]:
        own, hidden = self.attention, self.hidden
        inner, outer = self.formats.attention, self.formats.output
        groups = max(own.output_groups // self.tensor, 1)
        queries = self.heads * own.head_dim
        gemms = [
            (own.query_rank + own.head_dim, hidden, inner),
            (queries, own.query_rank, inner),
            # One of each group, as much together as one of the width of a group's heads.
            (groups * own.output_rank, queries / groups, outer),
            (hidden, groups * own.output_rank, outer),
        ]
        merged = own.compressor
        if merged is not None:
            gemms.append((merged.outputs(own.head_dim), hidden, "bf16"))
            if (index := merged.indexer) is not None:
                gemms.append((index.num_heads * index.head_dim, own.query_rank, inner))
                gemms.append((index.num_heads + merged.outputs(index.head_dim), hidden, "bf16"))
        return tuple(gemms)

    @property
    def _linear_gemms(self) -> tuple[tuple[float, float, str], ...]:
        own, hidden = self.linear, self.hidden
        widths = LINEAR_KINDS[own.kind].projections(own)
        inner, outer = self.formats.attention, self.formats.output
        gemms = (
            (widths.inputs - widths.scalars, hidden, inner),
            (widths.scalars, hidden, "bf16"),
            (widths.low_rank_outputs, widths.low_rank, inner),
            (hidden, own.value_dim, outer),
        )
        return tuple(one for one in gemms if one[0])

    @property
    def linear(self) -> LinearAttention:
        """The rank's part of linear attention."""
        assert self.attention.linear is not None  # DecoderAttention refuses its kinds without
        return self.attention.linear.shard(self.tensor)

    def projections_s(self, m_Q: Floats) -> Floats:
        """All of them for m tokens."""
        return self._gemms_s(self.projection_gemms, m_Q)

    def _gemms_s(self, gemms: tuple[tuple[float, float, str], ...], m_Q: Floats) -> Floats:
        total_Q = np.zeros_like(m_Q)
        for n, k, dtype in gemms:
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
            case AttentionKind.NONE:
                return np.zeros_like(s_Q)
            case AttentionKind.GROUPED:
                # A window of w costs s w pairs, as many as s / 2 w prompts of 2 w tokens; chunks
                # are prompts of their own.
                whole = own.window if own.window_is_chunk else 2.0 * own.window
                inside_Q = np.minimum(s_Q, whole) if own.window else s_Q
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
                measured_Q = self._sparse_s("sparse_latent_attention", past=0, sequence=s_Q)
                return self._sparse_parts_s(s_Q) if measured_Q is None else measured_Q
            case AttentionKind.COMPRESSED:
                return self._compressed_s(s_Q)
            case AttentionKind.GATED_DELTA | AttentionKind.MAMBA2 | AttentionKind.KDA:
                return self._linear_s("context", s_Q)

    def decode_core(self, n_Q: Floats, past_Q: Floats) -> Op:
        """Attention of one new token for each of n sequences, without what surrounds it."""
        own = self.attention
        if own.kind is AttentionKind.GROUPED:
            if own.window_is_chunk:
                # Sequences are anywhere in their chunk, halfway on average.
                past_Q = np.where(past_Q > own.window, 0.5 * own.window, past_Q)
            return self._op(
                "decode_attention",
                kind=self._kv,
                batch=n_Q,
                past=past_Q,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=own.head_dim,
                window=0 if own.window_is_chunk else own.window,
            )
        return self._latent_decode(_joined("core", self._kv), n_Q, past_Q)

    def _one_token_s(self, n_Q: Floats, past_Q: Floats) -> Floats:
        match self.attention.kind:
            case AttentionKind.NONE:
                return np.zeros_like(n_Q)
            case AttentionKind.GROUPED:
                return self.machine.seconds(self.decode_core(n_Q, past_Q))
            case AttentionKind.LATENT:
                return self._latent_decode_s(n_Q, past_Q)
            case AttentionKind.SPARSE_LATENT:
                measured_Q = self._sparse_s("sparse_latent_decode", batch=n_Q, past=past_Q)
                return self._sparse_parts_s(n_Q, past_Q) if measured_Q is None else measured_Q
            case AttentionKind.COMPRESSED:
                return self._compressed_s(n_Q, past_Q)
            case AttentionKind.GATED_DELTA | AttentionKind.MAMBA2 | AttentionKind.KDA:
                return self._linear_s("generation", n_Q)

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

    def _sparse_s(self, operation: str, **sizes: Numbers) -> Floats | None:
        """Return a whole module as measured; None where no table has it."""
        kind = _joined(self.attention.architecture, self._kv, f"gemm_{self._gemm_format}")
        dtype = self.formats.attention
        op = self._op(operation, kind=kind, dtype=dtype, heads=self.heads, **sizes)
        return self.machine.measured_s(op)

    def _sparse_parts_s(self, m_Q: Floats, past_Q: Floats | None = None) -> Floats:
        """One prompt of m tokens, or one new token of m sequences, from the parts of a module.

        Model:   projections, those of the indexer included, every rank's indexer over all earlier
                 tokens in fp8, and attention over top_k of them on the compressed keys.
        Source:  DeepSeek-V3.2, arXiv:2512.02556, equations 1 and 2; vLLM 0.33.0,
                 models/deepseek_v32 (the indexer is whole on every rank).
        """
        own = self.attention
        index = own.indexer
        assert index is not None  # DecoderAttention refuses sparse attention without
        inner = self.formats.attention
        indexer = (
            (index.num_heads * index.head_dim, own.query_rank, inner),
            (index.head_dim + index.num_heads, self.hidden, inner),
        )
        if past_Q is None:
            all_Q, kept_Q = 0.5 * m_Q**2, _kept_pairs(m_Q, most=index.top_k)
            read_Q = m_Q
        else:
            all_Q, kept_Q = m_Q * past_Q, m_Q * np.minimum(past_Q, index.top_k)
            read_Q = all_Q
        scores_Q = self._seconds(
            "index_scores",
            pairs=all_Q,
            elements=index.num_heads * index.head_dim,
            bytes=read_Q * INDEX_KEY_BYTES * index.head_dim,
        )
        width = 1.0 if self._kv else 2.0
        core_Q = self._seconds(
            "sparse_core",
            pairs=kept_Q,
            elements=self.heads * (own.kv_elements + own.kv_rank),
            bytes=(m_Q if past_Q is None else kept_Q) * own.kv_elements * width,
        )
        gemms_Q = self._gemms_s((*self._latent_gemms, *indexer), m_Q)
        return np.asarray(gemms_Q + self._absorbed_gemms_s(m_Q) + scores_Q + core_Q)

    def _compressed_s(self, m_Q: Floats, past_Q: Floats | None = None) -> Floats:
        """One prompt of m tokens, or one new token of m sequences, over window and entries.

        Model:   scores of every entry in fp8; attention over the window and the entries that are
                 kept, read once per sequence (decode) or written once (prompt); the open entries.
        Source:  transformers 5.24, models/deepseek_v4; vLLM 0.33.0, models/deepseek_v4.
        """
        own, merged = self.attention, self.attention.compressor
        token = entry_bytes(own.kv_elements)
        if past_Q is None:
            kept_Q, kept_bytes_Q = _kept_pairs(m_Q, most=own.window), m_Q * token
        else:
            kept_Q = m_Q * np.minimum(past_Q, own.window)
            kept_bytes_Q = kept_Q * token
        total_Q = np.zeros_like(m_Q)
        if merged is not None:
            if past_Q is None:
                entries_Q = m_Q / merged.ratio
                kept_Q = kept_Q + m_Q * merged.mean_kept(m_Q)
                kept_bytes_Q = kept_bytes_Q + entries_Q * token
                every_Q = 0.5 * m_Q * entries_Q
            else:
                entries_Q = every_Q = m_Q * (past_Q // merged.ratio)
                more_Q = m_Q * merged.kept(past_Q)
                kept_Q, kept_bytes_Q = kept_Q + more_Q, kept_bytes_Q + more_Q * token
            if (index := merged.indexer) is not None:
                total_Q = total_Q + self._seconds(
                    "index_scores",
                    pairs=every_Q,
                    elements=index.num_heads * index.head_dim,
                    bytes=entries_Q * INDEX_KEY_BYTES * index.head_dim,
                )
            # A row is written for each token, and as many read for each as overlap.
            row = STATE_BYTES * merged.state_elements(own.head_dim) / merged.series / merged.ratio
            total_Q = total_Q + self.machine.seconds(memory_bound(m_Q * row * (1 + merged.series)))
        core_Q = self._seconds(
            "sparse_core",
            pairs=kept_Q,
            elements=self.heads * (own.head_dim + own.value_dim),
            bytes=kept_bytes_Q,
        )
        return np.asarray(total_Q + core_Q)

    def _linear_s(self, phase: str, m_Q: Floats) -> Floats:
        """Convolution and recurrence of m tokens: of a prompt, or one of each of m sequences."""
        own = self.linear
        if own.kind is LinearName.GATED_DELTA and own.key_head_dim == own.value_head_dim:
            measured_Q = self.machine.measured_s(
                self._op(
                    "gated_delta",
                    kind=phase,
                    tokens=m_Q,
                    key_heads=own.num_key_heads,
                    value_heads=own.num_value_heads,
                    head_dim=own.key_head_dim,
                )
            )
            if measured_Q is not None:
                return measured_Q
        if phase == "generation":
            past = 2.0 * CONV_STATE_BYTES * own.conv_state_elements
            scan_Q = self._seconds("linear_update", tokens=m_Q, elements=own.state_elements)
            return np.asarray(scan_Q + self.machine.seconds(memory_bound(m_Q * past)))
        moved_Q = 2.0 * CONV_STATE_BYTES * own.conv_channels * m_Q
        scan = linear_scan(
            kind=own.kind.value,
            batch=1.0,
            sequence=m_Q,
            heads=own.num_value_heads,
            key_heads=own.num_key_heads,
            key_dim=own.key_head_dim,
            value_dim=own.value_head_dim,
            chunk=own.chunk_size,
            is_delta=float(own.kind is not LinearName.MAMBA2),
            decays_channels=float(own.kind is LinearName.KDA),
        )
        scan = replace(scan, software=self.software)
        return np.asarray(self.machine.seconds(scan) + self.machine.seconds(memory_bound(moved_Q)))

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


def _kept_pairs(s_Q: Floats, *, most: int) -> Floats:
    """Pairs of queries and tokens of a prompt, where a query sees so many earlier ones at most."""
    inside_Q = np.minimum(s_Q, most)
    return np.asarray(0.5 * inside_Q**2 + (s_Q - inside_Q) * most)
