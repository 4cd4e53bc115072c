"""Traffic of a plan between nodes, as the problem that orders the nodes.

Ranks are numbered tensor, context, data, pipeline, innermost first, so that a stage's devices fill
nodes that follow each other: R nodes a stage, or several stages a node. Between nodes travel

    sends       2 t h / TP bytes (bf16) of each device at a stage boundary, v times per micro-batch
    all-to-all  2 t l / TP k/g bytes of each device to each of the g nodes of its expert group, for
                dispatch and combine of every MoE layer, forward and backward, once more where the
                layer is recomputed; DeepEP, HybridEP and hierarchical dispatch send a token to a
                node once, reached / g
    reduction   gradients and parameters that the nodes of a ring share, each once per node: dense
                ones over the R nodes of a stage, experts over those that hold the same
                    ZeRO 0   2 G             ZeRO 1   G + W
                    ZeRO 2   m G + W         ZeRO 3   m G + 2 m W

with t tokens of a micro-batch, l the width that experts read (h, or their latent width), G and W
bytes of gradients and bf16 weights. Sources: Pipette (arXiv:2405.18093) for the problem;
tuner/costs/train/experts.py for the all-to-all; ZeRO (arXiv:1910.02054, section 7) for gradients,
which ZeRO 2 and 3 reduce in every micro-batch.

Letters: R nodes of a stage, S groups of stages that share nodes, m micro-batches, k experts of a
token, v model chunks of a pipeline rank. Not covered: context and tensor parallelism across nodes,
which keep the usual link's price; imbalanced routing; the send from the last stage back to
the first of an interleaved schedule; replicas as the outermost ranks.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from profilers.steps.config import LayerKind, Recompute
from solvers.rank_placement.problem import RankPlacementProblem
from tuner.arrays import Floats
from tuner.catalog.manifest import DEFAULT_RANK_ORDER
from tuner.config.train import TrainDecision
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.limited_routing import reached_places
from tuner.plans.train import TrainPrediction
from tuner.spec.accounting import (
    embedding_parameters,
    head_parameters,
    layer_parameters,
    one_expert_parameters,
)
from tuner.spec.cluster import Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec

BF16_BYTES: Final = 2.0

OVERLAPPED_RATIO: Final = 0.5
"""Share of dispatch and combine that stays exposed with overlap, as the generic
`expert_overlapped_ratio` of tuner/prices/train/constants.py."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeTraffic:
    """Traffic between nodes of one pool's part of a plan."""

    nodes_of_stage: int
    """Nodes of one stage (R)."""
    groups: int
    """Groups of stages that share nodes (S)."""
    num_microbatches: int
    hop_bytes: float
    """Bytes sent by a node, scaled so that it recurs as often as in the whole pipeline."""
    block: int
    """Nodes of one expert group."""
    all_to_all_bytes_S: Floats
    gradient_bytes_S: Floats
    """Half of the bytes of gradients and parameters around a ring, as if all were all-reduced."""
    block_gradient_bytes_S: Floats
    hidden_s: float
    """Seconds of backward passes that the reduction overlaps with."""

    @property
    def num_nodes(self) -> int:
        """Nodes that the plan uses."""
        return self.nodes_of_stage * self.groups

    def problem(self, bytes_per_s_NN: Floats) -> RankPlacementProblem:
        """Build the problem."""
        return RankPlacementProblem(
            pipelines=self.nodes_of_stage,
            stages=self.groups,
            num_microbatches=self.num_microbatches,
            bytes_per_s_NN=bytes_per_s_NN,
            hop_bytes=self.hop_bytes,
            gradient_bytes_S=self.gradient_bytes_S,
            block=self.block,
            all_to_all_bytes_S=self.all_to_all_bytes_S,
            block_gradient_bytes_S=self.block_gradient_bytes_S,
        )


def obstacle(decision: TrainDecision, pool: Pool) -> str:
    """Return why the nodes of a pool cannot be ordered for a decision; empty: they can."""
    stage, node = _stage_devices(decision), pool.devices_per_node
    experts = decision.expert_model_parallel_size * decision.expert_tensor_parallel_size
    if decision.rank_order != DEFAULT_RANK_ORDER and decision.pipeline_model_parallel_size > 1:
        return f"rank order {decision.rank_order} puts stages inside nodes"
    if stage % node and node % stage:
        return f"stages of {stage} devices do not fill nodes of {node}"
    if experts % node and node % experts:
        return f"groups of {experts} expert ranks do not fill nodes of {node}"
    return ""


def traffic(
    decision: TrainDecision,
    predicted: TrainPrediction,
    *,
    model: ModelSpec,
    goal: TrainGoal,
    pool: Pool,
    ranks: range,
) -> NodeTraffic:
    """Count the bytes that a pool's pipeline ranks send between its nodes.

    Raises:
        ValueError: `obstacle` names the reason.
    """
    if why := obstacle(decision, pool):
        raise ValueError(why)
    node, stage = pool.devices_per_node, _stage_devices(decision)
    per_node = max(1, node // stage)
    groups = -(-len(ranks) // per_node)
    microbatches = decision.num_microbatches(goal.global_batch_size)
    pipeline = decision.pipeline_model_parallel_size
    split = decision.expert_model_parallel_size * decision.expert_tensor_parallel_size
    block = max(1, split // node)
    # A device's share of one vector of the hidden width per token of a micro-batch.
    tokens = decision.micro_batch_size * goal.sequence_length / decision.context_parallel_size
    row_bytes = BF16_BYTES * tokens * model.hidden_size / decision.tensor_model_parallel_size
    recurring = max(1.0, microbatches / pipeline) / max(1.0, microbatches / groups)
    chunks = decision.virtual_pipeline_model_parallel_size
    ring_S, block_ring_S = _reduced_bytes_S(decision, model, node, ranks, microbatches)
    is_ring = stage > node
    copy_bytes = row_bytes * model.expert_hidden / model.hidden_size
    all_to_all_S = _moe_passes_S(decision, model, ranks) * _share_of_node(decision, model, block)
    return NodeTraffic(
        nodes_of_stage=max(1, stage // node),
        groups=groups,
        num_microbatches=microbatches,
        hop_bytes=model.residual_streams * row_bytes * min(node, stage) * chunks * recurring,
        block=block,
        all_to_all_bytes_S=(all_to_all_S * copy_bytes * node if block > 1 else np.zeros(groups)),
        gradient_bytes_S=ring_S if is_ring else np.zeros(groups),
        block_gradient_bytes_S=block_ring_S if is_ring else np.zeros(groups),
        hidden_s=_hidden_s(decision, predicted, ranks, microbatches),
    )


def _stage_devices(decision: TrainDecision) -> int:
    return decision.num_devices // decision.pipeline_model_parallel_size


def _share_of_node(decision: TrainDecision, model: ModelSpec, block: int) -> float:
    """Copies of a token that go to one given node of the expert group."""
    if model.moe is None:
        return 0.0
    if decision.dispatcher in ("deepep", "hybridep", "hierarchical"):
        shape = shape_of_model(model, mtp_layers=0)
        return float(np.max(reached_places(shape, float(block)))) / block
    return model.moe.computed_top_k / block


def _moe_passes_S(decision: TrainDecision, model: ModelSpec, ranks: range) -> Floats:
    """Exposed dispatches and combines of one micro-batch, on each pipeline rank."""
    is_recomputed = decision.recompute is Recompute.FULL or "moe" in decision.recompute_modules
    passes = 2.0 * (3.0 if is_recomputed else 2.0)
    shown = OVERLAPPED_RATIO if decision.a2a_overlap else 1.0
    layers = [_num_moe(model, _layers(decision, rank)) for rank in ranks]
    return passes * shown * np.array(layers, dtype=np.float64)


def _reduced_bytes_S(
    decision: TrainDecision, model: ModelSpec, node: int, ranks: range, microbatches: int
) -> tuple[Floats, Floats]:
    """Half the bytes of a node's rings: over all nodes of a stage, and between expert blocks."""
    reductions, all_gathers = {
        0: (2.0, 0.0),
        1: (1.0, 1.0),
        2: (float(microbatches), 1.0),
        3: (float(microbatches), 2.0 * microbatches),
    }[decision.zero_stage]
    moved = (reductions * decision.gradient_bytes + all_gathers * BF16_BYTES) / 2.0
    split = decision.expert_model_parallel_size * decision.expert_tensor_parallel_size
    tensor = decision.tensor_model_parallel_size
    ring, block_ring = [], []
    for rank in ranks:
        dense, experts = _parameters(decision, model, rank)
        # Copies of the same parameters are reduced inside a node first.
        dense_bytes = moved * dense / tensor * min(tensor, node)
        expert_bytes = moved * experts / split * min(split, node)
        ring.append(dense_bytes + (expert_bytes if split <= node else 0.0))
        block_ring.append(expert_bytes if split > node else 0.0)
    return np.array(ring), np.array(block_ring)


def _parameters(decision: TrainDecision, model: ModelSpec, rank: int) -> tuple[float, float]:
    """Dense and expert parameters of a pipeline rank, over all its devices."""
    layers = _layers(decision, rank)
    experts = 0
    if model.moe is not None:
        experts = model.moe.num_experts * one_expert_parameters(model)
    total = sum(layer_parameters(model, layer) for layer in layers)
    expert_total = _num_moe(model, layers) * experts
    is_last = rank == decision.pipeline_model_parallel_size - 1
    embedding_and_head = embedding_parameters(model) if rank == 0 else 0
    embedding_and_head += head_parameters(model) if is_last else 0
    return float(total - expert_total + embedding_and_head), float(expert_total)


def _layers(decision: TrainDecision, rank: int) -> list[int]:
    """Layers of every model chunk of a pipeline rank."""
    bounds = np.cumsum((0, *decision.pipeline_layout))
    return [
        int(layer)
        for stage in range(rank, decision.num_stages, decision.pipeline_model_parallel_size)
        for layer in range(bounds[stage], bounds[stage + 1])
    ]


def _num_moe(model: ModelSpec, layers: list[int]) -> int:
    return sum(model.layers[layer] is LayerKind.MOE for layer in layers)


def _hidden_s(
    decision: TrainDecision, predicted: TrainPrediction, ranks: range, microbatches: int
) -> float:
    """Seconds of the shortest backward pass that overlaps reduction; under ZeRO 2, 3 of all."""
    if not decision.overlap_grad_reduce:
        return 0.0
    pipeline = decision.pipeline_model_parallel_size
    of_rank = [
        sum(stage.backward_s for stage in predicted.stages[rank::pipeline]) for rank in ranks
    ]
    return min(of_rank) * (microbatches if decision.zero_stage >= 2 else 1)
