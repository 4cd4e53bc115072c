"""Predicts a serving launch under a spec: price it, simulate the traffic, try changes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from tuner.catalog.serve_rules.rules import ROLES
from tuner.config.host_memory import HostMemory, host_memory
from tuner.config.serve import Role
from tuner.costs.serve.bands import LatencyBand
from tuner.engines.reading.serve_launch import ServingLaunch, Surroundings
from tuner.engines.serving.releases import release_on
from tuner.errors import SpecError
from tuner.estimate.serving.changes import manifest_refusals, price_changes
from tuner.estimate.serving.instance import (
    EstimateInputs,
    build_inputs,
    device_memory,
    instances_needed,
    launch_transfers,
    logged_tokens,
    misfit_reason,
    other_half,
    price_option,
    simulate_load,
    to_plan_instances,
    with_goal,
)
from tuner.estimate.serving.records import (
    ServingChange,
    ServingEstimate,
    ServingLoad,
    ServingMemory,
)
from tuner.plans.serve import Latency
from tuner.search.serve.demand import MOST_RUNNING
from tuner.search.serve.options import Option, ServingPool
from tuner.search.serve.simulation import InstanceGroup
from tuner.search.serve.to_plan import tie_ratio
from tuner.spec.cluster import Pool
from tuner.spec.serving.lengths import LengthKind, LengthLaw
from tuner.spec.serving.spec import ServeSpec
from tuner.units import format_bytes_per_s, format_counted, format_ratio, format_s

Advise = Callable[[EstimateInputs, ServingLoad | None], tuple[ServingChange, ...]]

OTHER_LOG_RATIO: Final = 0.1
"""Difference from which on the logs of two releases are both named."""
BURST_ROUNDS: Final = 2
"""Requests over concurrency up to which the drain is much of a benchmark."""
CHAT_CV: Final = 1.0
CHAT_TAIL: Final = 8
"""Longest output over the mean: `vllm bench serve` and SGLang's client cut ShareGPT to outputs of
about 200 tokens, and to at most 2,048 with the prompt."""
OTHER_LENGTHS_RATIO: Final = 1.25
MOST_OF_THE_TIME: Final = 0.5
STREAMED_RATIO: Final = 2.0
"""Most of what published servers take for a token that they stream, over what is priced."""


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
    serving_pool: ServingPool,
    instances: int = 1,
    release: str = "",
    advise: Advise = price_changes,
) -> ServingEstimate:
    """Predict a launch under the spec's traffic, and find changes that beat it.

    Args:
        spec: with model, traffic and SLO.
        launch: read with the spec's model and pool.
        serving_pool: the priced pool.
        instances: equal launches that share the traffic.
        release: of the engine, whose memory rule counts; empty: the newest.
        advise: prices changes of the launch, which takes most of the time.

    Raises:
        SpecError: the traffic cannot be read, or there are fewer devices than instances take.
    """
    _check_instances(launch, serving_pool.pool, instances=instances)
    inputs = build_inputs(
        launch, spec=spec, serving_pool=serving_pool, instances=instances, release=release
    )
    option = price_option(inputs, launch.setting)
    if option.role is not Role.AGGREGATED:
        group = InstanceGroup(option=option, count=inputs.instances)
        stated = _stated_half(inputs)
        inputs = replace(
            inputs,
            beside=stated or other_half(inputs, group),
            is_beside_stated=stated is not None,
        )
    memory = device_memory(inputs, option, launch.setting)
    host = _host_memory(launch, serving_pool.pool, memory, instances=instances)
    misfit = misfit_reason(inputs, option, launch.setting)
    misfit = misfit or ("" if host is None or host.fits else f"host memory: {host.words}")
    has_room = not misfit
    load = simulate_load(inputs, option) if has_room else None
    changes = advise(inputs, load)
    around = serving_pool.bands(
        launch.engine,
        release=release or release_on(inputs.goal, serving_pool.pool).release,
        mode=next(mode for mode, roles in ROLES.items() if launch.role in roles),
        decoder=inputs.decoder,
    )
    tokens_per_s = load.output_tokens_per_s / inputs.instances if load else 0.0
    streaming_ratio = tokens_per_s * option.iteration.stream_s / option.degrees.attention_data
    streams_mostly = streaming_ratio > MOST_OF_THE_TIME
    high_ratio = around.tpot.high_ratio * (STREAMED_RATIO if streams_mostly else 1.0)
    return ServingEstimate(
        source=launch.source,
        engine=launch.engine,
        release=release_on(inputs.goal, serving_pool.pool).release,
        model=spec.model.name,
        device=serving_pool.machine.sheet.name,
        kernels=serving_pool.source,
        quantization=inputs.goal.quantization,
        kv_cache_dtype=inputs.goal.kv_cache_dtype,
        instance=to_plan_instances(inputs, option, launch.setting),
        load=load,
        has_slo=inputs.goal.slo.is_stated,
        ttft_s_band=_band(load.ttft_s if load else None, around.ttft),
        tpot_s_band=_band(
            load.tpot_s if load else None, replace(around.tpot, high_ratio=high_ratio)
        ),
        memory=memory,
        host_memory=host,
        kv_tokens=int(max(option.kv_tokens, 0.0) * option.degrees.attention_data),
        longest_tokens=inputs.longest_tokens,
        logged_kv_tokens=logged_tokens(inputs, option, launch.setting),
        fits=has_room,
        misfit=misfit,
        instances_needed=instances_needed(inputs, option) if has_room else 0,
        smallest_change=next((change for change in changes if change.beats), None),
        changes=changes,
        least_gain_ratio=tie_ratio(),
        num_tried=len(changes),
        flags_understood=launch.flags.understood,
        flags_ignored=launch.flags.ignored,
        flags_unpriced=launch.flags.unpriced,
        flags_timeless=launch.flags.timeless,
        refused_by=manifest_refusals(inputs, option, launch.setting),
        is_new_pair=around.is_new,
        notes=(
            *launch.notes,
            *_notes(inputs, option, load, spec=spec),
            *filter(None, (around.note,)),
            *["the server streams tokens most of the time: others take twice as long"]
            * streams_mostly,
        ),
    )


def _stated_half(inputs: EstimateInputs) -> InstanceGroup | None:
    """Return the file's instances of the other role; None where it has none, or they do not fit."""
    launch = inputs.launch.counterpart
    if launch is None:
        return None
    theirs = build_inputs(
        launch,
        spec=inputs.spec,
        serving_pool=inputs.serving_pool,
        instances=launch.replicas,
        release=inputs.release,
    )
    option = price_option(theirs, launch.setting)
    fits = not misfit_reason(theirs, option, launch.setting)
    return InstanceGroup(option=option, count=theirs.instances) if fits else None


def surroundings(spec: ServeSpec, pool: Pool) -> Surroundings:
    """Return the model and pool that a launch's flags are checked against."""
    memory_bytes = pool.memory_per_device
    if memory_bytes is None and pool.device is not None:
        memory_bytes = pool.sheet.memory_bytes
    if memory_bytes is None:
        return Surroundings(model=spec.model, pool=pool)
    return Surroundings(model=spec.model, pool=pool, memory_bytes=float(memory_bytes))


def _host_memory(
    launch: ServingLaunch, pool: Pool, memory: ServingMemory, *, instances: int
) -> HostMemory | None:
    """Count what a launch takes of a node's memory, with as many of its devices as fit there."""
    devices = min(pool.devices_per_node, _devices(launch) * instances)
    parts = {what: size * devices for what, size in launch.host_bytes.items()}
    parts["KV cache on hosts"] = launch.host_cache_ratio * memory.cache_bytes * devices
    return host_memory(parts, limit_bytes=pool.host_limit_bytes(None))


def _check_instances(launch: ServingLaunch, pool: Pool, *, instances: int) -> None:
    devices, counterpart = _devices(launch), launch.counterpart
    beside = 0 if counterpart is None else _devices(counterpart) * counterpart.replicas
    if devices * instances + beside > pool.num_devices:
        rest = f" beside {beside} of the file's other role" * bool(beside)
        raise SpecError(
            f"--instances {instances}: they take {devices * instances} devices{rest}, pool"
            f" {pool.name!r} has {pool.num_devices}; the nearest is"
            f" {max((pool.num_devices - beside) // devices, 1)}"
        )


def _devices(launch: ServingLaunch) -> int:
    return launch.setting.degrees.devices * launch.copies + launch.ffn_devices


def _band(value: Latency | None, band: LatencyBand) -> tuple[float, float] | None:
    return None if value is None else band.around(value.mean)


def _notes(
    inputs: EstimateInputs, option: Option, load: ServingLoad | None, *, spec: ServeSpec
) -> Iterator[str]:
    launch, goal = inputs.launch, spec.goal
    if goal.engine.name != launch.engine:
        yield f"the spec serves with {goal.engine.name}; the launch's {launch.engine} counts"
    if inputs.goal.quantization != goal.quantization:
        yield f"the spec has {goal.quantization} weights; the launch's {launch.quantization} count"
    if launch.kv_cache_dtype != goal.kv_cache_dtype:
        yield (
            f"the spec has a {goal.kv_cache_dtype} cache; the launch's {launch.kv_cache_dtype}"
            " counts"
        )
    if launch.setting.draft_tokens and inputs.drafting(launch.setting) is None:
        yield (
            f"{launch.setting.draft_tokens} drafted tokens a step have no price: the spec does not"
            " state their acceptance; add 'speculative: {draft_tokens: ..., acceptance: ...}'"
        )
    if not launch.reader.has_prefix_cache and goal.traffic.prefix_hit:
        yield "the launch has no prefix cache, so every prompt is computed in full"
    demand = inputs.demand.on(launch.role, ranks=option.degrees.attention_data)
    if demand.request_ratio < 1.0 and launch.role is not Role.DECODE:
        ratio = 1.0 - demand.computed_ratio
        yield (
            f"{format_ratio(ratio)} of the prompt tokens are counted on in prefix caches, not"
            f" {format_ratio(goal.traffic.prefix_hit)}: a session has its own on one of"
            f" {round(1.0 / demand.request_ratio)} caches (one an attention-data rank), and no"
            " router is read that looks for it there; 'prefix_scope: common' is for a prefix that"
            " all requests share"
        )
    if launch.setting.running > MOST_RUNNING:
        yield f"{MOST_RUNNING} sequences a rank are priced, not {launch.setting.running}"
    if inputs.release:
        yield (
            f"memory and host seconds are those of {launch.engine} {inputs.release}, flags and"
            f" kernels those of {release_on(inputs.goal, inputs.serving_pool.pool).release}"
        )
    yield from _corrections(inputs)
    yield from _logs_of_releases(inputs, option)
    yield from _beside(inputs, option, load)
    yield from _equal_outputs(inputs, option, load)
    if option.serving_pool.machine.estimated:
        yield f"from the datasheet: {', '.join(sorted(option.serving_pool.machine.estimated))}"


def _corrections(inputs: EstimateInputs) -> Iterator[str]:
    """Say what logs or launches of the engine on these devices corrected."""
    residual, pool = inputs.serving_pool.residual, inputs.serving_pool.pool
    if residual is not None:
        release = inputs.release or release_on(inputs.goal, pool).release
        yield from residual.notes(release=release, model=inputs.spec.model.name)


def _logs_of_releases(inputs: EstimateInputs, option: Option) -> Iterator[str]:
    """Say what the last rule before the newest makes of the same cache that makes much else."""
    setting, rules = inputs.launch.setting, option.iteration.traits.memory
    newest, fits = (
        logged_tokens(inputs, option, setting),
        not misfit_reason(inputs, option, setting),
    )
    for older, newer in zip(rules[1:], rules, strict=False):
        release, since = (".".join(map(str, rule.since)) for rule in (older, newer))
        earlier = replace(option, iteration=replace(option.iteration, release=release))
        tokens = logged_tokens(inputs, earlier, setting)
        turns = fits == bool(misfit_reason(inputs, earlier, setting))
        differs = turns or abs(tokens - newest) > OTHER_LOG_RATIO * newest > 0
        if not inputs.release and differs:
            first, last = ("does not start", "starts") if fits else ("starts", "does not")
            yield (
                f"no release is stated: {inputs.launch.engine} before {since} logs {tokens:,}"
                f" tokens of a rank's cache{f' and {first}' * turns}, the newest"
                f" {newest:,}{f' and {last}' * turns}; goal.engine.version says which counts"
            )
            return


def _link_note(inputs: EstimateInputs, option: Option) -> Iterator[str]:
    """Say which variables keep KV caches off the links inside the machine."""
    pool, transfers = inputs.serving_pool, launch_transfers(inputs, (option,))
    link = transfers.node_link(pool, pool)
    if option.role is Role.AGGREGATED or link is None:
        return
    best = replace(transfers, environment=link.environment).inside_bytes_per_s(pool, pool)
    reached = transfers.inside_bytes_per_s(pool, pool)
    if best is not None and (reached or 0.0) < best:
        over = "cross the NICs" if reached is None else f"take TCP, {format_bytes_per_s(reached)},"
        wanted = [f"{name}={value}" for name, value in link.environment.items()]
        wanted += ["cuda_ipc in UCX_TLS"] if "UCX_TLS" in inputs.launch.environment else []
        yield (
            f"KV caches {over} as the launch states it; with {' and '.join(wanted)} on both sides"
            f" they stay inside the machine, {format_bytes_per_s(best)} a device"
        )


def _beside(inputs: EstimateInputs, option: Option, load: ServingLoad | None) -> Iterator[str]:
    """Yield notes on the other servers that the prediction assumes."""
    launch = inputs.launch
    if launch.ffn_devices:
        yield (
            f"its FFN server of {launch.ffn_devices} devices is priced with it and counts as part"
            " of the instance; changes of an AFD unit are not tried, `moetune plan` sizes it"
        )
    yield from _link_note(inputs, option)
    if launch.role is not Role.AGGREGATED:
        count = format_counted(0 if inputs.beside is None else inputs.beside.count, "instance")
        yield (
            f"the other half is the file's: {count}"
            if inputs.is_beside_stated
            else "the other half is not part of the launch; it is assumed never to be the"
            " bottleneck"
        )
        if inputs.demand.concurrency is not None and load is not None:
            yield (
                f"a closed loop of {inputs.demand.concurrency} is in both halves together, each"
                f" request {format_s(load.other_half_s)} in the other one"
                + f", which is taken to be {count} of the launch's degrees"
                * (not inputs.is_beside_stated)
            )
    yield from _rate_note(inputs)


def _equal_outputs(
    inputs: EstimateInputs, option: Option, load: ServingLoad | None
) -> Iterator[str]:
    """Say what spread outputs, as those of chats, change: a burst's end, or prompts amid outputs.

    Equal ones end together, so that the prompts of a closed loop come in waves of all ranks.
    """
    traffic = inputs.goal.traffic
    law, requests = traffic.output_tokens, traffic.requests or math.inf
    if load is None or law is None or law.kind is not LengthKind.FIXED or law.mean is None:
        return
    if traffic.concurrency is None:
        return
    is_burst = requests <= BURST_ROUNDS * traffic.concurrency
    waits = option.role is Role.AGGREGATED and option.iteration.waits_for_ranks
    if not (is_burst or waits):
        return
    longest = CHAT_TAIL * int(law.mean)
    spread = LengthLaw(kind=LengthKind.LOGNORMAL, mean=law.mean, cv=CHAT_CV, most=longest)
    as_chats = traffic.model_copy(update={"output_tokens": spread})
    chat_load = simulate_load(with_goal(inputs, {"traffic": as_chats}), option)
    count = f"{traffic.requests:,} " if traffic.requests else ""
    spread_words = f"all {count}outputs have {law.mean:,.0f} tokens; were they spread as those of"
    state_words = (
        f"state 'output_tokens: {{kind: lognormal, mean: {law.mean:.0f}, cv: {CHAT_CV:.0f},"
        f" most: {longest}}}'"
    )
    if is_burst and chat_load.requests_per_s * OTHER_LENGTHS_RATIO < load.requests_per_s:
        yield (
            f"{spread_words} chats, the last ones would end late:"
            f" {chat_load.requests_per_s:.4g} requests/s; {state_words}"
        )
    elif (
        not is_burst
        and chat_load.tpot_s is not None
        and load.tpot_s is not None
        and chat_load.tpot_s.mean > OTHER_LENGTHS_RATIO * load.tpot_s.mean
    ):
        yield (
            f"{spread_words} chats, a prompt on one of {option.degrees.attention_data} ranks would"
            f" delay those that run on all: TPOT {format_s(chat_load.tpot_s.mean)}; {state_words}"
        )


def _rate_note(inputs: EstimateInputs) -> Iterator[str]:
    if inputs.goal.objective == "rate":
        yield (
            f"the goal is the most requests/s; {inputs.demand.rate_per_s:.4g} of them are "
            "simulated,"
            " the rate of the spec's traffic: state the one that this launch is to serve"
        )
