"""Bytes that a device needs beside weights and caches: activations, graphs, buffers, contexts.

    T tokens of a step of one rank, n running sequences, k + 1 tokens of each (drafts included)
    reserve      = context + communicators + activations + graphs + buffers of the exchange
    activations  = 2 residual streams + max(attention, dense network, experts, sampler)
    attention    = T (queries + keys + values + outputs) of the rank
    dense        = 3 T f                              gate, up and their product
    experts      = c (max(2 f, h) + f)                c copies of tokens on the rank; the products
                                                      before and behind, one of them reused
    sampler      = n V (2 + 4 + 4 + 4 + 8)            logits, as fp32, probabilities, sorted, order
    graphs       = 2 MiB n (k + 1), and 3 MiB more for each attention-data rank
    communicators = 1 GiB per 8 devices of an instance

Sources: what is alive at once is read off the engines' layers; engines run experts in chunks of
16,384 tokens (vLLM, `VLLM_FUSED_MOE_CHUNK_SIZE`). Graphs, communicators and the context of 512 MiB
are SGLang's own heuristic (0.5.23, `arg_groups/memory_hook.py`: 512 MiB, tp pp / 8 GiB, 2 MiB per
captured sequence, 3 MiB per sequence and attention-data rank). Buffers are DeepEP's sizes
(csrc/config.hpp, `LowLatencyLayout` and `Config`; deep_ep/buffer.py, 20 multiprocessors).

Against published logs: Llama-3-8B with 8,192 tokens a step 0.84 GB here, 1.26 GiB in vLLM's profile
(pull request 10511); DeepSeek-R1 on 16 H20 2.7 GB of context and communicators here, 2.53 GiB
(issue 13074). Each part is a lower bound by what allocators round up, and the sum is an estimate.

Not covered: prompts of pictures, graphs of prompts, copies of weights while they are reloaded.
"""

import math
from dataclasses import dataclass
from typing import Final

from tuner.costs.serving.decoder import AttentionKind
from tuner.costs.serving.engine import Degrees, Exchange
from tuner.costs.serving.exchange import ELEMENT_BYTES
from tuner.costs.serving.iteration import Iteration

MIB: Final = 2.0**20
CONTEXT_BYTES: Final = 512.0 * MIB
COMMUNICATOR_BYTES: Final = 1024.0 * MIB / 8.0
"""Of each device of an instance, where there are several."""
GRAPH_BYTES: Final = 2.0 * MIB
GRAPH_RANK_BYTES: Final = 3.0 * MIB
SAMPLER_BYTES: Final = 22.0
CHUNK_TOKENS: Final = 16_384.0
LEAST_DISPATCH: Final = 128
"""Tokens of a rank that low-latency buffers hold at least, by the engines' defaults."""
NODE_RANKS: Final = 8
"""Peers over NVLink that DeepEP's buffers are laid out for (`NUM_MAX_NVL_PEERS`)."""
CHANNELS: Final = 10
INSIDE_CHUNK: Final = 256
OUTSIDE_CHUNK: Final = 128
"""Tokens that a channel's receive buffers hold (deep_ep/buffer.py, `get_dispatch_config`)."""
META_BYTES: Final = 128.0 * (8.0 + 4.0 + 4.0) + 16.0
"""Beside each token there: ids and weights of 128 experts, 128 scales, where it came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Bytes of one device."""

    fixed: float
    """Context and communicators."""
    activations: float
    graphs: float
    buffers: float
    """Of the exchange around experts."""

    @property
    def total(self) -> float:
        """Of all of them."""
        return self.fixed + self.activations + self.graphs + self.buffers


def reserve_of(iteration: Iteration, *, step_tokens: int, running: int) -> Reserve:
    """What a device needs beside weights and caches.

    Args:
        iteration: the instance.
        step_tokens: of a step of one rank at most.
        running: sequences of one rank at most.
    """
    degrees, captured = iteration.degrees, running * iteration.checked_tokens
    each = GRAPH_BYTES
    if degrees.attention_data > 1:
        each += GRAPH_RANK_BYTES * degrees.attention_data
    others = degrees.devices if degrees.devices > 1 else 0
    return Reserve(
        fixed=CONTEXT_BYTES + COMMUNICATOR_BYTES * others,
        activations=activation_bytes(
            iteration, tokens=float(max(step_tokens, captured)), running=float(running)
        ),
        graphs=each * captured,
        buffers=exchange_buffer_bytes(iteration, tokens=captured),
    )


def activation_bytes(iteration: Iteration, *, tokens: float, running: float) -> float:
    """What is alive at once while a step of so many tokens of a rank runs."""
    decoder, degrees = iteration.decoder, iteration.degrees
    sampler = running * iteration.checked_tokens * decoder.vocab * SAMPLER_BYTES
    dense = max(group.dense_ffn for group in decoder.layers) / degrees.attention_tensor
    widest = max(_attention_width(iteration, at) for at in range(len(decoder.layers)))
    largest = max(
        tokens * ELEMENT_BYTES * widest,
        tokens * ELEMENT_BYTES * 3.0 * dense,
        _expert_bytes(iteration, tokens),
        sampler / degrees.attention_tensor,
    )
    return 2.0 * ELEMENT_BYTES * tokens * decoder.hidden + largest


def _attention_width(iteration: Iteration, at: int) -> float:
    """Elements of one token: queries, keys, values and outputs of a rank."""
    own, ranks = iteration.decoder.layers[at].attention, iteration.degrees.attention_tensor
    heads, kv_heads = own.heads / ranks, max(own.kv_heads / ranks, 1.0)
    if own.kind is AttentionKind.GROUPED:
        return own.head_dim * (heads * (3 if own.has_gate else 2) + 2.0 * kv_heads)
    if own.kind is AttentionKind.GATED_DELTA:
        return own.head_dim * 2.0 * (2.0 * heads + kv_heads)
    return heads * 2.0 * (own.head_dim + own.value_dim)


def _expert_bytes(iteration: Iteration, tokens: float) -> float:
    own, degrees = iteration.decoder.experts, iteration.degrees
    if own is None:
        return 0.0
    hidden, ffn = iteration.decoder.hidden, own.ffn / degrees.moe_tensor
    together, gathered = tokens, 0.0
    if degrees.attention_data > 1 and not _is_dispatched(iteration):
        together = tokens * degrees.attention_data
        gathered = 2.0 * together * hidden
    copies = min(together, CHUNK_TOKENS) * own.top_k
    return ELEMENT_BYTES * (gathered + copies * (max(2.0 * ffn, hidden) + ffn))


def exchange_buffer_bytes(iteration: Iteration, *, tokens: int) -> float:
    """Buffers of DeepEP for steps of at most so many tokens of a rank, drafts included."""
    own, degrees = iteration.decoder.experts, iteration.degrees
    if own is None or degrees.attention_data == 1 or not _is_dispatched(iteration):
        return 0.0
    slots = own.num if iteration.loads is None else iteration.loads.num_slots
    hidden = iteration.decoder.hidden
    total = _normal_bytes(hidden, degrees)
    if iteration.exchange is Exchange.LOW_LATENCY:
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


def _normal_bytes(hidden: int, degrees: Degrees) -> float:
    ranks = degrees.attention_tensor * degrees.attention_data
    each = ELEMENT_BYTES * hidden + META_BYTES
    inside = CHANNELS * min(ranks, NODE_RANKS) * INSIDE_CHUNK * each
    nodes = ranks // NODE_RANKS
    outside = CHANNELS * nodes * OUTSIDE_CHUNK * 2.0 * each if nodes > 1 else 0.0
    return inside + outside


def _is_dispatched(iteration: Iteration) -> bool:
    return iteration.exchange in (Exchange.NORMAL, Exchange.LOW_LATENCY)
