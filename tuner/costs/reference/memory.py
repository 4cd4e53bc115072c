"""Bytes of one rank: state, activations saved for the backward pass, and what recomputation adds.

Activations are counted as profilers/steps/memory.py measures them: distinct storages saved by
autograd. With D bytes per element, n tokens of this rank, N = n T of its T tensor ranks, M = n k
token copies sent, R copies received, per layer and micro-batch:

    attention     n H D + 4 n               input and scale of the norm
                  N H D                     input of qkv
                  N (A + 2 G) d D / T       queries, keys, values
                  N (A d D + 4 A) / T       output and log-sum-exp of the core
    before FFN    n H D + 4 n + n H D       norm, its output
    router        4 n E + 4 n k + 4 n       probabilities, weights before scaling and their sum
                  8 n k                     expert ids
    shared        N (H + 3 F / T) D         its input only where T > 1; released before the experts
    experts       M (H D + 8)               copies in token order, their order
                  2 M  (bf16)               cast weights; fp32 keeps the 4 n k of the router's
                  R (H + 3 F) D             rows, gate, up and gate * up
                  16 R                      where rows are re-sorted by expert
    dense FFN     N (H + 3 F / T) D         as one expert
    head          2 n H D + 4 n + 4 n V     norm, its output, fp32 log-probabilities

H hidden, A query heads, G key-value heads, d head size, E experts, k per token, F width, V
vocabulary. `selective` keeps all but `experts`, and the 4 n k scaled weights that chunks read, and
adds `experts` for one chunk at a time; `full` keeps the layer's input and ids, and adds the rest as
`selective` does, or at once where there is one chunk. Hierarchical dispatch keeps what
tuner/costs/reference/hierarchical_dispatch.py counts in place of `experts`, and no weights of the
router's.

Frozen weights (profilers/steps/adapters.py) keep no input; what follows the first adapter keeps the
rest, and what comes before it nothing. An adapter keeps its matrix's input and N r D beside it. The
input of the chunks is kept again where they are recomputed, as nothing else keeps it.

Not covered: temporaries, fragmentation, graphs' private pools; that a chunk's share of R varies
when chunks are not whole sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from profilers.steps.config import LayerKind, Recompute
from tuner.costs.reference.hierarchical_dispatch import kept_bytes
from tuner.costs.reference.training import LayerTraining
from tuner.costs.reference.update import GRADIENT_BYTES, Unit
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.spec.tune import EXPERTS, GATE_UP, NETWORK, QKV

ID_BYTES = 8
"""Token ids, expert ids and row indices are 64-bit integers."""

SCALE_BYTES = 4
"""Norm scales, log-sum-exp, router probabilities and losses are fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Bytes of parameters, gradients and optimizer state on one rank."""

    parameters: int
    """Bytes of parameters that the rank owns at rest: fp32, frozen ones in the compute type."""
    gradients: int
    """fp32, before they are reduced."""
    optimizer: int
    """Two fp32 moments of what the rank owns."""
    gathered: int
    """Copies in the compute type; FSDP makes them even where they could be the parameters."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


def unit_state(units: Sequence[Unit], work: Workload, degrees: StepDegrees) -> ModelStates:
    """Add up the state of some units; zero_stage 3 gathers one unit at a time, not counted here."""
    owned = sum(unit.sharded(degrees) for unit in units)
    whole = sum(unit.parameters for unit in units)
    frozen = sum(unit.frozen_share(degrees) for unit in units)
    sharded_throughout = degrees.zero_stage == 3
    return ModelStates(
        parameters=GRADIENT_BYTES * owned + work.element_bytes * frozen,
        gradients=GRADIENT_BYTES * (owned if sharded_throughout else whole),
        optimizer=2 * GRADIENT_BYTES * owned,
        gathered=0 if sharded_throughout else work.element_bytes * whole,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Bytes of one layer on one rank."""

    saved: int
    """Bytes kept per micro-batch in flight."""
    transient: int
    """Bytes added while the layer is recomputed."""


def layer_activations(
    work: Workload,
    degrees: StepDegrees,
    *,
    layer: int,
    recompute: Recompute,
    chunks: int,
    expert_rank: int | None = None,
) -> LayerActivations:
    """Count one layer's activations on an expert rank; None: on the most-loaded one."""
    training = work.trainings[layer]
    # A layer's input is the norm's too, unless nothing before it is trained.
    normed = _hidden(work, degrees) if training.has_input_gradient else 0
    before = _attention(work, degrees, training)
    training = training.after_attention()
    before += _norm(work, degrees) if training.has_input_gradient else 0
    if work.model.layers[layer] is LayerKind.DENSE:
        whole = before + _dense(work, degrees, training)
        kept = _hidden(work, degrees) if training.reaches(*NETWORK) else 0
        if recompute is Recompute.FULL:
            return LayerActivations(saved=kept, transient=whole - normed)
        return LayerActivations(saved=whole, transient=0)
    if not training.reaches(*NETWORK, EXPERTS):
        return LayerActivations(saved=0, transient=0)
    shared = _shared(work, degrees, training)
    outside = before + _router(work, degrees, training) + shared
    inside = chunk_bytes(work, degrees, layer=layer, chunks=chunks, expert_rank=expert_rank)
    weights = _weights(work, degrees)
    if recompute is not Recompute.NONE and not _keeps_ffn_input(training):
        # Chunks keep their input themselves.
        separate = _hidden(work, degrees)
        outside += separate if recompute is Recompute.SELECTIVE or chunks > 1 else 0
    is_flat = degrees.ranks_per_node is None
    own_weights = weights if is_flat and work.element_bytes == SCALE_BYTES else 0
    own_weights *= training.has_input_gradient
    if recompute is Recompute.NONE:
        return LayerActivations(saved=outside + inside + own_weights, transient=0)
    if recompute is Recompute.SELECTIVE:
        return LayerActivations(saved=outside + weights, transient=max(0, inside - shared))
    kept = _hidden(work, degrees) + _ids(work, degrees)
    recomputed_input = normed + _ids(work, degrees)
    if chunks == 1:
        return LayerActivations(
            saved=kept, transient=outside + inside + own_weights - recomputed_input
        )
    recomputed = outside + weights - recomputed_input
    return LayerActivations(saved=kept, transient=max(recomputed, recomputed - shared + inside))


def chunk_bytes(
    work: Workload, degrees: StepDegrees, *, layer: int, chunks: int, expert_rank: int | None = None
) -> int:
    """Count the bytes that dispatch, experts and combine of one chunk save."""
    moe, index = work.model.moe, work.moe_index[layer]
    assert moe is not None
    assert index is not None
    if degrees.ranks_per_node is not None:
        ranks = range(degrees.expert) if expert_rank is None else (expert_rank,)
        return max(
            kept_bytes(work, degrees, moe_layer=index, chunks=chunks, expert_rank=rank)
            for rank in ranks
        )
    sent = -(-work.tokens(degrees) // chunks) * moe.top_k
    by_rank = [sum(counts) for counts in work.received(degrees, index)]
    received = -(-(max(by_rank) if expert_rank is None else by_rank[expert_rank]) // chunks)
    training = work.trainings[layer].after_attention()
    return received * _received_copy(work, degrees, training) + sent * _sent_copy(work, training)


def most_chunk_copies(work: Workload, degrees: StepDegrees, *, free_bytes: int) -> int:
    """MemFine's s'_max: received copies of one chunk that fit, with as many sent ones.

    Eq. 8 of arXiv 2511.21431 with the bytes that this engine saves.
    """
    training = work.trainings[-1].after_attention()
    copy_bytes = _received_copy(work, degrees, training) + _sent_copy(work, training)
    return max(0, free_bytes // max(1, copy_bytes))


def _received_copy(work: Workload, degrees: StepDegrees, training: LayerTraining) -> int:
    moe = work.model.moe
    assert moe is not None
    if not training.reaches(EXPERTS):
        return 0
    needs_expert_sort = 1 < degrees.expert < moe.num_experts
    width = 2 * moe.expert_ffn_size
    if training.trains(EXPERTS):
        width += work.model.hidden_size + moe.expert_ffn_size + 2 * training.rank
    num_orders = 1 + training.has_input_gradient if needs_expert_sort else 0
    return width * work.element_bytes + num_orders * ID_BYTES


def _sent_copy(work: Workload, training: LayerTraining) -> int:
    if not training.reaches(EXPERTS):
        return 0
    cast_weight = work.element_bytes if work.element_bytes != SCALE_BYTES else 0
    # The weights' gradient needs the copies.
    copy = work.model.hidden_size * work.element_bytes if training.has_input_gradient else 0
    return copy + ID_BYTES + cast_weight


def token_ids_bytes(work: Workload, degrees: StepDegrees) -> int:
    """Token ids of the whole step on this rank; the loss keeps as many targets."""
    sequences = work.num_microbatches(degrees) * degrees.micro_batch_size
    return sequences * work.sequence_length // degrees.tensor * ID_BYTES


def head_saved(work: Workload, degrees: StepDegrees) -> int:
    """Norm, its output and fp32 log-probabilities; released before any layer's backward."""
    logits = work.tokens(degrees) * work.model.vocab_size * SCALE_BYTES
    normed = _hidden(work, degrees) if work.tune is None else 0
    return _norm(work, degrees) + normed + logits


def _hidden(work: Workload, degrees: StepDegrees) -> int:
    return work.tokens(degrees) * work.model.hidden_size * work.element_bytes


def _norm(work: Workload, degrees: StepDegrees) -> int:
    return _hidden(work, degrees) + work.tokens(degrees) * SCALE_BYTES


def _attention(work: Workload, degrees: StepDegrees, training: LayerTraining) -> int:
    attention = work.model.attention
    tokens = work.tokens(degrees) * degrees.tensor
    heads = attention.num_heads // degrees.tensor
    kv_heads = attention.num_kv_heads // degrees.tensor
    widths = (heads + 2 * kv_heads) * attention.head_dim + heads * attention.value_head_dim
    core = tokens * (widths * work.element_bytes + heads * SCALE_BYTES)
    gathered = _hidden(work, degrees) * degrees.tensor
    kept = training.adapter_ranks(*QKV, "o_proj") * tokens * work.element_bytes
    kept += _norm(work, degrees) if training.has_input_gradient else 0
    kept += gathered if training.trains(*QKV) else 0
    if training.reaches(*QKV):
        return kept + core
    mixed = heads * attention.value_head_dim * tokens * work.element_bytes
    return kept + (mixed if training.trains("o_proj") else 0)


def _dense(work: Workload, degrees: StepDegrees, training: LayerTraining) -> int:
    gathered = _hidden(work, degrees) * degrees.tensor if training.trains(*GATE_UP) else 0
    return gathered + _swiglu(work, degrees, training, width=work.model.dense_ffn_size)


def _swiglu(work: Workload, degrees: StepDegrees, training: LayerTraining, *, width: int) -> int:
    tokens = work.tokens(degrees) * degrees.tensor
    kept = 2 * width if training.reaches(*GATE_UP) else 0
    kept += width if training.trains("down_proj") else 0
    kept = kept // degrees.tensor + training.adapter_ranks(*NETWORK)
    return tokens * kept * work.element_bytes


def _router(work: Workload, degrees: StepDegrees, training: LayerTraining) -> int:
    moe = work.model.moe
    assert moe is not None
    n = work.tokens(degrees)
    probabilities = n * (moe.num_experts + moe.top_k + 1) * SCALE_BYTES
    kept = _hidden(work, degrees) if _keeps_ffn_input(training) else 0
    return kept + (probabilities + _ids(work, degrees)) * training.has_input_gradient


def _keeps_ffn_input(training: LayerTraining) -> bool:
    """Return whether the output of the norm before router and shared expert is kept."""
    return training.trains(*GATE_UP)


def _ids(work: Workload, degrees: StepDegrees) -> int:
    moe = work.model.moe
    assert moe is not None
    return work.tokens(degrees) * moe.top_k * ID_BYTES


def _weights(work: Workload, degrees: StepDegrees) -> int:
    moe = work.model.moe
    assert moe is not None
    return work.tokens(degrees) * moe.top_k * SCALE_BYTES


def _shared(work: Workload, degrees: StepDegrees, training: LayerTraining) -> int:
    moe = work.model.moe
    assert moe is not None
    if not moe.shared_ffn_size:
        return 0
    gathered = _hidden(work, degrees) * degrees.tensor if degrees.tensor > 1 else 0
    return gathered + _swiglu(work, degrees, training, width=moe.shared_ffn_size)
