"""Bytes of one layer, the embedding, the head and one micro-batch, priced once per candidate.

`unit_bytes` depends on model, hardware, constants and every field of the strategies but `pipeline`,
`virtual_pipeline`, `num_microbatches`, `zero_bubble` and those that affect only time: one column
for each distinct (TP, CP, DP, EP, ETP, micro-batch, ZeRO, recompute, chunks, dispatcher).

    head moment    gradients of the head's input and of its weights
    layer moment   what is recomputed, and activation gradients; with offloading, the activations of
                   the running layer, which are in transfer or fetched back
    always         one temporary weight gradient per shape of weight, which Transformer Engine keeps
                   (get_dummy_wgrad in transformer_engine/pytorch/module/base.py); under ZeRO 3 the
                   all-gathered weights of two layers, and one layer's full gradients in both types
    dispatch       DeepEP's queues; HybridEP's buffer for the tokens of every expert rank

Letters: C columns; B bytes: weights, gradients, optimizer, gathered weights, whole gradients; K
parts: dense layers, layers with experts, vocabulary matrices, multi-token-prediction layers.
"""

from dataclasses import dataclass

import numpy as np

from tuner.arrays import Floats
from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Hardware, ModelShape
from tuner.costs.train.activations import ActivationBytes, LayerBytes, activation_bytes
from tuner.costs.train.adapters import (
    adapter_counts,
    frozen_bytes,
    frozen_on_device,
    is_tuned,
)
from tuner.costs.train.eager_activations import chosen_layers, eager_activation_bytes
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.costs.train.parts import is_any
from tuner.costs.train.state import Parameters, parameters, shard_ranks, state_bytes

MTP_ROW = 3
"""Index of the multi-token-prediction layers among the parts K."""


DEEPEP_CHANNELS = 10.0
"""Half of DeepEP's default of 20 multiprocessors (deep_ep/buffer.py)."""

DEEPEP_SCALE_UP_TOKENS = 8.0 * 256.0
"""Peers in a server and tokens queued from each, per channel (csrc/config.hpp)."""

DEEPEP_NODE_TOKENS = 2.0 * 128.0
"""Tokens queued to and from each node, per channel (csrc/config.hpp)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryUnits:
    """Bytes by part; the last axis of every array is columns, or 1."""

    state_BKC: Floats
    saved_KC: Floats
    """Saved activations per micro-batch; of the vocabulary matrices the embedding's share."""
    head_saved_C: Floats
    """Last norm and logits."""
    head_moment_C: Floats
    """Bytes beside `head_saved_C` at the head's backward pass."""
    dense_moment_C: Floats
    moe_moment_C: Floats
    dense_late_C: Floats
    """Bytes of a dense layer at the end of its network's backward pass, beside the gradients."""
    moe_late_C: Floats
    frees_gradients_C: Floats
    """1 where gradients exist from their layer's backward pass to the optimizer's step."""
    always_layer_C: Floats
    """Allocated throughout, where a rank has layers."""
    always_dense_C: Floats
    always_moe_C: Floats
    dispatch_C: Floats
    boundary_C: Floats
    """Received ahead from another stage, where one buffer is enough."""
    received_C: Floats
    """A buffer that each micro-batch has for activations or gradients of another stage."""
    output_C: Floats
    """A stage's output of one micro-batch, where it is kept until the step ends."""
    input_gradient_C: Floats
    """Gradients of a stage's input of one micro-batch, where they are kept until the step ends."""
    logits_C: Floats
    """Logits of one micro-batch, where they are kept until the step ends."""
    is_gathered_C: Floats
    """ZeRO 3: layers read gathered parameters."""
    staged_ratio_C: Floats
    """Share of `always` under ZeRO 3 that a pipeline adds to its gathered stage."""
    is_tied_C: Floats
    live_C: Floats
    unused_ratio_C: Floats
    pool_ratio_C: Floats
    context_C: Floats
    pipeline_group_C: Floats
    """Bytes that a pipeline adds to the context."""
    copies_weights_C: Floats
    """1 where the start holds weights twice."""
    expert_weight_C: Floats
    """Weights of a layer's experts."""
    flattened_ratio_C: Floats
    """Bytes of gradients and their copies in the optimizer's step, over the optimizer's own."""


def unit_bytes(
    model: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    *,
    constants: MemoryConstants,
) -> MemoryUnits:
    """Price what does not depend on the pipeline; see the module for the fields read."""
    count = parameters(model, strategies)
    kept = activation_bytes(
        model,
        strategies,
        cp_output_copy_ratio=constants.cp_output_copy_ratio,
        last_gemm_ratio=constants.last_gemm_ratio,
        gathers_inputs=constants.gathers_inputs,
        keeps_exchanged=constants.keeps_exchanged,
        scored_bytes=constants.scored_bytes,
        keeps_activations=constants.keeps_activations,
    )
    if is_any(strategies.eager_modules):
        kept = chosen_layers(strategies, eager_activation_bytes(model, strategies), kept)
    moe = model.mtp_has_experts
    scale = constants.activation_ratio
    on_device = scale * (1.0 - strategies.activation_offload)
    prediction = kept.dense.saved + moe * (kept.moe.saved - kept.dense.saved) + 2.0 * kept.boundary
    dense_S, experts_S = shard_ranks(strategies)
    gathered = np.where(np.asarray(strategies.zero_stage) >= 3.0, 1.0, 0.0)
    # In a pipeline FSDP2 reduces gradients after the last micro-batch, whatever it shards.
    is_fsdp2 = constants.has_gather_buffer * np.equal(strategies.zero_stage, 2.0)
    sums_whole = np.maximum(gathered, is_fsdp2)
    always = _always(count, strategies, constants, gathered)
    state = _state(count, strategies, constants, moe, (dense_S, experts_S), (gathered, sums_whole))
    state[:, MTP_ROW] *= model.mtp_weight_ratio
    if is_tuned(strategies):
        tuned = _tuned_state(
            model, count, strategies, constants, moe, (dense_S, experts_S), (gathered, sums_whole)
        )
        state = np.where(np.greater(strategies.adapter_rank, 0.0), tuned, state)
    return MemoryUnits(
        state_BKC=state,
        saved_KC=_columns(
            kept.dense.saved * on_device,
            kept.moe.saved * on_device,
            kept.embedding * on_device,
            prediction * on_device,
        ),
        head_saved_C=column(kept.norm + _logit_bytes(strategies, constants) * kept.logit),
        head_moment_C=column(
            kept.head_gradient
            + count.vocab
            * (
                strategies.element_bytes * strategies.is_full * (1.0 - strategies.eager_modules)
                + gathered
                * (strategies.weight_bytes + strategies.gradient_bytes * strategies.is_full)
            )
        ),
        dense_moment_C=column(_moment(kept.dense, strategies) * scale),
        moe_moment_C=column(_moment(kept.moe, strategies) * scale),
        dense_late_C=column(kept.dense.late),
        moe_late_C=column(kept.moe.late),
        frees_gradients_C=column(strategies.eager_modules),
        always_layer_C=column(always * np.maximum(count.dense_mixer, count.moe_mixer)),
        always_dense_C=column(always * count.dense_ffn),
        always_moe_C=column(
            always * (count.moe_outside + count.one_expert)
            + sums_whole * always * (count.experts - count.one_expert)
        ),
        dispatch_C=column(_dispatch(model, strategies, hardware, kept)),
        boundary_C=column(kept.boundary * (1.0 - constants.receives_ahead)),
        received_C=column(kept.boundary * constants.receives_ahead),
        output_C=column(kept.boundary * constants.keeps_outputs),
        input_gradient_C=column(kept.boundary * constants.keeps_input_gradients),
        logits_C=column(kept.logit * strategies.element_bytes * constants.keeps_logits),
        is_gathered_C=column(gathered),
        staged_ratio_C=column(gathered * constants.has_gather_buffer * _staged_ratio(strategies)),
        is_tied_C=column(model.is_tied),
        live_C=column(constants.live_bytes),
        unused_ratio_C=column(
            constants.unused_ratio + constants.recompute_unused_ratio * strategies.recompute_full
        ),
        pool_ratio_C=column(constants.graph_ratio * strategies.partial_graph),
        context_C=column(_outside(model, strategies, hardware, constants)),
        pipeline_group_C=column(constants.communicator_bytes * _pipeline_groups(strategies)),
        copies_weights_C=column(
            constants.copies_weights * strategies.is_full * np.equal(strategies.zero_stage, 1.0)
        ),
        expert_weight_C=column(strategies.weight_bytes * count.experts),
        flattened_ratio_C=column(_flattened_ratio(strategies, constants)),
    )


def _logit_bytes(strategies: Strategies, constants: MemoryConstants) -> Numbers:
    is_split = np.asarray(strategies.tensor) > 1.0
    known = constants.logit_bytes + np.where(is_split, constants.split_logit_bytes, 0.0)
    return np.where(np.greater(strategies.logit_bytes, 0.0), strategies.logit_bytes, known)


def _moment(layer: LayerBytes, strategies: Strategies) -> Numbers:
    return layer.recomputed + layer.gradients + strategies.activation_offload * layer.saved


def _state(
    count: Parameters,
    strategies: Strategies,
    constants: MemoryConstants,
    moe: Numbers,
    ranks: tuple[Numbers, Numbers],
    whole: tuple[Numbers, Numbers],
) -> Floats:
    """Return bytes of every part; `whole` is 1 where weights, and gradients, are so in a stage."""
    dense, expert = (
        state_bytes(
            strategies,
            ranks=sharing,
            master_bytes=constants.master_bytes,
            moments_bytes=constants.moments_bytes,
            gathers_master=constants.gathers_master,
        )
        for sharing in ranks
    )
    weight, gradient = whole[0] * strategies.weight_bytes, whole[1] * strategies.gradient_bytes
    rows = []
    for of_dense, of_expert in (
        (dense.weight, expert.weight),
        (dense.gradient, expert.gradient),
        (dense.optimizer, expert.optimizer),
        (weight, weight),
        (gradient, gradient),
    ):
        with_dense = of_dense * (count.dense_mixer + count.dense_ffn)
        outside = count.moe_mixer + count.moe_outside
        with_experts = of_dense * outside + of_expert * count.experts
        prediction = with_dense + moe * (with_experts - with_dense)
        mixer = count.dense_mixer + moe * (count.moe_mixer - count.dense_mixer)
        prediction = prediction + of_dense * (count.attention - mixer)
        rows.append(
            _columns(
                with_dense,
                with_experts,
                of_dense * count.vocab,
                prediction + of_dense * count.mtp_projection,
            )
        )
    return np.stack(np.broadcast_arrays(*rows))


def _tuned_state(
    model: ModelShape,
    count: Parameters,
    strategies: Strategies,
    constants: MemoryConstants,
    moe: Numbers,
    ranks: tuple[Numbers, Numbers],
    whole: tuple[Numbers, Numbers],
) -> Floats:
    """Return the state's bytes with frozen weights and adapters (adapters.py)."""
    s, trained, (gathered, reduced_last) = strategies, adapter_counts(model, strategies), whole
    linear, unquantised = frozen_bytes(s)
    shares = [np.where(gathered > 0.0, 1.0 / sharing, 1.0) for sharing in ranks]
    moments = np.where(s.eager_modules > 0.0, 2.0 * s.adapter_bytes, constants.moments_bytes)
    bytes_of = [
        state_bytes(
            s,
            ranks=sharing,
            master_bytes=constants.master_bytes,
            moments_bytes=moments,
            gathers_master=constants.gathers_master,
        )
        for sharing in ranks
    ]
    linear, expert, unquantised = (
        frozen_on_device(s, frozen, ranks=ranks[at])
        for frozen, at in ((linear, 0), (unquantised, 1), (unquantised, 0))
    )
    router = model.hidden * model.router_outputs
    frozen_dense = linear * (count.dense_mixer + count.dense_ffn)
    frozen_outside = linear * (count.moe_mixer + count.moe_outside - router) + unquantised * router
    frozen_moe = frozen_outside + expert * count.experts
    gradient = np.where(s.eager_modules > 0.0, s.adapter_bytes, s.gradient_bytes)
    dense_of = trained.dense_layer(model)
    outside, experts = trained.moe_layer(model), trained.experts

    def rows(of_dense: Numbers, of_expert: Numbers) -> Floats:
        with_dense, with_experts = of_dense * dense_of, of_dense * outside + of_expert * experts
        last = with_dense + moe * (with_experts - with_dense)
        return _columns(with_dense, with_experts, 0.0, last)

    def kept(frozen: tuple[Numbers, ...]) -> Floats:
        with_dense, with_experts, vocab = frozen
        last = with_dense + moe * (with_experts - with_dense)
        return _columns(with_dense, with_experts, vocab, last)

    scale = gradient / s.gradient_bytes
    all_dense = s.weight_bytes * (count.dense_mixer + count.dense_ffn)
    all_moe = s.weight_bytes * (count.moe_mixer + count.moe_outside + count.experts)
    all_weights = (all_dense, all_moe, s.weight_bytes * count.vocab)
    parts = (
        kept((frozen_dense, frozen_moe, unquantised * count.vocab))
        + rows(s.adapter_bytes * shares[0], s.adapter_bytes * shares[1]),
        rows(bytes_of[0].gradient * scale, bytes_of[1].gradient * scale),
        rows(bytes_of[0].optimizer, bytes_of[1].optimizer),
        kept(tuple(gathered * weights for weights in all_weights)),
        rows(reduced_last * gradient, reduced_last * gradient),
    )
    return np.stack(np.broadcast_arrays(*parts))


def _flattened_ratio(strategies: Strategies, constants: MemoryConstants) -> Numbers:
    """Bytes of gradients in DeepSpeed's step over those of the states that it updates."""
    states = state_bytes(
        strategies,
        ranks=1.0,
        master_bytes=constants.master_bytes,
        moments_bytes=constants.moments_bytes,
        gathers_master=constants.gathers_master,
    ).optimizer
    gradient_bytes, stage = strategies.gradient_bytes, np.asarray(strategies.zero_stage)
    joined = 2.0 * gradient_bytes + np.where(
        np.less(gradient_bytes, constants.master_bytes), constants.master_bytes, 0.0
    )
    flattens = constants.flattens_gradients * ((stage >= 1.0) & (stage < 3.0))
    return flattens * joined / np.maximum(states, 1.0)


def _always(
    count: Parameters, strategies: Strategies, constants: MemoryConstants, gathered: Numbers
) -> Numbers:
    """Bytes per parameter of the running layer."""
    trained = strategies.is_full
    temporary = constants.weight_gradient_ratio * strategies.element_bytes * trained
    wide = np.maximum(strategies.weight_bytes, strategies.element_bytes)
    fetched = 2.0 * strategies.weight_bytes + wide + strategies.gradient_bytes * trained
    return temporary + gathered * (fetched - temporary)


def _staged_ratio(strategies: Strategies) -> Numbers:
    """Return the share that one layer and its bf16 gradients have of a gathered stage's buffers.

    Those are two gathered layers and a layer's gradients in both types.
    """
    weight = strategies.weight_bytes
    return 2.0 * weight / (3.0 * weight + strategies.gradient_bytes)


def _dispatch(
    model: ModelShape, strategies: Strategies, hardware: Hardware, kept: ActivationBytes
) -> Numbers:
    token = model.hidden * strategies.element_bytes
    nodes = np.maximum(1.0, strategies.expert / hardware.devices_per_node)
    queued = DEEPEP_SCALE_UP_TOKENS + np.where(nodes > 1.0, DEEPEP_NODE_TOKENS * nodes, 0.0)
    deepep = strategies.is_deepep * DEEPEP_CHANNELS * queued * token
    return deepep + strategies.is_hybridep * strategies.expert * kept.boundary


def _outside(
    model: ModelShape, strategies: Strategies, hardware: Hardware, constants: MemoryConstants
) -> Numbers:
    """Bytes outside the allocator: the context, groups of ranks, peers of an all-to-all.

    Megatron-Core gives every group a communicator of its own, whatever ranks it shares: tensor,
    model, context, data, data with context, optimizer, and of experts they, they with their tensor
    ranks (counts of tokens), their data, tensor with context (their loss): parallel_state.py,
    transformer/moe, optimizer/__init__.py of core 0.16. The world's is in the context.
    """
    s, experts = strategies, np.greater(model.moe_layers, 0.0)
    dense = s.tensor * s.context * s.data
    sizes = (s.tensor, s.tensor, s.context, s.data, s.data * s.context, dense)
    of_experts = (s.expert, s.expert * s.expert_tensor, s.expert_data, s.tensor * s.context)
    groups: Numbers = 0.0
    for size in (*sizes, *(experts * size for size in of_experts)):
        groups = groups + np.greater(size, 1.0)
    peers = np.minimum(s.expert * s.expert_tensor, hardware.devices_per_node) - 1.0
    exchanged = np.where(np.greater(s.expert, 1.0), peers, 0.0)
    return (
        constants.context_bytes
        + constants.communicator_bytes * groups
        + constants.peer_bytes * exchanged
    )


def _pipeline_groups(strategies: Strategies) -> Numbers:
    """Count a pipeline's own group, and those of model and optimizer that it alone makes."""
    s = strategies
    return 1.0 + np.less_equal(s.tensor, 1.0) + np.less_equal(s.tensor * s.context * s.data, 1.0)


def column(value: Numbers) -> Floats:
    """Return a number, or one per column, as an array."""
    return np.atleast_1d(np.asarray(value, dtype=np.float64))


def _columns(*values: Numbers) -> Floats:
    return np.stack(np.broadcast_arrays(*(column(value) for value in values)))
