"""Every operation of a layer's forward and backward pass on one rank, with its size.

This list is the cost model of the reference step: the same operations are priced, measured by
`moetune profile --for` and executed by profilers/steps. The step's own list is in the docstrings of
profilers/steps; a test compares the two by running a step.

Letters as in tuner/costs/reference/workload.py; n tokens of a rank, N = n * tensor tokens of its
group.
"""

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Final

from profilers.steps.config import LayerKind
from tuner.costs.ops import RAGGED, Op
from tuner.costs.reference.hierarchical_dispatch import EXPERT_ID_BYTES, ID_BYTES, rows_by_node
from tuner.costs.reference.workload import StepDegrees, Workload

FP32_KINDS = frozenset({"router", "cross_entropy"})
"""Memory-bound operations that compute in fp32 whatever the precision of the rest."""


FLAT_WIDTH = 1024
"""Row width at which flat arrays are looked up; only rows * width matters."""


class Part(StrEnum):
    """Categories of the time breakdown."""

    ATTENTION = "attention"
    """Norm, projections, rotation, attention core and residual."""
    FFN = "ffn"
    """Dense feed-forward networks and shared experts."""
    ROUTER = "router"
    """Norm before the experts, router, choice of experts."""
    EXPERTS = "experts"
    """Permutation, grouped GEMMs, combination."""
    EMBEDDING = "embedding"
    """Token embedding."""
    HEAD = "head"
    """Final norm, logits and loss."""
    TENSOR_COMMUNICATION = "tensor_communication"
    """All-gathers and reduce-scatters along the sequence."""
    EXPERT_COMMUNICATION = "expert_communication"
    """Counts, dispatch and combine between expert-parallel ranks."""
    PIPELINE_COMMUNICATION = "pipeline_communication"
    """Activations and their gradients between stages."""
    DATA_COMMUNICATION = "data_communication"
    """Gradients and parameters between data-parallel ranks."""
    OPTIMIZER = "optimizer"
    """The update."""


COMMUNICATION: Final = frozenset(
    {
        Part.TENSOR_COMMUNICATION,
        Part.EXPERT_COMMUNICATION,
        Part.PIPELINE_COMMUNICATION,
        Part.DATA_COMMUNICATION,
    }
)
"""Parts that are communication."""


def attention_ops(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    """List the attention block: norm, qkv, rotation, core, output, residual."""
    model, attention = work.model, work.model.attention
    n = work.tokens(degrees)
    gathered = n * degrees.tensor
    heads = attention.num_heads // degrees.tensor
    kv_heads = max(1, attention.num_kv_heads // degrees.tensor)
    width = attention.head_dim
    hidden = model.hidden_size
    part = Part.ATTENTION
    return (
        *_memory_bound(work, part, "rms_norm", rows=n, width=hidden),
        *_sequence_gather(work, degrees),
        *_gemm(work, part, m=gathered, n=(heads + 2 * kv_heads) * width, k=hidden),
        *_memory_bound(work, part, "rotary", rows=gathered, width=(heads + kv_heads) * width),
        *_both(
            work,
            part,
            "attention",
            batch=degrees.micro_batch_size,
            sequence=work.sequence_length,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
        ),
        *_gemm(work, part, m=gathered, n=hidden, k=heads * attention.value_head_dim),
        *_sequence_scatter(work, degrees),
        *_memory_bound(work, part, "residual_add", rows=n, width=hidden),
    )


def dense_ffn_ops(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    """List a dense layer's second half: norm, SwiGLU network, residual."""
    n, hidden = work.tokens(degrees), work.model.hidden_size
    return (
        *_memory_bound(work, Part.FFN, "rms_norm", rows=n, width=hidden),
        *_swiglu_ops(work, degrees, ffn=work.model.dense_ffn_size),
        *_memory_bound(work, Part.FFN, "residual_add", rows=n, width=hidden),
    )


def router_ops(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    """List what a MoE layer does outside of its chunks: norm, router, shared expert, residual."""
    moe = work.model.moe
    if moe is None:
        return ()
    n, hidden = work.tokens(degrees), work.model.hidden_size
    shared = _swiglu_ops(work, degrees, ffn=moe.shared_ffn_size) if moe.shared_ffn_size else ()
    return (
        *_memory_bound(work, Part.ROUTER, "rms_norm", rows=n, width=hidden),
        *_gemm(work, Part.ROUTER, m=n, n=moe.num_experts, k=hidden),
        *_memory_bound(work, Part.ROUTER, "router", rows=n, width=moe.num_experts),
        *shared,
        *_memory_bound(work, Part.ROUTER, "residual_add", rows=n, width=hidden),
    )


def expert_ops(
    work: Workload, degrees: StepDegrees, *, moe_layer: int, chunks: int
) -> tuple[Op, ...]:
    """List dispatch, experts and combine of one MoE layer on its most-loaded rank, by chunk.

    Chunks split a rank's own tokens, so each is a `chunks`-th of every count; the weight gradients
    of all local experts are added up chunk by chunk.
    """
    moe = work.model.moe
    if moe is None:
        return ()
    hidden = work.model.hidden_size
    n = -(-work.tokens(degrees) // chunks)
    copies = n * moe.top_k
    received = work.received(degrees, moe_layer)
    most_loaded = max(received, key=lambda counts: (sum(counts), max(counts)))
    rows = -(-sum(most_loaded) // chunks)
    part = Part.EXPERTS
    network = _both(
        work,
        part,
        "grouped_gemm",
        kind=RAGGED if work.ragged_experts else "",
        experts=len(most_loaded),
        tokens=rows,
        largest=max(-(-rows // len(most_loaded)), min(rows, -(-max(most_loaded) // chunks))),
        hidden=hidden,
        ffn=moe.expert_ffn_size,
    )
    ops = [
        *_memory_bound(work, part, "permute", rows=copies, width=hidden),
        *network,
        *_memory_bound(work, part, "unpermute", rows=copies, width=hidden),
    ]
    if degrees.ranks_per_node is not None:
        ops = [*network, *_hop_ops(work, degrees, moe_layer=moe_layer, chunks=chunks, rows=rows)]
    elif degrees.expert > 1:
        ops += _dispatch_ops(work, degrees, copies=copies, rows=rows)
    if chunks > 1:
        weights = 3 * len(most_loaded) * moe.expert_ffn_size * hidden
        ops.append(_weight_gradient_sum(weights, dtype=work.precision))
    return tuple(replace(op, count=chunks) for op in ops)


def embedding_ops(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    """List the token embedding of the first stage."""
    n = work.tokens(degrees)
    return _memory_bound(work, Part.EMBEDDING, "embedding", rows=n, width=work.model.hidden_size)


def head_ops(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    """List the last stage's norm, logits and loss."""
    n, model = work.tokens(degrees), work.model
    return (
        *_memory_bound(work, Part.HEAD, "rms_norm", rows=n, width=model.hidden_size),
        *_gemm(work, Part.HEAD, m=n, n=model.vocab_size, k=model.hidden_size),
        *_memory_bound(work, Part.HEAD, "cross_entropy", rows=n, width=model.vocab_size),
    )


def boundary_ops(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    """List what one stage sends to the next, and receives back as a gradient."""
    if degrees.pipeline == 1:
        return ()
    size = work.tokens(degrees) * work.model.hidden_size * work.element_bytes
    send = collective(
        "send_recv", num_bytes=size, ranks=2, stride=degrees.ranks_per_stage, world=degrees.world
    )
    return _of_part(Part.PIPELINE_COMMUNICATION, forward=(send,), backward=(send,))


def layer_ops(
    work: Workload, degrees: StepDegrees, *, layer: int, chunks: int
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """List a layer's operations as (outside the chunks, inside the chunks)."""
    attention = attention_ops(work, degrees)
    if work.model.layers[layer] is LayerKind.DENSE:
        return attention + dense_ffn_ops(work, degrees), ()
    index = work.moe_index[layer]
    assert index is not None
    inside = expert_ops(work, degrees, moe_layer=index, chunks=chunks)
    return attention + router_ops(work, degrees), inside


def collective(kind: str, *, num_bytes: int, ranks: int, stride: int, world: int) -> Op:
    """One collective, bytes as in profilers/links (NCCL's tests)."""
    axes = {"bytes": num_bytes, "ranks": ranks, "stride": stride, "world": world}
    return Op(operation="collective", kind=kind, axes=axes)


def arrival_skew(collective: Op, *, work_s: float) -> Op:
    """The arrival skew of a collective's group after `work_s` seconds of compute."""
    group = {axis: collective.axes[axis] for axis in ("ranks", "stride", "world")}
    return Op(operation="rendezvous", axes={"work_us": round(work_s * 1e6), **group})


def device_copy(num_bytes: int, *, part: str = "") -> Op:
    """One copy within a device's memory."""
    return Op(part=part, operation="copy", kind="device", axes={"bytes": num_bytes})


def _weight_gradient_sum(elements: int, *, dtype: str) -> Op:
    """Add a chunk's weight gradients to those of the others: a flat run of elements."""
    return Op(
        part=Part.EXPERTS,
        operation="memory_bound",
        kind="residual_add",
        dtype=dtype,
        direction="forward",
        in_backward=True,
        axes={"rows": max(1, -(-elements // FLAT_WIDTH)), "width": FLAT_WIDTH},
    )


def _swiglu_ops(work: Workload, degrees: StepDegrees, *, ffn: int) -> tuple[Op, ...]:
    gathered = work.tokens(degrees) * degrees.tensor
    hidden, local = work.model.hidden_size, ffn // degrees.tensor
    return (
        *_sequence_gather(work, degrees),
        *_gemm(work, Part.FFN, m=gathered, n=2 * local, k=hidden),
        *_memory_bound(work, Part.FFN, "swiglu", rows=gathered, width=local),
        *_gemm(work, Part.FFN, m=gathered, n=hidden, k=local),
        *_sequence_scatter(work, degrees),
    )


def _dispatch_ops(work: Workload, degrees: StepDegrees, *, copies: int, rows: int) -> list[Op]:
    hidden, ranks, world = work.model.hidden_size, degrees.expert, degrees.world
    part = Part.EXPERT_COMMUNICATION
    moe = work.model.moe
    assert moe is not None
    counts = collective(
        "all_to_all", num_bytes=8 * moe.num_experts, ranks=ranks, stride=1, world=world
    )
    payload = collective(
        "all_to_all",
        num_bytes=max(copies, rows) * hidden * work.element_bytes,
        ranks=ranks,
        stride=1,
        world=world,
    )
    # Rows arrive by source rank and must lie by expert: one more permutation each way.
    reorder = _memory_bound(work, Part.EXPERTS, "permute", rows=rows, width=hidden)
    return [
        *_of_part(part, forward=(counts, payload, payload), backward=(payload, payload)),
        *reorder,
        *reorder,
    ]


def _hop_ops(
    work: Workload, degrees: StepDegrees, *, moe_layer: int, chunks: int, rows: int
) -> list[Op]:
    """List hierarchical dispatch and combine on the most-loaded node.

    The operations are those of profilers/steps/dispatch.py.
    """
    moe, inside, world = work.model.moe, degrees.ranks_per_node, degrees.world
    assert moe is not None
    assert inside is not None
    nodes, hidden = degrees.expert // inside, work.model.hidden_size
    peak_node = max(
        rows_by_node(work, degrees, moe_layer=moe_layer, chunks=chunks),
        key=lambda node: node.copies,
    )

    def across(num_bytes: int) -> Op:
        return collective(
            "all_to_all", num_bytes=num_bytes, ranks=nodes, stride=inside, world=world
        )

    def within(num_bytes: int) -> tuple[Op, ...]:
        if inside == 1:
            return ()
        one = collective("all_to_all", num_bytes=num_bytes, ranks=inside, stride=1, world=world)
        return (one,)

    crossing = max(peak_node.sent, peak_node.received)
    announced = across(ID_BYTES * nodes)
    wanted = across(crossing * moe.top_k * EXPERT_ID_BYTES)
    gated = across(crossing * (hidden + moe.top_k) * work.element_bytes)
    summed = across(crossing * hidden * work.element_bytes)
    spread = within(max(peak_node.copies, rows) * hidden * work.element_bytes)
    counts = within(ID_BYTES * moe.num_experts // nodes)
    tokens = work.tokens(degrees) // chunks
    part = Part.EXPERTS
    reorder = _memory_bound(work, part, "permute", rows=rows, width=hidden)
    needs_expert_sort = min(inside, moe.num_experts // degrees.expert) > 1
    return [
        *_of_part(
            Part.EXPERT_COMMUNICATION,
            forward=(announced, wanted, gated, *counts, *spread, *spread, summed),
            backward=(summed, *spread, *spread, gated),
        ),
        # Gates are concatenated to the tokens, rows gathered by node, copies by expert; combine
        # weights and sums copies, then sums the rows of nodes.
        device_copy(tokens * (hidden + moe.top_k) * work.element_bytes, part=part),
        *_memory_bound(work, part, "permute", rows=peak_node.sent, width=hidden),
        *_memory_bound(work, part, "permute", rows=peak_node.copies, width=hidden),
        *((*reorder, *reorder) if needs_expert_sort else ()),
        *_memory_bound(work, part, "unpermute", rows=peak_node.copies, width=hidden),
        *_memory_bound(work, part, "permute", rows=peak_node.sent, width=hidden),
    ]


def _sequence_gather(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    return _sequence_collective(work, degrees, forward="all_gather", backward="reduce_scatter")


def _sequence_scatter(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    return _sequence_collective(work, degrees, forward="reduce_scatter", backward="all_gather")


def _sequence_collective(
    work: Workload, degrees: StepDegrees, *, forward: str, backward: str
) -> tuple[Op, ...]:
    if degrees.tensor == 1:
        return ()
    tokens = work.tokens(degrees) * degrees.tensor
    size = tokens * work.model.hidden_size * work.element_bytes
    # The sequence is not the outermost axis: rows are copied on one side of the collective.
    laid_out = device_copy(size)
    there, back = (
        collective(kind, num_bytes=size, ranks=degrees.tensor, stride=1, world=degrees.world)
        for kind in (forward, backward)
    )
    return _of_part(Part.TENSOR_COMMUNICATION, forward=(there, laid_out), backward=(back, laid_out))


def _of_part(part: Part, *, forward: Iterable[Op], backward: Iterable[Op]) -> tuple[Op, ...]:
    return (
        *(replace(op, part=part) for op in forward),
        *(replace(op, part=part, in_backward=True) for op in backward),
    )


def _gemm(work: Workload, part: Part, *, m: int, n: int, k: int) -> tuple[Op, ...]:
    return _both(work, part, "gemm", m=m, n=n, k=k)


def _memory_bound(
    work: Workload, part: Part, kind: str, *, rows: int, width: int
) -> tuple[Op, ...]:
    return _both(work, part, "memory_bound", kind=kind, rows=rows, width=width)


def _both(
    work: Workload, part: Part, operation: str, *, kind: str = "", **axes: int
) -> tuple[Op, ...]:
    """A kernel's forward and backward pass."""
    forward = Op(
        part=part,
        operation=operation,
        kind=kind,
        dtype="fp32" if kind in FP32_KINDS else work.precision,
        direction="forward",
        axes=axes,
    )
    return forward, replace(forward, direction="backward", in_backward=True)
