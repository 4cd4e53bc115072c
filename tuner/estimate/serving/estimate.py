"""From a serving launch and a spec to what it will do: read, priced, played, changed."""

from collections.abc import Iterator, Mapping
from typing import Final

from tuner.costs.serving.bands import NEW_PAIR, Band, bands_of
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError
from tuner.estimate.serving.changes import changes_of, refused
from tuner.estimate.serving.instance import (
    Asked,
    asked_of,
    instance_of,
    instances_needed,
    load_of,
    logged_tokens,
    memory_of_device,
    misfit_of,
    option_of,
)
from tuner.estimate.serving.launch import ServingLaunch, Surroundings
from tuner.estimate.serving.records import ServingEstimate, ServingLoad
from tuner.planner.serve.demand import MOST_RUNNING
from tuner.planner.serve.options import Option, PoolSite
from tuner.planner.serve.to_plan import tie_ratio
from tuner.serve_plan import Latency, Role
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import Mode, ServeGoal
from tuner.spec.serving.manifests.registry import release_on
from tuner.spec.serving.read import ServeSpec

_MODE: Final[Mapping[Role, Mode]] = {
    Role.AGGREGATED: "aggregated",
    Role.ATTENTION: "attention_expert",
}
"""Whose bands count, by role; of others those of prefill and decode apart."""


def pool_named(spec: ServeSpec, name: str | None) -> Pool:
    """Return the pool that a launch runs on.

    Raises:
        SpecError: no such pool, or several and none is named.
    """
    pools = {pool.name: pool for pool in spec.cluster.pools}
    if name is None and len(pools) == 1:
        return spec.cluster.pools[0]
    if name is None:
        raise SpecError(
            f"the spec has {len(pools)} pools; name one with --pool: {', '.join(pools)}"
        )
    if name not in pools:
        raise SpecError(f"--pool {name!r:.60} is none of {', '.join(pools)}")
    return pools[name]


def estimate_serving(
    spec: ServeSpec,
    launch: ServingLaunch,
    *,
    site: PoolSite,
    instances: int = 1,
    release: str = "",
) -> ServingEstimate:
    """Say what a launch does under the spec's traffic, and what would beat it.

    Args:
        spec: with model, traffic and targets.
        launch: read with the spec's model and pool.
        site: the pool, priced.
        instances: equal launches that share the traffic.
        release: of the engine, whose memory rule counts; empty: the newest.

    Raises:
        SpecError: the traffic cannot be read, or there are fewer devices than instances take.
    """
    _check_instances(launch, site.pool, instances=instances)
    asked = asked_of(launch, spec=spec, site=site, instances=instances, release=release)
    option = option_of(asked, launch.setting)
    misfit = misfit_of(asked, option, launch.setting)
    has_room = not misfit
    load = load_of(asked, option) if has_room else None
    changes = changes_of(asked, load)
    around = bands_of(
        launch.engine,
        mode=_MODE.get(launch.role, "disaggregated"),
        has_kernels=not site.machine.estimated,
        decoder=asked.decoder,
    )
    return ServingEstimate(
        source=launch.source,
        engine=launch.engine.value,
        release=release_on(asked.goal, site.pool).release,
        model=spec.model.name,
        device=site.machine.sheet.name,
        kernels=site.source,
        quantization=asked.goal.quantization,
        kv_cache_dtype=asked.goal.kv_cache_dtype,
        instance=instance_of(asked, option, launch.setting),
        load=load,
        ttft_s_band=_band(load.ttft_s if load else None, around.ttft),
        tpot_s_band=_band(load.tpot_s if load else None, around.tpot),
        memory=memory_of_device(asked, option, launch.setting),
        kv_tokens=int(max(option.kv_tokens, 0.0) * option.degrees.attention_data),
        longest_tokens=asked.longest_tokens,
        logged_kv_tokens=logged_tokens(asked, option, launch.setting),
        fits=has_room,
        misfit=misfit,
        instances_needed=instances_needed(asked, option) if has_room else 0,
        smallest_change=next((change for change in changes if change.beats), None),
        changes=changes,
        least_gain_ratio=tie_ratio(),
        num_tried=len(changes),
        flags_understood=launch.flags.understood,
        flags_ignored=launch.flags.ignored,
        flags_unpriced=launch.flags.unpriced,
        flags_timeless=launch.flags.timeless,
        refused_by=refused(asked, option, launch.setting),
        is_new_pair=around.is_new,
        notes=(
            *launch.notes,
            *_notes(asked, option, load, spec=spec),
            *((f"{NEW_PAIR}: bands are wider",) if around.is_new else ()),
        ),
    )


def surroundings(spec: ServeSpec, pool: Pool) -> Surroundings:
    """Return what a launch's flags are held against."""
    own = pool.memory_per_device
    if own is None and pool.device is not None:
        own = find_device(pool.device).memory_bytes
    if own is None:
        return Surroundings(model=spec.model, pool=pool)
    return Surroundings(model=spec.model, pool=pool, memory_bytes=float(own))


def _check_instances(launch: ServingLaunch, pool: Pool, *, instances: int) -> None:
    each = launch.setting.degrees.devices * launch.copies + launch.ffn_devices
    if each * instances > pool.num_devices:
        raise SpecError(
            f"--instances {instances}: they take {each * instances} devices, pool {pool.name!r}"
            f" has {pool.num_devices}; the nearest is {max(pool.num_devices // each, 1)}"
        )


def _band(value: Latency | None, band: Band) -> tuple[float, float] | None:
    return None if value is None else band.around(value.mean)


def _notes(
    asked: Asked, option: Option, load: ServingLoad | None, *, spec: ServeSpec
) -> Iterator[str]:
    launch, goal = asked.launch, spec.goal
    if goal.engine.name != launch.engine.value:
        yield f"the spec serves with {goal.engine.name}; the launch's {launch.engine.value} counts"
    if asked.goal.quantization != goal.quantization:
        yield f"the spec has {goal.quantization} weights; the launch's {launch.quantization} count"
    if launch.kv_cache_dtype != goal.kv_cache_dtype:
        yield (
            f"the spec has a {goal.kv_cache_dtype} cache; the launch's {launch.kv_cache_dtype}"
            " counts"
        )
    if launch.setting.draft_tokens and asked.drafting(launch.setting) is None:
        yield (
            f"{launch.setting.draft_tokens} drafted tokens a step have no price: the spec does not"
            " say how many are kept; add 'speculative: {draft_tokens: ..., acceptance: ...}'"
        )
    if not launch.has_prefix_cache and goal.traffic.prefix_hit:
        yield "the launch keeps no prefixes, so that every prompt is computed whole"
    if launch.setting.running > MOST_RUNNING:
        yield f"{MOST_RUNNING} sequences a rank are priced, not {launch.setting.running}"
    yield from _beside(asked, load, goal=goal)
    if option.site.machine.estimated:
        yield f"from the datasheet: {', '.join(sorted(option.site.machine.estimated))}"


def _beside(asked: Asked, load: ServingLoad | None, *, goal: ServeGoal) -> Iterator[str]:
    """Say what of other servers the prediction rests on."""
    launch = asked.launch
    if launch.ffn_devices:
        yield (
            f"its FFN server of {launch.ffn_devices} devices is priced with it and counts as part"
            " of the instance; changes of a cell are not tried, `moetune plan` chooses its sizes"
        )
    if launch.role is not Role.AGGREGATED:
        yield "the other half is not part of the launch; it is taken to be as fast as this one asks"
        if goal.traffic.is_closed_loop and load is not None:
            yield (
                f"a closed loop of {goal.traffic.concurrency} within its targets asks for"
                f" {asked.demand.rate_per_s:.3g} requests/s, which are played"
            )
    yield from _rate_note(asked)


def _rate_note(asked: Asked) -> Iterator[str]:
    if asked.goal.objective == "rate":
        yield (
            f"the goal is the most requests/s; {asked.demand.rate_per_s:.4g} of them are simulated,"
            " the rate of the spec's traffic: state the one that this launch is to serve"
        )
