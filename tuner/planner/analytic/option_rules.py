"""What makes a way to run given degrees illegal: nature, the targets' manifests, the user's limits.

Rules are listed in the order in which a refusal is counted. What a target cannot do comes from its
manifest (tuner/spec/manifests); what would do nothing is illegal too, so that no two decisions of
the space are the same run.
"""

from collections.abc import Iterator

from profilers.steps.config import Recompute
from tuner.planner.analytic.axes import RANK_ORDERS, Choice, Recomputed, WayRule
from tuner.planner.analytic.problem import Question


def way_rules(question: Question) -> tuple[WayRule, ...]:
    """List the rules between the axes of a question."""
    return (*_nature(question), *_targets(question), *_limits(question))


def _nature(question: Question) -> Iterator[WayRule]:
    """Rules that hold for every target: what would do nothing, and what cannot be."""
    yield WayRule(
        text="schedule interleaved and virtual stages need each other",
        axes=("schedule",),
        is_broken=lambda facts, schedule: (
            (schedule == "interleaved") != facts.has_virtual and schedule != "zero_bubble"
        ),
    )
    yield WayRule(
        text="schedule zero_bubble without a pipeline fills nothing",
        axes=("schedule",),
        is_broken=lambda facts, schedule: schedule == "zero_bubble" and not facts.has_pipeline,
    )
    least = min(question.capabilities.zero_stages, default=0)
    yield WayRule(
        text="zero_stage above 0 without data parallelism shards nothing",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: zero > least and not facts.is_sharded,
    )
    yield WayRule(
        text="overlap_grad_reduce without data parallelism overlaps nothing",
        axes=("overlap_grad_reduce",),
        is_broken=lambda facts, on: on and not facts.is_sharded,
    )
    yield WayRule(
        text="overlap_param_gather without sharded optimizer state overlaps nothing",
        axes=("zero_stage", "overlap_param_gather"),
        is_broken=lambda facts, zero, on: on and (zero == 0 or not facts.is_sharded),
    )
    # A copy per domain at zero_stage 1 holds more and sends no less: V / n for its part of the sum
    # to each of two neighbours, where sharding over all ranks sends V / n twice, sum and gather.
    yield WayRule(
        text="shard_ranks below zero_stage 2, or without several domains, saves no bytes",
        axes=("zero_stage", "sharding"),
        is_broken=lambda facts, zero, sharding: (
            sharding == "domain" and (zero < 2 or not facts.has_copies)
        ),
    )
    yield WayRule(
        text="rank_order without a pipeline orders nothing",
        axes=("rank_order",),
        is_broken=lambda facts, order: order != RANK_ORDERS[0] and not facts.has_pipeline,
    )
    yield WayRule(
        text="dispatcher above alltoall without expert parallelism moves nothing",
        axes=("dispatcher",),
        is_broken=lambda facts, name: name != "alltoall" and not facts.has_experts_apart,
    )
    yield WayRule(
        text="a2a_overlap without expert parallelism overlaps nothing",
        axes=("a2a_overlap",),
        is_broken=lambda facts, on: on and not facts.has_experts_apart,
    )
    yield WayRule(
        text="more than one chunk without recomputing the experts saves nothing",
        axes=("recompute", "chunks"),
        is_broken=lambda facts, again, chunks: chunks > 1 and not _covers_experts(again),
    )


def _covers_experts(again: Recomputed) -> bool:
    return again.share == 1.0 or "moe" in again.modules


def _targets(question: Question) -> Iterator[WayRule]:
    """Rules of the targets' manifests."""
    target = question.capabilities
    yield WayRule(
        text="the target has no such zero_stage",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: zero not in target.zero_stages,
    )
    yield WayRule(
        text="the target has no such zero_stage with pipeline parallelism",
        axes=("zero_stage",),
        is_broken=lambda facts, zero: (
            facts.has_pipeline and zero not in target.zero_stages_with_pipeline
        ),
    )
    yield WayRule(
        text="the target cannot shard over part of the ranks at this zero_stage",
        axes=("zero_stage", "sharding"),
        is_broken=lambda facts, zero, sharding: (
            sharding == "domain" and zero not in target.shard_ranks_zero_stages
        ),
    )
    if target.expert_folding_needs_sharding:
        yield WayRule(
            text="the target spreads experts over replicas at zero_stage above 0 only",
            axes=("zero_stage",),
            is_broken=lambda facts, zero: zero == 0 and facts.spans_replicas,
        )
    yield WayRule(
        text="the target cannot recompute this",
        axes=("recompute",),
        is_broken=lambda facts, again: (
            again.level not in target.recompute
            or not again.modules <= target.recompute_modules
            or (0.0 < again.share < 1.0 and not target.recompute_num_layers)
        ),
    )
    yield WayRule(
        text="the target has no such chunks",
        axes=("recompute", "chunks"),
        is_broken=lambda facts, again, chunks: (
            chunks > 1
            and (
                chunks > target.largest_chunks
                or again.level not in target.chunks_need
                or (
                    again.level is Recompute.SELECTIVE
                    and not target.chunks_need_modules <= again.modules
                )
            )
        ),
    )
    yield WayRule(
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
    yield WayRule(
        text="the target has no such dispatcher",
        axes=("dispatcher",),
        is_broken=lambda facts, name: (
            name not in target.dispatchers
            or (facts.has_pipeline and name not in target.dispatchers_with_pipeline)
        ),
    )
    yield from _a2a_rules(question)
    yield from _graph_rules(question)
    yield from _offload_rules(question)
    yield WayRule(
        text="the target cannot overlap this",
        axes=("overlap_grad_reduce", "overlap_param_gather"),
        is_broken=lambda facts, sums, gathers: (
            (sums and not target.overlap_grad_reduce)
            or (gathers and not target.overlap_param_gather)
            or (gathers and not sums and target.param_gather_needs_grad_reduce)
        ),
    )
    yield WayRule(
        text="the target has no such rank_order",
        axes=("rank_order",),
        is_broken=lambda facts, order: order not in target.rank_orders,
    )
    if question.precision == "fp8-delayed":
        yield WayRule(
            text="the target cannot recompute this under fp8-delayed",
            axes=("recompute",),
            is_broken=lambda facts, again: bool(again.modules & target.delayed_scaling_excludes),
        )


def _a2a_rules(question: Question) -> Iterator[WayRule]:
    target, mtp = question.capabilities, question.model.mtp_num_layers
    yield WayRule(
        text="the target has no a2a_overlap with these degrees",
        axes=("a2a_overlap",),
        is_broken=lambda facts, on: (
            on
            and (
                not target.a2a_overlap
                or (
                    target.a2a_overlap_needs_virtual_pipeline
                    and facts.has_pipeline
                    and not facts.has_virtual
                )
                or mtp > target.a2a_overlap_largest_mtp
                or (mtp > 0 and target.a2a_overlap_mtp_needs_pipeline and not facts.has_pipeline)
            )
        ),
    )
    yield WayRule(
        text="the target has no a2a_overlap with this dispatcher",
        axes=("dispatcher", "a2a_overlap"),
        is_broken=lambda facts, name, on: on and name not in target.a2a_overlap_dispatchers,
    )
    yield WayRule(
        text="the target has no a2a_overlap with this recompute",
        axes=("recompute", "a2a_overlap"),
        is_broken=lambda facts, again, on: (
            on
            and (
                again.level not in target.a2a_overlap_recompute
                or bool(again.modules & target.a2a_overlap_excludes)
            )
        ),
    )
    yield WayRule(
        text="the target has no a2a_overlap with this cuda_graph",
        axes=("a2a_overlap", "cuda_graph"),
        is_broken=lambda facts, on, graph: on and graph not in target.a2a_overlap_graphs,
    )


def _graph_rules(question: Question) -> Iterator[WayRule]:
    target = question.capabilities
    has_experts = question.model.num_moe_layers > 0
    yield WayRule(
        text="the target has no such cuda_graph",
        axes=("cuda_graph",),
        is_broken=lambda facts, graph: (
            graph not in target.cuda_graphs
            or (facts.has_pipeline and graph not in target.cuda_graphs_with_pipeline)
        ),
    )
    yield WayRule(
        text="the target has no full_iteration graph with this dispatcher",
        axes=("dispatcher", "cuda_graph"),
        is_broken=lambda facts, name, graph: (
            graph == "full_iteration" and has_experts and name not in target.full_graph_dispatchers
        ),
    )
    yield WayRule(
        text="the target has no partial graph with this recompute",
        axes=("recompute", "cuda_graph"),
        is_broken=lambda facts, again, graph: (
            graph == "partial"
            and (
                again.level not in target.partial_graph_recompute
                or bool(again.modules & target.partial_graph_excludes)
            )
        ),
    )


def _offload_rules(question: Question) -> Iterator[WayRule]:
    target = question.capabilities
    yield WayRule(
        text="the target cannot offload the optimizer under this zero_stage",
        axes=("zero_stage", "optimizer_offload"),
        is_broken=lambda facts, zero, on: on and zero not in target.optimizer_offload_zero_stages,
    )
    if target.moe_offload_needs_one_tensor_rank and question.model.num_moe_layers:
        yield WayRule(
            text="the target cannot offload the optimizer of experts under tensor parallelism",
            axes=("optimizer_offload",),
            is_broken=lambda facts, on: on and facts.has_tensor,
        )
    yield WayRule(
        text="the target cannot offload activations here",
        axes=("recompute", "cuda_graph", "activation_offload"),
        is_broken=lambda facts, again, graph, on: (
            on
            and (
                not target.activation_offload
                or again.level not in target.activation_offload_recompute
                or graph not in target.activation_offload_graphs
            )
        ),
    )


def _limits(question: Question) -> Iterator[WayRule]:
    """What the user's limits leave out, one rule per limited decision."""
    limits = question.limits
    for name in ("zero_stage", "chunks", "dispatcher", "a2a_overlap", "cuda_graph", "schedule"):
        yield from _limit(name, getattr(limits, name))
    for name in ("optimizer_offload", "activation_offload"):
        yield from _limit(name, getattr(limits, name))
    levels = limits.recompute
    if levels is not None:
        yield WayRule(
            text="search.recompute leaves it out",
            axes=("recompute",),
            is_broken=lambda facts, again: again.level not in levels,
        )


def _limit(name: str, allowed: tuple[Choice, ...] | None) -> Iterator[WayRule]:
    if allowed is not None:
        yield WayRule(
            text=f"search.{name} leaves it out",
            axes=(name,),
            is_broken=lambda facts, choice: choice not in allowed,
        )
