"""The instance options that a spec allows and the engine's release launches."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from tuner.catalog.serve_rules.afd import afd_refusals
from tuner.catalog.serve_rules.manifest import DEEPEP, ServingCapabilities
from tuner.catalog.serve_rules.rules import absent_mode, group_refusals
from tuner.config.serve import Role
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.engine import A2aBackend
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.costs.serve.speculative import Drafting, DraftMethod
from tuner.errors import SpecError
from tuner.prices.serve.machine import on_core_share
from tuner.search.serve.choices import Choices, engine_budgets
from tuner.search.serve.demand import Demand
from tuner.search.serve.expert_copies import ExpertCopies
from tuner.search.serve.instances import to_instances
from tuner.search.serve.options import (
    Option,
    Options,
    ServingPool,
    merge_options,
    price_options,
)
from tuner.search.serve.pages import page_by_pool
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.spec import ServeSpec

POLLED_CORE_RATIO: Final = 0.5
"""Share of a core that is left to compute in where a thread of the KV connector polls on it."""
A2A_BACKENDS: Final = (A2aBackend.ALLGATHER, A2aBackend.NORMAL, A2aBackend.LOW_LATENCY)


def launchable_options(
    spec: ServeSpec,
    serving_pools: tuple[ServingPool, ...],
    *,
    decoder: Decoder,
    formats: Formats,
    demand: Demand,
    roles: tuple[Role, ...],
    loads: ExpertLoads | None = None,
    is_spread: bool = False,
) -> Options:
    """Price every instance option, and leave out what the engine's release refuses.

    Args:
        spec: with its engine and what may be used.
        serving_pools: pools.
        decoder: the model.
        formats: its storage.
        demand: the traffic.
        roles: of the instances.
        loads: of the experts, as recorded; None: those of the kernel tables.
        is_spread: instances have every stage on a machine of its own.
    """
    pages = page_by_pool(spec, serving_pools)
    parts = []
    for release, pools in pools_by_release(spec, serving_pools):
        choices = build_choices(spec, pools, demand=demand)
        copies = replace(choices.copies, loads=loads)
        parts += [
            price_options(
                sharing,
                decoder=decoder,
                formats=formats,
                traits=release.traits,
                release=release.release,
                demand=demand,
                roles=sharing_roles,
                choices=replace(choices, copies=copies, page_by_pool=pages, is_spread=is_spread),
                refuse=lambda option: release_refuses(option, spec),
            )
            for sharing, sharing_roles in _core_shares(release, pools, roles)
        ]
    return merge_options(parts, roles=roles)


def pools_by_release(
    spec: ServeSpec, serving_pools: Iterable[ServingPool]
) -> Iterator[tuple[ServingCapabilities, tuple[ServingPool, ...]]]:
    """Yield every release with the pools that it serves on."""
    pools_of: dict[str, list[ServingPool]] = {}
    for serving_pool in serving_pools:
        title = spec.releases[serving_pool.pool.name].title
        pools_of.setdefault(title, []).append(serving_pool)
    for pools in pools_of.values():
        yield spec.releases[pools[0].pool.name], tuple(pools)


def _core_shares(
    release: ServingCapabilities, serving_pools: tuple[ServingPool, ...], roles: tuple[Role, ...]
) -> Iterator[tuple[tuple[ServingPool, ...], tuple[Role, ...]]]:
    """Yield the pools of one release as roles have them: whole, or beside a thread that polls."""
    polled = tuple(role for role in roles if has_polling_thread(release, role))
    whole = tuple(role for role in roles if role not in polled)
    if whole:
        yield serving_pools, whole
    if polled:
        yield tuple(map(beside_polling_thread, serving_pools)), polled


def has_polling_thread(release: ServingCapabilities, role: Role) -> bool:
    """Return whether an instance of that role has a thread that polls for KV transfers."""
    return release.transfer_thread_polls and role in (Role.PREFILL, Role.DECODE)


def beside_polling_thread(serving_pool: ServingPool) -> ServingPool:
    """Return a pool with what such a thread leaves of its cores.

    The scheduler gives two threads that never wait half of a core each.
    """
    machine = on_core_share(serving_pool.machine, POLLED_CORE_RATIO)
    return replace(serving_pool, machine=machine)


def release_refuses(option: Option, spec: ServeSpec, *, mode: Mode | None = None) -> str:
    """Say in a line why the engine's release does not launch an option; empty: it does.

    Args:
        option: of an instance.
        spec: with its engine and targets.
        mode: that alone has such options; None: several have.
    """
    engine = spec.releases[option.serving_pool.pool.name]
    if mode is not None and mode not in engine.modes:
        return absent_mode(engine, mode)
    if spec.goal.placement is not None and option.role is not Role.PREFILL:
        loads = option.iteration.loads
        if loads is None or option.degrees.expert != len(loads.slots_R):
            return "the placement is for another number of expert ranks"
    groups, sheet = to_instances(option, count=1), option.serving_pool.machine.sheet
    broken = [
        line
        for group in groups
        for line in group_refusals(
            engine,
            group,
            model=spec.model,
            goal=spec.goal,
            devices_per_node=option.serving_pool.pool.devices_per_node,
            sheet=sheet,
        )
    ]
    if mode is not None and (lines := spec.target_refusals[mode]):
        return lines[0]
    if engine.afd is not None:
        generations = {option.serving_pool.pool.name: sheet.generation}
        broken += afd_refusals(engine.afd, groups, generations=generations)
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


def build_choices(
    spec: ServeSpec, serving_pools: tuple[ServingPool, ...], *, demand: Demand
) -> Choices:
    """Return what the goal and the release let vary; the sites are of one release.

    Raises:
        SpecError: the model has no heads for the drafts that the goal allows.
    """
    goal = spec.goal
    engine, speculative = spec.releases[serving_pools[0].pool.name], goal.speculative
    drafting = None
    if speculative is not None and speculative.method == "mtp" and not spec.model.mtp_num_layers:
        raise SpecError(
            f"goal.speculative: {spec.model.name} has no heads for further tokens, which mtp drafts"
            " with; write 'method: eagle', or leave it out"
        )
    if speculative is not None:
        drafting = Drafting(
            draft_tokens=speculative.draft_tokens,
            acceptance=speculative.acceptance,
            method=DraftMethod(speculative.method),
        )
    feeds_all = goal.quantization not in engine.no_deepep_quantization
    backends = engine.a2a_backends if feeds_all else engine.a2a_backends - DEEPEP
    return Choices(
        budgets=engine_budgets(engine.traits, longest=demand.most_tokens),
        drafting=drafting,
        a2a_backends=tuple(backend for backend in A2A_BACKENDS if backend.value in backends),
        copies=copies_of(spec.model, engine, None),
        overlapped=frozenset(
            backend for backend in A2A_BACKENDS if backend.value in engine.overlap_backends
        ),
        page_by_pool=page_by_pool(spec, serving_pools),
    )
