"""Every operation of a layer's forward and backward pass on one rank, with its size.

This list is the cost model of the reference step: the same operations are priced, measured by
`moetune profile --for` and executed by profilers/steps. The step's own list is in the docstrings of
profilers/steps; a test compares the two by running a step.

Letters as in tuner/costs/reference/workload.py; n tokens of a rank, N = n * tensor tokens of its
group.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Final

from profilers.steps.config import LayerKind
from tuner.costs.reference.hierarchical_dispatch import EXPERT_ID_BYTES, ID_BYTES, rows_by_node
from tuner.costs.reference.training import FULL, LayerTraining
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.prices.ops import FROZEN, RAGGED, Op, adapted_kind
from tuner.spec.tune import EXPERTS, NETWORK

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
    """Optimizer update."""


COMMUNICATION: Final = frozenset(
    {
        Part.TENSOR_COMMUNICATION,
        Part.EXPERT_COMMUNICATION,
        Part.PIPELINE_COMMUNICATION,
        Part.DATA_COMMUNICATION,
    }
)
"""Parts that are communication."""


def attention_ops(
    work: Workload, degrees: StepDegrees, training: LayerTraining = FULL
) -> tuple[Op, ...]:
    """List the attention block: norm, qkv, rotation, core, output, residual."""
    model, attention = work.model, work.model.attention
    n = work.tokens(degrees)
    gathered = n * degrees.tensor
    heads = attention.num_heads // degrees.tensor
    kv_heads = max(1, attention.num_kv_heads // degrees.tensor)
    width = attention.head_dim
    hidden = model.hidden_size
    part = Part.ATTENTION
    keys = kv_heads * width
    inputs = {"q_proj": heads * width, "k_proj": keys, "v_proj": keys}
    core = (
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
    )
    has_gradient = training.has_input_gradient
    mixed = training.reaches(*inputs)
    return (
        *_norm(work, part, training, rows=n),
        *_sequence_gather(work, degrees),
        *_linear(work, part, training, has_gradient, m=gathered, k=hidden, outputs=inputs),
        *_differentiated(core, mixed),
        *_linear(
            work,
            part,
            training,
            mixed,
            m=gathered,
            k=heads * attention.value_head_dim,
            outputs={"o_proj": hidden},
        ),
        *_sequence_scatter(work, degrees),
        *_differentiated(
            _memory_bound(work, part, "residual_add", rows=n, width=hidden),
            training.reaches(*inputs, "o_proj"),
        ),
    )


def dense_ffn_ops(
    work: Workload, degrees: StepDegrees, training: LayerTraining = FULL
) -> tuple[Op, ...]:
    """List a dense layer's second half: norm, SwiGLU network, residual.

    `training` is that after attention, as in the functions below.
    """
    n, hidden = work.tokens(degrees), work.model.hidden_size
    return (
        *_norm(work, Part.FFN, training, rows=n),
        *_swiglu_ops(work, degrees, training, ffn=work.model.dense_ffn_size),
        *_differentiated(
            _memory_bound(work, Part.FFN, "residual_add", rows=n, width=hidden),
            training.reaches(*NETWORK),
        ),
    )


def router_ops(
    work: Workload, degrees: StepDegrees, training: LayerTraining = FULL
) -> tuple[Op, ...]:
    """List what a MoE layer does outside of its chunks: norm, router, shared expert, residual."""
    moe = work.model.moe
    if moe is None:
        return ()
    n, hidden = work.tokens(degrees), work.model.hidden_size
    shared = moe.shared_ffn_size
    has_gradient = training.has_input_gradient
    scores = _linear(
        work, Part.ROUTER, training, has_gradient, m=n, k=hidden, outputs={"": moe.num_experts}
    )
    choice = _memory_bound(work, Part.ROUTER, "router", rows=n, width=moe.num_experts)
    residual = _memory_bound(work, Part.ROUTER, "residual_add", rows=n, width=hidden)
    return (
        *_norm(work, Part.ROUTER, training, rows=n),
        *scores,
        *_differentiated(choice, has_gradient),
        *(_swiglu_ops(work, degrees, training, ffn=shared) if shared else ()),
        *_differentiated(residual, training.reaches(*NETWORK, EXPERTS)),
    )


def expert_ops(
    work: Workload,
    degrees: StepDegrees,
    training: LayerTraining = FULL,
    *,
    moe_layer: int,
    chunks: int,
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
        kind=_expert_kind(work, training),
        experts=len(most_loaded),
        tokens=rows,
        largest=max(-(-rows // len(most_loaded)), min(rows, -(-max(most_loaded) // chunks))),
        hidden=hidden,
        ffn=moe.expert_ffn_size,
    )
    before, after = training.has_input_gradient, training.reaches(EXPERTS)
    network = _differentiated(network, after)
    permuted = _memory_bound(work, part, "permute", rows=copies, width=hidden)
    summed = _memory_bound(work, part, "unpermute", rows=copies, width=hidden)
    ops = [*_differentiated(permuted, before), *network, *_differentiated(summed, after)]
    if degrees.ranks_per_node is not None:
        ops = [*network, *_hop_ops(work, degrees, moe_layer=moe_layer, chunks=chunks, rows=rows)]
    elif degrees.expert > 1:
        ops += _dispatch_ops(work, degrees, training, copies=copies, rows=rows)
    if chunks > 1 and training.trains(EXPERTS):
        weights = 3 * moe.expert_ffn_size * hidden
        if not training.is_full:
            weights = training.rank * (2 * hidden + 3 * moe.expert_ffn_size)
        weights *= len(most_loaded)
        ops.append(_weight_gradient_sum(weights, dtype=work.precision))
    return tuple(replace(op, count=chunks) for op in ops)


def embedding_ops(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    """List the token embedding of the first stage."""
    n = work.tokens(degrees)
    looked_up = _memory_bound(
        work, Part.EMBEDDING, "embedding", rows=n, width=work.model.hidden_size
    )
    return _differentiated(looked_up, work.tune is None)


def head_ops(work: Workload, degrees: StepDegrees) -> tuple[Op, ...]:
    """List the last stage's norm, logits and loss."""
    n, model = work.tokens(degrees), work.model
    training = replace(work.trainings[-1], has_input_gradient=True)
    return (
        *_norm(work, Part.HEAD, training, rows=n),
        *_linear(
            work,
            Part.HEAD,
            training,
            True,
            m=n,
            k=model.hidden_size,
            outputs={"": model.vocab_size},
        ),
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
    training = work.trainings[layer]
    attention = attention_ops(work, degrees, training)
    training = training.after_attention()
    if work.model.layers[layer] is LayerKind.DENSE:
        return attention + dense_ffn_ops(work, degrees, training), ()
    index = work.moe_index[layer]
    assert index is not None
    inside = expert_ops(work, degrees, training, moe_layer=index, chunks=chunks)
    return attention + router_ops(work, degrees, training), inside


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


def _swiglu_ops(
    work: Workload, degrees: StepDegrees, training: LayerTraining, *, ffn: int
) -> tuple[Op, ...]:
    gathered = work.tokens(degrees) * degrees.tensor
    hidden, local = work.model.hidden_size, ffn // degrees.tensor
    inputs, outputs = {"gate_proj": local, "up_proj": local}, {"down_proj": hidden}
    before, inner = training.has_input_gradient, training.reaches(*inputs)
    product = _memory_bound(work, Part.FFN, "swiglu", rows=gathered, width=local)
    return (
        *_sequence_gather(work, degrees),
        *_linear(work, Part.FFN, training, before, m=gathered, k=hidden, outputs=inputs),
        *_differentiated(product, inner),
        *_linear(work, Part.FFN, training, inner, m=gathered, k=local, outputs=outputs),
        *_sequence_scatter(work, degrees),
    )


def _expert_kind(work: Workload, training: LayerTraining) -> str:
    if training.is_full:
        return RAGGED if work.ragged_experts else ""
    if not training.trains(EXPERTS):
        return FROZEN
    return adapted_kind(training.rank, has_input_gradient=training.has_input_gradient)


def _dispatch_ops(
    work: Workload, degrees: StepDegrees, training: LayerTraining, *, copies: int, rows: int
) -> list[Op]:
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
    before, after = training.has_input_gradient, training.reaches(EXPERTS)
    backward = (payload,) * (before + after)
    return [
        *_of_part(part, forward=(counts, payload, payload), backward=backward),
        *_differentiated(reorder, before),
        *_differentiated(reorder, after),
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
        op = collective("all_to_all", num_bytes=num_bytes, ranks=inside, stride=1, world=world)
        return (op,)

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


def _linear(
    work: Workload,
    part: Part,
    training: LayerTraining,
    has_input_gradient: bool,
    /,
    *,
    m: int,
    k: int,
    outputs: Mapping[str, int],
) -> tuple[Op, ...]:
    """A matrix whose outputs lie one after the other, by name, with their adapters."""
    n = sum(outputs.values())
    if training.is_full:
        return _both(work, part, "gemm", m=m, n=n, k=k)
    frozen = _both(work, part, "gemm", kind=FROZEN, m=m, n=n, k=k)
    ops = [*_differentiated(frozen, has_input_gradient)]
    for name, width in outputs.items():
        if name in training.names:
            ops += _both(work, part, "gemm", m=m, n=training.rank, k=k)
            ops += _both(work, part, "gemm", m=m, n=width, k=training.rank)
    return tuple(ops)


def _norm(work: Workload, part: Part, training: LayerTraining, *, rows: int) -> tuple[Op, ...]:
    kind = "rms_norm" if training.is_full else "frozen_rms_norm"
    norm = _memory_bound(work, part, kind, rows=rows, width=work.model.hidden_size)
    return _differentiated(norm, training.has_input_gradient)


def _differentiated(ops: Iterable[Op], has_gradient: bool) -> tuple[Op, ...]:
    """Leave the backward pass out where nothing before is trained."""
    return tuple(op for op in ops if has_gradient or not op.in_backward)


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
