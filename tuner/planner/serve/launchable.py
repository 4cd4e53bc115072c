"""The ways to run an instance that a spec allows and the engine's release launches."""

from dataclasses import replace
from typing import Final

from tuner.costs.serving.decoder import Decoder, Formats
from tuner.costs.serving.drafting import Drafting, Method
from tuner.costs.serving.engine import Engine, Exchange
from tuner.costs.serving.expert_loads import ExpertLoads
from tuner.errors import SpecError
from tuner.planner.serve.choices import Choices, budgets_of
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.instances import instances_of
from tuner.planner.serve.options import (
    Option,
    Options,
    PoolSite,
    joined_options,
    options_of,
)
from tuner.planner.serve.pages import page_of_pool
from tuner.serve_plan import Role
from tuner.spec.serving.manifests.registry import release_on
from tuner.spec.serving.manifests.rules import group_refusals
from tuner.spec.serving.read import ServeSpec

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
        parts.append(
            options_of(
                own,
                decoder=decoder,
                formats=formats,
                engine=Engine(release_on(spec.goal, own[0].pool).name),
                demand=demand,
                roles=roles,
                choices=replace(choices, loads=loads, page_of_pool=pages),
                refuse=lambda option: release_refuses(option, spec),
            )
        )
    return joined_options(parts, roles=roles)


def release_refuses(option: Option, spec: ServeSpec) -> str:
    """Say in a line why the engine's release does not launch an option; empty: it does."""
    engine = release_on(spec.goal, option.site.pool)
    if spec.goal.placement is not None and option.role is not Role.PREFILL:
        loads = option.iteration.loads
        if loads is None or option.degrees.expert != len(loads.slots_R):
            return "the placement is for another number of expert ranks"
    broken = group_refusals(
        engine,
        instances_of(option, count=1),
        model=spec.model,
        goal=spec.goal,
        devices_per_node=option.site.pool.devices_per_node,
        generation=option.site.machine.sheet.generation,
    )
    return f"{engine.title}: {broken[0]}" if broken else ""


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
        overlapped=frozenset(one for one in EXCHANGES if one.value in engine.overlap_backends),
        page_of_pool=page_of_pool(spec, sites),
    )
