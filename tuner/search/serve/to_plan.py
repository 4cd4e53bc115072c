"""A mode's solution as fields of the plan: decision, prediction, binding constraint, cautions."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from tuner.catalog.serve_rules.autoscalers import named_autoscaler
from tuner.catalog.serve_rules.rules import is_disaggregated, refusals
from tuner.catalog.serve_rules.steps import lacks_units
from tuner.catalog.serve_rules.vendor_pairs import portable_backend
from tuner.catalog.serve_rules.vendors import TRAITS
from tuner.config.serve import Island, PlannedKvTransfer, Role, ServeDecision
from tuner.config.serve_words import target_words
from tuner.costs.serve.bands import ratio_bands
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.remote_ffn import RemoteFfnIteration, ffn_bytes
from tuner.devices.datasheet import Generation, Vendor
from tuner.plans.serve import PlannedHits, ServeAlternative, ServePrediction
from tuner.search.serve.assumptions import plan_assumptions
from tuner.search.serve.demand import NO_TARGET_TPOT_S, NO_TARGET_TTFT_S, Demand
from tuner.search.serve.instances import to_instances
from tuner.search.serve.islands import island_shares
from tuner.search.serve.kv_transfers import KvTransfers, build_kv_transfers
from tuner.search.serve.launchable import build_choices
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.options import (
    Option,
    device_memory_bytes,
    step_seconds,
)
from tuner.search.serve.preference import (
    bands_around,
    gain_ratio,
    held_back_reason,
    lost_by,
    objective_value,
)
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.program import BOUND_TOLERANCE
from tuner.search.serve.routers import (
    has_sessions,
    loses_prefixes,
    missing_ranks,
    to_serve_router,
)
from tuner.search.serve.simulation import InstanceGroup, latency_of, reading_groups
from tuner.search.serve.solve_mode import (
    FIRST_SPARE,
    MOST_SPARE,
    packed_as,
)
from tuner.search.serve.token_cost import input_tokens_per_s, token_cost
from tuner.spec.serving.routers import RouterPolicy
from tuner.units import format_counted, format_ratio, format_s


def tie_ratio() -> float:
    """Return the share of the objective within which layouts tie: the band of a ratio of TPOT.

    Instances that are needed go as the time of their steps, and what two layouts of one model miss
    together cancels (tuner/costs/serve/bands.py).
    """
    return ratio_bands()[1].high_ratio - 1.0


def solution_refusals(solution: ModeSolution, problem: ServeProblem) -> tuple[str, ...]:
    """Return why the engine's release does not launch a solution."""
    spec = problem.spec
    refused = refusals(
        spec.main_release,
        to_decision(solution, problem),
        model=spec.model,
        goal=spec.goal,
        devices_per_node={pool.name: pool.devices_per_node for pool in spec.cluster.pools},
        sheets={
            serving_pool.pool.name: serving_pool.machine.sheet
            for serving_pool in problem.serving_pools
        },
        releases=problem.kv_transfers.releases,
    )
    return (*refused, *spec.target_refusals[solution.mode])


def to_decision(solution: ModeSolution, problem: ServeProblem) -> ServeDecision:
    """Return what to launch."""
    groups, threshold = solution.groups, solution.threshold
    kv_transfers = packed_as(problem.kv_transfers, groups)
    if threshold is not None:
        kv_transfers = build_kv_transfers(
            problem.spec,
            input_tokens=threshold.input_tokens(is_long=True),
            options=tuple(group.option for group in groups),
        )
    planned_transfers = {
        (
            sender.option.serving_pool.pool.name,
            receiver.option.serving_pool.pool.name,
            pair.seconds,
        ): pair
        for sender in groups
        if sender.option.role is Role.PREFILL
        for receiver in groups
        if receiver.option.role is not Role.PREFILL
        if receiver.island == sender.island
        for pair in [_to_kv_transfer(sender.option, receiver.option, kv_transfers)]
    }
    return ServeDecision(
        mode=solution.mode,
        instances=tuple(
            instances
            for group in groups
            for instances in to_instances(group.option, count=group.count, island=group.island)
        ),
        handovers=tuple(planned_transfers.values()),
        offload_above_tokens=None if threshold is None else threshold.above_tokens,
        router=to_serve_router(
            solution.router,
            problem.spec.goal,
            *(
                [(group.option.role, group.count) for group in groups if group.island == island]
                for island in dict.fromkeys(group.island for group in groups)
            ),
            is_counted=problem.hits is not None,
            is_scaled=named_autoscaler(problem.spec.emit) is not None,
            ranks=_equal_ranks(groups),
        ),
        islands=tuple(
            Island(name=name, share_ratio=share) for name, share in island_shares(groups).items()
        ),
    )


def _equal_ranks(groups: Sequence[InstanceGroup]) -> int:
    """Return the attention-data ranks of each instance that prefills; 1 where they differ."""
    ranks = {group.option.degrees.attention_data for group in reading_groups(groups)}
    return ranks.pop() if len(ranks) == 1 else 1


def _to_kv_transfer(
    sender: Option, receiver: Option, kv_transfers: KvTransfers
) -> PlannedKvTransfer:
    return PlannedKvTransfer(
        from_pool=sender.serving_pool.pool.name,
        to_pool=receiver.serving_pool.pool.name,
        connector=kv_transfers.connector(sender.serving_pool, receiver.serving_pool).value,
        path=kv_transfers.path_kind(sender.serving_pool, receiver.serving_pool),
        link="network"
        if kv_transfers.inside_bytes_per_s(sender.serving_pool, receiver.serving_pool) is None
        else "scale_up",
        request_bytes=round(kv_transfers.moved(sender, receiver).whole),
        seconds=kv_transfers.seconds(sender, receiver),
    )


def to_prediction(solution: ModeSolution, problem: ServeProblem) -> ServePrediction:
    """Return the predicted latency, throughput, memory and cost."""
    simulated, demand = solution.simulated, problem.demand
    rate = solution.rate_per_s or demand.rate_per_s
    if problem.spec.goal.traffic.sets_its_rate:
        rate = simulated.requests_per_s  # What comes next waits for what was served.
    ttft, tpot = latency_of(simulated.ttft_s_R), latency_of(simulated.tpot_s_R)
    around = bands_around(solution, problem)
    slowest = max(
        (group for group in solution.groups if group.option.role is not Role.PREFILL),
        key=lambda group: group.option.tpot_s,
    )
    shares = island_shares(solution.groups)
    return ServePrediction(
        ttft_s=ttft,
        ttft_s_band=around.ttft.around(ttft.mean),
        tpot_s=tpot,
        tpot_s_band=around.tpot.around(tpot.mean),
        is_new_pair=around.is_new,
        goodput_per_device=simulated.requests_per_s * simulated.met_ratio / solution.devices,
        requests_per_s=simulated.requests_per_s,
        output_tokens_per_s=simulated.output_tokens_per_s,
        utilisation_ratio={
            name: min(1.0, shares.get(group.island, 1.0) * rate / _role_rate(solution, group))
            for group in solution.groups
            for name, _ in _memory(group, demand)
        },
        memory_bytes=dict(entry for group in solution.groups for entry in _memory(group, demand)),
        input_tokens_per_s=input_tokens_per_s(solution, problem),
        cost_per_hour=solution.price_per_hour,
        prefix_hits=planned_hits(solution, problem),
        token_cost=token_cost(solution, problem),
        breakdown_s=_breakdown(slowest.option, demand),
    )


def planned_hits(solution: ModeSolution, problem: ServeProblem) -> PlannedHits | None:
    """Return what is left of stated hits on the caches of a solution's ranks."""
    goal = problem.spec.goal
    if not has_sessions(goal) or problem.hits is not None:
        return None
    reading = reading_groups(solution.groups)
    whole = goal.traffic.prefix_hit if solution.prefix_hit is None else solution.prefix_hit
    total = sum(group.rate_per_s for group in reading)
    split = sum(
        group.rate_per_s / total * whole / group.option.degrees.attention_data for group in reading
    )
    ratio = whole if solution.router.keeps_hits_on_ranks else split
    follows = whole if solution.router.policy is RouterPolicy.CACHE_AWARE else None
    return PlannedHits(
        ratio=ratio,
        ratio_band=(split, ratio),
        instances=sum(group.count for group in reading),
        ranks=sum(group.ranks for group in reading),
        if_instances=None if follows is None else split,
        if_ranks=follows,
    )


def _named(group: InstanceGroup) -> str:
    """Name a group by its role; an AFD unit by its attention servers."""
    option = group.option
    role = Role.ATTENTION if isinstance(option.iteration, RemoteFfnIteration) else option.role
    return _label(role, option, option.degrees)


def _label(role: Role, option: Option, degrees: InstanceDegrees) -> str:
    stages = f"pp{degrees.pipeline}" * (degrees.pipeline > 1)
    shape = f"tp{degrees.attention_tensor}dp{degrees.attention_data}{stages}"
    return f"{role.value}@{option.serving_pool.pool.name}/{shape}"


def _memory(group: InstanceGroup, demand: Demand) -> Iterator[tuple[str, int]]:
    """Yield bytes of one device of a group, and of the FFN servers of its AFD units."""
    option = group.option
    yield _named(group), device_memory_bytes(option, demand)
    if isinstance(option.iteration, RemoteFfnIteration):
        ffn, peers = option.iteration.ffn, max(option.iteration.peers, 1.0)
        used_bytes = ffn_bytes(
            ffn,
            step_tokens=round(peers * option.step_tokens),
            running=round(peers * option.running),
        )
        yield _label(Role.EXPERT, option, ffn.degrees), int(used_bytes)


def _role_rate(solution: ModeSolution, beside: InstanceGroup) -> float:
    """Return the requests a second of all instances of the same role and island."""
    return sum(
        group.rate_per_s
        for group in solution.groups
        if (group.option.role, group.island) == (beside.option.role, beside.island)
    )


def _breakdown(option: Option, demand: Demand) -> dict[str, float]:
    running_N = np.array([float(option.running)])
    iteration = option.iteration
    parts = {name: float(seconds[0]) for name, seconds in iteration.linear_parts(running_N).items()}
    whole = float(step_seconds(iteration, running_N, demand)[0])
    past_N = np.array([demand.past_tokens])
    parts["attention"] = float(iteration.decode_s(running_N, past_N)[0])
    parts["head"] = float(iteration.head_s(running_N)[0])
    parts["scheduler"] = iteration.scheduler_s
    parts["clocks"] = whole - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if abs(seconds) > 1e-12}


def binding_constraint(best: ModeSolution, problem: ServeProblem) -> str:
    """Name what keeps the deployment from being smaller."""
    slo, simulated = problem.spec.goal.slo, best.simulated
    tight = [
        (value / limit, target_words(f"{name} {kind}"))
        for name, targets, values in (
            ("ttft", slo.ttft, simulated.ttft_s_R),
            ("tpot", slo.tpot, simulated.tpot_s_R),
        )
        for kind in ("mean", "p50", "p90", "p99")
        if (limit := getattr(targets, kind)) is not None and len(values)
        for value in [getattr(latency_of(values), kind)]
    ]
    missed = map(target_words, best.missed_at_goal_spare)
    kept = " and ".join(missed) or max(tight, default=(0.0, ""))[1]
    if best.rate_per_s is not None:
        return _of_rate(best, kept)
    spare, goal_ratio = best.spare, problem.spec.goal.spare_ratio
    if spare.most_ratio > goal_ratio:
        whose = "of prefill " if spare.prefill_ratio > max(spare.others_ratio, goal_ratio) else ""
        return (
            f"waiting: {format_ratio(spare.most_ratio, digits=0)} of spare capacity {whose}keeps"
            f" {kept}"
        )
    if tight and best.objective > best.bound * (1.0 + tie_ratio()):
        return f"waiting: cheaper instances that serve the rate miss {kept}"
    if tight and max(tight)[0] > 0.85:
        return max(tight)[1]
    return "throughput: the traffic's rate"


def _of_rate(best: ModeSolution, kept: str) -> str:
    """Name what keeps a deployment from serving more."""
    if best.missed_at_goal_spare and best.objective > best.bound * (1.0 + BOUND_TOLERANCE):
        return (
            f"waiting: above {best.rate_per_s:.4g} requests/s {kept} is missed;"
            f" {1.0 / best.bound:.4g} would be served if no request waited"
        )
    return "throughput: the pools serve no more within the targets"


def to_alternatives(
    best: ModeSolution, others: Sequence[ModeSolution], problem: ServeProblem
) -> Iterator[ServeAlternative]:
    """Yield the other modes that can be launched."""
    goal = problem.spec.goal
    for solution in others:
        yield ServeAlternative(
            decision=to_decision(solution, problem),
            predicted=to_prediction(solution, problem),
            within_band=gain_ratio(objective_value(solution, goal), best, goal) >= -tie_ratio(),
            lost_by=lost_by(solution, best, goal) + held_back_reason(solution, best, goal),
        )


def describe_missed(solution: ModeSolution, problem: ServeProblem) -> str:
    """Name the target that a solution misses, by how much, and the most spare that was tried."""
    spare = solution.spare.most_ratio
    name, seconds, limit_s = solution.simulated.misses(problem.spec.goal.slo)[0]
    text = (
        f"{target_words(name)} of {format_s(seconds)} (SLO {format_s(limit_s)}) on"
        f" {format_counted(solution.devices, 'device')}, with {format_ratio(spare, digits=0)} of"
        " spare capacity"
    )
    # The next step is twice as much, a quarter at least.
    return text if max(FIRST_SPARE, 2.0 * spare) > MOST_SPARE else f"{text}; the pools hold no more"


def describe_solution(solution: ModeSolution) -> str:
    """Summarise a mode's solution."""
    groups = " and ".join(
        f"{instances.count} x {instances.devices} {instances.pool} ({instances.role.value})"
        for group in solution.groups
        for instances in to_instances(group.option, count=group.count)
    )
    return f"{solution.mode} on {groups}{load_mode(solution.mode).words(solution)}"


def plan_cautions(solution: ModeSolution, problem: ServeProblem) -> Iterator[str]:
    """Yield cautions for the chosen instances."""
    yield from _shares(solution)
    yield from _vendors(solution, problem)
    copies = any(group.option.iteration.redundant_experts for group in solution.groups)
    if copies and problem.loads is None:
        yield (
            "copies of experts are taken to level loads that no recording here shows, as far as"
            " even experts can be in their slots; goal.routing names a recording, and the engine"
            " places copies by the loads that it records itself"
        )
    yield from _lost_prefixes(solution, problem)
    if note := bands_around(solution, problem).note:
        yield note
    yield from load_mode(solution.mode).cautions(solution)
    if is_disaggregated(solution.mode) and any(
        group.option.serving_pool.machine.sheet.generation is Generation.PROCESSOR
        for group in solution.groups
    ):
        yield (
            "disaggregated instances on processors are priced with half of each core, since a"
            " thread of NIXL polls on it, as two emulated machines showed; on one machine, as"
            " local.sh starts them, they share a core, too: measure before relying on it"
        )


def _lost_prefixes(solution: ModeSolution, problem: ServeProblem) -> Iterator[str]:
    """Say why sessions miss their prefixes, and what is counted on."""
    spec, hits = problem.spec, planned_hits(solution, problem)
    releases, where = spec.releases.values(), []
    if solution.prefix_hit is not None:
        where.append(
            "no router of this stack looks for prefixes, so that a session meets its own on one"
            " instance of several"
            if loses_prefixes(
                spec.goal,
                spec.emit,
                is_disaggregated=is_disaggregated(solution.mode),
                releases=releases,
            )
            else "the router in front of islands looks for no prefixes, so that a session meets its"
            " own on one island of several"
        )
    if hits is None:
        return
    if hits.ranks > hits.instances and not solution.router.keeps_hits_on_ranks:
        lacking = missing_ranks(spec.emit, releases=releases)
        release = spec.main_release
        where.append(
            f"each of {hits.ranks} attention-data ranks has a cache of its own, and {release.name}"
            f" gives them requests {release.rank_dispatch}{lacking and f' ({lacking})'}"
        )
    if where:
        yield (
            f"{format_ratio(hits.ratio, digits=0)} of every prompt is counted on in"
            f" prefix caches: {'; '.join(where)};"
            " where requests have the same prefix state goal.traffic.prefix_scope: common"
        )


def unseen_hits(predicted: ServePrediction) -> Iterator[str]:
    """Say how far hits may be off that were not seen on devices."""
    hits = predicted.prefix_hits
    if hits is not None and hits.ratio_band[0] < hits.ratio_band[1]:
        low, high = map(format_ratio, hits.ratio_band)
        yield (
            f"no run on devices has shown hits of routing to ranks, so that {low} to {high} of the"
            " prompt tokens may be found"
        )


def _vendors(solution: ModeSolution, problem: ServeProblem) -> Iterator[str]:
    """Say what is not priced where devices are of other vendors, or of two."""
    serving_pools = {
        group.option.serving_pool.pool.name: group.option.serving_pool for group in solution.groups
    }
    for name, serving_pool in serving_pools.items():
        vendor = serving_pool.machine.sheet.generation.vendor
        spread = [group for group in solution.groups if group.option.serving_pool is serving_pool]
        if vendor is not Vendor.NVIDIA and any(
            group.option.degrees.attention_data > 1 for group in spread
        ):
            yield (
                f"{name}: the all-to-all of experts is priced as all-gather; {vendor}'s own kernels"
                f" ({TRAITS[vendor].a2a_kernels}) were never measured for this plan"
            )
    for sender, receiver in product(solution.groups, solution.groups):
        if sender.option.role is not Role.PREFILL or receiver.option.role is Role.PREFILL:
            continue
        pair = sender.option.serving_pool, receiver.option.serving_pool
        if sender.island != receiver.island or problem.kv_transfers.path_kind(*pair) == "device":
            continue
        backend = portable_backend(
            *problem.kv_transfers.pool_releases(*pair), cache=problem.kv_transfers.cache
        )
        known = problem.kv_transfers.converted_bytes_per_s(sender.option, receiver.option)
        conversion = "" if known else "; turning the pages is not priced: no profile measured it"
        yield (
            f"{pair[0].pool.name} to {pair[1].pool.name}: both sides run the attention backend"
            f" {backend}, whose kernels are not the priced ones{conversion}; no published run"
            " passes caches between these vendors: try one pair before relying on it"
        )


def _shares(solution: ModeSolution) -> Iterator[str]:
    """Say what the router gives each of several kinds of instances, by their capacity."""
    kinds = dict.fromkeys((group.option.role, group.island) for group in solution.groups)
    for role, island in kinds:
        groups = [
            group
            for group in solution.groups
            if (group.option.role, group.island) == (role, island)
        ]
        total = sum(group.rate_per_s for group in groups)
        if len(groups) > 1:
            text = ", ".join(
                f"{format_ratio(group.option.rate_per_s / total)} to each of {group.count} x"
                f" {group.option.devices} {group.option.serving_pool.pool.name}"
                for group in groups
            )
            yield (
                f"{role.value} instances of {len(groups)} kinds need a router that follows load; by"
                f" capacity {text}"
            )


def plan_notes(problem: ServeProblem) -> Iterator[str]:
    """Yield the assumptions of the plan."""
    for serving_pool in problem.serving_pools:
        if serving_pool.machine.estimated:
            named = ", ".join(sorted(serving_pool.machine.estimated))
            yield f"{serving_pool.pool.name}: from the datasheet: {named}"
    yield from _unpacked(problem)
    choices = build_choices(problem.spec, problem.serving_pools, demand=problem.demand)
    yield from plan_assumptions(problem.spec, problem.demand, choices)
    if problem.demand.concurrency is not None:
        targets = "within its targets"
        if not problem.spec.goal.slo.is_stated:
            targets = (
                "without an SLO, planned as if it were"
                f" {format_s(NO_TARGET_TTFT_S)} to the first token and {format_s(NO_TARGET_TPOT_S)}"
                " a token where the pools hold that,"
            )
        yield (
            f"a closed loop of {problem.demand.concurrency} {targets} asks for"
            f" {problem.demand.rate_per_s:.3g} requests/s"
        )


def _unpacked(problem: ServeProblem) -> Iterator[str]:
    """Say which devices do not multiply the weights' type."""
    goal = problem.spec.goal
    for serving_pool in problem.serving_pools:
        sheet = serving_pool.machine.sheet
        if lacks_units(goal, sheet):
            yield (
                f"{serving_pool.pool.name}: {sheet.name} has no units for {goal.quantization}; an"
                " engine that serves it there unpacks weights as it reads them, which makes prompts"
                " slower"
            )
