"""Relaxations of targets that nothing meets: what binds, the closest plan, what each change buys.

The closest plan serves the most requests a second of all pools within the targets: what the goal
`objective: rate` finds (most_rate.py). Every other relaxation changes one thing and is solved anew.
Only modes that the release launches count.

Where pools have no links, links of 400 Gbit/s between all of them are tried: if these make the
traffic fit, the link is what binds.

Not covered: two relaxations at once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from types import MappingProxyType
from typing import Final

from tuner.config.serve import Role, ServeDecision
from tuner.plans.serve import ServeRelaxation
from tuner.search.change import Change, first_solution
from tuner.search.serve.causes import most_of_pools, rate_of
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.most_rate import at_rate, at_stated_rate, solve_goal
from tuner.search.serve.preference import rank_solutions
from tuner.search.serve.problem import ModeSolution, ModeSolutions, ServeProblem
from tuner.search.serve.program import BOUND_TOLERANCE
from tuner.search.serve.solve_mode import (
    build_serve_problem,
)
from tuner.search.serve.to_plan import describe_missed, solution_refusals, to_decision
from tuner.spec.cluster import Link
from tuner.spec.serving.goal import Mode, Percentiles, Slo
from tuner.spec.serving.lengths import LengthLaw
from tuner.spec.serving.spec import ServeSpec
from tuner.units import format_ratio, format_s

LINK_BYTES_PER_S: Final = 50e9
LINK_LATENCY_S: Final = 10e-6
"""Seconds of latency of a link that is tried where pools have none: one 400 Gbit/s NIC on one
switch."""
LADDER_RATIOS: Final = (0.05, 0.1, 0.2, 0.5)
"""Additional shares of time that each target is given in turn, until one helps."""
MORE_TIME: Final = MappingProxyType({2.0: "twice", 4.0: "four times", 8.0: "eight times"})
"""Multiples of all targets at once that are tried in turn, until one helps."""
WITHOUT_TARGET: Final = 1e3
"""Additional share of time with which a target is none."""
ROOM_RATIOS: Final = (1.5, 3.0, 6.0, 12.0)
"""Target over the latency of a single request, tried in turn where the target lies below it: room
for a batch and for queueing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """Instances that meet every target at less traffic."""

    decision: ServeDecision
    requests_per_s: float
    change: str
    """Change of the traffic, in words."""
    solution: ModeSolution
    """Instances, simulated at that rate."""


def explain_infeasible(
    problem: ServeProblem, solutions: ModeSolutions, closest: Closest | None
) -> str:
    """Name the target that binds, with the closest plan where there is one."""
    binding = _binding(problem, solutions)
    if closest is None:
        return binding
    return (
        f"{binding}; the closest plan serves {floored(closest.requests_per_s)} requests/s on"
        f" {closest.decision.num_devices} devices"
    )


def _binding(problem: ServeProblem, solutions: ModeSolutions) -> str:
    options, demand = problem.options, problem.demand
    if options.slowest_tpot_s == float("inf"):
        return (
            f"memory: no parallel layout of {problem.spec.model.name} leaves room for one request"
            f" of {demand.longest_input + demand.longest_output} tokens"
        )
    if options.slowest_tpot_s > demand.tpot_s:
        return f"tpot: a single request takes {options.slowest_tpot_s * 1e3:.3g} ms a token"
    if options.slowest_ttft_s > demand.ttft_s:
        return f"ttft: a single prompt takes {options.slowest_ttft_s * 1e3:.4g} ms"
    launched = problem.launchable_modes
    candidates = [solution for solution in solutions.serving if solution.mode in launched]
    missed = [solution for solution in candidates if solution.missed]
    if missed:
        return describe_missed(missed[0], problem)
    return _refused(problem, solutions, launched) or _exhausted(problem)


def _refused(problem: ServeProblem, solutions: ModeSolutions, launched: tuple[Mode, ...]) -> str:
    """Say where the engine's release is the reason; empty: it does not."""
    if not launched:
        engine = problem.spec.main_release
        return (
            f"release: {engine.name} {engine.release} launches none of the requested modes"
            f" ({', '.join(problem.modes)}), but {', '.join(sorted(engine.modes))}"
        )
    candidates = [solution for solution in solutions.serving if solution.mode in launched]
    if candidates:
        return f"release: {solutions.refused[candidates[0].mode][0]}"
    refused = problem.options.refused
    without = [refused.keys() & load_mode(mode).priced_roles for mode in launched]
    if all(without):
        return f"release: {refused[min(set[Role]().union(*without))]}"
    return ""


def _exhausted(problem: ServeProblem) -> str:
    """Say what keeps the pools from serving the traffic: links, a target, or their devices."""
    demand = problem.demand
    if problem.spec.goal.objective == "rate":
        return "devices: the pools hold no instances that serve a request within the targets"
    if _joined_would_do(problem):
        return "link: no link joins the pools, and no single pool serves the traffic"
    text = f"{demand.rate_per_s:.3g} requests/s are more than all pools serve"
    for name, target_s in (("tpot", demand.tpot_s), ("ttft", demand.ttft_s)):
        if target_s < float("inf"):
            free = _solved(_with_slo(problem.spec, {name: 1.0 + WITHOUT_TARGET}), problem)
            if free is not None:
                return f"{name}: {text} within it; without it {free.num_devices} devices do"
    return f"devices: {text}"


def _joined_would_do(problem: ServeProblem) -> bool:
    """Return whether links between all pools would make the traffic fit."""
    spec = _with_links(problem.spec)
    return spec is not problem.spec and _solved(spec, problem) is not None


def _with_links(spec: ServeSpec) -> ServeSpec:
    """Join the pools that have no link, or a slower one; the same spec where there are none."""
    pairs = list(combinations((pool.name for pool in spec.cluster.pools), 2))
    known = {frozenset(link.between): link for link in spec.cluster.links}
    links = []
    for pair in pairs:
        link = known.get(frozenset(pair))
        if link is None or link.bandwidth < LINK_BYTES_PER_S:
            link = Link(between=pair, bandwidth=LINK_BYTES_PER_S, latency=LINK_LATENCY_S)
        links.append(link)
    if set(links) == set(spec.cluster.links):
        return spec
    return replace(spec, cluster=spec.cluster.model_copy(update={"links": tuple(links)}))


def at_held_rate(problem: ServeProblem) -> ServeProblem:
    """Return the problem with no more requests a second than its pools hold."""
    rates = [
        rate_of(solved, problem)
        for mode in problem.launchable_modes
        for solved in most_of_pools(problem, mode)
    ]
    most_rate_per_s = (1.0 - BOUND_TOLERANCE) * max(rates, default=math.inf)
    demand = problem.demand
    return replace(
        problem, demand=replace(demand, rate_per_s=min(demand.rate_per_s, most_rate_per_s))
    )


def find_closest(problem: ServeProblem) -> Closest | None:
    """Return the plan that serves the most within the targets; None where none serves anything.

    It is what `objective: rate` finds. Once the time limit has passed no further mode is tried
    where one serves.
    """
    settings, goal = problem.settings, problem.spec.goal.model_copy(update={"objective": "rate"})
    spec = replace(problem.spec, goal=goal)
    # A program takes its objective from the spec of the KV transfers.
    kv_transfers = replace(problem.kv_transfers, spec=spec)
    rate_problem = replace(problem, spec=spec, kv_transfers=kv_transfers)
    end_s, candidates = settings.clock() + settings.time_limit_s, list[ModeSolution]()
    for mode in rate_problem.launchable_modes:
        if candidates and settings.clock() > end_s:
            break
        solution = solve_goal(rate_problem, mode)
        if (
            solution is not None
            and solution.rate_per_s is not None
            and not solution_refusals(solution, rate_problem)
        ):
            candidates.append(solution)
    if not candidates:
        return None
    best = rank_solutions(candidates, rate_problem)[0]
    less = at_rate(problem, best.rate_per_s or 0.0)
    return Closest(
        decision=to_decision(best, problem),
        requests_per_s=best.simulated.requests_per_s,
        change=_traffic_words(less, problem),
        solution=best,
    )


def held_after_all(
    problem: ServeProblem, solutions: ModeSolutions, closest: Closest | None
) -> ModeSolutions:
    """Return the solutions with the closest plan as the chosen one where it holds the rate."""
    stated = None if closest is None else solutions.of(closest.solution.mode)
    if closest is None or stated is None:
        return solutions
    chosen = at_stated_rate(closest.solution, problem, stated=stated)
    if chosen is None or solutions.refused[chosen.mode]:
        return solutions
    serving = tuple(chosen if solution is stated else solution for solution in solutions.serving)
    return replace(solutions, serving=serving, fitting=(chosen,))


def _traffic_words(less: ServeProblem, problem: ServeProblem) -> str:
    if less.demand.concurrency is not None:
        return (
            f"{less.demand.concurrency} requests at a time in place of {problem.demand.concurrency}"
        )
    return (
        f"{floored(less.demand.rate_per_s)} requests/s in place of {problem.demand.rate_per_s:.3g}"
    )


def floored(rate_per_s: float) -> str:
    """Print a rate in three digits, rounded down: what is printed is served."""
    digits = 2 - math.floor(math.log10(rate_per_s))
    return f"{math.floor(rate_per_s * 10.0**digits) / 10.0**digits:.{max(digits, 0)}f}"


def solve_relaxations(problem: ServeProblem, closest: Closest | None) -> Iterator[ServeRelaxation]:
    """Solve again with one constraint relaxed, and yield what then fits."""

    def solve(change: Change[ServeSpec]) -> ServeRelaxation | None:
        decision = _solved(change.apply(problem.spec), problem)
        if decision is None:
            return None
        return ServeRelaxation(limit=change.limit, change=change.words, decision=decision)

    if closest is not None:
        yield ServeRelaxation(limit="rate", change=closest.change, decision=closest.decision)
    slightly = (ladder for ladder in _slightly_more_time(problem) if solve(ladder[-1]))
    single = ([change] for change in _changes(problem.spec))
    multiples = (
        Change(
            limit="slo",
            words=f"{words} the time for every target",
            apply=partial(_with_slo, factors={"ttft": ratio, "tpot": ratio}),
        )
        for ratio, words in MORE_TIME.items()
    )
    ladders = chain(slightly, single, [chain(_reachable(problem), multiples)])
    yield from filter(None, (first_solution(ladder, solve) for ladder in ladders))


def _slightly_more_time(problem: ServeProblem) -> Iterator[list[Change[ServeSpec]]]:
    """Yield the steps by which each target is relaxed."""
    demand = problem.demand
    for name, target_s, words in (
        ("ttft", demand.ttft_s, "to the first token"),
        ("tpot", demand.tpot_s, "per token"),
    ):
        if target_s < float("inf"):
            yield [
                Change(
                    limit=name,
                    words=f"{format_ratio(ratio, digits=0)} more time {words}",
                    apply=partial(_with_slo, factors={name: 1.0 + ratio}),
                )
                for ratio in LADDER_RATIOS
            ]


def _solved(spec: ServeSpec, problem: ServeProblem) -> ServeDecision | None:
    serving_pools = tuple(
        replace(serving_pool, pool=pool)
        for serving_pool, pool in zip(problem.serving_pools, spec.cluster.pools, strict=True)
    )
    relaxed = build_serve_problem(
        spec,
        serving_pools,
        problem.settings,
        hits=problem.hits,
        hits_by_ranks=problem.demand.hits_by_ranks,
    )
    candidates = [
        solution
        for mode in relaxed.launchable_modes
        if (solution := solve_goal(relaxed, mode))
        and not solution.missed
        and not solution_refusals(solution, relaxed)
    ]
    best = rank_solutions(candidates, relaxed)
    return to_decision(best[0], relaxed) if best else None


def _changes(spec: ServeSpec) -> Iterator[Change[ServeSpec]]:
    """Yield one relaxed constraint at a time."""
    nodes = {pool.name: pool.nodes for pool in spec.cluster.pools}
    for name, before in nodes.items():
        more = partial(_with_nodes, nodes={name: before + 1})
        yield Change(limit="nodes", words=f"one more node of {name}", apply=more)
    if _with_links(spec) is not spec:
        words = "links of 400 Gbit/s between all pools"
        yield Change(limit="link", words=words, apply=_with_links)
    if sum(nodes.values()) > 1:  # else that is one more node
        twice = partial(_with_nodes, nodes={name: 2 * before for name, before in nodes.items()})
        yield Change(limit="nodes", words="twice the nodes of every pool", apply=twice)
    if spec.goal.traffic.trace is None:
        words = "prompts and outputs half as long"
        yield Change(limit="context", words=words, apply=_with_half_the_lengths)


def _reachable(problem: ServeProblem) -> Iterator[Change[ServeSpec]]:
    """Relax targets that a single request misses, further each time."""
    options, demand = problem.options, problem.demand
    beyond = {
        name: (isolated_s, target_s)
        for name, isolated_s, target_s in (
            ("ttft", options.slowest_ttft_s, demand.ttft_s),
            ("tpot", options.slowest_tpot_s, demand.tpot_s),
        )
        if target_s < isolated_s < float("inf")
    }
    for room in ROOM_RATIOS if beyond else ():
        words = (
            f"a {name} of {format_s(room * isolated_s)}" for name, (isolated_s, _) in beyond.items()
        )
        factors = {
            name: room * isolated_s / target_s for name, (isolated_s, target_s) in beyond.items()
        }
        yield Change(
            limit="slo", words=" and ".join(words), apply=partial(_with_slo, factors=factors)
        )


def _with_nodes(spec: ServeSpec, nodes: Mapping[str, int]) -> ServeSpec:
    pools = tuple(
        pool.model_copy(update={"nodes": nodes.get(pool.name, pool.nodes)})
        for pool in spec.cluster.pools
    )
    return replace(spec, cluster=spec.cluster.model_copy(update={"pools": pools}))


def _with_slo(spec: ServeSpec, factors: Mapping[str, float]) -> ServeSpec:
    """Multiply the times of the targets, by name."""
    before = spec.goal.slo
    slo = Slo(
        ttft=_scaled(before.ttft, factors.get("ttft", 1.0)),
        tpot=_scaled(before.tpot, factors.get("tpot", 1.0)),
    )
    return replace(spec, goal=spec.goal.model_copy(update={"slo": slo}))


def _scaled(targets: Percentiles, factor: float) -> Percentiles:
    stated = {kind: getattr(targets, kind) for kind in ("mean", "p50", "p90", "p99")}
    return targets.model_copy(
        update={kind: factor * limit for kind, limit in stated.items() if limit is not None}
    )


def _with_half_the_lengths(spec: ServeSpec) -> ServeSpec:
    traffic = spec.goal.traffic
    laws = {
        name: None if (law := getattr(traffic, name)) is None else _half(law)
        for name in ("input_tokens", "output_tokens")
    }
    traffic = traffic.model_copy(update=laws)
    return replace(spec, goal=spec.goal.model_copy(update={"traffic": traffic}))


def _half(law: LengthLaw) -> LengthLaw:
    whole = {name: value for name in ("low", "high") if (value := getattr(law, name)) is not None}
    changes: dict[str, object] = {name: max(1, value // 2) for name, value in whole.items()}
    changes["most"] = max(1, law.most // 2)
    if law.mean is not None:
        changes["mean"] = max(1.0, 0.5 * law.mean)
    if law.values is not None:
        changes["values"] = tuple(max(1, value // 2) for value in law.values)
    return law.model_copy(update=changes)
