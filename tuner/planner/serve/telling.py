"""A mode's answer in the words of the plan: decision, prediction, certificate, what binds."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from solvers.instances.problem import InstancePlan
from solvers.result import Outcome, Status
from tuner.costs.serving.bands import bands_of
from tuner.costs.serving.engine import Engine
from tuner.planner.serve.answering import Found, Question
from tuner.planner.serve.assumptions import assumptions_of
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.handovers import HandOvers, handovers_of
from tuner.planner.serve.instances import instances_of
from tuner.planner.serve.launchable import choices_of
from tuner.planner.serve.options import (
    Option,
    memory_of,
    step_seconds,
)
from tuner.planner.serve.playing import Group, latency_of
from tuner.planner.serve.program import BOUND_TOLERANCE, unpaired
from tuner.serve_plan import (
    Handover,
    Role,
    ServeAlternative,
    ServeCertificate,
    ServeDecision,
    ServePrediction,
    ServeSpace,
)
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.manifests.registry import manifest_of
from tuner.spec.serving.manifests.rules import refusals

TIE_RATIO: Final = 0.05
"""Of the objective that the model cannot tell apart: half of the median error of the time per
token."""
MOST_TIES: Final = 10
TIES_S: Final = 2.0
"""For finding them."""


def rank_of(found: Found, goal: ServeGoal) -> tuple[float, float]:
    """Order answers by the goal's objective; the least is best."""
    price = found.price_per_hour or 0.0
    if goal.objective == "cost":
        return price, float(found.devices)
    if goal.objective == "devices":
        return float(found.devices), price
    goodput = found.played.requests_per_s * found.played.met_ratio
    return -goodput / found.devices, price


def worth_of(found: Found, goal: ServeGoal) -> float:
    """Return what the goal wants least of: money an hour, or devices."""
    return (found.price_per_hour or 0.0) if goal.objective == "cost" else float(found.devices)


def gain_ratio(worth: float, best: Found, goal: ServeGoal) -> float:
    """Return what is saved against the chosen answer; negative where it takes more."""
    return 1.0 - worth / max(worth_of(best, goal), 1e-9)


def refusals_of(found: Found, question: Question) -> tuple[str, ...]:
    """Return what keeps the engine's release from launching an answer."""
    spec = question.spec
    return refusals(
        manifest_of(spec.goal.engine),
        decision_of(found, question),
        model=spec.model,
        goal=spec.goal,
        devices_per_node={pool.name: pool.devices_per_node for pool in spec.cluster.pools},
        generations={site.pool.name: site.machine.sheet.generation for site in question.sites},
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
        for pair in [_handover(sender.option, receiver.option, hand_overs)]
    }
    return ServeDecision(
        mode=found.mode,
        instances=tuple(instances_of(group.option, count=group.count) for group in groups),
        handovers=tuple(handovers.values()),
        offload_above_tokens=None if cut is None else cut.above_tokens,
    )


def _handover(sender: Option, receiver: Option, hand_overs: HandOvers) -> Handover:
    return Handover(
        from_pool=sender.site.pool.name,
        to_pool=receiver.site.pool.name,
        connector=hand_overs.connector.value,
        path=hand_overs.path_kind(sender.site, receiver.site),
        request_bytes=round(hand_overs.moved(sender, receiver).whole),
        seconds=hand_overs.seconds(sender, receiver),
    )


def prediction_of(found: Found, question: Question) -> ServePrediction:
    """Return what the played requests met."""
    played, demand = found.played, question.demand
    ttft, tpot = latency_of(played.ttft_s_R), latency_of(played.tpot_s_R)
    ttft_band, tpot_band = bands_of(
        Engine(question.spec.goal.engine.name),
        mode=found.mode,
        has_kernels=not any(group.option.site.machine.estimated for group in found.groups),
    )
    busiest = max(
        (group for group in found.groups if group.option.role is not Role.PREFILL),
        key=lambda group: group.option.tpot_s,
    )
    return ServePrediction(
        ttft_s=ttft,
        ttft_s_band=ttft_band.around(ttft.mean),
        tpot_s=tpot,
        tpot_s_band=tpot_band.around(tpot.mean),
        goodput_per_device=played.requests_per_s * played.met_ratio / found.devices,
        requests_per_s=played.requests_per_s,
        output_tokens_per_s=played.output_tokens_per_s,
        utilisation_ratio={
            _named(group): min(1.0, demand.rate_per_s / _role_rate(found, group.option.role))
            for group in found.groups
        },
        memory_bytes={_named(group): memory_of(group.option, demand) for group in found.groups},
        cost_per_hour=found.price_per_hour,
        breakdown_s=_breakdown(busiest.option, demand),
    )


def _named(group: Group) -> str:
    degrees = group.option.degrees
    shape = f"tp{degrees.attention_tensor}dp{degrees.attention_data}"
    return f"{group.option.role.value}@{group.option.site.pool.name}/{shape}"


def _role_rate(found: Found, role: Role) -> float:
    return sum(group.rate_per_s for group in found.groups if group.option.role is role)


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


def certificate_of(
    best: Found, question: Question, fitting: Sequence[Found], *, solve_s: float
) -> ServeCertificate:
    """State what is proven about the instances.

    The bound is the least of all modes that keep the targets and can be launched, at the goal's own
    spare capacity: what waiting costs besides is played, not proven, and shows as the gap. Modes
    that miss a target whatever spare capacity they were given do not count.

    Ties of the chosen mode are other counts whose objective lies within the band; those of the
    others are the modes whose objective does. They are not played.

    Args:
        best: chosen.
        question: that was answered.
        fitting: answers that keep the targets and can be launched, the chosen one among them.
        solve_s: taken in all.
    """
    outcome: Outcome[InstancePlan] = best.solved.outcome
    ties, is_least = _ties(best)
    limit = (1.0 + TIE_RATIO) * worth_of(best, question.spec.goal)
    modes = [
        other
        for other in fitting
        if other is not best and worth_of(other, question.spec.goal) <= limit
    ]
    bound = min(outcome.bound, *(one.bound for one in fitting))
    is_proven = bound >= outcome.objective * (1.0 - BOUND_TOLERANCE)
    return ServeCertificate(
        status="optimal" if outcome.status is Status.OPTIMAL and is_proven else "feasible",
        objective=outcome.objective,
        bound=bound,
        gap_ratio=min(max(1.0 - bound / outcome.objective, 0.0), 1.0),
        program_gap_ratio=outcome.gap_ratio,
        space=space_of(question, fitting),
        within_band=len(modes) + ties,
        within_band_is_least=is_least,
        solve_s=solve_s,
        method=outcome.method,
    )


def space_of(question: Question, found: Sequence[Found]) -> ServeSpace:
    """Count what was priced: ways to run an instance, and those that modes of their own add."""
    own = [one for one in found if one.mode in ("shared_device", "prefill_offload")]
    added = sum(len(one.solved.program.options) for one in own)
    return ServeSpace(
        priced=len(question.options.options) + added,
        bounded=question.options.beaten,
        illegal=question.options.illegal,
        illegal_by=dict(question.options.illegal_by),
    )


def _ties(best: Found) -> tuple[int, bool]:
    """Count other instances of the same mode that cost about as much, and whether there are more.

    Those with a pair that may not meet are none.
    """
    from solvers.instances.alternatives import alternatives

    chosen, problem = best.solved.outcome.solution, best.solved.program.problem
    if chosen is None:
        return 0, False
    near = alternatives(
        problem, chosen, band_ratio=TIE_RATIO, most=MOST_TIES + 1, time_limit_s=TIES_S
    )
    others = [one for one in near.plans if one.count_J != chosen.count_J]
    return sum(unpaired(problem, one) is None for one in others), not near.is_complete


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
    spare, asked = best.spare, question.spec.goal.spare_ratio
    if spare.most_ratio > asked:
        whose = "of prefill " if spare.prefill_ratio > max(spare.others_ratio, asked) else ""
        return f"waiting: {spare.most_ratio:.0%} of spare capacity {whose}keeps {max(tight)[1]}"
    if tight and best.objective > best.bound * (1.0 + TIE_RATIO):
        return f"waiting: slower instances that serve the rate miss {max(tight)[1]}"
    if tight and max(tight)[0] > 0.85:
        return max(tight)[1]
    return "throughput: the traffic's rate"


def alternatives_of(
    best: Found, others: Sequence[Found], question: Question
) -> Iterator[ServeAlternative]:
    """Tell of the other modes that can be launched."""
    goal = question.spec.goal
    for other in others:
        yield ServeAlternative(
            decision=decision_of(other, question),
            predicted=prediction_of(other, question),
            within_band=gain_ratio(worth_of(other, goal), best, goal) >= -TIE_RATIO,
            lost_by=lost_by(other, best, goal),
        )


def lost_by(other: Found, best: Found, goal: ServeGoal) -> str:
    """Say what an answer takes beside the chosen one."""
    told = f"{other.devices} devices, the chosen one takes {best.devices}"
    if goal.objective == "cost":
        told += (
            f"; {other.price_per_hour or 0.0:.4g} an hour against {best.price_per_hour or 0.0:.4g}"
        )
    return told


def told_of(found: Found) -> str:
    """Return a mode's answer in a few words."""
    groups = " and ".join(
        f"{group.count} x {group.option.devices} {group.option.site.pool.name}"
        f" ({group.option.role.value})"
        for group in found.groups
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


def cautions_of(found: Found) -> Iterator[str]:
    """Say what is to be watched with the chosen instances."""
    yield from _weights(found)
    if found.mode == "shared_device":
        yield (
            "shared devices are priced from published curves (semi-PD, Nexus), not from"
            " measurements; the engine's loop for them does not hide the host's work between"
            " steps, which is not priced, and sglang 0.5.23 warns of slow steps with torch after"
            " 2.6: measure before relying on it"
        )


def _weights(found: Found) -> Iterator[str]:
    """Say where instances of unlike kinds must not get equal shares of the requests."""
    for role in dict.fromkeys(group.option.role for group in found.groups):
        own = [group for group in found.groups if group.option.role is role]
        total = sum(group.rate_per_s for group in own)
        if len(own) > 1:
            told = ", ".join(
                f"{group.option.rate_per_s / total:.1%} to each of {group.count} of"
                f" {group.option.devices} {group.option.site.pool.name}"
                for group in own
            )
            yield (
                f"no one kind of {role.value} instances serves the traffic; the router must weigh"
                f" them: {told}"
            )


def notes_of(question: Question) -> Iterator[str]:
    """Say what the plan rests on."""
    for site in question.sites:
        if site.machine.estimated:
            named = ", ".join(sorted(site.machine.estimated))
            yield f"{site.pool.name}: from the datasheet: {named}"
    choices = choices_of(question.spec, question.sites, demand=question.demand)
    yield from assumptions_of(question.spec, question.demand, choices)
    if question.demand.concurrency is not None:
        yield (
            f"a closed loop of {question.demand.concurrency} within its targets asks for"
            f" {question.demand.rate_per_s:.3g} requests/s"
        )
