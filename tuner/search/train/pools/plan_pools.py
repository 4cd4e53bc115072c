"""From a spec with several pools to a plan: over several pools, or over the best single one.

Chains over pools and the best decisions of each single pool, which may use interleaved schedules,
are ranked together by wall clock per step, including failures and the expected cost of running out
of memory (candidate_order.py): more pools have more devices that fail. If a single pool is as good,
the plan uses that pool alone. The search itself ranks by step time, so no bound covers failures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tuner.costs.train.calibration import Residuals
from tuner.costs.train.measured_profile import MeasuredProfile
from tuner.plans.train import Alternative, Plan, Provenance, Relaxation, TrainPrediction
from tuner.search.layout_groups import by_layout, layout_of, rows_of_layouts
from tuner.search.progress import PlanningEvent
from tuner.search.ratios import is_tie
from tuner.search.reasons import why_lost
from tuner.search.settings import SearchSettings
from tuner.search.train.extrapolation import extrapolated_by_search, with_extrapolation_notes
from tuner.search.train.memory_risk import LIKELY, SMALL
from tuner.search.train.pools.build_problem import PoolsProblem, build_pools_problem
from tuner.search.train.pools.candidate_order import Ranking, is_over_several, rank_decisions
from tuner.search.train.pools.certificate import ratio_band, to_certificate, to_preference
from tuner.search.train.pools.headroom import (
    headroom_fields,
    used_pools,
    with_headroom_on_other_pools,
)
from tuner.search.train.pools.relaxations import (
    headroom_relaxations,
    infeasibility_reason,
    relaxations,
)
from tuner.search.train.pools.risk import PoolsDecision
from tuner.search.train.pools.search import PoolsSearchOutcome, search
from tuner.search.train.pools.single_pool import (
    SinglePoolDecision,
    plan_single_pool,
    search_single_pools,
    to_single_pool_baselines,
)
from tuner.search.train.pools.to_plan import (
    SimulatedChain,
    to_decision,
    to_placement,
    to_prediction,
)
from tuner.search.train.pools.whole_run import effective_step_s
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
        notes = (*provenance.notes, _single_pool_note(ranking, best, problem))
        provenance = provenance.model_copy(update={"notes": notes})
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
        f"; pool {problem.cluster.pools[one.index].name!r} alone takes "
        f"{format_s(one.objective_s)}, with a {format_ratio(ranking.risks[one].chance)} chance of "
        "running out of memory"
        for one in ranking.order
        if isinstance(one, SinglePoolDecision)
        and one.index != used
        and one.objective_s < best.objective_s
        and ranking.risks[one].chance > SMALL
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
    note = priced_release(spec.emit, spec.goal.engine, problem.priced_pools[0].residuals).note
    if note:
        provenance = provenance.model_copy(update={"notes": (*provenance.notes, note)})
    common = {
        "model": spec.model,
        "cluster": spec.cluster,
        "goal": spec.goal,
        "search": spec.search,
        "emit": spec.emit,
        "certificate": to_certificate(outcome, order),
        "provenance": _with_profile_notes(provenance, problem),
    }
    if not order:
        settings.watch(
            PlanningEvent(stage="relaxations", text="nothing fits; searching for what would")
        )
        nothing = {
            "decision": None,
            "predicted": None,
            "binding_constraint": infeasibility_reason(outcome),
            "alternatives": (),
            "relaxations": relaxations(outcome, settings),
        }
        return Plan.model_validate(common | nothing)
    best, *others = order
    predicted = to_prediction(best, problem)
    decision = to_decision(best.chain, problem, options)
    relaxed: tuple[Relaxation, ...] = ()
    if ranking.risks[best].chance > LIKELY:
        settings.watch(PlanningEvent(stage="relaxations", text="searching for headroom"))
        relaxed = headroom_relaxations(outcome, settings, full=best)
    return Plan.model_validate(
        common
        | {
            "decision": decision,
            "predicted": predicted,
            "binding_constraint": _bottleneck(best, problem),
            "preferred": to_preference(outcome, order, ranking.risks),
            **headroom_fields(ranking, outcome, best, predicted),
            "relaxations": relaxed,
            **by_layout(
                decision,
                [
                    _alternative(one, best, predicted, outcome)
                    for one in others[: _num_runners_up(order, outcome, top=settings.top)]
                ],
            ),
            "placement": to_placement(best.chain, problem),
        }
    )


def _num_runners_up(
    order: Sequence[SimulatedChain], outcome: PoolsSearchOutcome, *, top: int
) -> int:
    """Return the number of runners-up that show `top` layouts."""
    layouts = [
        layout_of(to_decision(one.chain, outcome.problem, outcome.space.options)) for one in order
    ]
    return (rows_of_layouts(layouts, top=top) or len(layouts)) - 1


def _with_profile_notes(provenance: Provenance, problem: PoolsProblem) -> Provenance:
    """Add, for every measured pool, what its profile lacks and what was extrapolated."""
    for pool, own in zip(problem.cluster.pools, problem.by_pool, strict=True):
        before = len(provenance.notes)
        provenance = with_extrapolation_notes(provenance, own, None)
        provenance = provenance.model_copy(
            update={
                "notes": (
                    *provenance.notes[:before],
                    *(f"pool {pool.name!r}: {note}" for note in provenance.notes[before:]),
                ),
                "extrapolated": (
                    *provenance.extrapolated,
                    *(f"pool {pool.name!r}: {name}" for name in extrapolated_by_search(own)),
                ),
            }
        )
    return provenance


def _alternative(
    one: SimulatedChain, best: SimulatedChain, chosen: TrainPrediction, outcome: PoolsSearchOutcome
) -> Alternative:
    predicted = to_prediction(one, outcome.problem)
    band = ratio_band(outcome, best, one)
    return Alternative(
        decision=to_decision(one.chain, outcome.problem, outcome.space.options),
        predicted=predicted,
        within_band=is_tie(band),
        ratio_band=band,
        lost_by=why_lost(chosen, predicted),
    )


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
