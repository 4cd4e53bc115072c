"""Bytes that live beside state and saved activations while a rank runs backward, at their peak.

Of the operations of profilers/steps, in the order in which autograd runs them backward. Each entry
is what is alive beyond the bytes that the layer saved (tuner/costs/memory.py), counted from the
gradient of its output, n H D, on. n tokens of this rank, N = n T of its T tensor ranks, M copies
sent, R copies received, D bytes per element, F width of an expert, f of a dense network's part:

    dense, shared   N f D (2 + 2) + g / 3         SwiGLU: its gradient [2 f], silu, products; the
                                                  product that was saved is released before
                    3 N H D                       where T > 1: gathered, laid out, received
    combine         2 M H D                       gradients of the products with the gates
    last product    R F D + g / 3                 beside rows on their way, up to (2 R + M) H D
    experts         R F D (2 + 2) + g / 3 - M H D SwiGLU, the copies in token order released
    first product   R H D - (M H + R F) D + g
    norm            5 n H 4 (bf16), 4 n H 4       what fp32 needs of a norm's backward
    head            8 n V                         two fp32 gradients beside the log-probabilities
    reduction       4 P (2 + 1 / S) - D P         S ranks share P; less 4 P of earlier gradients,
                                                  and 2 P more where they are scattered
    optimizer       4 P / S                       AdamW's square roots, all at once (foreach)

g: gradients of the weights in the compute type, which a unit holds until its layer is done. Its
fp32 gradients exist from the first micro-batch on; with one micro-batch they come layer by layer.

Source: PyTorch 2.13, torch/optim/adam.py (`_multi_tensor_adam`), torch/distributed/fsdp
(`foreach_reduce`), and every allocation of traced steps. How well it holds:
tests/benchmarks/fit_or_not.py.
Not covered: scratch memory of matrix products; that inside collectives, except where gradients are
summed, whose own copy and the half that Gloo's scatter holds on top are in the reduction above; and
allocators that keep or cut up what is freed. Plans leave room by `usable_memory_ratio`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from profilers.steps.config import LayerKind, Recompute
from tuner.costs.hierarchical_dispatch import rows_by_node
from tuner.costs.memory import chunk_bytes, layer_activations
from tuner.costs.update import GRADIENT_BYTES, Unit, layer_units
from tuner.costs.workload import Degrees, Workload
from tuner.spec.accounting import embedding_parameters, head_parameters, one_expert_parameters

WIDE_BYTES = 4
"""Norms, losses and reductions are computed in fp32."""

NORM_BUFFERS = {2: 5, 4: 4}
"""fp32 buffers alive at once in `_RmsNorm.backward`, by bytes of an element: casts are copies."""

UNCOUNTED_RATIO: Final = 0.015
"""Of the counted bytes: blocks of less than 64 KiB, scratch memory that is not covered above, and
the tail of what holds more. Chosen before tests/benchmarks/fit_or_not.py was judged, from 36 other
trials (its seed 1, without limit): the median held 0.3 % more than counted, the fullest 0.9 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Rows of one chunk of an MoE layer on one rank."""

    sent: int
    received: int
    is_exchanged: bool
    """Whether rows travel between ranks."""
    staged: int
    """Bytes of rows on their way through nodes, where dispatch is hierarchical."""


def layer_working(
    work: Workload,
    degrees: Degrees,
    *,
    layer: int,
    recompute: Recompute,
    chunks: int,
    expert_rank: int,
    adds_in_place: bool = False,
) -> int:
    """Return the most that a layer's backward holds beyond what the layer saved, in bytes.

    What is computed again counts. With `adds_in_place` gradients are added to those of an earlier
    micro-batch as they come, which is so where both are fp32.
    """
    hidden = _hidden(work, degrees)
    is_dense = work.model.layers[layer] is LayerKind.DENSE
    own = layer_activations(
        work,
        degrees,
        layer=layer,
        recompute=recompute,
        chunks=chunks,
        expert_rank=expert_rank,
    )
    # Beside the gradient of the layer's output, the output itself where it is computed again.
    entry = 2 * hidden if recompute is Recompute.FULL else hidden
    if is_dense:
        peak = _swiglu(work, degrees, width=work.model.dense_ffn_size)
        return entry + own.transient + max(peak, _norm(work, degrees))
    moe = work.model.moe
    assert moe is not None
    shared = moe.shared_ffn_size
    waiting = shared_gradients(work, degrees)
    copies = _copies(work, degrees, layer=layer, chunks=chunks, expert_rank=expert_rank)
    is_whole = recompute is Recompute.NONE or (recompute is Recompute.FULL and chunks == 1)
    leaves = chunks > 1 and not is_whole and not adds_in_place
    experts = _experts(work, degrees, copies, leaves_gradients=leaves)
    norm = hidden + waiting + _norm(work, degrees)
    if is_whole:
        kept = chunk_bytes(work, degrees, layer=layer, chunks=1, expert_rank=expert_rank)
        # The shared expert comes first; its products are then gone, its gradients are not.
        released = 3 * work.tokens(degrees) * shared * work.element_bytes
        inside = waiting + (hidden if shared else 0) - released + experts
        first = _swiglu(work, degrees, width=shared) if shared else 0
        return entry + own.transient + max(first, inside, norm - kept - released)
    # Chunks bring gradients of their tokens one by one, which are then put together.
    inside = own.transient + waiting + (2 if shared else 1) * hidden + experts
    outside = max(_swiglu(work, degrees, width=shared) if shared else 0, norm)
    if recompute is Recompute.FULL:
        outside += own.transient
    return entry + max(inside, outside)


def shared_gradients(work: Workload, degrees: Degrees) -> int:
    """Return the gradients of the shared expert, which come before those of the experts."""
    moe = work.model.moe
    width = 0 if moe is None else moe.shared_ffn_size
    return 3 * work.model.hidden_size * width // degrees.tensor * work.element_bytes


def head_working(work: Workload, degrees: Degrees) -> int:
    """Return what the loss and the head hold beyond their saved bytes, at the peak."""
    logits = work.tokens(degrees) * work.model.vocab_size
    losses = 2 * WIDE_BYTES * logits
    # The loss has let go of its fp32 tensors when the head's products run.
    products = (work.element_bytes - WIDE_BYTES) * logits + head_gradients(work)
    return max(losses, products + _hidden(work, degrees) + _norm(work, degrees), 0)


def head_gradients(work: Workload) -> int:
    """Return the head's gradient in the compute type, which waits for the end of the backward."""
    weights = head_parameters(work.model) or embedding_parameters(work.model)
    return work.element_bytes * weights


def reduction_working(unit: Unit, work: Workload, degrees: Degrees, *, has_gradients: bool) -> int:
    """Return what the sum of a unit's gradients over ranks holds beyond the unit's state.

    What goes in, what comes out, and as much as goes in once more: the collective's own copy, or
    where nothing is scattered the scaled one. Gloo's scatter halves what it exchanges and holds a
    half on top. The unit's weights are given up before, and with `has_gradients` the fp32 gradients
    of earlier micro-batches.
    """
    whole = GRADIENT_BYTES * unit.parameters
    held = 2 * whole + GRADIENT_BYTES * unit.sharded(degrees)
    if degrees.zero_stage and unit.ranks > 1:
        held += whole // 2
    given_up = work.element_bytes * unit.parameters
    return held - given_up - (whole if has_gradients and degrees.zero_stage != 3 else 0)


def optimizer_working(units: Sequence[Unit], degrees: Degrees) -> int:
    """Return what AdamW holds beyond parameters, gradients and moments."""
    return GRADIENT_BYTES * sum(unit.sharded(degrees) for unit in units)


def gathered_in_turn(work: Workload, degrees: Degrees, *, layers: Iterable[int]) -> int:
    """Return what zero_stage 3 gathers besides the ends while a backward runs.

    One layer's experts at a time; of the other units the one before is gathered ahead, and the
    one behind not yet given back.
    """
    if degrees.zero_stage != 3:
        return 0
    experts, others = [0], []
    for layer in layers:
        sizes = [unit.parameters for unit in layer_units(work, degrees, layer=layer)]
        if work.model.layers[layer] is LayerKind.MOE:
            experts.append(sizes.pop())
        others.append(sum(sizes))
    return work.element_bytes * (max(experts) + sum(sorted(others)[-3:]))


def boundary_bytes(work: Workload, degrees: Degrees, *, stage: int, in_flight: int) -> int:
    """Return what a stage holds to exchange activations with its neighbours.

    A buffer for every micro-batch of a step on either side; those in flight that were received are
    saved activations already, those to send are held until their gradients come.
    """
    if degrees.pipeline == 1:
        return 0
    batches = work.num_microbatches(degrees)
    received = batches - in_flight if stage > 0 else 0
    returned = batches + in_flight if stage < degrees.num_stages - 1 else 0
    logits = work.tokens(degrees) * work.model.vocab_size * work.element_bytes
    last = in_flight * logits if stage == degrees.num_stages - 1 else 0
    return (received + returned) * _hidden(work, degrees) + last


def _hidden(work: Workload, degrees: Degrees) -> int:
    return work.tokens(degrees) * work.model.hidden_size * work.element_bytes


def _norm(work: Workload, degrees: Degrees) -> int:
    buffers = NORM_BUFFERS[work.element_bytes]
    return buffers * WIDE_BYTES * work.tokens(degrees) * work.model.hidden_size


def _swiglu(work: Workload, degrees: Degrees, *, width: int) -> int:
    """A network that every token passes, its width split over tensor ranks."""
    hidden = _hidden(work, degrees)
    products = work.tokens(degrees) * width * work.element_bytes
    gradient = work.model.hidden_size * width // degrees.tensor * work.element_bytes
    if degrees.tensor == 1:
        return 4 * products + gradient
    gathered = hidden * degrees.tensor
    return max(4 * products + gradient + gathered, 3 * gathered)


def _copies(
    work: Workload, degrees: Degrees, *, layer: int, chunks: int, expert_rank: int
) -> Copies:
    moe, index = work.model.moe, work.moe_index[layer]
    assert moe is not None
    assert index is not None
    received = -(-sum(work.received(degrees, index)[expert_rank]) // chunks)
    sent = -(-work.tokens(degrees) // chunks) * moe.top_k
    if degrees.ranks_per_node is None:
        return Copies(sent=sent, received=received, is_exchanged=degrees.expert > 1, staged=0)
    rows = rows_by_node(work, degrees, moe_layer=index, chunks=chunks)[
        expert_rank // degrees.ranks_per_node
    ]
    row = (work.model.hidden_size + moe.top_k) * work.element_bytes
    return Copies(
        sent=rows.copies,
        received=received,
        is_exchanged=True,
        staged=(rows.sent + rows.received) * row,
    )


def _experts(work: Workload, degrees: Degrees, copies: Copies, *, leaves_gradients: bool) -> int:
    """Combine, experts and dispatch of one chunk, in reverse."""
    moe = work.model.moe
    assert moe is not None
    element, size = work.element_bytes, work.model.hidden_size
    sent, received = (rows * size * element for rows in (copies.sent, copies.received))
    product = copies.received * moe.expert_ffn_size * element
    local = moe.num_experts // degrees.expert
    gradients = local * one_expert_parameters(work.model) * element
    third = gradients // 3
    # Chunks before this one have left gradients, to which this one's are added in place.
    left = gradients if leaves_gradients else 0
    on_their_way = sent + received if copies.is_exchanged else 0
    moments = (
        2 * sent,
        on_their_way + received - sent + product + third,
        4 * product - sent + (0 if left else third),
        received - sent - product + gradients - (third if left else 0),
        2 * sent + received - sent - 3 * product + (0 if left else gradients),
    )
    return left + copies.staged + max(moments)
