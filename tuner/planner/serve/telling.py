"""A mode's answer in the words of the plan: decision, prediction, certificate, what binds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from solvers.instances.problem import InstancePlan
from solvers.result import Outcome, Status
from tuner.costs.serving.bands import bands_of
from tuner.costs.serving.engine import Engine
from tuner.planner.serve.answering import Found, Question
from tuner.planner.serve.apart import unlaunchable_apart
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.instances import instances_of
from tuner.planner.serve.options import (
    Option,
    memory_of,
    step_seconds,
)
from tuner.planner.serve.playing import Group, latency_of
from tuner.planner.serve.program import unpaired
from tuner.serve_plan import (
    Handover,
    Role,
    ServeAlternative,
    ServeCertificate,
    ServeDecision,
    ServePrediction,
    ServeSpace,
    ServeUnlaunchable,
)
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.kv_pages import LAYOUT
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
    price = sum(
        group.count * group.option.devices * (group.option.site.pool.price_per_device_hour or 0.0)
        for group in found.groups
    )
    if goal.objective == "cost":
        return price, float(found.devices)
    if goal.objective == "devices":
        return float(found.devices), price
    goodput = found.played.requests_per_s * found.played.met_ratio
    return -goodput / found.devices, price


def refusals_of(found: Found, question: Question) -> tuple[str, ...]:
    """Return what keeps the engine's release from launching an answer."""
    spec = question.spec
    return refusals(
        manifest_of(spec.goal.engine),
        decision_of(found, question),
        model=spec.model,
        goal=spec.goal,
        devices_per_node={pool.name: pool.devices_per_node for pool in spec.cluster.pools},
    )


def decision_of(found: Found, question: Question) -> ServeDecision:
    """Return what to launch."""
    groups = found.groups
    handovers = {
        (sender.option.site.pool.name, receiver.option.site.pool.name, pair.seconds): pair
        for sender in groups
        if sender.option.role is Role.PREFILL
        for receiver in groups
        if receiver.option.role is Role.DECODE
        for pair in [_handover(sender.option, receiver.option, question)]
    }
    return ServeDecision(
        mode=found.solved.program.mode,
        instances=tuple(instances_of(group.option, count=group.count) for group in groups),
        handovers=tuple(handovers.values()),
    )


def _handover(sender: Option, receiver: Option, question: Question) -> Handover:
    hand_overs = question.hand_overs
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
        mode=found.solved.program.mode,
        has_kernels=not any(group.option.site.machine.estimated for group in found.groups),
    )
    busiest = max(
        (group for group in found.groups if group.option.role is not Role.PREFILL),
        key=lambda group: group.option.tpot_s,
    )
    price = _price_per_hour(found)
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
        cost_per_hour=price,
        breakdown_s=_breakdown(busiest.option, demand),
    )


def _price_per_hour(found: Found) -> float | None:
    prices = [group.option.site.pool.price_per_device_hour for group in found.groups]
    if any(price is None for price in prices):
        return None
    return sum(
        group.count * group.option.devices * (price or 0.0)
        for group, price in zip(found.groups, prices, strict=True)
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
    past_N = np.array([demand.input_tokens + 0.5 * demand.output_tokens])
    parts["attention"] = float(iteration.decode_s(running_N, past_N)[0])
    parts["head"] = float(iteration.head_s(running_N)[0])
    parts["scheduler"] = iteration.scheduler_s
    parts["clocks"] = whole - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if abs(seconds) > 1e-12}


def certificate_of(
    best: Found, question: Question, found: Sequence[Found], *, solve_s: float
) -> ServeCertificate:
    """State what is proven about the instances."""
    outcome: Outcome[InstancePlan] = best.solved.outcome
    solution = outcome.solution
    found_ties = () if solution is None else _ties(best, solution)
    problem = best.solved.program.problem
    others = [one for one in found_ties if unpaired(problem, one) is None]
    modes = sum(
        1
        for other in found
        if other is not best
        and not other.missed
        and abs(other.devices / best.devices - 1.0) <= TIE_RATIO
    )
    return ServeCertificate(
        status="optimal" if outcome.status is Status.OPTIMAL else "feasible",
        objective=outcome.objective,
        bound=outcome.bound,
        gap_ratio=outcome.gap_ratio,
        space=ServeSpace(
            priced=len(question.options.options),
            bounded=0,
            illegal=question.options.illegal,
        ),
        within_band=modes + len(others),
        within_band_is_least=len(found_ties) == MOST_TIES,
        solve_s=solve_s,
        method=outcome.method,
    )


def _ties(best: Found, solution: InstancePlan) -> tuple[InstancePlan, ...]:
    """Find other counts of the same mode that cost about as much."""
    from solvers.instances.alternatives import alternatives

    near = alternatives(
        best.solved.program.problem,
        solution,
        band_ratio=TIE_RATIO,
        most=MOST_TIES,
        time_limit_s=TIES_S,
    )
    return near.plans


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
    if best.spare_ratio > question.spec.goal.spare_ratio:
        return f"waiting: {best.spare_ratio:.0%} of spare capacity keeps {max(tight)[1]}"
    if tight and max(tight)[0] > 0.85:
        return max(tight)[1]
    return "throughput: the traffic's rate"


def alternatives_of(
    best: Found, others: Sequence[Found], question: Question
) -> Iterator[ServeAlternative]:
    """Tell of the other modes."""
    for other in others:
        yield ServeAlternative(
            decision=decision_of(other, question),
            predicted=prediction_of(other, question),
            within_band=abs(other.devices / best.devices - 1.0) <= TIE_RATIO,
            lost_by=f"{other.devices} devices, the chosen one takes {best.devices}",
        )


def unlaunchable_of(question: Question, best: Found) -> Iterator[ServeUnlaunchable]:
    """Name modes that no release launches, with what they would save against the chosen plan."""
    if "attention_expert" in question.spec.goal.modes and question.decoder.experts is not None:
        yield unlaunchable_apart(question, best)


def refused_modes(
    best: Found,
    found: Sequence[Found],
    refused: Mapping[str, tuple[str, ...]],
) -> Iterator[ServeUnlaunchable]:
    """Tell of modes that would serve and cannot be launched, with the devices they would save."""
    for one in found:
        broken = refused[one.solved.program.mode]
        if broken and not one.missed:
            gain = max(0.0, 1.0 - one.devices / best.devices)
            yield ServeUnlaunchable(
                feature=f"{one.solved.program.mode}: {broken[0]}", gain_ratio=gain
            )


def notes_of(question: Question) -> Iterator[str]:
    """Say what the plan rests on."""
    for site in question.sites:
        if site.machine.estimated:
            named = ", ".join(sorted(site.machine.estimated))
            yield f"{site.pool.name}: from the datasheet: {named}"
    engine = question.spec.goal.engine.name
    if "disaggregated" in question.spec.goal.modes and engine not in LAYOUT:
        yield f"which KV caches {engine} hands over is not described: every pair was allowed"
    if question.demand.concurrency is not None:
        yield (
            f"a closed loop of {question.demand.concurrency} within its targets asks for"
            f" {question.demand.rate_per_s:.3g} requests/s"
        )
