"""Rules that make execution options illegal: no effect, targets' manifests, the user's limits.

Rules are listed in the order in which refusals are counted. What a target cannot do comes from its
manifest (tuner/catalog/manifest.py). A setting without any effect is illegal too, so that no two
decisions of the space are the same run.
"""

from collections.abc import Iterator

from profilers.steps.config import Recompute
from tuner.catalog.manifest import CONDITIONAL, Conditions
from tuner.config.knobs import SWITCH, searched
from tuner.costs.train.host_memory import GRADIENT_BYTES
from tuner.search.train.axes import RANK_ORDERS, Choice, OptionRule, RecomputeChoice
from tuner.search.train.problem import TrainProblem
from tuner.spec.accounting import num_parameters
from tuner.units import format_bytes


def option_rules(problem: TrainProblem) -> tuple[OptionRule, ...]:
    """List the rules between the axes of a problem."""
    return (*_nature(problem), *_targets(problem), *_limits(problem))


def _nature(problem: TrainProblem) -> Iterator[OptionRule]:
    """Rules for every target: settings without effect, and impossible ones."""
    yield OptionRule(
        text="schedule interleaved and virtual stages need each other",
        axes=("schedule",),
        is_broken=lambda facts, schedule: (
            (schedule == "interleaved") != facts.has_virtual and schedule != "zero_bubble"
        ),
    )
    yield OptionRule(
        text="schedule zero_bubble without a pipeline fills nothing",
        axes=("schedule",),
        is_broken=lambda facts, schedule: schedule == "zero_bubble" and not facts.has_pipeline,
    )
    least = min(problem.capabilities.zero_stages, default=0)
    yield OptionRule(
        text="zero_stage above 0 without data parallelism shards nothing",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: zero > least and not facts.is_sharded,
    )
    yield OptionRule(
        text="overlap_grad_reduce without data parallelism overlaps nothing",
        axes=("overlap_grad_reduce",),
        is_broken=lambda facts, on: on and not facts.is_sharded,
    )
    yield OptionRule(
        text="overlap_param_gather without sharded optimizer state overlaps nothing",
        axes=("zero_stage", "overlap_param_gather"),
        is_broken=lambda facts, zero, on: on and (zero == 0 or not facts.is_sharded),
    )
    # A copy per domain at zero_stage 1 holds more and sends no less: V / n for its part of the
    # reduction to each of two neighbours; sharding over all ranks sends V / n twice, in the
    # reduce-scatter and in the all-gather.
    yield OptionRule(
        text="shard_ranks below zero_stage 2, or without several domains, saves no bytes",
        axes=("zero_stage", "sharding"),
        is_broken=lambda facts, zero, sharding: (
            sharding == "domain" and (zero < 2 or not facts.has_copies)
        ),
    )
    yield OptionRule(
        text="rank_order without a pipeline orders nothing",
        axes=("rank_order",),
        is_broken=lambda facts, order: order != RANK_ORDERS[0] and not facts.has_pipeline,
    )
    yield OptionRule(
        text="dispatcher above alltoall without expert parallelism moves nothing",
        axes=("dispatcher",),
        is_broken=lambda facts, name: name != "alltoall" and not facts.has_expert_parallel,
    )
    for knob in searched():
        if knob.of_experts and knob.choices == SWITCH:
            yield OptionRule(
                text=f"{knob.field} without expert parallelism overlaps nothing",
                axes=(knob.field,),
                is_broken=lambda facts, on: on and not facts.has_expert_parallel,
            )
    yield OptionRule(
        text="more than one chunk without recomputing the experts saves nothing",
        axes=("recompute", "chunks"),
        is_broken=lambda facts, recompute, chunks: chunks > 1 and not _covers_experts(recompute),
    )


def _covers_experts(recompute: RecomputeChoice) -> bool:
    return recompute.share == 1.0 or "moe" in recompute.modules


def _targets(problem: TrainProblem) -> Iterator[OptionRule]:
    """Rules of the targets' manifests."""
    target = problem.capabilities
    yield OptionRule(
        text="the target has no such zero_stage",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: zero not in target.zero_stages,
    )
    yield OptionRule(
        text="the target has no such zero_stage with pipeline parallelism",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: (
            facts.has_pipeline and zero not in target.zero_stages_with_pipeline
        ),
    )
    yield OptionRule(
        text="the target cannot shard over part of the ranks at this zero_stage",
        axes=("zero_stage", "sharding"),
        is_broken=lambda facts, zero, sharding: (
            sharding == "domain" and zero not in target.shard_ranks_zero_stages
        ),
    )
    if target.expert_folding_needs_sharding:
        yield OptionRule(
            text="the target spreads experts over replicas at zero_stage above 0 only",
            axes=("zero_stage",),
            is_broken=lambda facts, zero: zero == 0 and facts.spans_replicas,
        )
    yield OptionRule(
        text="the target cannot recompute this",
        axes=("recompute",),
        is_broken=lambda facts, recompute: (
            recompute.level not in target.recompute
            or not recompute.modules <= target.recompute_modules
            or (0.0 < recompute.share < 1.0 and not target.recompute_num_layers)
        ),
    )
    yield OptionRule(
        text="the target has no such chunks",
        axes=("recompute", "chunks"),
        is_broken=lambda facts, recompute, chunks: (
            chunks > 1
            and (
                chunks > target.largest_chunks
                or recompute.level not in target.chunks_need
                or (
                    recompute.level is Recompute.SELECTIVE
                    and not target.chunks_need_modules <= recompute.modules
                )
            )
        ),
    )
    yield OptionRule(
        text="the target has no such schedule",
        axes=("schedule",),
        is_broken=lambda facts, schedule: (
            schedule not in target.schedules
            or (
                schedule == "zero_bubble"
                and target.zero_bubble_needs_virtual_pipeline
                and not facts.has_virtual
            )
        ),
    )
    yield OptionRule(
        text="the target has no such dispatcher",
        axes=("dispatcher",),
        is_broken=lambda facts, name: (
            name not in target.dispatchers
            or (facts.has_pipeline and name not in target.dispatchers_with_pipeline)
        ),
    )
    for feature in CONDITIONAL:
        yield from _conditional_rules(problem, feature)
    yield from _graph_rules(problem)
    yield from _offload_rules(problem)
    yield OptionRule(
        text="the target cannot overlap this",
        axes=("overlap_grad_reduce", "overlap_param_gather"),
        is_broken=lambda facts, reduce, gather: (
            (reduce and not target.overlap_grad_reduce)
            or (gather and not target.overlap_param_gather)
            or (gather and not reduce and target.param_gather_needs_grad_reduce)
        ),
    )
    yield OptionRule(
        text="the target has no such rank_order",
        axes=("rank_order",),
        is_broken=lambda facts, order: order not in target.rank_orders,
    )
    if problem.precision == "fp8-delayed":
        yield OptionRule(
            text="the target cannot recompute this under fp8-delayed",
            axes=("recompute",),
            is_broken=lambda facts, recompute: bool(
                recompute.modules & target.delayed_scaling_excludes
            ),
        )


def _conditional_rules(problem: TrainProblem, feature: str) -> Iterator[OptionRule]:
    """Yield the rules for the settings beside which the target has a feature."""
    conditions: Conditions | None = getattr(problem.capabilities, feature)
    mtp = problem.model.mtp_num_layers
    yield OptionRule(
        text=f"the target has no {feature} with these degrees",
        axes=(feature,),
        is_broken=lambda facts, on: (
            on
            and (
                conditions is None
                or (
                    conditions.needs_virtual_pipeline
                    and facts.has_pipeline
                    and not facts.has_virtual
                )
                or mtp > conditions.largest_mtp
                or (mtp > 0 and conditions.mtp_needs_pipeline and not facts.has_pipeline)
            )
        ),
    )
    if conditions is None:
        return
    yield OptionRule(
        text=f"the target has no {feature} with this dispatcher",
        axes=("dispatcher", feature),
        is_broken=lambda facts, name, on: on and name not in conditions.dispatchers,
    )
    yield OptionRule(
        text=f"the target has no {feature} with this recompute",
        axes=("recompute", feature),
        is_broken=lambda facts, recompute, on: (
            on
            and (
                recompute.level not in conditions.recompute
                or bool(recompute.modules & conditions.excludes)
            )
        ),
    )
    yield OptionRule(
        text=f"the target has no {feature} with this cuda_graph",
        axes=(feature, "cuda_graph"),
        is_broken=lambda facts, on, graph: on and graph not in conditions.cuda_graphs,
    )


def _graph_rules(problem: TrainProblem) -> Iterator[OptionRule]:
    target = problem.capabilities
    has_experts = problem.model.num_moe_layers > 0
    yield OptionRule(
        text="the target has no such cuda_graph",
        axes=("cuda_graph",),
        is_broken=lambda facts, graph: (
            graph not in target.cuda_graphs
            or (facts.has_pipeline and graph not in target.cuda_graphs_with_pipeline)
        ),
    )
    yield OptionRule(
        text="the target has no full_iteration graph with this dispatcher",
        axes=("dispatcher", "cuda_graph"),
        is_broken=lambda facts, name, graph: (
            graph == "full_iteration" and has_experts and name not in target.full_graph_dispatchers
        ),
    )
    yield OptionRule(
        text="the target has no partial graph with this recompute",
        axes=("recompute", "cuda_graph"),
        is_broken=lambda facts, recompute, graph: (
            graph == "partial"
            and (
                recompute.level not in target.partial_graph_recompute
                or bool(recompute.modules & target.partial_graph_excludes)
            )
        ),
    )


def _offload_rules(problem: TrainProblem) -> Iterator[OptionRule]:
    target = problem.capabilities
    yield OptionRule(
        text="the target cannot offload the optimizer under this zero_stage",
        axes=("zero_stage", "optimizer_offload"),
        is_broken=lambda facts, zero, on: on and zero not in target.optimizer_offload_zero_stages,
    )
    nodes = max(1.0, problem.num_devices / problem.devices_per_node)
    limit, known = problem.host_limit_bytes, problem.memory_constants
    least = known.master_bytes + known.moments_bytes + GRADIENT_BYTES
    least *= 0.0 if problem.tuned.get("adapter_rank") else num_parameters(problem.model) / nodes
    # A price leaves out a few parameters, such as some norms.
    if limit is not None and least > limit * 1.01:
        yield OptionRule(
            text=f"the optimizer would take {format_bytes(int(least))} of a node's memory, of which"
            f" {format_bytes(int(limit))} may be used",
            axes=("optimizer_offload",),
            is_broken=lambda facts, on: on,
        )
    if target.moe_offload_needs_one_tensor_rank and problem.model.num_moe_layers:
        yield OptionRule(
            text="the target cannot offload the optimizer of experts under tensor parallelism",
            axes=("optimizer_offload",),
            is_broken=lambda facts, on: on and facts.has_tensor,
        )


def _limits(problem: TrainProblem) -> Iterator[OptionRule]:
    """Yield the rules of the user's limits, one per limited decision."""
    limits = problem.limits
    for axis in ("chunks", *(knob.field for knob in searched())):
        yield from _limit(axis, getattr(limits, axis, None))
    levels = limits.recompute
    if levels is not None:
        yield OptionRule(
            text="search.recompute leaves it out",
            axes=("recompute",),
            is_broken=lambda facts, recompute: recompute.level not in levels,
            is_limit=True,
        )


def _limit(name: str, allowed: tuple[Choice, ...] | None) -> Iterator[OptionRule]:
    if allowed is not None:
        yield OptionRule(
            text=f"search.{name} leaves it out",
            axes=(name,),
            is_broken=lambda facts, choice: choice not in allowed,
            is_limit=True,
        )
