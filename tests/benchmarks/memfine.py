"""MemFine's memory model of one MoE layer's activations, as the paper has it.

    Eq. 2   M = m_g / (t c) * D b [ s (5 h + a h_d + 2 k_a h_d + e_n) + s' (2 h + 2 g_e) ]
    Eq. 8   s'_max = (alpha M_GPU - M_sta - s-part of Eq. 2) / (s'-part of Eq. 2 per token copy)
    Eq. 9   chunks = ceil(s'' / s'_max), rounded up to one of the allowed counts
    fit     M(chunks) = A + B / chunks: only the s'-part is divided by the chunks

Letters: t tensor and c context ranks, D bytes per element, b sequences, s tokens of one, h hidden,
a query heads, k_a key-value heads, h_d head size, e_n experts, g_e width of an expert, s' token
copies that a device receives per sequence, s'' those measured, m_g sets of activations held.

Source: MemFine, arXiv 2511.21431, sections 4 and 5. This is the yardstick that the project's own
count (tuner/costs/reference/memory.py) is compared with; no plan is made from it.
Not covered: Eq. 1's static memory, which the paper's own figures do not follow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

InFlight = Literal["paper", "plain_1f1b", "recomputed"]
"""Count of m_g: the paper's v p + p - 2 r - 1, which is interleaved 1F1B's count; the p - r
of plain 1F1B; or the 1 of full recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What Eq. 2 reads of a model and a batch."""

    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    experts: int
    expert_ffn: int
    sequence_tokens: int
    sequences: int = 1
    element_bytes: int = 2
    sequence_ranks: int = 1
    """t c: ranks that share a sequence."""

    @property
    def bytes_per_sequence_position(self) -> float:
        """Of attention, norms and router, per token of the sequence: the factor of s."""
        kept = 5 * self.hidden + self.experts
        kept += (self.query_heads + 2 * self.kv_heads) * self.head_dim
        return self.element_bytes * self.sequences * kept / self.sequence_ranks

    @property
    def bytes_per_received_copy(self) -> float:
        """Of the experts, per token copy received: the factor of s'."""
        kept = 2 * self.hidden + 2 * self.expert_ffn
        return self.element_bytes * self.sequences * kept / self.sequence_ranks


def sets_in_flight(
    count: InFlight, *, pipeline_ranks: int = 1, pipeline_rank: int = 0, chunks_per_rank: int = 1
) -> int:
    """Return m_g, the activation sets that a pipeline rank holds at once."""
    if count == "recomputed":
        return 1
    if count == "plain_1f1b":
        return pipeline_ranks - pipeline_rank
    return chunks_per_rank * pipeline_ranks + pipeline_ranks - 2 * pipeline_rank - 1


def stored_bytes(shape: LayerShape, *, received: float, in_flight: int, chunks: int = 1) -> float:
    """Bytes of stored activations of one layer (Eq. 2), its experts in chunks."""
    outside = shape.sequence_tokens * shape.bytes_per_sequence_position
    return in_flight * (outside + received * shape.bytes_per_received_copy / chunks)


def largest_received(
    shape: LayerShape, *, usable_bytes: float, static_bytes: float, in_flight: int
) -> float:
    """Most token copies that fit at once, s'_max of Eq. 8.

    Raises:
        ValueError: not even the part outside of the experts fits.
    """
    left = usable_bytes - static_bytes - stored_bytes(shape, received=0.0, in_flight=in_flight)
    if left <= 0.0:
        raise ValueError(f"{-left:.0f} bytes too few before the first token copy is received")
    return left / (in_flight * shape.bytes_per_received_copy)


def chunks_for(received: float, *, largest: float, bins: Sequence[int] = (1, 2, 4, 8)) -> int:
    """Choose the smallest allowed chunk count that keeps every chunk under s'_max (Eq. 9).

    Raises:
        ValueError: not even the largest allowed count does.
    """
    needed = math.ceil(received / largest)
    fitting = [count for count in sorted(bins) if count >= needed]
    if not fitting:
        raise ValueError(f"{needed} chunks are needed, at most {max(bins)} are allowed")
    return fitting[0]


def active_bytes(constant: float, divided: float, *, chunks: int) -> float:
    """Bytes of active memory at a chunk count: A + B / chunks."""
    return constant + divided / chunks


def fit_active(chunks: Sequence[int], active: Sequence[float]) -> tuple[float, float]:
    """Fit A and B of A + B / chunks to measured bytes by least squares.

    Raises:
        ValueError: fewer than two distinct chunk counts.
    """
    if len(set(chunks)) < 2 or len(chunks) != len(active):
        raise ValueError(f"chunk counts {tuple(chunks)} do not determine two numbers")
    share = [1.0 / count for count in chunks]
    mean_share, mean_active = sum(share) / len(share), sum(active) / len(active)
    spread = sum((one - mean_share) ** 2 for one in share)
    together = sum(
        (one - mean_share) * (seen - mean_active) for one, seen in zip(share, active, strict=True)
    )
    divided = together / spread
    return mean_active - divided * mean_share, divided
