"""Enumerate the combinations of parallel degrees, and count the illegal ones by rule.

The space is the product of all divisors of the device count for the tensor, pipeline and expert
degrees (the data degree follows), of power-of-two micro-batches, ZeRO stages, model-chunk counts
(1, and with a pipeline all that leave every chunk a layer) and, where an expert group exceeds a
node, of flat and hierarchical dispatch. Each combination is either legal or counted under the first
rule that it breaks.

Not covered: context parallelism and expert tensor parallelism above 1, heterogeneous pools.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from profilers.steps.config import LayerKind
from tuner.catalog.manifest import Capabilities
from tuner.config.microbatches import spanned_replicas
from tuner.costs.reference.workload import StepDegrees, Workload, ZeroStage
from tuner.search.train.rules import (
    FEW_RULE,
    INTERLEAVING_RULE,
    MICRO_RULE,
    UNDIVIDED_RULE,
    UNEQUAL_RULE,
    divisors,
)
from tuner.spec.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    """The legal combinations in a fixed order, and the illegal ones counted by rule."""

    legal: tuple[StepDegrees, ...]
    illegal: Mapping[str, int]
    """Combinations by the first rule they break."""
    nearly: tuple[tuple[str, StepDegrees], ...]
    """Combinations that break exactly one rule, with that rule."""

    @property
    def num_illegal(self) -> int:
        """Combinations that break a rule."""
        return sum(self.illegal.values())


def enumerate_degrees(
    work: Workload,
    *,
    num_devices: int,
    capabilities: Capabilities,
    search: Search,
    ranks_per_node: int | None = None,
) -> Enumeration:
    """Split the whole space into legal combinations and counted illegal ones.

    Without `ranks_per_node` all devices share a node.
    """
    legal: list[StepDegrees] = []
    illegal: Counter[str] = Counter()
    nearly: list[tuple[str, StepDegrees]] = []
    for degrees in _all_degrees(work, num_devices, ranks_per_node or num_devices):
        rules = tuple(_broken_rules(work, degrees, capabilities, search))
        if not rules:
            legal.append(degrees)
            continue
        illegal[rules[0]] += 1
        if len(rules) == 1:
            nearly.append((rules[0], degrees))
    return Enumeration(
        legal=tuple(legal), illegal=dict(sorted(illegal.items())), nearly=tuple(nearly)
    )


def _all_degrees(work: Workload, num_devices: int, ranks_per_node: int) -> Iterator[StepDegrees]:
    sizes = divisors(num_devices).tolist()
    micro_batches = _powers_of_two(work.global_batch_size)
    chunks = range(1, work.model.num_layers + 1)
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    for tensor, pipeline in product(sizes, sizes):
        if num_devices % (tensor * pipeline):
            continue
        data = num_devices // (tensor * pipeline)
        for (expert, hops), virtual, micro_batch, zero in product(
            _expert_groups(tensor * data, ranks_per_node),
            [v for v in chunks if v == 1 or 1 < pipeline <= work.model.num_layers // v],
            micro_batches,
            zero_stages,
        ):
            yield StepDegrees(
                tensor=tensor,
                pipeline=pipeline,
                virtual_pipeline=virtual,
                data=data,
                expert=expert,
                micro_batch_size=micro_batch,
                zero_stage=zero,
                ranks_per_node=hops,
            )


def _expert_groups(ranks: int, ranks_per_node: int) -> Iterator[tuple[int, int | None]]:
    """Expert degrees with flat dispatch, and with hierarchical where a group exceeds a node."""
    for expert in divisors(ranks).tolist():
        yield expert, None
        if expert > ranks_per_node:
            yield expert, ranks_per_node


def _broken_rules(
    work: Workload, degrees: StepDegrees, capabilities: Capabilities, search: Search
) -> Iterator[str]:
    yield from _broken_by_model(work, degrees)
    yield from _broken_by_batch(work, degrees, capabilities)
    yield from _broken_by_nodes(degrees)
    yield from _broken_by_capabilities(work, degrees, capabilities)
    yield from _broken_by_search(degrees, search)


def _broken_by_model(work: Workload, degrees: StepDegrees) -> Iterator[str]:
    model, tensor = work.model, degrees.tensor
    if model.attention.num_heads % tensor or model.attention.num_kv_heads % tensor:
        yield "tensor_model_parallel_size does not divide the attention heads"
    if LayerKind.DENSE in model.layers and model.dense_ffn_size % tensor:
        yield "tensor_model_parallel_size does not divide the feed-forward width"
    if model.moe is not None and model.moe.shared_ffn_size % tensor:
        yield "tensor_model_parallel_size does not divide the shared expert's width"
    if work.sequence_length % tensor:
        yield "tensor_model_parallel_size does not divide the sequence"
    if model.moe is None and degrees.expert > 1:
        yield "expert_model_parallel_size above 1 in a model without experts"
    if model.moe is not None and model.moe.num_experts % degrees.expert:
        yield "expert_model_parallel_size does not divide the experts"
    if degrees.num_stages > model.num_layers:
        yield "more pipeline stages than layers"
    if model.tie_word_embeddings and degrees.pipeline > 1:
        yield "tied embeddings keep the first and the last layer on one stage"


def _broken_by_batch(
    work: Workload, degrees: StepDegrees, capabilities: Capabilities
) -> Iterator[str]:
    batches, rest = divmod(work.global_batch_size, degrees.micro_batch_size)
    is_equal = not rest and batches % degrees.data == 0
    if not is_equal and not capabilities.unequal_microbatches:
        yield MICRO_RULE
    elif rest:
        yield UNDIVIDED_RULE
    elif batches < degrees.data:
        yield FEW_RULE
    elif degrees.virtual_pipeline > 1 and batches % (degrees.data * degrees.pipeline):
        yield INTERLEAVING_RULE
    elif degrees.pipeline > 1 and batches % spanned_replicas(
        ranks=degrees.tensor, group=degrees.expert
    ):
        yield UNEQUAL_RULE


def _broken_by_nodes(degrees: StepDegrees) -> Iterator[str]:
    if degrees.ranks_per_node is not None and degrees.expert % degrees.ranks_per_node:
        yield "hierarchical dispatch needs expert groups that fill their nodes"


def _broken_by_capabilities(
    work: Workload, degrees: StepDegrees, capabilities: Capabilities
) -> Iterator[str]:
    """Yield the rules of the targets; those that hold for adapters alone say so."""
    broken = tuple(_broken_by_manifest(work, degrees, capabilities))
    whole = capabilities.without_adapters
    always = broken
    if broken and whole is not None:
        always = tuple(_broken_by_manifest(work, degrees, whole))
    yield from (rule if rule in always else f"{rule} beside adapters" for rule in broken)


def _broken_by_manifest(
    work: Workload, degrees: StepDegrees, capabilities: Capabilities
) -> Iterator[str]:
    yield from _broken_by_target(work, degrees, capabilities)
    yield from _broken_by_expert_ranks(degrees, capabilities)
    yield from _broken_by_tensor_ranks(work, degrees, capabilities)


def _broken_by_target(
    work: Workload, degrees: StepDegrees, capabilities: Capabilities
) -> Iterator[str]:
    if _dispatcher(degrees) not in capabilities.dispatchers:
        yield f"the target has no dispatcher {_dispatcher(degrees)}"
    if degrees.zero_stage not in capabilities.zero_stages:
        yield "the target has no such zero_stage"
    if degrees.pipeline > 1 and not capabilities.pipeline:
        yield "the target has no pipeline parallelism"
    elif degrees.pipeline > 1 and degrees.zero_stage not in capabilities.zero_stages_with_pipeline:
        yield "the target has no such zero_stage with pipeline parallelism"
    least = min(capabilities.zero_stages, default=0)
    if degrees.zero_stage > least and degrees.ranks_per_stage == 1:
        yield "zero_stage above 0 without data parallelism shards nothing"
    if not capabilities.uneven_layout and work.model.num_layers % degrees.num_stages:
        yield "the target's stages hold equally many layers"
    if degrees.virtual_pipeline > 1 and not capabilities.virtual_pipeline:
        yield "the target has no interleaved schedule"


def _broken_by_expert_ranks(degrees: StepDegrees, capabilities: Capabilities) -> Iterator[str]:
    if degrees.expert > 1 and not capabilities.expert_parallel:
        yield "the target has no expert parallelism"
        return
    if (
        capabilities.expert_folding_needs_sharding
        and degrees.zero_stage == 0
        and degrees.tensor % degrees.expert
    ):
        yield "the target spreads experts over replicas at zero_stage above 0 only"
    if degrees.expert > degrees.data and not capabilities.expert_folding:
        yield "the target has no parallel folding"


def _broken_by_tensor_ranks(
    work: Workload, degrees: StepDegrees, capabilities: Capabilities
) -> Iterator[str]:
    if degrees.tensor == 1:
        return
    if not capabilities.tensor_parallel:
        yield "the target has no tensor parallelism"
    elif not capabilities.sequence_parallel:
        yield "the target's tensor ranks cannot share the sequence, as the reference step's do"
    elif (
        capabilities.moe_tensor_needs_experts and work.model.moe is not None and degrees.expert == 1
    ):
        yield "the target needs expert parallelism beside tensor parallelism"


def _broken_by_search(degrees: StepDegrees, search: Search) -> Iterator[str]:
    chosen: Mapping[str, object] = {
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "virtual_pipeline_model_parallel_size": degrees.virtual_pipeline,
        "context_parallel_size": 1,
        "data_parallel_size": degrees.data,
        "expert_model_parallel_size": degrees.expert,
        "expert_tensor_parallel_size": 1,
        "micro_batch_size": degrees.micro_batch_size,
        "zero_stage": degrees.zero_stage,
        "dispatcher": _dispatcher(degrees),
    }
    for name, value in chosen.items():
        allowed: Sequence[object] | None = getattr(search, name)
        if allowed is not None and value not in allowed:
            yield f"search.{name} leaves it out"


def _dispatcher(degrees: StepDegrees) -> str:
    return "alltoall" if degrees.ranks_per_node is None else "hierarchical"


def _powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]
