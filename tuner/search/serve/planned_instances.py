"""The instances of a plan, looked up among all priced options, and simulated again.

If one is missing (another release, other tables), nothing is. A neighbour of a plan has half or
twice the sequences, or the tokens of a step, of one kind of its instances. The engine's runtime
takes both as they come, and no model knows them best: `moetune verify` launches them.

Not covered: traces, which have their own rate, and modes whose instances are no priced options.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from tuner.config.serve import Instances, Role, ServeDecision
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.search.serve.demand import build_demand, with_hits
from tuner.search.serve.instances import to_instance_group
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.options import Option, Options, device_memory_bytes
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.simulation import InstanceGroup, SimulationResult, latency_of
from tuner.search.serve.solve_mode import plainest_router, simulate_traffic
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.spec import ServeSpec

FACTORS = (0.5, 1.0, 2.0)


def at_planned_rate(spec: ServeSpec, planned: ServeGoal) -> ServeSpec:
    """Return the spec at the planned rate, where the rate is the objective."""
    if planned.objective != "rate":
        return spec
    traffic = spec.goal.traffic.model_copy(update={"rate": planned.traffic.rate})
    return replace(spec, goal=spec.goal.model_copy(update={"traffic": traffic}))


def planned_groups(
    problem: ServeProblem, decision: ServeDecision
) -> tuple[InstanceGroup, ...] | None:
    """Return the priced instances of a decision; None where they cannot be found."""
    if not load_mode(decision.mode).is_routed:
        return None
    is_packed = any(transfer.link == "scale_up" for transfer in decision.handovers)
    options = (
        *problem.options.options,
        *problem.own_options.get(decision.mode, Options()).options,
    )
    groups = [_matching_group(options, group) for group in decision.instances]
    known = [replace(group, is_packed=is_packed) for group in groups if group is not None]
    return tuple(known) if len(known) == len(groups) else None


def _matching_group(options: Sequence[Option], wanted: Instances) -> InstanceGroup | None:
    """Return the priced option that matches an instance of the plan; None without one."""
    for option in options:
        if to_instance_group(option, count=wanted.count, island=wanted.island) == wanted:
            return InstanceGroup(option=option, count=wanted.count, island=wanted.island)
    return None


def simulate_planned(
    problem: ServeProblem,
    decision: ServeDecision,
    groups: Sequence[InstanceGroup],
    *,
    factor: float = 1.0,
) -> SimulationResult:
    """Simulate the planned traffic, times a factor, on instances behind the decision's router."""
    goal = problem.spec.goal
    planned_traffic = goal.traffic
    traffic = planned_traffic.model_copy(
        update={"rate": planned_traffic.rate * factor}
        if planned_traffic.rate is not None
        else {"concurrency": max(1, round((planned_traffic.concurrency or 1) * factor))}
    )
    goal = goal.model_copy(update={"traffic": traffic})
    model = problem.spec.model
    longest = min(goal.max_model_len or model.max_position, model.max_position)
    demand = build_demand(goal, longest=longest)
    if problem.hits is not None:
        demand = with_hits(demand, problem.hits)
    demand = replace(demand, hits_by_ranks=problem.demand.hits_by_ranks)
    offered = replace(problem, spec=replace(problem.spec, goal=goal), demand=demand)
    router = plainest_router(offered, decision.mode, groups)
    if decision.router is not None:
        router = replace(
            router,
            policy=decision.router.policy,
            mixed_policy=decision.router.policy,
            decode_policy=decision.router.decode_policy,
            to_ranks=decision.router.ranks is not None,
        )
    return simulate_traffic(offered, decision.mode, groups, router=router)


def batch_neighbours(
    problem: ServeProblem, plan: ServePlan
) -> Mapping[ServeDecision, ServePrediction]:
    """Return the neighbours of a plan's choice that fit, with their predictions.

    Latencies and throughput are simulated, memory and use stay those of the choice.
    """
    decision, predicted = plan.decision, plan.predicted
    groups = None if decision is None else planned_groups(problem, decision)
    if decision is None or predicted is None or groups is None:
        return {}
    near_predictions = {}
    for place, group in enumerate(groups):
        for option in _other_batches(problem, group.option):
            others = (*groups[:place], replace(group, option=option), *groups[place + 1 :])
            near = decision.model_copy(
                update={
                    "instances": tuple(
                        to_instance_group(kind.option, count=kind.count, island=kind.island)
                        for kind in others
                    )
                }
            )
            simulated = simulate_planned(problem, decision, others)
            if len(simulated.ttft_s_R) and len(simulated.tpot_s_R):
                near_predictions[near] = _prediction(
                    predicted, simulated, devices=decision.num_devices
                )
    return near_predictions


def _other_batches(problem: ServeProblem, option: Option) -> Iterator[Option]:
    for running, tokens in product(FACTORS, FACTORS):
        near = replace(
            option,
            running=max(1, round(option.running * running)),
            step_tokens=max(1, round(option.step_tokens * tokens)),
        )
        is_new = (near.running, near.step_tokens) != (option.running, option.step_tokens)
        # The engine itself raises a budget to the sequences, which decode one token each.
        holds = near.running <= near.step_tokens or option.role is Role.PREFILL
        if is_new and holds and _fits(problem, near):
            yield near


def _fits(problem: ServeProblem, option: Option) -> bool:
    demand = problem.demand.on(option.role, ranks=option.degrees.attention_data)
    return device_memory_bytes(option, demand) <= option.serving_pool.memory_bytes


def _prediction(
    planned: ServePrediction, simulated: SimulationResult, *, devices: int
) -> ServePrediction:
    ttft, tpot = latency_of(simulated.ttft_s_R), latency_of(simulated.tpot_s_R)
    bands = (
        tuple(edge_s * new.mean / old.mean if old.mean else edge_s for edge_s in band)
        for new, old, band in (
            (ttft, planned.ttft_s, planned.ttft_s_band),
            (tpot, planned.tpot_s, planned.tpot_s_band),
        )
    )
    ttft_band, tpot_band = bands
    return planned.model_copy(
        update={
            "ttft_s": ttft,
            "tpot_s": tpot,
            "ttft_s_band": ttft_band,
            "tpot_s_band": tpot_band,
            "requests_per_s": simulated.requests_per_s,
            "output_tokens_per_s": simulated.output_tokens_per_s,
            "goodput_per_device": simulated.requests_per_s * simulated.met_ratio / devices,
        }
    )
