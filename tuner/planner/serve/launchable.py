"""The ways to run an instance that a spec allows and the engine's release launches."""

from dataclasses import replace
from typing import Final

from tuner.costs.serving.decoder import Decoder, Formats
from tuner.costs.serving.engine import Engine, Exchange
from tuner.costs.serving.expert_loads import ExpertLoads
from tuner.costs.serving.remote_ffn import RemoteFfnIteration
from tuner.costs.serving.speculative import Drafting, Method
from tuner.errors import SpecError
from tuner.planner.serve.afd_options import PricedCells, priced_cells
from tuner.planner.serve.choices import Choices, budgets_of
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.expert_copies import ExpertCopies
from tuner.planner.serve.instances import launched_as
from tuner.planner.serve.options import (
    Option,
    Options,
    PoolSite,
    joined_options,
    options_of,
)
from tuner.planner.serve.pages import page_of_pool
from tuner.serve_plan import Role
from tuner.spec.model import ModelSpec
from tuner.spec.serving.manifests.afd import cell_refusals, target_refusals
from tuner.spec.serving.manifests.manifest import ServingCapabilities
from tuner.spec.serving.manifests.registry import release_on
from tuner.spec.serving.manifests.rules import group_refusals
from tuner.spec.serving.read import ServeSpec

AFD: Final = "attention_expert"
EXCHANGES: Final = (Exchange.ALLGATHER, Exchange.NORMAL, Exchange.LOW_LATENCY)


def launchable_options(
    spec: ServeSpec,
    sites: tuple[PoolSite, ...],
    *,
    decoder: Decoder,
    formats: Formats,
    demand: Demand,
    roles: tuple[Role, ...],
    loads: ExpertLoads | None = None,
) -> Options:
    """Price every way to run an instance, and leave out what the engine's release refuses.

    Args:
        spec: with its engine and what may be used.
        sites: pools.
        decoder: the model.
        formats: its storage.
        demand: the traffic.
        roles: of the instances.
        loads: of the experts, as recorded; None: those of the kernel tables.
    """
    pages = page_of_pool(spec, sites)
    parts = []
    for release in dict.fromkeys(release_on(spec.goal, site.pool).title for site in sites):
        own = tuple(one for one in sites if release_on(spec.goal, one.pool).title == release)
        choices = choices_of(spec, own, demand=demand)
        copies = replace(choices.copies, loads=loads)
        parts.append(
            options_of(
                own,
                decoder=decoder,
                formats=formats,
                engine=Engine(release_on(spec.goal, own[0].pool).name),
                demand=demand,
                roles=roles,
                choices=replace(choices, copies=copies, page_of_pool=pages),
                refuse=lambda option: release_refuses(option, spec),
            )
        )
    return joined_options(parts, roles=roles)


def launchable_cells(
    spec: ServeSpec,
    sites: tuple[PoolSite, ...],
    *,
    decoder: Decoder,
    formats: Formats,
    demand: Demand,
    loads: ExpertLoads | None = None,
) -> PricedCells:
    """Price attention servers with FFN servers of their own; none where nobody asks or has them."""
    having = tuple(site for site in sites if AFD in release_on(spec.goal, site.pool).modes)
    if AFD not in spec.goal.modes or not having:
        return PricedCells()
    return priced_cells(
        having,
        decoder=decoder,
        formats=formats,
        engine=Engine(release_on(spec.goal, having[0].pool).name),
        demand=demand,
        loads=loads,
        page_of_pool=page_of_pool(spec, sites),
        refuse=lambda option: release_refuses(option, spec),
    )


def release_refuses(option: Option, spec: ServeSpec) -> str:
    """Say in a line why the engine's release does not launch an option; empty: it does."""
    engine = release_on(spec.goal, option.site.pool)
    if spec.goal.placement is not None and option.role is not Role.PREFILL:
        loads = option.iteration.loads
        if loads is None or option.degrees.expert != len(loads.slots_R):
            return "the placement is for another number of expert ranks"
    groups, generation = launched_as(option, count=1), option.site.machine.sheet.generation
    broken = [
        line
        for group in groups
        for line in group_refusals(
            engine,
            group,
            model=spec.model,
            goal=spec.goal,
            devices_per_node=option.site.pool.devices_per_node,
            generation=generation,
        )
    ]
    if isinstance(option.iteration, RemoteFfnIteration) and (lines := target_refusals(spec.emit)):
        return lines[0]
    if engine.afd is not None:
        generations = {option.site.pool.name: generation}
        broken += cell_refusals(engine.afd, groups, generations=generations)
    return f"{engine.title}: {broken[0]}" if broken else ""


def copies_of(
    model: ModelSpec, engine: ServingCapabilities, loads: ExpertLoads | None
) -> ExpertCopies:
    """Return what copies of experts the release keeps, and what loads they share."""
    return ExpertCopies(
        loads=loads,
        groups=1 if model.moe is None else model.moe.num_groups,
        is_launched=model.architecture in engine.redundant_architectures,
    )


def choices_of(spec: ServeSpec, sites: tuple[PoolSite, ...], *, demand: Demand) -> Choices:
    """Return what the goal and the release let vary; the sites are of one release.

    Raises:
        SpecError: the model has no heads for the drafts that the goal allows.
    """
    goal = spec.goal
    engine, own = release_on(goal, sites[0].pool), goal.speculative
    drafting = None
    if own is not None and own.method == "mtp" and not spec.model.mtp_num_layers:
        raise SpecError(
            f"goal.speculative: {spec.model.name} has no heads for further tokens, which mtp drafts"
            " with; write 'method: eagle', or leave it out"
        )
    if own is not None:
        drafting = Drafting(
            draft_tokens=own.draft_tokens,
            acceptance=own.acceptance,
            method=Method(own.method),
        )
    return Choices(
        budgets=budgets_of(Engine(engine.name), longest=demand.most_tokens),
        drafting=drafting,
        exchanges=tuple(one for one in EXCHANGES if one.value in engine.a2a_backends),
        copies=copies_of(spec.model, engine, None),
        overlapped=frozenset(one for one in EXCHANGES if one.value in engine.overlap_backends),
        page_of_pool=page_of_pool(spec, sites),
    )
