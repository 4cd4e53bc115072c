"""Settings of an autoscaler, from simulating the planned deployment at the most that it serves.

    capacity    the highest rate at which every target holds on the planned instances, by bisection
    requests    rate x mean latency / instances (Little, Operations Research 9(3), 1961): of a
                prefill instance the time to the first token less the KV transfer, of a decode
                instance the tokens after the first, of an aggregated one both
    KV usage    sequences of a rank x their mean tokens (demand.py) / tokens that its cache holds

Not covered: several kinds of instances in one role, whose metric has no common target; closed
loops, whose requests in flight do not depend on the instances.
"""

import math
from collections.abc import Sequence
from typing import Final

from tuner.catalog.serve_rules.autoscalers import named_autoscaler
from tuner.config.serve import Role, ServeDecision
from tuner.errors import SpecError
from tuner.plans.autoscaling import Autoscaling, ScaledInstances
from tuner.search.serve.islands import capacity_per_s
from tuner.search.serve.planned_instances import simulate_planned
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.simulation import InstanceGroup, SimulationResult, mean_request_s
from tuner.spec.serving.goal import Autoscaler
from tuner.units import format_counted, format_ratio

PRECISION: Final = 0.02
"""Share of the capacity to which it is found."""
FLOOR: Final = 2
"""Fewest instances of a role that has several, so that one may be lost."""


def plan_autoscaling(
    problem: ServeProblem, decision: ServeDecision, groups: Sequence[InstanceGroup]
) -> Autoscaling | None:
    """Return what the spec's autoscaler is told; None where `emit` names none.

    Raises:
        SpecError: the instances cannot be scaled, or not within the spec's limits.
    """
    name, limits = named_autoscaler(problem.spec.emit), problem.spec.goal.autoscaler or Autoscaler()
    if name is None:
        return None
    if len({group.option.role for group in groups}) < len(groups):
        raise SpecError(
            f"emit: {name} scales one kind of instances a role, and the plan has"
            f" {len(groups)} kinds, whose loads have no common target; plan on fewer pools, or"
            " leave it out"
        )
    rate_per_s, at_capacity = _capacity(problem, decision, groups)
    roles = tuple(
        _scaled(problem, decision, groups, group, rate_per_s, at_capacity, limits=limits)
        for group in groups
    )
    highest = max(scaled.kv_usage_ratio for scaled in roles)
    if limits.kv_usage is not None and limits.kv_usage >= highest:
        raise SpecError(
            f"goal.autoscaler.kv_usage: {format_ratio(limits.kv_usage, digits=0)} of the KV cache"
            f" are never in use: at {rate_per_s:.3g} requests/s, the most within the targets,"
            f" {max(roles, key=lambda scaled: scaled.kv_usage_ratio).requests:.3g} requests fill"
            f" {format_ratio(highest, digits=0)}; leave it out: running and waiting requests fire"
        )
    return Autoscaling(
        autoscaler=name,
        capacity_per_s=rate_per_s,
        roles=roles,
        kv_usage=limits.kv_usage,
        start_up_s=_start_up_s(groups, limits),
        node_provisioning_s=limits.node_provisioning,
    )


def _start_up_s(groups: Sequence[InstanceGroup], limits: Autoscaler) -> float | None:
    """Return the start-up that is stated, or the longest that the pools' profiles measured."""
    if limits.start_up is not None:
        return limits.start_up
    measured = [group.option.serving_pool.start_up_s for group in groups]
    return max((seconds for seconds in measured if seconds is not None), default=None)


def _capacity(
    problem: ServeProblem, decision: ServeDecision, groups: Sequence[InstanceGroup]
) -> tuple[float, SimulationResult]:
    """Return the highest rate at which the targets hold, and the simulation there."""
    planned_per_s, slo = problem.demand.rate_per_s, problem.spec.goal.slo
    low, high = 1.0, max(capacity_per_s(groups) / planned_per_s, 1.0)
    within = simulate_planned(problem, decision, groups)
    while high > low * (1.0 + PRECISION):
        middle = 0.5 * (low + high)
        simulated = simulate_planned(problem, decision, groups, factor=middle)
        if simulated.missed(slo):
            high = middle
        else:
            low, within = middle, simulated
    return low * planned_per_s, within


def _scaled(
    problem: ServeProblem,
    decision: ServeDecision,
    groups: Sequence[InstanceGroup],
    group: InstanceGroup,
    rate_per_s: float,
    simulated: SimulationResult,
    *,
    limits: Autoscaler,
) -> ScaledInstances:
    option, demand = group.option, problem.demand
    ttft_s, tpot_s = simulated.ttft_s_R, simulated.tpot_s_R
    transfer_s = max((transfer.seconds for transfer in decision.handovers), default=0.0)
    further = max(demand.output_tokens - 1.0, 0.0)
    mean_s = mean_request_s(ttft_s, tpot_s, further=further)
    past_tokens = demand.past_tokens
    if option.role is Role.PREFILL:
        mean_s = max(float(ttft_s.mean()) - transfer_s, 1e-9)
        past_tokens = demand.input_tokens
    elif option.role is Role.DECODE:
        mean_s -= float(ttft_s.mean()) - transfer_s
    requests = rate_per_s * mean_s / group.count
    longest_s = float(ttft_s.max()) + demand.most_output * float(tpot_s.max(initial=0.0))
    return ScaledInstances(
        role=option.role,
        **_bounds(groups, group, limits),
        requests=requests,
        kv_usage_ratio=requests / option.degrees.attention_data * past_tokens / option.kv_tokens,
        longest_request_s=math.ceil(longest_s),
    )


def _bounds(
    groups: Sequence[InstanceGroup], group: InstanceGroup, limits: Autoscaler
) -> dict[str, int]:
    """Return the fewest and the most instances of a group.

    Raises:
        SpecError: the stated fewest do not fit the pool.
    """
    pool = group.option.serving_pool.pool
    used = sum(
        beside.count * beside.option.devices
        for beside in groups
        if beside.option.serving_pool.pool.name == pool.name
    )
    at_most = group.count * pool.num_devices // used
    at_least = limits.at_least or min(FLOOR, group.count)
    if at_least > at_most:
        raise SpecError(
            f"goal.autoscaler.at_least: {at_least} instances of"
            f" {format_counted(group.option.devices, 'device')} are more than the {at_most} that"
            f" pool {pool.name!r} has room for ({format_counted(pool.num_devices, 'device')});"
            " lower it, or add machines"
        )
    return {"at_least": at_least, "at_most": at_most}
