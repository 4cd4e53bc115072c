"""Conversion between the solver's numbers and a decision in Megatron's names, both ways."""

from collections.abc import Sequence

from profilers.steps.config import Recompute
from solvers.layout.problem import Layout
from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import StepDegrees
from tuner.search.reference.options import RecomputeOption

STRENGTH = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)


def decode(
    degrees: StepDegrees, layout: Layout, options: Sequence[RecomputeOption]
) -> TrainDecision:
    """Name what a solved layout decides."""
    chosen = [options[option] for option in layout.option_S]
    return decision(
        degrees,
        layers=tuple(sum(layers_R) for layers_R in layout.layers_SR),
        options=chosen,
    )


def decision(
    degrees: StepDegrees, *, layers: tuple[int, ...], options: Sequence[RecomputeOption]
) -> TrainDecision:
    """Name a combination of degrees, layers per stage and option per stage."""
    levels = tuple(option.recompute for option in options)
    strongest = max(levels, key=STRENGTH.index)
    return TrainDecision(
        tensor_model_parallel_size=degrees.tensor,
        pipeline_model_parallel_size=degrees.pipeline,
        virtual_pipeline_model_parallel_size=degrees.virtual_pipeline,
        context_parallel_size=1,
        data_parallel_size=degrees.data,
        expert_model_parallel_size=degrees.expert,
        expert_tensor_parallel_size=1,
        expert_data_parallel_size=degrees.expert_data,
        sequence_parallel=degrees.tensor > 1,
        micro_batch_size=degrees.micro_batch_size,
        zero_stage=degrees.zero_stage,
        dispatcher="alltoall" if degrees.ranks_per_node is None else "hierarchical",
        recompute=strongest,
        recompute_modules=("moe",) if strongest is Recompute.SELECTIVE else (),
        stage_recompute=levels,
        chunks=tuple(option.chunks for option in options),
        pipeline_layout=layers,
    )


def degrees_of(decision: TrainDecision, *, ranks_per_node: int | None = None) -> StepDegrees:
    """Read the degrees back; hierarchical dispatch is over nodes of `ranks_per_node`.

    Raises:
        ValueError: dispatch is hierarchical and the nodes are not known.
    """
    is_hierarchical = decision.dispatcher == "hierarchical"
    if is_hierarchical and ranks_per_node is None:
        raise ValueError("dispatcher hierarchical needs the number of ranks on a node")
    return StepDegrees(
        tensor=decision.tensor_model_parallel_size,
        pipeline=decision.pipeline_model_parallel_size,
        virtual_pipeline=decision.virtual_pipeline_model_parallel_size,
        data=decision.data_parallel_size,
        expert=decision.expert_model_parallel_size,
        micro_batch_size=decision.micro_batch_size,
        zero_stage=decision.zero_stage,
        ranks_per_node=ranks_per_node if is_hierarchical else None,
    )


def options_of(decision: TrainDecision) -> tuple[RecomputeOption, ...]:
    """Read the option of each stage back."""
    return tuple(
        RecomputeOption(recompute=recompute, chunks=chunks)
        for recompute, chunks in zip(decision.stage_recompute, decision.chunks, strict=True)
    )


def layers_of(decision: TrainDecision) -> tuple[range, ...]:
    """Name the layers of each stage."""
    ranges, start = [], 0
    for count in decision.pipeline_layout:
        ranges.append(range(start, start + count))
        start += count
    return tuple(ranges)
