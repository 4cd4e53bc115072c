"""Operations of one token mixer on one rank, without prices.

    gemms        projections of the hidden state, those of an indexer or a compressor included
    up_gemms     up-projections of compressed keys and values: of a prompt's tokens once, absorbed
                 in decode, with as many operations
    decode_ops   attention of one new token for each of n sequences over a past of so many tokens
    prompt_ops   attention of one prompt from its start

Linear attention reads and writes its state for every new token, and reads prompts in chunks; its
short convolution does so with its last inputs (tuner/spec/linear_attention.py).

Sparse attention (DSA) has scores of an indexer over all earlier tokens, and attends to top_k of
them on the compressed keys.

Shared keys (DeepSeek-V4) are one kernel over the tokens of a window and the entries of the layer's
compressor, behind an indexer's scores where it has one; projections are separate, those of
compressors and indexers whole on every rank. A compressor writes every token's keys and gates to
the open entries, in fp32, and reads a whole entry of them when it closes.

Letters: Q query points.

Sources: DeepSeek-V3.2, arXiv:2512.02556, equations 1 and 2; vLLM 0.33.0, models/deepseek_v32 (the
indexer is whole on every rank) and models/deepseek_v4; transformers 5.24, models/deepseek_v4.
"""

from dataclasses import dataclass, replace

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.serve.decoder import AttentionKind, DecoderAttention, Formats
from tuner.prices.ops import Op, linear_scan, memory_bound
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.work import CONV_STATE_BYTES, STATE_BYTES, entry_bytes
from tuner.spec.linear_attention import LINEAR_KINDS, LinearAttention, LinearName
from tuner.spec.sparse_attention import Indexer

Gemm = tuple[float, float, str]
"""Outputs, inputs and format of a GEMM."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixerOps:
    """One layer's token mixer on one rank."""

    attention: DecoderAttention
    hidden: int
    formats: Formats
    tensor: int = 1
    """Ranks that share the heads."""
    software: str = ""
    state_bytes: float = STATE_BYTES
    """Bytes of one element of a state of linear attention."""
    context: int = 1
    """Ranks that share the positions of a cache: each attends over its own for the heads of all."""
    side_context: int = 1
    """Ranks that share the positions of an indexer's keys."""

    @property
    def heads(self) -> int:
        """Query heads of the rank."""
        return max(self.attention.heads // self.tensor, 1)

    @property
    def kv_heads(self) -> int:
        """Key heads of the rank; at least one, copied where there are fewer than ranks."""
        return max(self.attention.kv_heads // self.tensor, 1)

    @property
    def linear(self) -> LinearAttention:
        """The rank's part of linear attention."""
        assert self.attention.linear is not None  # DecoderAttention refuses its kinds without
        return self.attention.linear.shard(self.tensor)

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """Projections of the hidden state."""
        attention, hidden = self.attention, self.hidden
        match attention.kind:
            case AttentionKind.NONE:
                return ()
            case AttentionKind.LATENT | AttentionKind.SPARSE_LATENT:
                return self._latent_gemms
            case AttentionKind.COMPRESSED:
                return self._shared_gemms
            case AttentionKind.GATED_DELTA | AttentionKind.MAMBA2 | AttentionKind.KDA:
                return self._linear_gemms
            case AttentionKind.GROUPED:
                queries = self.heads * (2 if attention.has_gate else 1)
                width = (queries + 2 * self.kv_heads) * attention.head_dim
                inner, outer = self.formats.attention, self.formats.output
                return ((width, hidden, inner), (hidden, self.heads * attention.head_dim, outer))

    @property
    def context_elements(self) -> tuple[float, float]:
        """Elements of a token's queries, and of its outputs, for the heads of all context ranks."""
        attention, heads = self.attention, float(self.heads * self.context)
        if attention.kind is AttentionKind.GROUPED:
            return heads * attention.head_dim, heads * attention.value_dim
        if attention.kind in (AttentionKind.LATENT, AttentionKind.SPARSE_LATENT):
            return heads * attention.kv_elements, heads * attention.kv_rank
        return 0.0, 0.0

    @property
    def up_gemms(self) -> tuple[Gemm, ...]:
        """Up-projections of compressed keys and values (MLA)."""
        attention = self.attention
        if attention.kind not in (AttentionKind.LATENT, AttentionKind.SPARSE_LATENT):
            return ()
        width = self.heads * (attention.head_dim - attention.rope_dim + attention.value_dim)
        return ((width, attention.kv_rank, self.formats.attention),)

    @property
    def _latent_gemms(self) -> tuple[Gemm, ...]:
        attention, hidden, index = self.attention, self.hidden, self.attention.own_indexer
        inner, outer = self.formats.attention, self.formats.output
        down = attention.query_rank + attention.kv_rank + attention.rope_dim
        gemms = (
            (down, hidden, inner),
            (self.heads * attention.head_dim, attention.query_rank or hidden, inner),
            (hidden, self.heads * attention.value_dim, outer),
        )
        if index is None:
            return gemms
        return (
            *gemms,
            (index.num_heads * index.head_dim, attention.query_rank, inner),
            (index.head_dim + index.num_heads, hidden, inner),
        )

    @property
    def _shared_gemms(self) -> tuple[Gemm, ...]:
        attention, hidden = self.attention, self.hidden
        inner, outer = self.formats.attention, self.formats.output
        groups = max(attention.output_groups // self.tensor, 1)
        queries = self.heads * attention.head_dim
        gemms = [
            (attention.query_rank + attention.head_dim, hidden, inner),
            (queries, attention.query_rank, inner),
            # One of each group, as much together as one of the width of a group's heads.
            (groups * attention.output_rank, queries / groups, outer),
            (hidden, groups * attention.output_rank, outer),
        ]
        merged = attention.compressor
        if merged is not None:
            gemms.append((merged.outputs(attention.head_dim), hidden, "bf16"))
            if (index := merged.indexer) is not None:
                gemms.append((index.num_heads * index.head_dim, attention.query_rank, inner))
                gemms.append((index.num_heads + merged.outputs(index.head_dim), hidden, "bf16"))
        return tuple(gemms)

    @property
    def _linear_gemms(self) -> tuple[Gemm, ...]:
        linear, hidden = self.linear, self.hidden
        widths = LINEAR_KINDS[linear.kind].projections(linear)
        inner, outer = self.formats.linear_projections
        gemms = (
            (widths.inputs - widths.scalars, hidden, inner),
            (widths.scalars, hidden, "bf16"),
            (widths.low_rank_outputs, widths.low_rank, inner),
            (hidden, linear.value_dim, outer),
        )
        return tuple(product for product in gemms if product[0])

    def decode_ops(self, n_Q: Floats, past_Q: Floats) -> tuple[Op, ...]:
        """One new token for each of n sequences."""
        match self.attention.kind:
            case AttentionKind.NONE:
                return ()
            case AttentionKind.GROUPED | AttentionKind.LATENT:
                return (self.decode_core(n_Q, past_Q),)
            case AttentionKind.SPARSE_LATENT:
                return self._sparse_ops(n_Q, past_Q)
            case AttentionKind.COMPRESSED:
                return self._compressed_ops(n_Q, past_Q)
            case AttentionKind.GATED_DELTA | AttentionKind.MAMBA2 | AttentionKind.KDA:
                linear = self.linear
                past_bytes = 2.0 * CONV_STATE_BYTES * linear.conv_state_elements
                return self._update(n_Q), memory_bound(n_Q * past_bytes)

    def _update(self, n_Q: Floats) -> Op:
        """States of n sequences; without a kind, as no profiler measures them, if not fp32."""
        linear = self.linear
        return self._op(
            "linear_update",
            kind=linear.kind.value if self.state_bytes == STATE_BYTES else "",
            batch=n_Q,
            heads=linear.num_value_heads,
            key_heads=linear.num_key_heads,
            key_dim=linear.key_head_dim,
            value_dim=linear.value_head_dim,
            state_bytes=self.state_bytes,
        )

    def piece_Q(self, s_Q: Floats) -> Floats:
        """Tokens of the independent pieces that a prompt of s tokens costs as much as.

        A window of w costs s w pairs, as many as s / 2 w prompts of 2 w tokens; chunks are prompts
        of their own.
        """
        attention = self.attention
        if attention.kind is not AttentionKind.GROUPED or not attention.window:
            return s_Q
        return np.minimum(
            s_Q, attention.window if attention.window_is_chunk else 2.0 * attention.window
        )

    def prompt_ops(self, s_Q: Floats) -> tuple[Op, ...]:
        """One prompt of s tokens from its start; under a window the pieces that cost as much."""
        attention = self.attention
        match attention.kind:
            case AttentionKind.NONE:
                return ()
            case AttentionKind.GROUPED:
                piece_Q = self.piece_Q(s_Q)
                prompt = self._op(
                    "attention",
                    kind=self._kv,
                    batch=np.maximum(s_Q / np.maximum(piece_Q, 1.0), 1.0),
                    sequence=piece_Q,
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                    head_dim=attention.head_dim,
                )
                return (replace(prompt, direction="forward"),)
            case AttentionKind.LATENT:
                core = self._op(
                    "latent_attention",
                    kind=join_words("core", self._kv),
                    batch=1,
                    sequence=s_Q,
                    heads=self.heads,
                    head_dim=attention.head_dim,
                    value_dim=attention.value_dim,
                )
                return (core,)
            case AttentionKind.SPARSE_LATENT:
                return self._sparse_ops(s_Q)
            case AttentionKind.COMPRESSED:
                return self._compressed_ops(s_Q)
            case AttentionKind.GATED_DELTA | AttentionKind.MAMBA2 | AttentionKind.KDA:
                return self._scan_ops(s_Q)

    def decode_core(self, n_Q: Floats, past_Q: Floats) -> Op:
        """Attention of one new token for each of n sequences, without what surrounds it."""
        attention = self.attention
        if attention.kind is AttentionKind.GROUPED:
            if attention.window_is_chunk:
                # Sequences are anywhere in their chunk, halfway on average.
                past_Q = np.where(past_Q > attention.window, 0.5 * attention.window, past_Q)
            return self._op(
                "decode_attention",
                kind=self._kv,
                batch=n_Q,
                past=past_Q / self.context,
                heads=self.heads * self.context,
                kv_heads=self.kv_heads,
                head_dim=attention.head_dim,
                window=0 if attention.window_is_chunk else attention.window,
            )
        return self._latent_decode(join_words("core", self._kv), n_Q, past_Q)

    def _latent_decode(self, kind: str, n_Q: Floats, past_Q: Floats) -> Op:
        return self._op(
            "latent_decode",
            kind=kind,
            batch=n_Q,
            past=past_Q / self.context,
            heads=self.heads * self.context,
            kv_elements=self.attention.kv_elements,
        )

    def _sparse_ops(self, m_Q: Floats, past_Q: Floats | None = None) -> tuple[Op, ...]:
        """One prompt of m tokens, or one new token of m sequences: scores, then attention."""
        attention = self.attention
        index = attention.indexer
        assert index is not None  # DecoderAttention refuses sparse attention without
        if past_Q is None:
            kept_Q = _kept_pairs(m_Q, largest=index.top_k)
            scores = self._scores(index, batch=1.0, sequence=m_Q, past=m_Q, pairs=0.5 * m_Q**2)
        else:
            kept_Q = m_Q * np.minimum(past_Q, index.top_k) / self.context
            scored_Q = past_Q / self.side_context
            scores = self._scores(
                index, batch=m_Q, sequence=1.0, past=scored_Q, pairs=m_Q * scored_Q
            )
        width = 1.0 if self._kv else 2.0
        core = self._op(
            "sparse_core",
            pairs=kept_Q,
            elements=self.heads
            * (1 if past_Q is None else self.context)
            * (attention.kv_elements + attention.kv_rank),
            bytes=(m_Q if past_Q is None else kept_Q) * attention.kv_elements * width,
        )
        return (core,) if attention.shares_index else (scores, core)

    def _compressed_ops(self, m_Q: Floats, past_Q: Floats | None = None) -> tuple[Op, ...]:
        """One prompt of m tokens, or one new token of m sequences, over window and entries.

        Scores of every entry in fp8; the open entries; attention over the window and the entries
        that are kept, read once per sequence (decode) or written once (prompt).
        """
        attention, merged = self.attention, self.attention.compressor
        token = entry_bytes(attention.kv_elements)
        if past_Q is None:
            kept_Q, kept_bytes_Q = _kept_pairs(m_Q, largest=attention.window), m_Q * token
        else:
            kept_Q = m_Q * np.minimum(past_Q, attention.window)
            kept_bytes_Q = kept_Q * token
        ops: list[Op] = []
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
                # One prompt of m tokens, or m sequences of one.
                is_prompt = past_Q is None
                ops.append(
                    self._scores(
                        index,
                        batch=1.0 if is_prompt else m_Q,
                        sequence=m_Q if is_prompt else 1.0,
                        past=m_Q / merged.ratio if past_Q is None else past_Q // merged.ratio,
                        pairs=every_Q,
                    )
                )
            # A row is written for each token, and as many read for each as overlap.
            row = (
                STATE_BYTES
                * merged.state_elements(attention.head_dim)
                / merged.series
                / merged.ratio
            )
            ops.append(memory_bound(m_Q * row * (1 + merged.series)))
        core = self._op(
            "sparse_core",
            pairs=kept_Q,
            elements=self.heads * (attention.head_dim + attention.value_dim),
            bytes=kept_bytes_Q,
        )
        return (*ops, core)

    def _scores(
        self, index: Indexer, *, batch: Numbers, sequence: Numbers, past: Numbers, pairs: Floats
    ) -> Op:
        """Scores of an indexer, whose keys are read once for each sequence."""
        return self._op(
            "index_scores",
            batch=batch,
            sequence=sequence,
            past=past,
            heads=index.num_heads,
            head_dim=index.head_dim,
            top_k=index.top_k,
            pairs=pairs,
        )

    def _scan_ops(self, s_Q: Floats) -> tuple[Op, ...]:
        linear = self.linear
        scan = linear_scan(
            kind=linear.kind.value,
            batch=1.0,
            sequence=s_Q,
            heads=linear.num_value_heads,
            key_heads=linear.num_key_heads,
            key_dim=linear.key_head_dim,
            value_dim=linear.value_head_dim,
            chunk=linear.chunk_size,
            is_delta=float(linear.kind is not LinearName.MAMBA2),
            decays_channels=float(linear.kind is LinearName.KDA),
        )
        moved_Q = 2.0 * CONV_STATE_BYTES * linear.conv_channels * s_Q
        return replace(scan, software=self.software), memory_bound(moved_Q)

    @property
    def _kv(self) -> str:
        return "kv_fp8" if self.formats.kv == "fp8" else ""

    def _op(self, operation: str, *, kind: str = "", dtype: str = "", **axes: Numbers) -> Op:
        return Op(operation=operation, kind=kind, dtype=dtype, axes=axes, software=self.software)


def join_words(*words: str) -> str:
    """Join the words of an operation's kind, without those that are empty."""
    return "/".join(word for word in words if word)


def _kept_pairs(s_Q: Floats, *, largest: int) -> Floats:
    """Pairs of queries and tokens of a prompt, where a query sees so many earlier ones at most."""
    inside_Q = np.minimum(s_Q, largest)
    return np.asarray(0.5 * inside_Q**2 + (s_Q - inside_Q) * largest)
