"""Bytes that a device needs beside weights and caches: activations, graphs, buffers, contexts.

    T tokens of a step of one rank, n running sequences, k + 1 tokens of each (drafts included)
    reserve      = context + communicators + workspaces + activations + graphs
                   + all-to-all buffers
    activations  = residual and hidden state of all streams, a layer's input where it is not
                   compiled + max(attention, dense network, experts), or the sampler
    attention    = T (queries + keys + values + outputs) of the rank
    dense        = 3 T f                              gate, up and their product; 2 T f ungated
    experts      = c (max(2 f, h) + f)                c copies of tokens on the rank; the GEMMs
                                                      before and behind, one of them reused; f for
                                                      2 f ungated, h a latent width if any
    sampler      = n (k + 1) V b                      every rank gathers the logits of the whole
                                                      vocabulary; b by engine (traits.py), which may
                                                      count one draft only
    graphs       = 0.4 MiB of every captured batch and layer

Sources: what is alive at once is read off the engines' layers; engines run experts in chunks of
16,384 tokens (vLLM, `VLLM_FUSED_MOE_CHUNK_SIZE`). Captured batches are 1, 2, 4, every eighth to 256
and every sixteenth to 512 (vLLM 0.33.0 `config/vllm.py`; SGLang 0.5.23 `cuda_graph_hook.py`); what
one takes is from 0.21 GiB of 35 graphs of Llama-3.2-1B, 16 layers (vLLM pull request 11349; 0.34
MiB in the log of issue 50722). Communicators are what the logs of 4, 8 and 16 devices leave when
a context of 512 MiB is taken off: 2.25 GiB with it (vLLM issue 21348, 4 H100), 2.3 (SGLang issue
6017, 8 H200), 2.53 (vLLM issue 13074, 16 H20). Workspaces of libraries are what vLLM's logs call
memory beside torch's: 0.25 GiB in the middle of 0.15 to 0.35 (issues 13061, 14452, 15340, 10517,
pull request 14447). Buffers are DeepEP's sizes (csrc/config.hpp,
`LowLatencyLayout` and `Config`; deep_ep/buffer.py, 20 multiprocessors).

Against published logs: Llama-3-8B with 8,192 tokens a step and 256 sequences 1.22 GiB here, 1.26 in
vLLM's profile (pull request 10511); gpt-oss-120b with 1,024 sequences 7.3 GiB here, 7.4 there with
8,192 tokens a step and with 1,024 (issues 23278 and 27508). Each part is a lower bound by what
allocators round up, and the sum is an estimate.

Not covered: prompts of pictures, graphs of prompts, copies of weights while they are reloaded.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

from tuner.catalog.serve_rules.traits import MemoryRule
from tuner.costs.serve.all_to_all import ELEMENT_BYTES
from tuner.costs.serve.decoder import AttentionKind, DecoderAttention, Layers
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.memory import stage_ratio
from tuner.prices.serve.work import INDEX_KEY_BYTES
from tuner.spec.linear_attention import LINEAR_KINDS

MIB: Final = 2.0**20
CONTEXT_BYTES: Final = 512.0 * MIB
COMMUNICATOR_BYTES: Final = 1792.0 * MIB
"""Bytes of communicators where an instance has several devices with links of their own."""
BUS_BYTES_PER_S: Final = 64e9
"""Up to here devices have but a bus between them (PCIe 5.0 x16), over which NCCL runs few channels:
logs of 2 to 16 such devices show no more than workspaces (vLLM issues 13061, 14452, 15340)."""
WORKSPACE_BYTES: Final = 256.0 * MIB
GRAPH_LAYER_BYTES: Final = 0.4 * MIB
"""Bytes of a CUDA graph per captured batch and layer."""
MOST_CAPTURED: Final = 512
"""Sequences of the largest graph that engines capture by default."""
CHUNK_TOKENS: Final = 16_384.0
INDEX_BYTES: Final = 4.0
SCORE_BYTES: Final = 512.0 * MIB
SPARSE_PROMPTS: Final = 5
COMPRESSED_PROMPTS: Final = 4
INDEX_PROMPTS: Final = 40
"""Prompts whose keys are gathered at once: to attend, and an indexer's to score."""
SPARSE_HEADS: Final = 64
"""Number of query heads of a rank, or a multiple of it, that kernels of sparse attention pad to
(vLLM 0.32.0, models/deepseek_v4/nvidia/flashmla.py, `get_padded_num_q_heads`)."""
TRANSFER_BYTES: Final = 1536.0 * MIB
"""Two buffers to send and one to receive of TensorRT-LLM's cache transceiver, 512 MiB each by
default (cpp/tensorrt_llm/batch_manager/cacheTransBuffer.cpp, common/envUtils.cpp)."""
GRAPH_LOGIT_BYTES: Final = 6.0
"""Bytes of a logit that TensorRT-LLM's graphs end with: bf16 and fp32
(_torch/models/modeling_utils.py, _torch/modules/logits_processor.py)."""
LEAST_DISPATCH: Final = 128
"""Tokens of a rank that low-latency buffers hold at least, by the engines' defaults."""
NODE_RANKS: Final = 8
"""Peers over NVLink that DeepEP's buffers are laid out for (`NUM_MAX_NVL_PEERS`)."""
CHANNELS: Final = 10
INSIDE_CHUNK: Final = 256
OUTSIDE_CHUNK: Final = 128
"""Tokens that a channel's receive buffers hold (deep_ep/buffer.py, `get_dispatch_config`)."""
META_BYTES: Final = 128.0 * (8.0 + 4.0 + 4.0) + 16.0
"""Bytes beside each token in these buffers: ids and weights of 128 experts, 128 scales, where it
came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Bytes that one device needs beside weights and caches."""

    context: float
    communicators: float
    activations: float
    graphs: float
    buffers: float
    """Buffers of the all-to-all around experts, and of cache transfers that are allocated before
    the cache."""
    workspaces: float = 0.0
    """Memory of the libraries that run the kernels, and of sparse attention."""
    late: float = 0.0
    """Bytes that the memory which the engine leaves free must hold, beside all that it measured
    before it made the cache."""

    @property
    def steps(self) -> float:
        """Return the bytes of steps, which a server can lack only once it works."""
        return self.activations + self.graphs + self.buffers + self.workspaces

    @property
    def total(self) -> float:
        """Return the bytes of all parts together."""
        return self.context + self.communicators + self.steps


def step_reserve(
    iteration: Iteration,
    *,
    step_tokens: int,
    running: int,
    captured: int | None = None,
    longest: int = 0,
    moves_cache: bool = False,
) -> Reserve:
    """Return the bytes that a device needs beside weights and caches.

    Args:
        iteration: the instance.
        step_tokens: most tokens of a step of one rank.
        running: most running sequences of one rank.
        captured: sequences of the largest CUDA graph, 0 without any; None: the engine's own.
        longest: tokens of the longest request that the engine takes; 0: not known.
        moves_cache: the server sends or receives caches.
    """
    rule = iteration.memory_rule
    graph_sequences = (
        min(running, MOST_CAPTURED if captured is None else captured) * iteration.has_graphs
    )
    checked = iteration.checked_tokens
    steps = partial(
        activation_bytes,
        iteration,
        tokens=float(max(step_tokens, running * checked)),
        logit_bytes=_logit_bytes(rule, drafts=checked - 1),
        hidden_states=2 if rule.compiles else 3,
    )
    activations = steps(running=float(min(running, step_tokens)))
    graphs = rule.graphs_per_size * graph_bytes(iteration, sequences=graph_sequences)
    late = moved = 0.0
    if rule.allocates_late:
        graphs += graph_sequences * checked * iteration.decoder.vocab * GRAPH_LOGIT_BYTES
        moved = moves_cache * TRANSFER_BYTES
        late = activations + graphs + moved
        activations = steps(running=1.0)
        late -= activations
    sparse = 0.0
    if rule.gathers_sparse:
        sparse = sparse_workspace_bytes(iteration, step_tokens=step_tokens, longest=longest)
    return Reserve(
        context=CONTEXT_BYTES,
        communicators=_communicator_bytes(iteration),
        activations=activations,
        graphs=graphs,
        buffers=all_to_all_buffer_bytes(iteration, tokens=(graph_sequences or running) * checked)
        + moved,
        workspaces=WORKSPACE_BYTES + sparse,
        late=late,
    )


def sparse_workspace_bytes(iteration: Iteration, *, step_tokens: int, longest: int) -> float:
    """Return the bytes that prompts of sparse attention gather and score; 0 of other attention.

    Model:   scores of 512 MiB; (5 s + m h) (c + p) b of keys that an indexer picks among, of an fp8
             cache, and of queries, or 4 (s / r + w + m) d b of a window beside entries; in the same
             place 40 s / r (i + 4) of an indexer's fp8 keys; m k 4 of the numbers that it picks,
             2 m s / r 4 of those of entries where all are read
             s tokens of the longest request, m of a step, r of an entry, b bytes of bf16, h heads
    Source:  vLLM 0.32.0, v1/attention/backends/mla/flashmla_sparse.py
             (`get_prefill_workspace_size`), indexer.py (`get_max_prefill_buffer_size`),
             v1/worker/workspace.py, models/deepseek_v4/nvidia/flashmla.py,
             models/deepseek_v4/sparse_mla.py (`c128a_prefill_buffer`),
             `VLLM_SPARSE_INDEXER_MAX_LOGITS_MB` of envs.py
    """
    gathered = chosen = picked = 0.0
    for group in iteration.decoder.layers:
        attention = group.attention
        merged = attention.compressor
        index = attention.own_indexer if merged is None else merged.indexer
        if index is not None:
            scored = INDEX_PROMPTS * longest / (1 if merged is None else merged.ratio)
            gathered = max(gathered, scored * index.head_dim * INDEX_KEY_BYTES)
            picked = step_tokens * index.top_k * INDEX_BYTES
        if attention.kind is AttentionKind.SPARSE_LATENT:
            heads = attention.heads / iteration.degrees.attention_tensor
            cache = iteration.cache_formats
            keys = SPARSE_PROMPTS * longest * (cache.kv == "fp8" and cache.packs_sparse)
            rows = keys + step_tokens * heads
            gathered = max(gathered, rows * attention.kv_elements * ELEMENT_BYTES)
        elif attention.kind is AttentionKind.COMPRESSED and merged is not None:
            kept = longest / merged.ratio + attention.window + step_tokens
            gathered = max(gathered, COMPRESSED_PROMPTS * kept * attention.head_dim * ELEMENT_BYTES)
            if index is None:
                chosen = 2.0 * step_tokens * longest / merged.ratio * INDEX_BYTES
    return gathered + chosen + picked + SCORE_BYTES if gathered else 0.0


def _communicator_bytes(iteration: Iteration) -> float:
    has_links = iteration.machine.sheet.scale_up_bytes_per_s > BUS_BYTES_PER_S
    return COMMUNICATOR_BYTES if iteration.degrees.devices > 1 and has_links else 0.0


def graph_bytes(iteration: Iteration, *, sequences: int) -> float:
    """Return the bytes of CUDA graphs, one for every captured batch of up to so many sequences."""
    layers = iteration.decoder.num_layers * stage_ratio(iteration.decoder, iteration.degrees)
    return GRAPH_LAYER_BYTES * layers * captured_sizes(sequences)


def captured_sizes(sequences: int) -> int:
    """Count the captured batches: 1, 2, 4, every eighth to 256, every sixteenth beyond."""
    small = sum(size <= sequences for size in (1, 2, 4))
    return small + min(sequences, 256) // 8 + max(sequences - 256, 0) // 16


def activation_bytes(
    iteration: Iteration,
    *,
    tokens: float,
    running: float,
    logit_bytes: float,
    hidden_states: int = 2,
) -> float:
    """Return the peak bytes of activations in a step of so many tokens of a rank.

    Args:
        iteration: the instance.
        tokens: of the step.
        running: sequences of the rank.
        logit_bytes: of one word of the vocabulary, for each sequence and its drafts.
        hidden_states: beside the widest kernel.
    """
    decoder = iteration.decoder
    sampler = running * decoder.vocab * logit_bytes
    widest, dense = _widths(decoder.layers, iteration.degrees.attention_tensor)
    largest = max(
        tokens * ELEMENT_BYTES * widest,
        tokens * ELEMENT_BYTES * decoder.matrices * dense,
        _expert_bytes(iteration, tokens),
        sampler,
    )
    return hidden_states * decoder.streams * ELEMENT_BYTES * tokens * decoder.hidden + largest


def _logit_bytes(rule: MemoryRule, *, drafts: int) -> float:
    """Return the bytes of one word of the vocabulary, for one sequence and its drafts."""
    if rule.draft_bytes is None:
        return rule.sampler_bytes * (1 + drafts)
    return rule.sampler_bytes + rule.draft_bytes * min(drafts, 1)


@lru_cache(maxsize=64)
def _widths(layers: tuple[Layers, ...], ranks: int) -> tuple[float, float]:
    """Return the elements of one token of a rank in the widest attention and the widest network."""
    widest = max(_attention_width(group.attention, ranks) for group in layers)
    return widest, max(group.dense_ffn for group in layers) / ranks


def _attention_width(attention: DecoderAttention, ranks: int) -> float:
    """Elements of one token: queries, keys, values and outputs of a rank."""
    heads, kv_heads = attention.heads / ranks, max(attention.kv_heads / ranks, 1.0)
    if attention.kind is AttentionKind.GROUPED:
        return attention.head_dim * (heads * (3 if attention.has_gate else 2) + 2.0 * kv_heads)
    if attention.linear is not None:
        # What is projected, and the outputs.
        shard = attention.linear.shard(ranks)
        return LINEAR_KINDS[shard.kind].projections(shard).inputs + float(shard.value_dim)
    if attention.kind is AttentionKind.COMPRESSED:
        # Queries and outputs, as they are and padded; those of an indexer in bf16 and fp8; the low
        # rank, the key, the joined groups, keys and gates.
        keys = (
            0 if attention.compressor is None else attention.compressor.outputs(attention.head_dim)
        )
        groups = attention.output_groups * attention.output_rank / ranks
        padded = SPARSE_HEADS * math.ceil(heads / SPARSE_HEADS)
        index = None if attention.compressor is None else attention.compressor.indexer
        picked = 0.0 if index is None else 1.5 * index.num_heads * index.head_dim
        width = (heads + padded) * 2.0 * attention.head_dim + picked
        return width + attention.query_rank + attention.head_dim + groups + keys
    if attention.kind is AttentionKind.SPARSE_LATENT:
        # Queries in the width of the keys, and outputs in that of their compressed part.
        padded = SPARSE_HEADS * math.ceil(heads / SPARSE_HEADS)
        return heads * (attention.head_dim + attention.value_dim) + padded * (
            attention.kv_elements + attention.kv_rank
        )
    return heads * 2.0 * (attention.head_dim + attention.value_dim)


def _expert_bytes(iteration: Iteration, tokens: float) -> float:
    experts, degrees = iteration.decoder.experts, iteration.degrees
    # An attention server has none: its experts are elsewhere.
    if experts is None or not experts.num:
        return 0.0
    hidden, ffn = iteration.decoder.expert_hidden, experts.ffn / degrees.moe_tensor
    inner = (iteration.decoder.matrices - 1.0) * ffn
    together, gathered = tokens, 0.0
    if degrees.attention_data > 1 and not is_dispatched(iteration):
        together = tokens * degrees.attention_data
        gathered = 2.0 * together * hidden
    copies = min(together, CHUNK_TOKENS) * iteration.computed_copies
    return ELEMENT_BYTES * (gathered + copies * (max(inner, hidden) + ffn))


def all_to_all_buffer_bytes(iteration: Iteration, *, tokens: int) -> float:
    """Buffers of DeepEP for steps of at most so many tokens of a rank, drafts included."""
    experts, degrees = iteration.decoder.experts, iteration.degrees
    if experts is None or degrees.attention_data == 1 or not is_dispatched(iteration):
        return 0.0
    slots = iteration.num_slots
    hidden = iteration.decoder.expert_hidden
    total = _normal_bytes(hidden, degrees)
    if iteration.a2a_backend is A2aBackend.LOW_LATENCY:
        total += low_latency_bytes(hidden=hidden, experts=slots, tokens=dispatch_cap(tokens))
    return total


def dispatch_cap(tokens: int) -> int:
    """The tokens of a rank that buffers are made for: a power of two, 128 at least."""
    return max(LEAST_DISPATCH, 1 << math.ceil(math.log2(max(tokens, 1))))


def low_latency_bytes(*, hidden: int, experts: int, tokens: int) -> float:
    """Symmetric buffers of low-latency kernels: two to send and two to receive for every expert.

    Model:   4 E M (2 h + 4 h / 128)     M tokens of a rank; fp8 scales count with combined rows
    Source:  DeepEP, csrc/config.hpp, `LowLatencyLayout`; its counters are left out
    """
    row = 2.0 * hidden + 4.0 * hidden / 128.0
    return 4.0 * experts * tokens * row


def _normal_bytes(hidden: int, degrees: InstanceDegrees) -> float:
    ranks = degrees.attention_tensor * degrees.attention_data
    token_bytes = ELEMENT_BYTES * hidden + META_BYTES
    inside = CHANNELS * min(ranks, NODE_RANKS) * INSIDE_CHUNK * token_bytes
    nodes = ranks // NODE_RANKS
    outside = CHANNELS * nodes * OUTSIDE_CHUNK * 2.0 * token_bytes if nodes > 1 else 0.0
    return inside + outside


def is_dispatched(iteration: Iteration) -> bool:
    """Return whether an all-to-all takes tokens to experts, instead of every rank gathering all."""
    return iteration.a2a_backend in (A2aBackend.NORMAL, A2aBackend.LOW_LATENCY)
