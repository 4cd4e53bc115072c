"""Rules of a release that a deployment breaks, one line each: value, rule and way out.

A group is a set of equal instances; `devices_per_node` of its pool gives the machines of an
instance. Limits of a step are checked in steps.py, pairs of prefill and decode instances in
pairs.py.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from tuner.catalog.serve_rules.afd import afd_refusals, side_refusals
from tuner.catalog.serve_rules.manifest import (
    DEEPEP,
    DEEPEP_HIDDEN_SIZES,
    DEEPEP_RANKS,
    LARGEST_DISPATCH_TOKENS,
    WITHOUT_NVLINK,
    ServingCapabilities,
)
from tuner.catalog.serve_rules.models import model_refusals
from tuner.catalog.serve_rules.pairs import pair_refusals
from tuner.catalog.serve_rules.steps import dispatch_tokens, step_refusals
from tuner.config.serve import Instances, Role, ServeDecision
from tuner.devices.datasheet import Datasheet, Generation
from tuner.spec.model import ModelSpec
from tuner.spec.serving.expert_slots import are_even, even_counts, even_ranks
from tuner.spec.serving.goal import Mode, ServeGoal

ROLES: Final[Mapping[Mode, frozenset[Role]]] = {
    "aggregated": frozenset({Role.AGGREGATED}),
    "disaggregated": frozenset({Role.PREFILL, Role.DECODE}),
    "attention_expert": frozenset({Role.PREFILL, Role.ATTENTION, Role.EXPERT}),
    "shared_device": frozenset({Role.AGGREGATED}),
    "prefill_offload": frozenset({Role.PREFILL, Role.AGGREGATED}),
}
"""Roles of the instances that each mode launches."""

_WHY_NOT: Final[Mapping[Mode, str]] = {
    "attention_expert": "the release has no attention-FFN disaggregation; vllm 0.30.0+afd has it,"
    " as an experiment",
    "shared_device": "the release does not multiplex prefill and decode on a device",
    "prefill_offload": "routers keep only prompts local that are cached in part, whatever their"
    " length",
}
"""Reasons why releases lack a mode. Routers: NVIDIA Dynamo 1.6.1 (`--router-conditional-disagg`,
policy isl_bounding: tokens to compute over all tokens below a ratio of 1 at most) and TensorRT-LLM
(`conditional_disagg_config`, examples/disaggregated), whose limits need a cached part too."""

LAUNCHERS: Final[Mapping[Mode, tuple[str, frozenset[str]]]] = {
    "attention_expert": ("attention-FFN disaggregation", frozenset({"slurm", "local"})),
}
"""Modes that few launch targets start: the feature, and those beside engines that have the mode."""

_UNKNOWN: Final[Mapping[str, Datasheet]] = MappingProxyType({})
_SAME: Final[Mapping[str, ServingCapabilities]] = MappingProxyType({})


def refusals(
    engine: ServingCapabilities,
    decision: ServeDecision,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    devices_per_node: Mapping[str, int],
    sheets: Mapping[str, Datasheet] = _UNKNOWN,
    releases: Mapping[str, ServingCapabilities] = _SAME,
) -> tuple[str, ...]:
    """Return why the release cannot launch the decision; empty if it can.

    Args:
        engine: the release.
        decision: what is to be launched.
        model: to serve.
        goal: precision and traffic.
        devices_per_node: by pool.
        sheets: of the devices, by pool; rules that need a missing one are skipped.
        releases: by pool, if not `engine`.
    """
    used = {group.pool: releases.get(group.pool, engine) for group in decision.instances}
    for release in used.values():
        if decision.mode not in release.modes:
            return (absent_mode(release, decision.mode),)
    generations = {pool: sheet.generation for pool, sheet in sheets.items()}
    broken = [
        f"{engine.title}: {line}"
        for line in (
            *_roles(decision),
            *_kv_transfers(engine, decision, releases=used),
            *pair_refusals(
                engine, decision, model=model, goal=goal, generations=generations, releases=used
            ),
            *_afd_units(decision, generations=generations, releases=used),
        )
    ]
    for group in decision.instances:
        release = used[group.pool]
        broken += [
            f"{release.title}: {line}"
            for line in group_refusals(
                release,
                group,
                model=model,
                goal=goal,
                devices_per_node=devices_per_node[group.pool],
                sheet=sheets.get(group.pool),
            )
        ]
    return tuple(dict.fromkeys(broken))


def group_refusals(
    engine: ServingCapabilities,
    group: Instances,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    devices_per_node: int,
    sheet: Datasheet | None = None,
) -> tuple[str, ...]:
    """Return why the release cannot launch such instances, regardless of other groups."""
    generation = None if sheet is None else sheet.generation
    absent = tuple(
        model_refusals(engine.models, group, architecture=model.architecture, generation=generation)
    )
    if model.architecture not in engine.models.architectures:
        return absent
    return tuple(
        f"{group.role} on {group.pool}: {line}"
        for line in (
            *absent,
            *_mixers(group, model=model),
            *_experts(engine, group, model=model),
            *_afd_server(engine, group, model=model, goal=goal, generation=generation),
            *_attention(engine, group, devices_per_node=devices_per_node),
            *_shared_core(engine, group, devices_per_node=devices_per_node),
            *_all_to_all(
                engine,
                group,
                model=model,
                generation=generation,
                devices_per_node=devices_per_node,
            ),
            *step_refusals(engine, group, model=model, goal=goal, sheet=sheet),
        )
    )


def nodes_needed(devices: int, *, devices_per_node: int) -> int:
    """Return the machines of one instance: the fewest that fit it in equal parts."""
    nodes = -(-devices // devices_per_node)
    while devices % nodes:
        nodes += 1
    return nodes


def is_disaggregated(mode: Mode) -> bool:
    """Return whether some prompts are prefilled on separate instances."""
    return Role.PREFILL in ROLES[mode]


def absent_mode(engine: ServingCapabilities, mode: Mode) -> str:
    """Say in a line that the release lacks a mode, and why."""
    why = _WHY_NOT.get(mode)
    known = ", ".join(sorted(engine.modes))
    return f"{engine.title}: mode {mode} is not one of {known}" + (f": {why}" if why else "")


def _roles(decision: ServeDecision) -> Iterator[str]:
    roles = {group.role for group in decision.instances}
    if roles != ROLES[decision.mode]:
        yield (
            f"mode {decision.mode} has roles {' and '.join(sorted(ROLES[decision.mode]))}, the"
            f" decision of {' and '.join(sorted(roles))}"
        )


def _kv_transfers(
    engine: ServingCapabilities,
    decision: ServeDecision,
    *,
    releases: Mapping[str, ServingCapabilities],
) -> Iterator[str]:
    if not is_disaggregated(decision.mode):
        return
    used = {transfer.connector for transfer in decision.handovers}
    of_pool: dict[str, set[str]] = {}
    for transfer in decision.handovers:
        for pool in (transfer.from_pool, transfer.to_pool):
            of_pool.setdefault(pool, set()).add(transfer.connector)
    if not used or any(len(names) > 1 for names in of_pool.values()):
        yield f"an instance has one KV connector, the KV transfers name {sorted(used) or 'none'}"
    for pool, names in of_pool.items():
        release = releases.get(pool, engine)
        for connector in sorted(names - set(release.connectors)):
            yield f"connector {connector} is not one of {', '.join(release.connectors)}"
    through_host = [transfer for transfer in decision.handovers if transfer.path == "host"]
    for transfer in through_host:
        sides = (releases.get(pool, engine) for pool in (transfer.from_pool, transfer.to_pool))
        if not all(side.host_path for side in sides):
            yield "KV caches cannot pass through host memory; plan for a path between devices"
        elif transfer.connector == "mooncake":
            yield "connector mooncake cannot pass through host memory; nixl can"


def _afd_units(
    decision: ServeDecision,
    *,
    generations: Mapping[str, Generation],
    releases: Mapping[str, ServingCapabilities],
) -> Iterator[str]:
    plugins = dict.fromkeys(
        release.afd
        for group in decision.instances
        if (release := releases[group.pool]).afd is not None
    )
    for plugin in plugins:
        own_groups = [group for group in decision.instances if releases[group.pool].afd is plugin]
        yield from afd_refusals(plugin, own_groups, generations=generations)


def _afd_server(
    engine: ServingCapabilities,
    group: Instances,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    generation: Generation | None,
) -> Iterator[str]:
    if engine.afd is not None and group.role in ("attention", "expert"):
        yield from side_refusals(engine.afd, group, model=model, goal=goal, generation=generation)


def _mixers(group: Instances, *, model: ModelSpec) -> Iterator[str]:
    linear, ranks = model.linear, group.attention_tp
    if linear is None or linear.num_key_heads == 1:
        return
    for count, what in ((linear.num_value_heads, "heads"), (linear.num_key_heads, "key heads")):
        if count % ranks:
            yield f"attention_tp {ranks} does not divide the {count} {what} of linear attention"


def _experts(engine: ServingCapabilities, group: Instances, *, model: ModelSpec) -> Iterator[str]:
    spread = group.moe_tp * group.ep
    if engine.only_tensor_parallel and (group.attention_dp > 1 or group.ep > 1 or group.pp > 1):
        yield (
            f"attention_dp {group.attention_dp}, ep {group.ep} and pp {group.pp} must be 1:"
            " the release runs tensor parallelism alone on such devices"
        )
    if group.role == "attention":
        if spread > 1:
            yield f"moe_tp {group.moe_tp} and ep {group.ep} of a server without experts must be 1"
        return
    if model.moe is None:
        if spread > 1:
            yield f"moe_tp {group.moe_tp} and ep {group.ep} of a model without experts must be 1"
        if group.redundant_experts:
            copies = group.redundant_experts
            yield f"redundant_experts {copies} of a model without experts must be 0"
        return
    if spread * group.pp != group.devices:
        yield (
            f"experts are on all {group.devices // group.pp} devices of a pipeline stage, moe_tp"
            f" {group.moe_tp} x ep {group.ep} is {spread}"
        )
    yield from _slots(engine, group, model=model, experts=model.moe.num_experts)
    if group.moe_tp > 1 and group.ep > 1 and not engine.both_expert_degrees:
        yield f"experts are split or not: moe_tp {group.moe_tp} or ep {group.ep} must be 1"


def _slots(
    engine: ServingCapabilities, group: Instances, *, model: ModelSpec, experts: int
) -> Iterator[str]:
    copies = group.redundant_experts
    has_copies = model.architecture in engine.redundant_architectures
    if not are_even(experts, copies, group.ep):
        ranks = " or ".join(map(str, even_ranks(experts + copies, group.ep)))
        counts = " or ".join(map(str, even_counts(experts, copies, group.ep)))
        among = f" with {copies} redundant" if copies else ""
        advice = f", or redundant_experts {counts}" if has_copies else ""
        yield f"ep {group.ep} does not divide {experts} experts{among}; ep {ranks} does{advice}"
    if not copies:
        return
    if not has_copies:
        yield f"redundant_experts {copies}: {model.architecture} has no redundant experts"
    if group.ep == 1:
        yield f"redundant_experts {copies} need ep above 1"
    if engine.redundant_needs_attention_dp and group.attention_dp == 1:
        yield f"redundant_experts {copies} need attention_dp above 1"


def _attention(
    engine: ServingCapabilities, group: Instances, *, devices_per_node: int
) -> Iterator[str]:
    if group.attention_tp > 1 and group.attention_dp > 1 and not engine.both_attention_degrees:
        yield (
            f"attention_tp {group.attention_tp} or attention_dp {group.attention_dp} must be 1:"
            " every device is a data-parallel rank of attention, or none is"
        )
    nodes = nodes_needed(group.devices, devices_per_node=devices_per_node)
    if group.attention_dp > 1 and nodes > 1 and not engine.data_parallel_rank_spans_nodes:
        local = group.devices // nodes
        if local % (group.attention_tp * group.pp):
            yield (
                f"a data-parallel rank of attention_tp {group.attention_tp} x pp {group.pp} must"
                f" fit the {local} devices of a machine"
            )


def _shared_core(
    engine: ServingCapabilities, group: Instances, *, devices_per_node: int
) -> Iterator[str]:
    has_connector = group.role in ("prefill", "decode")
    if engine.transferring_ranks_share_core and has_connector and devices_per_node > 1:
        yield (
            "with a KV connector all ranks of a machine compute on the last cores of its NUMA"
            f" nodes, so it runs one rank; devices_per_node {devices_per_node} must be 1"
        )


def _all_to_all(
    engine: ServingCapabilities,
    group: Instances,
    *,
    model: ModelSpec,
    generation: Generation | None,
    devices_per_node: int,
) -> Iterator[str]:
    backend = group.a2a_backend
    if backend not in engine.a2a_backends:
        yield f"a2a_backend {backend} is not one of {', '.join(sorted(engine.a2a_backends))}"
    if backend not in DEEPEP:
        return
    if generation in WITHOUT_NVLINK:
        yield (
            f"a2a_backend {backend} needs NVLink between the devices of a machine, which those of"
            f" {generation} lack; use allgather"
        )
    is_inside = backend == "deepep_normal" and group.ep <= devices_per_node
    if generation is Generation.AMPERE and not is_inside:
        # setup.py of deepseek-ai/DeepEP: SM80 builds have neither NVSHMEM nor low-latency kernels.
        yield (
            f"a2a_backend {backend} on {generation} devices: DeepEP is built for them with normal"
            f" kernels inside one machine only, of {devices_per_node} devices; use allgather"
        )
    if group.moe_tp > 1 or group.ep == 1:
        yield (
            f"a2a_backend {backend} needs moe_tp 1 and ep above 1, not {group.moe_tp}"
            f" and {group.ep}"
        )
    if engine.deepep_needs_attention_dp and group.attention_dp == 1:
        yield f"a2a_backend {backend} needs attention_dp above 1"
    known = engine.a2a_architectures
    if known is not None and model.moe is not None and model.architecture not in known:
        yield f"a2a_backend {backend} is not built into the experts of {model.architecture}"
    if _runs_normal(engine, group) and group.ep not in {1, *DEEPEP_RANKS}:
        ranks = ", ".join(map(str, sorted(DEEPEP_RANKS)))
        yield f"DeepEP's normal kernels run on {ranks} ranks, not ep {group.ep}"
    if backend == "deepep_low_latency":
        yield from _low_latency(engine, group, width=model.expert_hidden)


def _runs_normal(engine: ServingCapabilities, group: Instances) -> bool:
    """Say whether some steps use DeepEP's normal kernels."""
    if group.a2a_backend == "deepep_normal":
        return True
    return engine.low_latency_leaves_prefill and group.role == "aggregated"


def _low_latency(engine: ServingCapabilities, group: Instances, *, width: int) -> Iterator[str]:
    if width not in DEEPEP_HIDDEN_SIZES:
        sizes = ", ".join(map(str, sorted(DEEPEP_HIDDEN_SIZES)))
        yield f"low-latency DeepEP is built for hidden sizes {sizes}, not {width}"
    tokens = dispatch_tokens(engine, group)
    if tokens > LARGEST_DISPATCH_TOKENS:
        yield (
            f"low-latency DeepEP takes {LARGEST_DISPATCH_TOKENS} tokens per rank and step at most,"
            f" not {tokens}; lower the batch{' or the drafts' if group.draft_tokens else ''} or use"
            " deepep_normal"
        )
