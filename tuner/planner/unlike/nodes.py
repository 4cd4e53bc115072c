"""Which node of a pool with measured links runs which stage of which replica of a plan.

The plan's stages are alike enough to be priced as its slowest one everywhere, so that the order of
nodes decides sends and gradient sums alone (solvers/rank_placement, after Pipette). A node's
devices share its links. Of experts' gradients a node sums what it holds: all experts where their
ranks lie inside a node, else its own part, over as many nodes as hold the same.

Letters: N nodes, S pipeline ranks. Not covered: nodes that compute at unlike speed; ZeRO 2 and 3,
which exchange more.
"""

import numpy as np

from profilers.imports.link_matrix import LinkMatrix
from profilers.steps.config import LayerKind
from solvers.rank_placement import check
from solvers.rank_placement.problem import RankPlacement
from solvers.registry import RANK_PLACEMENT
from tuner.errors import SpecError
from tuner.formulate.heterogeneous import rank_placement_problem
from tuner.placement import NodeOrder, Placement
from tuner.plan import StagePrediction, TrainDecision, TrainPrediction
from tuner.spec.accounting import one_expert_parameters
from tuner.spec.cluster import Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec


def node_order(
    decision: TrainDecision,
    predicted: TrainPrediction,
    *,
    model: ModelSpec,
    goal: TrainGoal,
    pool: Pool,
    ranks: range,
    links: LinkMatrix,
    memory_limit_bytes: int,
    time_limit_s: float,
    method: str = "annealing",
) -> NodeOrder:
    """Put the nodes of one pool in the order that suits a plan.

    Args:
        decision: the plan's.
        predicted: what is expected of it.
        model: what it trains.
        goal: with the sequence and the batch.
        pool: whose nodes.
        ranks: pipeline ranks that the pool runs.
        links: measured between its nodes; more than are needed leave spare ones.
        memory_limit_bytes: what a plan may use of one device.
        time_limit_s: for the search.
        method: of solvers/registry.py.

    Raises:
        SpecError: fewer nodes were measured than the stages need, or a node does not hold whole
            replicas of one stage.
    """
    nodes = len(links.nodes)
    stage_devices = decision.num_devices // decision.pipeline_model_parallel_size
    needed = -(-len(ranks) * stage_devices // pool.devices_per_node)
    if nodes < needed:
        raise SpecError(
            f"cluster: the links of {nodes} nodes were measured, the plan runs on {needed} of pool "
            f"{pool.name!r}; measure every pair of them"
        )
    held = [_of_rank(decision, predicted, rank) for rank in ranks]
    seconds = max(sum(stage.forward_s + stage.backward_s for stage in stages) for stages in held)
    tokens = decision.micro_batch_size * goal.sequence_length / decision.context_parallel_size
    # One vector of the hidden width per token, in bf16, shared by sequence or scattered to send.
    boundary_bytes = 2.0 * tokens * model.hidden_size / decision.tensor_model_parallel_size
    problem = rank_placement_problem(
        bytes_per_s_NN=links.bytes_per_s_NN,
        devices_per_node=pool.devices_per_node,
        tensor=decision.tensor_model_parallel_size,
        context=decision.context_parallel_size,
        pipeline=len(ranks),
        data=decision.data_parallel_size,
        num_microbatches=decision.num_microbatches(goal.global_batch_size),
        stage_s_N=np.full(nodes, seconds),
        boundary_bytes=boundary_bytes,
        gradient_bytes_S=np.array(
            [_summed_bytes(decision, model, pool, predicted, rank) for rank in ranks]
        ),
        stage_bytes_S=np.array([predicted.peak_memory_bytes[rank] for rank in ranks]),
        memory_limit_bytes_N=np.full(nodes, memory_limit_bytes),
    )
    as_listed = RankPlacement(
        node_RS=tuple(
            tuple(stage * problem.pipelines + replica for stage in range(problem.stages))
            for replica in range(problem.pipelines)
        )
    )
    outcome = RANK_PLACEMENT.solve(problem, method=method, time_limit_s=time_limit_s)
    before_s = check.objective(problem, as_listed)
    placement = outcome.solution or as_listed
    chosen = placement.launch_order
    return NodeOrder(
        pool=pool.name,
        nodes=tuple(links.nodes[node] for node in chosen),
        spare=tuple(links.nodes[node] for node in range(nodes) if node not in chosen),
        step_time_before_s=before_s,
        step_time_after_s=check.objective(problem, placement),
        bound_s=min(outcome.bound, before_s),
    )


def with_node_orders(placement: Placement, orders: tuple[NodeOrder, ...]) -> Placement:
    """Put measured nodes in the place of unnamed ones."""
    named = {order.pool: list(order.nodes) for order in orders}
    hosts: list[str] = []
    for pool in dict.fromkeys(stage.pool for stage in placement.stages):
        unnamed = [host for host in placement.hosts if host.rpartition("-")[0] == pool]
        hosts += named.get(pool, unnamed)
    return placement.model_copy(update={"hosts": tuple(hosts), "node_orders": orders})


def _of_rank(
    decision: TrainDecision, predicted: TrainPrediction, rank: int
) -> tuple[StagePrediction, ...]:
    return predicted.stages[rank :: decision.pipeline_model_parallel_size]


def _summed_bytes(
    decision: TrainDecision,
    model: ModelSpec,
    pool: Pool,
    predicted: TrainPrediction,
    rank: int,
) -> float:
    """Gradient bytes of a rank that leave its node, per device of one tensor-parallel group."""
    held = sum(stage.gradient_bytes for stage in _of_rank(decision, predicted, rank))
    if model.moe is None:
        return float(held)
    ends = np.cumsum((0, *decision.pipeline_layout))
    kinds = [
        kind
        for stage in range(rank, decision.num_stages, decision.pipeline_model_parallel_size)
        for kind in model.layers[ends[stage] : ends[stage + 1]]
    ]
    split = decision.expert_model_parallel_size * decision.expert_tensor_parallel_size
    of_layer = model.moe.num_experts * one_expert_parameters(model) / split
    experts = kinds.count(LayerKind.MOE) * of_layer * decision.gradient_bytes
    on_node = experts * min(split, pool.devices_per_node)
    return max(held - experts, 0.0) + on_node / decision.tensor_model_parallel_size
