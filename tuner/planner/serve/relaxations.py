"""Where nothing meets the targets: what binds, the closest plan, and what each way out buys.

The closest plan serves the most requests a second of all pools within the targets: instances by the
integer program with the rate as its objective, then their traffic played at less and less of it, by
bisection, until every target holds. Every other way out changes one thing and is solved anew. Only
modes that the release launches count.

Where pools are not joined, links of 400 Gbit/s between all of them are tried: if they alone make
the traffic fit, they are what binds.

Not covered: two things given up at once; thresholds of offloaded prompts in the closest plan.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Final

from tuner.planner.serve.islands import island_layouts
from tuner.planner.serve.modes import Answers, modes_of
from tuner.planner.serve.most_rate import answer_goal
from tuner.planner.serve.preference import ranked
from tuner.planner.serve.program import program_of, solve
from tuner.planner.serve.solve_mode import (
    PRICED,
    Found,
    Question,
    at_share,
    groups_of,
    least_spare,
    play,
    question_of,
    router_for,
    variants_of,
)
from tuner.planner.serve.to_plan import decision_of, missed_with, refusals_of
from tuner.serve_plan import ServeDecision, ServeRelaxation
from tuner.spec.cluster import Link, Pool
from tuner.spec.serving.goal import Mode, Percentiles, ServeGoal, Slo
from tuner.spec.serving.lengths import LengthLaw
from tuner.spec.serving.manifests.registry import main_release, modes_on
from tuner.spec.serving.read import ServeSpec
from tuner.units import format_s

LINK_BYTES_PER_S: Final = 50e9
LINK_LATENCY_S: Final = 10e-6
"""Of a link that is tried where pools have none: one 400 Gbit/s card on one switch."""
RATE_STEPS: Final = 7
"""Halvings of the interval in which the closest plan's rate lies."""
LADDER_RATIOS: Final = (0.05, 0.1, 0.2, 0.5)
"""More time that each target is given, the least that helps."""
MORE_TIME: Final = MappingProxyType({2.0: "twice", 4.0: "four times", 8.0: "eight times"})
"""For all targets at once, the least that helps."""
WITHOUT_TARGET: Final = 1e3
"""So much more is no target."""
ROOM_RATIOS: Final = (1.5, 3.0, 6.0, 12.0)
"""Target over the time of a request alone, tried in turn where the target lies below that time:
room for a batch and for waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """Instances that meet every target at less traffic."""

    decision: ServeDecision
    requests_per_s: float
    change: str
    """In traffic."""


def launchable_modes(question: Question) -> tuple[Mode, ...]:
    """Return the modes that are asked for and that the release of a pool has."""
    known = modes_on(question.spec.goal, question.spec.cluster)
    return tuple(mode for mode in modes_of(question) if mode in known)


def why_nothing(question: Question, answers: Answers, closest: Closest | None) -> str:
    """Name the target that binds, with the closest plan where there is one."""
    binding = _binding(question, answers)
    if closest is None:
        return binding
    return (
        f"{binding}; the closest plan serves {floored(closest.requests_per_s)} requests/s on"
        f" {closest.decision.num_devices} devices"
    )


def _binding(question: Question, answers: Answers) -> str:
    options, demand = question.options, question.demand
    if options.slowest_tpot_s == float("inf"):
        return (
            f"memory: no way to split {question.spec.model.name} leaves room for one request of"
            f" {demand.longest_input + demand.longest_output} tokens"
        )
    if options.slowest_tpot_s > demand.tpot_s:
        return f"tpot: one request alone takes {options.slowest_tpot_s * 1e3:.3g} ms a token"
    if options.slowest_ttft_s > demand.ttft_s:
        return f"ttft: one prompt alone takes {options.slowest_ttft_s * 1e3:.4g} ms"
    launched = launchable_modes(question)
    found = [one for one in answers.found if one.mode in launched]
    missed = [one for one in found if one.missed]
    if missed:
        return missed_with(missed[0])
    return _refused(question, answers, launched) or _exhausted(question)


def _refused(question: Question, answers: Answers, launched: tuple[Mode, ...]) -> str:
    """Say where the engine's release is what stands in the way; empty: it does not."""
    if not launched:
        engine = main_release(question.spec.goal, question.spec.cluster)
        return (
            f"release: {engine.name} {engine.release} launches none of the modes asked for"
            f" ({', '.join(modes_of(question))}), but {', '.join(sorted(engine.modes))}"
        )
    found = [one for one in answers.found if one.mode in launched]
    if found:
        return f"release: {answers.refused[found[0].mode][0]}"
    roles = {role for mode in launched for role in PRICED[mode]} & set(question.refused)
    if roles and all(any(role in roles for role in PRICED[mode]) for mode in launched):
        return f"release: {question.refused[min(roles)]}"
    return ""


def _exhausted(question: Question) -> str:
    """Say what keeps the pools from serving the traffic: links, a target, or their devices."""
    demand = question.demand
    if question.spec.goal.objective == "rate":
        return "devices: the pools hold no instances that serve a request within the targets"
    if _joined_would_do(question):
        return "link: no link joins the pools, and no pool alone serves the traffic"
    told = f"{demand.rate_per_s:.3g} requests/s are more than all pools serve"
    for name, target_s in (("tpot", demand.tpot_s), ("ttft", demand.ttft_s)):
        if target_s < float("inf"):
            free = _moved(question, name, WITHOUT_TARGET)
            if free is not None:
                return f"{name}: {told} within it; without it {free.num_devices} devices do"
    return f"devices: {told}"


def _joined_would_do(question: Question) -> bool:
    """Whether links between all pools would make the traffic fit."""
    spec = _with_links(question.spec)
    return spec is not None and _solved(spec, question) is not None


def _with_links(spec: ServeSpec) -> ServeSpec | None:
    """Join the pools that have no link, or a slower one; None where there is nothing to join."""
    pairs = list(combinations((pool.name for pool in spec.cluster.pools), 2))
    known = {frozenset(link.between): link for link in spec.cluster.links}
    links = []
    for pair in pairs:
        link = known.get(frozenset(pair))
        if link is None or link.bandwidth < LINK_BYTES_PER_S:
            link = Link(between=pair, bandwidth=LINK_BYTES_PER_S, latency=LINK_LATENCY_S)
        links.append(link)
    if set(links) == set(spec.cluster.links):
        return None
    return replace(spec, cluster=spec.cluster.model_copy(update={"links": tuple(links)}))


def closest_of(question: Question) -> Closest | None:
    """Return the plan that serves the most within the targets; None where none serves anything.

    Once the time limit has passed, what is known is not improved: no further mode is tried where
    one serves, and no further share of the traffic.
    """
    settings = question.settings
    end_s, found = settings.clock() + settings.time_limit_s, list[Closest]()
    for mode in launchable_modes(question):
        for variant in variants_of(question, mode) if mode != "prefill_offload" else ():
            for islands in island_layouts(question.spec, mode):
                if found and settings.clock() > end_s:
                    break
                one = _closest_in(variant, mode, islands, end_s=end_s)
                found += [one] if one else []
    return max(found, key=lambda one: one.requests_per_s, default=None)


def _closest_in(
    question: Question, mode: Mode, islands: Mapping[str, str], *, end_s: float
) -> Closest | None:
    spare_ratio, spare = question.spec.goal.spare_ratio, least_spare(question)
    program = program_of(
        mode,
        question.options.options,
        sites=question.sites,
        hand_overs=question.hand_overs,
        demand=question.demand,
        spare=spare,
        most_rate=True,
        islands=islands,
    )
    if program is None:
        return None
    solved = solve(program, time_limit_s=question.settings.time_limit_s / 4.0)
    plan = solved.outcome.solution
    if plan is None:
        return None
    groups = groups_of(solved)
    most = min(plan.rate_per_s / (1.0 + spare_ratio) / question.demand.rate_per_s, 1.0)
    low, high, best = 0.0, most, None
    for _ in range(RATE_STEPS):
        if best is not None and question.settings.clock() > end_s:
            break
        share = 0.5 * (low + high)
        less = at_share(question, share)
        played = play(less, mode, groups)
        if played.missed(question.spec.goal.slo):
            high = share
            continue
        low, best = share, (less, played)
    if best is None:
        return None
    less, played = best
    one = Found(
        solved=solved,
        groups=groups,
        played=played,
        spare=spare,
        missed=(),
        router=router_for(question, mode, groups),
    )
    if refusals_of(one, question):
        return None
    return Closest(
        decision=decision_of(one, question),
        requests_per_s=played.requests_per_s,
        change=_traffic_words(less, question),
    )


def _traffic_words(less: Question, question: Question) -> str:
    if less.demand.concurrency is not None:
        return (
            f"{less.demand.concurrency} requests at a time in place of"
            f" {question.demand.concurrency}"
        )
    return (
        f"{floored(less.demand.rate_per_s)} requests/s in place of {question.demand.rate_per_s:.3g}"
    )


def floored(rate_per_s: float) -> str:
    """Print a rate in three digits, rounded down: what is printed is served."""
    digits = 2 - math.floor(math.log10(rate_per_s))
    return f"{math.floor(rate_per_s * 10.0**digits) / 10.0**digits:.{max(digits, 0)}f}"


def ways_out(question: Question, closest: Closest | None) -> Iterator[ServeRelaxation]:
    """Solve again with one thing given up, and keep what then fits."""
    if closest is not None:
        yield ServeRelaxation(limit="rate", change=closest.change, decision=closest.decision)
    yield from _a_little_more(question)
    for limit, change, spec in _changes(question):
        decision = _solved(spec, question)
        if decision is not None:
            yield ServeRelaxation(limit=limit, change=change, decision=decision)
    for change, spec in _reachable(question):
        decision = _solved(spec, question)
        if decision is not None:
            yield ServeRelaxation(limit="slo", change=change, decision=decision)
            return
    for ratio, words in MORE_TIME.items():
        decision = _solved(_with_slo(question.spec, ttft=ratio, tpot=ratio), question)
        if decision is not None:
            change = f"{words} the time for every target"
            yield ServeRelaxation(limit="slo", change=change, decision=decision)
            return


def _a_little_more(question: Question) -> Iterator[ServeRelaxation]:
    """Move each target by as little of the ladder as makes the traffic fit."""
    demand, times = question.demand, {"ttft": "to the first token", "tpot": "per token"}
    for name, words in times.items():
        if {"ttft": demand.ttft_s, "tpot": demand.tpot_s}[name] == float("inf"):
            continue
        if _moved(question, name, LADDER_RATIOS[-1]) is None:
            continue
        for ratio in LADDER_RATIOS:
            decision = _moved(question, name, ratio)
            if decision is not None:
                change = f"{ratio:.0%} more time {words}".replace("%", " %")
                yield ServeRelaxation(limit=name, change=change, decision=decision)
                break


def _moved(question: Question, name: str, ratio: float) -> ServeDecision | None:
    factor = {"ttft": 1.0, "tpot": 1.0, name: 1.0 + ratio}
    spec = _with_slo(question.spec, ttft=factor["ttft"], tpot=factor["tpot"])
    return _solved(spec, question)


def _solved(spec: ServeSpec, question: Question) -> ServeDecision | None:
    sites = tuple(
        replace(site, pool=pool)
        for site, pool in zip(question.sites, spec.cluster.pools, strict=True)
    )
    other = question_of(spec, sites, question.settings, hits=question.hits)
    found = [
        one
        for mode in launchable_modes(other)
        if (one := answer_goal(other, mode)) and not one.missed and not refusals_of(one, other)
    ]
    best = ranked(found, other)
    return decision_of(best[0], other) if best else None


def _changes(question: Question) -> Iterator[tuple[str, str, ServeSpec]]:
    """Say what is given up, one thing at a time, as limit, words and spec."""
    spec, goal = question.spec, question.spec.goal
    for pool in spec.cluster.pools:
        more = pool.model_copy(update={"nodes": pool.nodes + 1})
        yield "nodes", f"one more node of {pool.name}", _with_pools(spec, {pool.name: more})
    joined = _with_links(spec)
    if joined is not None:
        yield "link", "links of 400 Gbit/s between all pools", joined
    twice = {
        pool.name: pool.model_copy(update={"nodes": 2 * pool.nodes}) for pool in spec.cluster.pools
    }
    if sum(pool.nodes for pool in spec.cluster.pools) > 1:  # else that is one more node
        yield "nodes", "twice the nodes of every pool", _with_pools(spec, twice)
    if goal.traffic.trace is None:
        yield "context", "prompts and answers half as long", replace(spec, goal=_halved(goal))


def _reachable(question: Question) -> Iterator[tuple[str, ServeSpec]]:
    """Move targets that one request alone misses, further each time, as words and spec."""
    options, demand = question.options, question.demand
    beyond = {
        name: (alone_s, target_s)
        for name, alone_s, target_s in (
            ("ttft", options.slowest_ttft_s, demand.ttft_s),
            ("tpot", options.slowest_tpot_s, demand.tpot_s),
        )
        if target_s < alone_s < float("inf")
    }
    if not beyond:
        return
    for room in ROOM_RATIOS:
        words = " and ".join(
            f"a {name} of {format_s(room * alone_s)}" for name, (alone_s, _) in beyond.items()
        )
        factor = {name: room * alone_s / target_s for name, (alone_s, target_s) in beyond.items()}
        yield (
            words,
            _with_slo(question.spec, ttft=factor.get("ttft", 1.0), tpot=factor.get("tpot", 1.0)),
        )


def _with_pools(spec: ServeSpec, changed: dict[str, Pool]) -> ServeSpec:
    pools = tuple(changed.get(pool.name, pool) for pool in spec.cluster.pools)
    return replace(spec, cluster=spec.cluster.model_copy(update={"pools": pools}))


def _with_slo(spec: ServeSpec, *, ttft: float, tpot: float) -> ServeSpec:
    slo = Slo(ttft=_scaled(spec.goal.slo.ttft, ttft), tpot=_scaled(spec.goal.slo.tpot, tpot))
    return replace(spec, goal=spec.goal.model_copy(update={"slo": slo}))


def _scaled(targets: Percentiles, factor: float) -> Percentiles:
    stated = {kind: getattr(targets, kind) for kind in ("mean", "p50", "p90", "p99")}
    return targets.model_copy(
        update={kind: factor * limit for kind, limit in stated.items() if limit is not None}
    )


def _halved(goal: ServeGoal) -> ServeGoal:
    traffic = goal.traffic
    laws = {
        name: None if (law := getattr(traffic, name)) is None else _half(law)
        for name in ("input_tokens", "output_tokens")
    }
    return goal.model_copy(update={"traffic": traffic.model_copy(update=laws)})


def _half(law: LengthLaw) -> LengthLaw:
    whole = {name: value for name in ("low", "high") if (value := getattr(law, name)) is not None}
    changes: dict[str, object] = {name: max(1, value // 2) for name, value in whole.items()}
    changes["most"] = max(1, law.most // 2)
    if law.mean is not None:
        changes["mean"] = max(1.0, 0.5 * law.mean)
    if law.values is not None:
        changes["values"] = tuple(max(1, value // 2) for value in law.values)
    return law.model_copy(update=changes)
