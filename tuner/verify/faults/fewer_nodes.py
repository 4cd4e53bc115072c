"""The layout in which a run goes on with a node less."""

from pydantic import ValidationError

from profilers.steps.config import StepConfig
from tuner.config.microbatches import split_microbatches
from tuner.errors import SpecError
from tuner.verify.faults.scenario import StatedPolicy


def with_fewer_nodes(config: StepConfig, *, ranks_per_node: int) -> StepConfig:
    """Return a layout with as many data-parallel replicas as one node less has ranks for.

    The global batch stays: its micro-batches are spread over the replicas as evenly as they can be,
    and the experts over the largest part of the ranks that divides their number, at most as many as
    before. The layout fills whole nodes.

    Raises:
        SpecError: not even one replica fits, or none of the layouts can take the batch.
    """
    degrees = config.parallelism
    nodes = degrees.world // ranks_per_node
    for data in range(degrees.data - 1, 0, -1):
        ranks = degrees.world // degrees.data * data
        if ranks > (nodes - 1) * ranks_per_node or ranks % ranks_per_node:
            continue
        for expert in range(degrees.expert, 0, -1):
            layout = _layout(config, data=data, expert=expert)
            if layout is not None:
                return layout
    raise SpecError(
        f"without_spare: continue: no layout of {nodes - 1} nodes of {ranks_per_node} ranks: it"
        f" would keep tensor {degrees.tensor} and pipeline {degrees.pipeline}, and leave out some"
        f" of {degrees.data} data-parallel replicas; use without_spare: wait"
    )


def fewer_nodes_policy(policy: StatedPolicy, *, nodes: int) -> StatedPolicy:
    """Return the policy of a layout: with as many replicas as it has other nodes for."""
    return policy.model_copy(update={"replicas": min(policy.replicas, nodes - 1)})


def _layout(config: StepConfig, *, data: int, expert: int) -> StepConfig | None:
    batches = split_microbatches(config.global_batch_size // config.micro_batch_size, replicas=data)
    degrees = {"data": data, "expert": expert}
    fields = {
        "parallelism": config.parallelism.model_copy(update=degrees).model_dump(),
        "microbatches": batches if len(set(batches)) > 1 else None,
    }
    try:
        return StepConfig.model_validate(config.model_dump() | fields)
    except ValidationError:
        return None
