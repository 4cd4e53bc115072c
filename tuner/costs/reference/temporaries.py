"""Peak bytes of temporaries in a backward pass, besides state and saved activations.

For the operations of profilers/steps, in the order in which autograd runs them backward. Each entry
is what is allocated beyond the bytes that the layer saved (tuner/costs/reference/memory.py), after
the gradient of its output, n H D. n tokens of this rank, N = n T of its T tensor ranks, M copies
sent, R copies received, D bytes per element, F width of an expert, f of a dense network's shard:

    dense, shared   N f D (2 + 2) + g / 3         SwiGLU: its gradient [2 f], silu, gate * up; the
                                                  saved gate * up is released before
                    3 N H D                       where T > 1: gathered, copied, received
    combine         2 M H D                       gradients of the rows times the gates
    down GEMM       R F D + g / 3                 beside rows in transfer, up to (2 R + M) H D
    experts         R F D (2 + 2) + g / 3 - M H D SwiGLU, the copies in token order released
    up GEMM         R H D - (M H + R F) D + g
    norm            5 n H 4 (bf16), 4 n H 4       what fp32 needs of a norm's backward
    head            8 n V                         two fp32 gradients beside the log-probabilities
    reduction       4 P (2 + 1 / S) - D P         S ranks share P; less 4 P of earlier gradients,
                                                  and 2 P more where they are scattered
    optimizer       4 P / S                       AdamW's square roots, all at once (foreach)

g: gradients of the weights in the compute type, which a unit keeps until its layer is done. Its
fp32 gradients exist from the first micro-batch on; with one micro-batch they are made layer by
layer. Beside frozen weights adapters alone have some, and a gate * up that was not saved is one
buffer less to release.

Source: PyTorch 2.13, torch/optim/adam.py (`_multi_tensor_adam`), torch/distributed/fsdp
(`foreach_reduce`), and every allocation of traced steps. How well it holds:
tests/benchmarks/fit_or_not.py.
Not covered: scratch memory of GEMMs and of collectives (except of the gradient reduction, whose own
copy and the additional half of Gloo's scatter are included above), and fragmentation. Plans leave
room by `usable_memory_ratio`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from profilers.steps.config import LayerKind, Recompute
from tuner.costs.reference.hierarchical_dispatch import rows_by_node
from tuner.costs.reference.memory import chunk_bytes, layer_activations
from tuner.costs.reference.training import LayerTraining
from tuner.costs.reference.update import GRADIENT_BYTES, Unit, layer_units
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.spec.accounting import embedding_parameters, head_parameters, one_expert_parameters
from tuner.spec.tune import EXPERTS

WIDE_BYTES = 4
"""Norms, losses and reductions are computed in fp32."""

NORM_BUFFERS = {2: 5, 4: 4}
"""fp32 buffers alive at once in `_RmsNorm.backward`, by bytes of an element: casts are copies."""

UNCOUNTED_RATIO: Final = 0.015
"""Share added to the counted bytes for blocks of less than 64 KiB, scratch memory that is not
covered above, and outliers. Chosen before tests/benchmarks/fit_or_not.py was evaluated, from 36
other trials (its seed 1, without limit): 0.3 % more than counted in the median, 0.9 % at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Rows of one chunk of an MoE layer on one rank."""

    sent: int
    received: int
    is_exchanged: bool
    """Whether rows travel between ranks."""
    staged: int
    """Bytes of rows in transfer through nodes, where dispatch is hierarchical."""


def layer_workspace(
    work: Workload,
    degrees: StepDegrees,
    *,
    layer: int,
    recompute: Recompute,
    chunks: int,
    expert_rank: int,
    adds_in_place: bool = False,
) -> int:
    """Return the peak bytes of a layer's backward beyond what the layer saved.

    Recomputed activations count. With `adds_in_place` gradients are accumulated into those of an
    earlier micro-batch, as where both are fp32.
    """
    hidden = _hidden(work, degrees)
    is_dense = work.model.layers[layer] is LayerKind.DENSE
    training = work.trainings[layer].after_attention()
    activations = layer_activations(
        work,
        degrees,
        layer=layer,
        recompute=recompute,
        chunks=chunks,
        expert_rank=expert_rank,
    )
    # The gradient of the layer's output, and the output itself where it is recomputed.
    entry = 2 * hidden if recompute is Recompute.FULL else hidden
    if is_dense:
        peak = _swiglu(work, degrees, training, width=work.model.dense_ffn_size)
        return entry + activations.transient + max(peak, _norm(work, degrees))
    moe = work.model.moe
    assert moe is not None
    shared = moe.shared_ffn_size
    waiting = shared_gradients(work, degrees)
    copies = _copies(work, degrees, layer=layer, chunks=chunks, expert_rank=expert_rank)
    is_whole = recompute is Recompute.NONE or (recompute is Recompute.FULL and chunks == 1)
    leaves = chunks > 1 and not is_whole and not adds_in_place
    experts = _experts(work, degrees, training, copies, leaves_gradients=leaves)
    norm = hidden + waiting + _norm(work, degrees)
    if is_whole:
        kept = chunk_bytes(work, degrees, layer=layer, chunks=1, expert_rank=expert_rank)
        # The shared expert comes first: its activations are released, its gradients are not.
        widths = 2 + training.trains("down_proj")
        released = widths * work.tokens(degrees) * shared * work.element_bytes
        inside = waiting + (hidden if shared else 0) - released + experts
        first = _swiglu(work, degrees, training, width=shared) if shared else 0
        return entry + activations.transient + max(first, inside, norm - kept - released)
    # Chunks produce gradients of their tokens one by one, which are then concatenated.
    inside = activations.transient + waiting + (2 if shared else 1) * hidden + experts
    outside = max(_swiglu(work, degrees, training, width=shared) if shared else 0, norm)
    if recompute is Recompute.FULL:
        outside += activations.transient
    return entry + max(inside, outside)


def shared_gradients(work: Workload, degrees: StepDegrees) -> int:
    """Return the bytes of the shared expert's gradients, which precede those of the experts."""
    moe = work.model.moe
    width = 0 if moe is None else moe.shared_ffn_size
    if work.tune is not None:
        return 0
    return 3 * work.model.hidden_size * width // degrees.tensor * work.element_bytes


def head_workspace(work: Workload, degrees: StepDegrees) -> int:
    """Return the peak bytes of the loss and the head beyond their saved bytes."""
    logits = work.tokens(degrees) * work.model.vocab_size
    losses = 2 * WIDE_BYTES * logits
    # The loss has released its fp32 tensors when the head's GEMMs run.
    gemm_bytes = (work.element_bytes - WIDE_BYTES) * logits + head_gradients(work)
    return max(losses, gemm_bytes + _hidden(work, degrees) + _norm(work, degrees), 0)


def head_gradients(work: Workload) -> int:
    """Return the bytes of the head's gradient in the compute type, kept until backward ends."""
    if work.tune is not None:
        return 0
    weights = head_parameters(work.model) or embedding_parameters(work.model)
    return work.element_bytes * weights


def reduction_workspace(
    unit: Unit, work: Workload, degrees: StepDegrees, *, has_gradients: bool
) -> int:
    """Return the bytes of a unit's gradient reduction beyond the unit's state.

    The input, the output, and a second copy of the input: the collective's own, or without
    scattering the scaled one. Gloo's scatter allocates another half. The unit's weights are
    released before, and with `has_gradients` the fp32 gradients of earlier micro-batches.
    """
    whole = GRADIENT_BYTES * unit.parameters
    workspace = 2 * whole + GRADIENT_BYTES * unit.sharded(degrees)
    if degrees.zero_stage and unit.ranks > 1:
        workspace += whole // 2
    given_up = work.element_bytes * unit.parameters
    return workspace - given_up - (whole if has_gradients and degrees.zero_stage != 3 else 0)


def optimizer_workspace(units: Sequence[Unit], degrees: StepDegrees) -> int:
    """Return the bytes of AdamW beyond parameters, gradients and moments."""
    return GRADIENT_BYTES * sum(unit.sharded(degrees) for unit in units)


def zero3_gathered_bytes(work: Workload, degrees: StepDegrees, *, layers: Iterable[int]) -> int:
    """Return the bytes that zero_stage 3 gathers during backward, besides embedding and head.

    One layer's experts at a time; of the other units the previous one is prefetched, and the
    following one not yet released.
    """
    if degrees.zero_stage != 3:
        return 0
    experts, others = [0], []
    for layer in layers:
        sizes = [unit.parameters + unit.frozen for unit in layer_units(work, degrees, layer=layer)]
        if work.model.layers[layer] is LayerKind.MOE:
            experts.append(sizes.pop())
        others.append(sum(sizes))
    return work.element_bytes * (max(experts) + sum(sorted(others)[-3:]))


def boundary_bytes(work: Workload, degrees: StepDegrees, *, stage: int, in_flight: int) -> int:
    """Return the bytes of a stage's send and receive buffers.

    A buffer for every micro-batch of a step on either side; received ones in flight are saved
    activations already, sent ones are kept until their gradients arrive.
    """
    if degrees.pipeline == 1:
        return 0
    batches = work.num_microbatches(degrees)
    received = batches - in_flight if stage > 0 else 0
    returned = batches + in_flight if stage < degrees.num_stages - 1 else 0
    logits = work.tokens(degrees) * work.model.vocab_size * work.element_bytes
    last = in_flight * logits if stage == degrees.num_stages - 1 else 0
    return (received + returned) * _hidden(work, degrees) + last


def _hidden(work: Workload, degrees: StepDegrees) -> int:
    return work.tokens(degrees) * work.model.hidden_size * work.element_bytes


def _norm(work: Workload, degrees: StepDegrees) -> int:
    buffers = NORM_BUFFERS[work.element_bytes]
    return buffers * WIDE_BYTES * work.tokens(degrees) * work.model.hidden_size


def _swiglu(work: Workload, degrees: StepDegrees, training: LayerTraining, *, width: int) -> int:
    """A network for all tokens, its width split over tensor ranks."""
    hidden = _hidden(work, degrees)
    gemm_bytes = work.tokens(degrees) * width * work.element_bytes
    if not training.is_full:
        return (5 - training.trains("down_proj")) * gemm_bytes
    gradient = work.model.hidden_size * width // degrees.tensor * work.element_bytes
    if degrees.tensor == 1:
        return 4 * gemm_bytes + gradient
    gathered = hidden * degrees.tensor
    return max(4 * gemm_bytes + gradient + gathered, 3 * gathered)


def _copies(
    work: Workload, degrees: StepDegrees, *, layer: int, chunks: int, expert_rank: int
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


def _experts(
    work: Workload,
    degrees: StepDegrees,
    training: LayerTraining,
    copies: Copies,
    *,
    leaves_gradients: bool,
) -> int:
    """Combine, experts and dispatch of one chunk, in reverse."""
    moe = work.model.moe
    assert moe is not None
    element, size = work.element_bytes, work.model.hidden_size
    sent, received = (rows * size * element for rows in (copies.sent, copies.received))
    intermediate = copies.received * moe.expert_ffn_size * element
    local = moe.num_experts // degrees.expert
    gradients = local * one_expert_parameters(work.model) * element
    is_product_saved = 1
    if not training.is_full:
        adapter = training.adapter_ranks(EXPERTS) * (2 * size + 3 * moe.expert_ffn_size)
        gradients = local * adapter * element
        is_product_saved = int(training.trains(EXPERTS))
    third = gradients // 3
    # Earlier chunks have left gradients, into which this one's are accumulated.
    left = gradients if leaves_gradients else 0
    in_transit = sent + received if copies.is_exchanged else 0
    moments = (
        2 * sent,
        in_transit + received - sent + intermediate + third,
        (5 - is_product_saved) * intermediate - sent + (0 if left else third),
        received - sent - is_product_saved * intermediate + gradients - (third if left else 0),
        2 * sent
        + received
        - sent
        - (2 + is_product_saved) * intermediate
        + (0 if left else gradients),
    )
    return left + copies.staged + max(moments)
