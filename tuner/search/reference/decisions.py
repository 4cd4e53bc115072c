"""Decisions of the reference step in the solver's numbers and in Megatron's names, both ways.

A stage has one recomputation option. `none` keeps everything. `selective/cN` recomputes dispatch,
experts and combine in N chunks (MemFine). `full/cN` recomputes the whole layer, its experts in N
chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from profilers.steps.config import Recompute
from solvers.layout.problem import Layout
from tuner.catalog.manifest import Capabilities
from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import StepDegrees
from tuner.errors import SpecError
from tuner.spec.search import Search

MEMFINE_CHUNKS = (1, 2, 4, 8)
"""The bins of the paper (arXiv 2511.21431, section 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOption:
    """One recomputation option for every layer of a stage."""

    recompute: Recompute
    chunks: int

    @property
    def name(self) -> str:
        """E.g. `selective/c4`."""
        if self.recompute is Recompute.NONE:
            return "none"
        return f"{self.recompute.value}/c{self.chunks}"


def options(
    *, has_experts: bool, capabilities: Capabilities, search: Search
) -> tuple[RecomputeOption, ...]:
    """List the options that the target can launch and the user allows, in a fixed order.

    Raises:
        SpecError: none is left.
    """
    levels = [
        level
        for level in Recompute
        if level in capabilities.recompute
        and (search.recompute is None or level in search.recompute)
        and (has_experts or level is not Recompute.SELECTIVE)
    ]
    largest = capabilities.largest_chunks if has_experts else 1
    chunks = sorted({count for count in search.chunks or MEMFINE_CHUNKS if count <= largest})
    allowed = tuple(
        RecomputeOption(recompute=level, chunks=count)
        for level in levels
        for count in chunks
        if count == 1 or level in capabilities.chunks_need
    )
    if not allowed:
        names = ", ".join(capabilities.names)
        raise SpecError(
            f"search: no recomputation option is left by recompute {search.recompute} and "
            f"chunks {search.chunks} on {names}; chunks above 1 need recompute, 1 always works"
        )
    return allowed


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
