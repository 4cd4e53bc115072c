"""A mode's answer in the words of the plan: decision, prediction, what binds, what to watch."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from tuner.costs.serving.bands import NEW_PAIR, ratio_bands
from tuner.costs.serving.engine import Degrees
from tuner.costs.serving.remote_ffn import RemoteFfnIteration, ffn_bytes
from tuner.devices.datasheet import Vendor
from tuner.planner.serve.assumptions import assumptions_of
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.instances import launched_as
from tuner.planner.serve.islands import island_shares
from tuner.planner.serve.kv_transfers import HandOvers, handovers_of
from tuner.planner.serve.launchable import choices_of
from tuner.planner.serve.options import (
    Option,
    memory_of,
    step_seconds,
)
from tuner.planner.serve.preference import (
    bands_around,
    gain_ratio,
    held_back_by,
    lost_by,
    worth_of,
)
from tuner.planner.serve.program import BOUND_TOLERANCE
from tuner.planner.serve.routers import loses_prefixes, router_of
from tuner.planner.serve.simulation import Group, latency_of
from tuner.planner.serve.solve_mode import FIRST_SPARE, MOST_SPARE, Found, Question
from tuner.planner.serve.token_cost import input_tokens_per_s, token_cost
from tuner.serve_plan import (
    PUBLISHED_MODES,
    Handover,
    Island,
    Role,
    ServeAlternative,
    ServeDecision,
    ServePrediction,
)
from tuner.spec.serving.manifests.afd import target_refusals
from tuner.spec.serving.manifests.registry import main_release
from tuner.spec.serving.manifests.rules import refusals
from tuner.spec.serving.manifests.steps import lacks_units
from tuner.spec.serving.manifests.vendor_pairs import portable_backend
from tuner.spec.serving.manifests.vendors import TRAITS


def tie_ratio() -> float:
    """Return what the model cannot tell apart of the objective: the band of a ratio of TPOT.

    Instances that are needed go as the time of their steps, and what two layouts of one model miss
    together cancels (tuner/costs/serving/bands.py).
    """
    return ratio_bands()[1].high_ratio - 1.0


def refusals_of(found: Found, question: Question) -> tuple[str, ...]:
    """Return what keeps the engine's release from launching an answer."""
    spec = question.spec
    own = target_refusals(spec.emit) if found.mode == "attention_expert" else ()
    return own + refusals(
        main_release(spec.goal, spec.cluster),
        decision_of(found, question),
        model=spec.model,
        goal=spec.goal,
        devices_per_node={pool.name: pool.devices_per_node for pool in spec.cluster.pools},
        generations={site.pool.name: site.machine.sheet.generation for site in question.sites},
        releases=question.hand_overs.releases,
    )


def decision_of(found: Found, question: Question) -> ServeDecision:
    """Return what to launch."""
    groups, cut = found.groups, found.cut
    hand_overs = question.hand_overs
    if cut is not None:
        hand_overs = handovers_of(
            question.spec,
            input_tokens=cut.input_tokens(is_long=True),
            options=tuple(group.option for group in groups),
        )
    handovers = {
        (sender.option.site.pool.name, receiver.option.site.pool.name, pair.seconds): pair
        for sender in groups
        if sender.option.role is Role.PREFILL
        for receiver in groups
        if receiver.option.role is not Role.PREFILL
        if receiver.island == sender.island
        for pair in [_handover(sender.option, receiver.option, hand_overs)]
    }
    return ServeDecision(
        mode=found.mode,
        instances=tuple(
            each
            for group in groups
            for each in launched_as(group.option, count=group.count, island=group.island)
        ),
        handovers=tuple(handovers.values()),
        offload_above_tokens=None if cut is None else cut.above_tokens,
        router=router_of(
            found.router,
            question.spec.goal,
            *(
                [(one.option.role, one.count) for one in groups if one.island == island]
                for island in dict.fromkeys(group.island for group in groups)
            ),
            is_counted=question.hits is not None,
        ),
        islands=tuple(
            Island(name=name, share_ratio=share) for name, share in island_shares(groups).items()
        ),
    )


def _handover(sender: Option, receiver: Option, hand_overs: HandOvers) -> Handover:
    return Handover(
        from_pool=sender.site.pool.name,
        to_pool=receiver.site.pool.name,
        connector=hand_overs.connector(sender.site, receiver.site).value,
        path=hand_overs.path_kind(sender.site, receiver.site),
        request_bytes=round(hand_overs.moved(sender, receiver).whole),
        seconds=hand_overs.seconds(sender, receiver),
    )


def prediction_of(found: Found, question: Question) -> ServePrediction:
    """Return what the played requests met."""
    played, demand = found.played, question.demand
    rate = found.rate_per_s or demand.rate_per_s
    ttft, tpot = latency_of(played.ttft_s_R), latency_of(played.tpot_s_R)
    around = bands_around(found, question)
    busiest = max(
        (group for group in found.groups if group.option.role is not Role.PREFILL),
        key=lambda group: group.option.tpot_s,
    )
    shares = island_shares(found.groups)
    return ServePrediction(
        ttft_s=ttft,
        ttft_s_band=around.ttft.around(ttft.mean),
        tpot_s=tpot,
        tpot_s_band=around.tpot.around(tpot.mean),
        is_new_pair=around.is_new,
        goodput_per_device=played.requests_per_s * played.met_ratio / found.devices,
        requests_per_s=played.requests_per_s,
        output_tokens_per_s=played.output_tokens_per_s,
        utilisation_ratio={
            name: min(1.0, shares.get(group.island, 1.0) * rate / _role_rate(found, group))
            for group in found.groups
            for name, _ in _memory(group, demand)
        },
        memory_bytes=dict(each for group in found.groups for each in _memory(group, demand)),
        input_tokens_per_s=input_tokens_per_s(found, question),
        cost_per_hour=found.price_per_hour,
        token_cost=token_cost(found, question),
        breakdown_s=_breakdown(busiest.option, demand),
    )


def _named(group: Group) -> str:
    """Name a group by its role, of a cell that of its attention servers."""
    own = group.option
    role = Role.ATTENTION if isinstance(own.iteration, RemoteFfnIteration) else own.role
    return _label(role, own, own.degrees)


def _label(role: Role, option: Option, degrees: Degrees) -> str:
    stages = f"pp{degrees.pipeline}" * (degrees.pipeline > 1)
    shape = f"tp{degrees.attention_tensor}dp{degrees.attention_data}{stages}"
    return f"{role.value}@{option.site.pool.name}/{shape}"


def _memory(group: Group, demand: Demand) -> Iterator[tuple[str, int]]:
    """Yield bytes of one device of a group, and of the FFN servers of its cells."""
    option = group.option
    yield _named(group), memory_of(option, demand)
    if isinstance(option.iteration, RemoteFfnIteration):
        ffn, peers = option.iteration.ffn, max(option.iteration.peers, 1.0)
        held = ffn_bytes(
            ffn,
            step_tokens=round(peers * option.step_tokens),
            running=round(peers * option.running),
        )
        yield _label(Role.EXPERT, option, ffn.degrees), int(held)


def _role_rate(found: Found, beside: Group) -> float:
    """Of all instances that do the same in the same island."""
    return sum(
        group.rate_per_s
        for group in found.groups
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


def binding_constraint(best: Found, question: Question) -> str:
    """Name what keeps the deployment from being smaller."""
    slo, played = question.spec.goal.slo, best.played
    tight = [
        (value / limit, f"{name} {kind}")
        for name, targets, values in (
            ("ttft", slo.ttft, played.ttft_s_R),
            ("tpot", slo.tpot, played.tpot_s_R),
        )
        for kind in ("mean", "p50", "p90", "p99")
        if (limit := getattr(targets, kind)) is not None and len(values)
        for value in [getattr(latency_of(values), kind)]
    ]
    kept = " and ".join(best.eased) or max(tight, default=(0.0, ""))[1]
    if best.rate_per_s is not None:
        return _of_rate(best, kept)
    spare, asked = best.spare, question.spec.goal.spare_ratio
    if spare.most_ratio > asked:
        whose = "of prefill " if spare.prefill_ratio > max(spare.others_ratio, asked) else ""
        return f"waiting: {spare.most_ratio:.0%} of spare capacity {whose}keeps {kept}"
    if tight and best.objective > best.bound * (1.0 + tie_ratio()):
        return f"waiting: cheaper instances that serve the rate miss {kept}"
    if tight and max(tight)[0] > 0.85:
        return max(tight)[1]
    return "throughput: the traffic's rate"


def _of_rate(best: Found, kept: str) -> str:
    """Name what keeps a deployment from serving more."""
    if best.eased and best.objective > best.bound * (1.0 + BOUND_TOLERANCE):
        return (
            f"waiting: above {best.rate_per_s:.4g} requests/s {kept} is missed;"
            f" {1.0 / best.bound:.4g} would be served if no request waited"
        )
    return "throughput: the pools serve no more within the targets"


def alternatives_of(
    best: Found, others: Sequence[Found], question: Question
) -> Iterator[ServeAlternative]:
    """Tell of the other modes that can be launched."""
    goal = question.spec.goal
    for other in others:
        yield ServeAlternative(
            decision=decision_of(other, question),
            predicted=prediction_of(other, question),
            within_band=gain_ratio(worth_of(other, goal), best, goal) >= -tie_ratio(),
            lost_by=lost_by(other, best, goal) + held_back_by(other, best, goal),
        )


def missed_with(found: Found) -> str:
    """Name the target that an answer misses, and how much spare capacity it was given at most."""
    most = found.spare.most_ratio
    told = f"{found.missed[0]}, with {most:.0%} of spare capacity"
    # The next step is twice as much, a quarter at least.
    return told if max(FIRST_SPARE, 2.0 * most) > MOST_SPARE else f"{told}; the pools hold no more"


def told_of(found: Found) -> str:
    """Return a mode's answer in a few words."""
    groups = " and ".join(
        f"{each.count} x {each.devices} {each.pool} ({each.role.value})"
        for group in found.groups
        for each in launched_as(group.option, count=group.count)
    )
    words = f"{found.mode} on {groups}"
    share = found.groups[0].option.prefill_share_ratio
    if share is not None:
        words += f", {share:.0%} of the multiprocessors for prompts"
    if found.cut is not None:
        words += (
            f", prompts with more than {found.cut.above_tokens} tokens to compute"
            f" ({found.cut.long_share:.0%}) read remotely"
        )
    return words


def cautions_of(found: Found, question: Question) -> Iterator[str]:
    """Say what is to be watched with the chosen instances."""
    yield from _shares(found)
    yield from _vendors(found, question)
    copies = any(group.option.iteration.redundant_experts for group in found.groups)
    if copies and question.loads is None:
        yield (
            "copies of experts are taken to level loads that no recording here shows, as far as"
            " even experts can be in their slots; goal.routing names a recording, and the engine"
            " places copies by the loads that it records itself"
        )
    if found.prefix_hit is not None:
        spec = question.spec
        pools = spec.cluster.pools
        where = (
            "no router of this stack looks for prefixes, so that a session meets its own on one"
            " instance of several"
            if loses_prefixes(spec.goal, spec.emit, found.mode, pools=pools)
            else "the router in front of islands looks for no prefixes, so that a session meets its"
            " own on one island of several"
        )
        yield (
            f"{found.prefix_hit:.0%} of every prompt is counted on in prefix caches: {where}; where"
            " requests have the same prefix state goal.traffic.prefix_scope: common"
        )
    if bands_around(found, question).is_new:
        yield f"{NEW_PAIR}: bands are those that hold pairs left out of the calibration"
    if found.mode not in PUBLISHED_MODES:
        yield f"no published run stands behind the bands of {found.mode}: they are a guess"
    if found.mode == "attention_expert":
        yield from _experiment(found)
    if found.mode == "shared_device":
        yield (
            "shared devices are priced from published curves (semi-PD, Nexus), not from"
            " measurements; the engine's loop for them does not hide the host's work between"
            " steps, which is not priced, and sglang 0.5.23 warns of slow steps with torch after"
            " 2.6: measure before relying on it"
        )


def _experiment(found: Found) -> Iterator[str]:
    """Say what is not known of attention and experts on servers of their own."""
    yield (
        "attention and experts apart are an experiment of the engine's plugin: messages that"
        " announce each step, and steps beyond the captured graphs, are not priced, and no run was"
        " compared; measure before relying on it"
    )
    if any(
        isinstance(one.iteration, RemoteFfnIteration)
        and one.devices > one.site.pool.devices_per_node
        for one in (group.option for group in found.groups)
    ):
        yield (
            "cells span machines, which the plugin has verified for DeepSeek-V2-Lite with 2"
            " attention and 2 FFN devices alone"
        )


def _vendors(found: Found, question: Question) -> Iterator[str]:
    """Say what is not priced where devices are of other vendors, or of two."""
    sites = {group.option.site.pool.name: group.option.site for group in found.groups}
    for name, site in sites.items():
        vendor = site.machine.sheet.generation.vendor
        spread = [one for one in found.groups if one.option.site is site]
        if vendor is not Vendor.NVIDIA and any(
            group.option.degrees.attention_data > 1 for group in spread
        ):
            yield (
                f"{name}: the exchange of experts is priced as all-gather; {vendor}'s own kernels"
                f" ({TRAITS[vendor].own_exchange}) were never measured for this plan"
            )
    for sender, receiver in product(found.groups, found.groups):
        if sender.option.role is not Role.PREFILL or receiver.option.role is Role.PREFILL:
            continue
        ends = sender.option.site, receiver.option.site
        if sender.island != receiver.island or question.hand_overs.path_kind(*ends) == "device":
            continue
        backend = portable_backend(
            *question.hand_overs.ends(*ends), cache=question.hand_overs.cache
        )
        known = question.hand_overs.converted_bytes_per_s(sender.option, receiver.option)
        conversion = "" if known else "; turning the pages is not priced: no profile measured it"
        yield (
            f"{ends[0].pool.name} to {ends[1].pool.name}: both sides run the attention backend"
            f" {backend}, whose kernels are not the priced ones{conversion}; no published run"
            " passes caches between these vendors: try one pair before relying on it"
        )


def _shares(found: Found) -> Iterator[str]:
    """Say what the router gives each of several kinds of instances, by their capacity."""
    kinds = dict.fromkeys((group.option.role, group.island) for group in found.groups)
    for role, island in kinds:
        own = [
            group for group in found.groups if (group.option.role, group.island) == (role, island)
        ]
        total = sum(group.rate_per_s for group in own)
        if len(own) > 1:
            told = ", ".join(
                f"{group.option.rate_per_s / total:.1%} to each of {group.count} of"
                f" {group.option.devices} {group.option.site.pool.name}"
                for group in own
            )
            yield (
                f"{role.value} instances of {len(own)} kinds need a router that follows load; by"
                f" capacity {told}"
            )


def notes_of(question: Question) -> Iterator[str]:
    """Say what the plan rests on."""
    for site in question.sites:
        if site.machine.estimated:
            named = ", ".join(sorted(site.machine.estimated))
            yield f"{site.pool.name}: from the datasheet: {named}"
    yield from _unpacked(question)
    choices = choices_of(question.spec, question.sites, demand=question.demand)
    yield from assumptions_of(question.spec, question.demand, choices)
    if question.demand.concurrency is not None:
        yield (
            f"a closed loop of {question.demand.concurrency} within its targets asks for"
            f" {question.demand.rate_per_s:.3g} requests/s"
        )


def _unpacked(question: Question) -> Iterator[str]:
    """Say which devices do not multiply the weights' type."""
    wanted = question.spec.goal.quantization
    for site in question.sites:
        sheet = site.machine.sheet
        if lacks_units(wanted, generation=sheet.generation):
            yield (
                f"{site.pool.name}: {sheet.name} has no units for {wanted}; an engine that"
                " serves it there unpacks weights as it reads them, which makes prompts slower"
            )
