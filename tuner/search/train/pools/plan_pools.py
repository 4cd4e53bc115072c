"""Plan of a spec with several pools: over several of them, or over the best single one.

Chains over pools and the best decisions of each single pool, which may use interleaved schedules,
are ranked together by wall clock per step, including failures and the expected cost of running out
of memory (ranking.py): more pools have more devices that fail. If a single pool is as good,
the plan uses that pool alone. The search itself ranks by step time, so no bound covers failures.

Where the plan may run out of memory it names the fastest decision with headroom, on whichever
pools.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tuner.costs.train.calibration import Residuals
from tuner.costs.train.measured_profile import MeasuredProfile
from tuner.plans.train import (
    Band,
    Certificate,
    Plan,
    Preference,
    Provenance,
    Relaxation,
    Roomier,
    TrainPrediction,
)
from tuner.search.layout_groups import by_layout, layout_of, num_runners_up
from tuner.search.progress import PlanningEvent
from tuner.search.ratios import is_tie
from tuner.search.settings import SearchSettings
from tuner.search.to_plan import to_alternative, to_plan, with_notes, without_decision
from tuner.search.train.extrapolation import extrapolated_by_search, with_extrapolation_notes
from tuner.search.train.memory_risk import LIKELY, SMALL, loss_prices
from tuner.search.train.plan_fields import refuse_impossible_checkpoints
from tuner.search.train.pools.build_problem import PoolsProblem, build_pools_problem
from tuner.search.train.pools.ranking import (
    PoolsDecision,
    PricedRisk,
    Ranking,
    decision_with_headroom,
    fastest_chain,
    is_over_several,
    price_risks,
    rank_decisions,
)
from tuner.search.train.pools.relaxations import (
    headroom_relaxations,
    infeasibility_reason,
    relaxations,
)
from tuner.search.train.pools.search import PoolsSearchOutcome, search
from tuner.search.train.pools.single_pool import (
    SinglePoolDecision,
    plan_single_pool,
    search_single_pools,
    to_single_pool_baselines,
)
from tuner.search.train.pools.to_plan import (
    SimulatedChain,
    chain_memory_risk,
    effective_step_s,
    rank_at_risk,
    to_decision,
    to_placement,
    to_prediction,
)
from tuner.search.train.preference import (
    LESS_EXPECTED,
    is_excluded,
    less_chance_words,
    memory_step,
)
from tuner.search.train.regimes import priced_release
from tuner.spec.spec import Spec
from tuner.units import format_ratio, format_s


def plan_over_pools(
    spec: Spec,
    *,
    residuals: Residuals | None,
    settings: SearchSettings,
    provenance: Provenance,
    measured: Mapping[str, MeasuredProfile] | None = None,
) -> Plan:
    """Plan a training run over heterogeneous pools.

    Args:
        spec: with `device` on every pool and links between them.
        residuals: corrections and bands; None prices with the generic constants.
        settings: of the search; the time limit applies to chains over pools, again to all single
            pools together, and again to all relaxations together.
        provenance: inputs of the plan.
        measured: profiles of pools, by name; the others are planned on datasheets.

    Returns:
        A plan over several pools or a single one, with its placement; `cluster` holds what it uses.

    Raises:
        SpecError: the spec asks for what no device or target can do, or leaves a pool unjoined.
        UnknownDeviceError: a device has no description.
    """
    problem = build_pools_problem(spec, residuals=residuals, measured=measured or {})
    names = ", ".join(pool.name for pool in spec.cluster.pools)
    settings.watch(PlanningEvent(stage="search", text=f"chains of stages over {names}"))
    outcome = search(problem, settings)
    problem = problem.with_extrapolation()
    outcome = replace(outcome, problem=problem)
    settings.watch(PlanningEvent(stage="pools", text=f"each of {names} by itself"))
    single_pools = search_single_pools(problem, settings)
    ranking = rank_decisions(outcome, settings, single_pools=single_pools)
    best = ranking.best
    if best is not None and len(used_pools(best)) == 1:
        provenance = with_notes(provenance, (_single_pool_note(ranking, best, problem),))
    if isinstance(best, SinglePoolDecision):
        plan = plan_single_pool(problem, best.index, settings=settings, provenance=provenance)
        plan = with_headroom_on_other_pools(plan, ranking, outcome)
    else:
        plan = _plan_chains(spec, outcome, ranking, provenance, settings=settings)
    if plan.placement is None:
        return plan
    placement = plan.placement.model_copy(
        update={"alone": to_single_pool_baselines(single_pools, plan)}
    )
    return plan.model_copy(update={"placement": placement})


def _single_pool_note(ranking: Ranking, best: PoolsDecision, problem: PoolsProblem) -> str:
    (used,) = used_pools(best)
    together = next(filter(is_over_several, ranking.chains), None)
    reason = "no stages over several pools fit or are near as fast"
    if together is not None:
        reason = f"over all pools a step takes {format_s(together.objective_s)}"
        lasting_s = effective_step_s(together.chain, problem, step_s=together.objective_s)
        if lasting_s > together.objective_s:
            reason += f", {format_s(lasting_s)} of wall clock with failures"
        chance = ranking.risks[together].chance
        if chance > SMALL:
            reason += f", with a {format_ratio(chance)} chance of running out of memory"
    reason += "".join(
        f"; pool {problem.cluster.pools[decision.index].name!r} alone takes "
        f"{format_s(decision.objective_s)}, with a "
        f"{format_ratio(ranking.risks[decision].chance)} chance of running out of memory"
        for decision in ranking.order
        if isinstance(decision, SinglePoolDecision)
        and decision.index != used
        and decision.objective_s < best.objective_s
        and ranking.risks[decision].chance > SMALL
    )
    return f"only pool {problem.cluster.pools[used].name!r} is used; {reason}"


def _plan_chains(
    spec: Spec,
    outcome: PoolsSearchOutcome,
    ranking: Ranking,
    provenance: Provenance,
    *,
    settings: SearchSettings,
) -> Plan:
    problem, options, order = outcome.problem, outcome.space.options, ranking.chains
    note = priced_release(spec.programs, spec.goal.engine, problem.priced_pools[0].residuals).note
    notes = tuple(filter(None, dict.fromkeys((note, *problem.widenings))))
    if notes:
        provenance = with_notes(provenance, notes)
    certificate = to_certificate(outcome, order)
    provenance = _with_profile_notes(provenance, problem)
    if not order:
        settings.watch(
            PlanningEvent(stage="relaxations", text="nothing fits; searching for what would")
        )
        return without_decision(
            spec,
            certificate=certificate,
            provenance=provenance,
            reason=infeasibility_reason(outcome),
            relaxations=relaxations(outcome, settings),
        )
    best, *others = order
    predicted = to_prediction(best, problem)
    refuse_impossible_checkpoints(spec.goal, predicted)
    decision = to_decision(best.chain, problem, options)
    relaxed: tuple[Relaxation, ...] = ()
    if ranking.risks[best].chance > LIKELY:
        settings.watch(PlanningEvent(stage="relaxations", text="searching for headroom"))
        relaxed = headroom_relaxations(outcome, settings, full=best)
    layouts = [layout_of(to_decision(simulated.chain, problem, options)) for simulated in order]
    return to_plan(
        spec,
        certificate=certificate,
        provenance=provenance,
        decision=decision,
        predicted=predicted,
        binding_constraint=_bottleneck(best, problem),
        preferred=to_preference(outcome, order, ranking.risks),
        **headroom_fields(ranking, outcome, best, predicted),
        relaxations=relaxed,
        **by_layout(
            decision,
            [
                to_alternative(
                    to_decision(simulated.chain, problem, options),
                    to_prediction(simulated, problem),
                    chosen=predicted,
                    band=ratio_band(outcome, best, simulated),
                )
                for simulated in others[: num_runners_up(layouts, top=settings.top)]
            ],
        ),
        placement=to_placement(best.chain, problem),
    )


def _with_profile_notes(provenance: Provenance, problem: PoolsProblem) -> Provenance:
    """Add, for every measured pool, what its profile lacks and what was extrapolated."""
    for pool, pool_problem in zip(problem.cluster.pools, problem.by_pool, strict=True):
        before = len(provenance.notes)
        provenance = with_extrapolation_notes(provenance, pool_problem, None)
        provenance = provenance.model_copy(
            update={
                "notes": (
                    *provenance.notes[:before],
                    *(f"pool {pool.name!r}: {note}" for note in provenance.notes[before:]),
                ),
                "extrapolated": (
                    *provenance.extrapolated,
                    *(
                        f"pool {pool.name!r}: {name}"
                        for name in extrapolated_by_search(pool_problem)
                    ),
                ),
            }
        )
    return provenance


def _bottleneck(best: SimulatedChain, problem: PoolsProblem) -> str:
    """Name the bottleneck: the slowest stage, or the slowest link between stages."""
    price, pools = best.chain.price, problem.cluster.pools
    seconds = [f + b for f, b in zip(price.forward_s_S, price.backward_s_S, strict=True)]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    if price.send_s and max(price.send_s) > seconds[slowest]:
        cut = price.send_s.index(max(price.send_s))
        names = [pools[index].name for index in best.chain.pool_S[cut : cut + 2]]
        return f"link between stages {cut} ({names[0]}) and {cut + 1} ({names[1]})"
    return (
        f"the slowest stage, {slowest} in pool {pools[best.chain.pool_S[slowest]].name!r}: "
        f"{format_s(seconds[slowest])} a micro-batch"
    )


def to_certificate(outcome: PoolsSearchOutcome, order: Sequence[SimulatedChain]) -> Certificate:
    """State what the search proves of the fastest chain, and of the chosen one, the first.

    With failures another chain than the fastest may be first; no bound covers failures.
    """
    if not order:
        return outcome.proof.certify(None, method="partition")
    chosen, fastest = order[0], fastest_chain(order)
    return outcome.proof.certify(
        fastest.objective_s,
        decision_s=None if chosen is fastest else chosen.objective_s,
        within_band=sum(is_tie(ratio_band(outcome, chosen, simulated)) for simulated in order[1:]),
        within_band_is_least=(
            chosen.objective_s * outcome.problem.ratios.farthest > outcome.proof.complete_s
        ),
        method="partition",
    )


def to_preference(
    outcome: PoolsSearchOutcome,
    order: Sequence[SimulatedChain],
    risks: Mapping[PoolsDecision, PricedRisk],
) -> Preference | None:
    """Explain why the fastest chain was not chosen; None where it was."""
    chosen, fastest = order[0], fastest_chain(order)
    if chosen is fastest:
        return None
    chosen_risk, fastest_risk = risks[chosen], risks[fastest]
    has_fallback = chosen_risk.has_fallback
    tried_first_s = None
    if is_excluded(fastest_risk.chance, beside=chosen_risk.chance):
        tries = dict.fromkeys((fastest, chosen, decision_with_headroom(risks) or chosen))
        tried_first_s = price_risks(tuple(tries), outcome.problem)[fastest].expected_s
    return Preference(
        fastest=to_decision(fastest.chain, outcome.problem, outcome.space.options),
        fastest_step_s=fastest.objective_s,
        slower_ratio=max(0.0, chosen.objective_s / fastest.objective_s - 1.0),
        reasons=tuple(_reasons(outcome, order, risks)) or (LESS_EXPECTED,),
        expected_step_s=chosen_risk.expected_s if has_fallback else None,
        fastest_expected_step_s=fastest_risk.expected_s if has_fallback else None,
        fastest_out_of_memory_probability=fastest_risk.chance,
        fastest_tried_first_step_s=tried_first_s,
    )


def _reasons(
    outcome: PoolsSearchOutcome,
    order: Sequence[SimulatedChain],
    risks: Mapping[PoolsDecision, PricedRisk],
) -> Iterator[str]:
    """Advantages of the chosen chain over the fastest."""
    tries = order[0], fastest_chain(order)
    chosen_chance, fastest_chance = (risks[simulated].chance for simulated in tries)
    if memory_step(chosen_chance) < memory_step(fastest_chance):
        yield less_chance_words(chosen_chance, instead_of=fastest_chance)
    own_s, other_s = (
        effective_step_s(simulated.chain, outcome.problem, step_s=simulated.objective_s)
        for simulated in tries
    )
    if own_s < other_s:
        yield "less wall clock per step with failures"


def ratio_band(
    outcome: PoolsSearchOutcome, chosen: SimulatedChain, alternative: SimulatedChain
) -> Band:
    """Return the band of the measured ratio of another chain's step to the chosen one's."""
    problem, options = outcome.problem, outcome.space.options
    ratio = alternative.objective_s / chosen.objective_s
    if chosen.chain.pool_S != alternative.chain.pool_S:
        low, high = problem.ratios.other_kernels
        return ratio * low, ratio * high
    decisions = [
        to_decision(simulated.chain, problem, options) for simulated in (chosen, alternative)
    ]
    return problem.ratios.between(*decisions, ratio=ratio)


def headroom_fields(
    ranking: Ranking, outcome: PoolsSearchOutcome, best: PoolsDecision, predicted: TrainPrediction
) -> dict[str, Roomier | bool | float | None]:
    """Return the cost of a decision with headroom, where the plan's may run out of memory.

    Also up to which step the search for it is complete, and whether it is complete.
    """
    if (predicted.out_of_memory_probability or 0.0) <= SMALL:
        return {}
    roomy = decision_with_headroom(ranking.risks)
    complete_s = ranking.complete_s
    ratio = 0.0 if complete_s is None else complete_s / predicted.step_time_s - 1.0
    return {
        "roomier": None if roomy is None else _roomier(roomy, best, predicted, outcome),
        "no_roomier": roomy is None and complete_s is not None and math.isinf(complete_s),
        "roomier_within_ratio": ratio if 0.0 < ratio < math.inf else None,
    }


def _roomier(
    roomy: PoolsDecision,
    best: PoolsDecision,
    predicted: TrainPrediction,
    outcome: PoolsSearchOutcome,
) -> Roomier:
    problem, options, pools = outcome.problem, outcome.space.options, used_pools(roomy)
    slower_ratio = max(0.0, roomy.objective_s / predicted.step_time_s - 1.0)
    run_s = loss_prices(problem.specs[0].goal).run_s(predicted.step_time_s)
    cost = {
        "step_time_s": roomy.objective_s,
        "slower_ratio": slower_ratio,
        "slower_s": slower_ratio * run_s,
        "pools": () if set(pools) == set(used_pools(best)) else _names(pools, problem),
    }
    if isinstance(roomy, SinglePoolDecision):
        where = {
            "decision": roomy.decision,
            "peak_memory_bytes": roomy.peak_bytes,
            "out_of_memory_probability": roomy.risk.out_of_memory_probability,
        }
    else:
        at_risk = rank_at_risk(roomy.chain, problem)
        where = {
            "decision": to_decision(roomy.chain, problem, options),
            "peak_memory_bytes": at_risk.peak_memory_bytes,
            "out_of_memory_probability": chain_memory_risk(
                roomy.chain, problem
            ).out_of_memory_probability,
            "rank_at_risk": at_risk,
        }
    return Roomier.model_validate(cost | where)


def used_pools(decision: PoolsDecision) -> tuple[int, ...]:
    """Positions of the pools that a decision runs on, in the order of its stages."""
    return (
        (decision.index,)
        if isinstance(decision, SinglePoolDecision)
        else tuple(dict.fromkeys(decision.chain.pool_S))
    )


def _names(pools: Sequence[int], problem: PoolsProblem) -> tuple[str, ...]:
    return tuple(problem.cluster.pools[index].name for index in pools)


def with_headroom_on_other_pools(plan: Plan, ranking: Ranking, outcome: PoolsSearchOutcome) -> Plan:
    """Add to a single-pool plan the decision with headroom on any pools, if it is faster."""
    best, predicted = ranking.best, plan.predicted
    if best is None or predicted is None:
        return plan
    room = headroom_fields(ranking, outcome, best, predicted)
    elsewhere = room.get("roomier")
    is_slower = not isinstance(elsewhere, Roomier) or (
        plan.roomier is not None and plan.roomier.step_time_s <= elsewhere.step_time_s
    )
    return plan if plan.roomier is not None and is_slower else plan.model_copy(update=room)
