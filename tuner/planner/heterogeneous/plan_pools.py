"""From a spec with several pools to a plan: over all of them together, or over the best one alone.

Chains that the search found and the best decisions of each pool alone, which may use what a chain
over pools cannot (interleaved schedules), stand in one order of wall clock per step, failures and
what running out of memory costs on average included (candidate_order.py): the pools together have
more devices to fail. Where a pool alone is as good, the plan is that pool's and the others are left
out. The search itself ranks by the step, so that no bound is proven on what failures cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tuner.costs.analytic.calibration import Residuals
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.plan import Alternative, Plan, Provenance, Relaxation, TrainPrediction
from tuner.planner.analytic.extrapolation import asked_beyond, provenance_of
from tuner.planner.analytic.memory_risk import LIKELY, SMALL
from tuner.planner.analytic.releases import priced_release
from tuner.planner.heterogeneous.build_problem import PoolsQuestion, pools_question
from tuner.planner.heterogeneous.candidate_order import Ranking, is_over_several, ranked
from tuner.planner.heterogeneous.certificate import certificate_of, preference_of, ratio_band
from tuner.planner.heterogeneous.headroom import pools_of, room_of, with_room_elsewhere
from tuner.planner.heterogeneous.relaxations import in_the_way, more_room, relaxations
from tuner.planner.heterogeneous.risk import Decided
from tuner.planner.heterogeneous.search import Search, Settings, search
from tuner.planner.heterogeneous.single_pool import (
    DecisionAlone,
    each_alone,
    plan_alone,
    told_of,
)
from tuner.planner.heterogeneous.to_plan import (
    Played,
    decision_of,
    placement_of,
    prediction_of,
)
from tuner.planner.heterogeneous.whole_run import effective_step_s
from tuner.planner.layout_groups import by_layout, layout_of, rows_of_layouts
from tuner.planner.progress import Told, Watch, unwatched
from tuner.planner.ratios import is_tie
from tuner.planner.reasons import why_lost
from tuner.spec.spec import Spec
from tuner.units import format_ratio, format_s


def plan_over_pools(
    spec: Spec,
    *,
    residuals: Residuals | None,
    settings: Settings,
    provenance: Provenance,
    measured: Mapping[str, MeasuredProfile] | None = None,
    watch: Watch = unwatched,
) -> Plan:
    """Plan a training run over pools of unlike devices.

    Args:
        spec: with `device` on every pool and links between them.
        residuals: corrections and bands; None prices with the generic constants.
        settings: how to search; the time limit holds for all pools together, and once more for
            each alone in turn, and once more for all ways out together.
        provenance: what the plan rests on.
        measured: profiles of pools, by name; the others are planned on datasheets.
        watch: told about every stage of the work.

    Returns:
        A plan of all pools, or of the one that is better alone, with its placement; `cluster`
        holds what it uses.

    Raises:
        SpecError: the spec asks for what no device or target can do, or leaves a pool unjoined.
        UnknownDeviceError: a device has no description.
    """
    question = pools_question(spec, residuals=residuals, measured=measured or {})
    names = ", ".join(pool.name for pool in spec.cluster.pools)
    watch(Told(stage="search", text=f"chains of stages over {names}"))
    found = search(question, settings)
    question = question.with_extrapolation()
    found = replace(found, question=question)
    watch(Told(stage="alone", text=f"each of {names} without the others"))
    alone = each_alone(question, settings)
    ranking = ranked(found, settings, alone=alone, watch=watch)
    best = ranking.best
    if best is not None and len(pools_of(best)) == 1:
        notes = (*provenance.notes, _why_alone(ranking, best, question))
        provenance = provenance.model_copy(update={"notes": notes})
    if isinstance(best, DecisionAlone):
        plan = plan_alone(question, best.index, settings=settings, provenance=provenance)
        plan = with_room_elsewhere(plan, ranking, found)
    else:
        plan = _together(spec, found, ranking, provenance, settings=settings, watch=watch)
    if plan.placement is None:
        return plan
    placement = plan.placement.model_copy(update={"alone": told_of(alone, plan)})
    return plan.model_copy(update={"placement": placement})


def _why_alone(ranking: Ranking, best: Decided, question: PoolsQuestion) -> str:
    (used,) = pools_of(best)
    together = next(filter(is_over_several, ranking.chains), None)
    told = "no stages over several pools fit or are near as fast"
    if together is not None:
        told = f"over all pools a step takes {format_s(together.objective_s)}"
        lasting_s = effective_step_s(together.chain, question, step_s=together.objective_s)
        if lasting_s > together.objective_s:
            told += f", {format_s(lasting_s)} of wall clock with failures"
        chance = ranking.risks[together].chance
        if chance > SMALL:
            told += f", with a {format_ratio(chance)} chance of running out of memory"
    told += "".join(
        f"; pool {question.cluster.pools[one.index].name!r} alone takes "
        f"{format_s(one.objective_s)}, with a {format_ratio(ranking.risks[one].chance)} chance of "
        "running out of memory"
        for one in ranking.order
        if isinstance(one, DecisionAlone)
        and one.index != used
        and one.objective_s < best.objective_s
        and ranking.risks[one].chance > SMALL
    )
    return f"only pool {question.cluster.pools[used].name!r} is used; {told}"


def _together(
    spec: Spec,
    found: Search,
    ranking: Ranking,
    provenance: Provenance,
    *,
    settings: Settings,
    watch: Watch,
) -> Plan:
    question, ways, order = found.question, found.space.ways, ranking.chains
    note = priced_release(spec.emit, spec.goal.engine, question.sites[0].residuals).note
    if note:
        provenance = provenance.model_copy(update={"notes": (*provenance.notes, note)})
    common = {
        "model": spec.model,
        "cluster": spec.cluster,
        "goal": spec.goal,
        "search": spec.search,
        "emit": spec.emit,
        "certificate": certificate_of(found, order),
        "provenance": _of_profiles(provenance, question),
    }
    if not order:
        watch(Told(stage="ways out", text="nothing fits; looking for what would"))
        nothing = {
            "decision": None,
            "predicted": None,
            "binding_constraint": in_the_way(found),
            "alternatives": (),
            "relaxations": relaxations(found, settings),
        }
        return Plan.model_validate(common | nothing)
    best, *others = order
    predicted = prediction_of(best, question)
    decision = decision_of(best.chain, question, ways)
    relaxed: tuple[Relaxation, ...] = ()
    if ranking.risks[best].chance > LIKELY:
        watch(Told(stage="ways out", text="looking for what would make room"))
        relaxed = more_room(found, settings, full=best)
    return Plan.model_validate(
        common
        | {
            "decision": decision,
            "predicted": predicted,
            "binding_constraint": _pace(best, question),
            "preferred": preference_of(found, order, ranking.risks),
            **room_of(ranking, found, best, predicted),
            "relaxations": relaxed,
            **by_layout(
                decision,
                [
                    _alternative(one, best, predicted, found)
                    for one in others[: _enough(order, found, top=settings.top)]
                ],
            ),
            "placement": placement_of(best.chain, question),
        }
    )


def _enough(order: Sequence[Played], found: Search, *, top: int) -> int:
    """Return how many runners-up there are until `top` layouts are reached."""
    layouts = [layout_of(decision_of(one.chain, found.question, found.space.ways)) for one in order]
    return (rows_of_layouts(layouts, top=top) or len(layouts)) - 1


def _of_profiles(provenance: Provenance, question: PoolsQuestion) -> Provenance:
    """Say of every measured pool what its profile lacks and what was asked beyond it."""
    for pool, own in zip(question.cluster.pools, question.of_pool, strict=True):
        before = len(provenance.notes)
        provenance = provenance_of(provenance, own, None)
        provenance = provenance.model_copy(
            update={
                "notes": (
                    *provenance.notes[:before],
                    *(f"pool {pool.name!r}: {note}" for note in provenance.notes[before:]),
                ),
                "extrapolated": (
                    *provenance.extrapolated,
                    *(f"pool {pool.name!r}: {name}" for name in asked_beyond(own)),
                ),
            }
        )
    return provenance


def _alternative(one: Played, best: Played, chosen: TrainPrediction, found: Search) -> Alternative:
    predicted = prediction_of(one, found.question)
    band = ratio_band(found, best, one)
    return Alternative(
        decision=decision_of(one.chain, found.question, found.space.ways),
        predicted=predicted,
        within_band=is_tie(band),
        ratio_band=band,
        lost_by=why_lost(chosen, predicted),
    )


def _pace(best: Played, question: PoolsQuestion) -> str:
    """Name what sets the pace: the slowest stage's pool, or the slowest cut."""
    price, pools = best.chain.price, question.cluster.pools
    seconds = [f + b for f, b in zip(price.forward_s_S, price.backward_s_S, strict=True)]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    if price.send_s and max(price.send_s) > seconds[slowest]:
        cut = price.send_s.index(max(price.send_s))
        ends = [pools[index].name for index in best.chain.pool_S[cut : cut + 2]]
        return f"link between stages {cut} ({ends[0]}) and {cut + 1} ({ends[1]})"
    return (
        f"the slowest stage, {slowest} in pool {pools[best.chain.pool_S[slowest]].name!r}: "
        f"{format_s(seconds[slowest])} a micro-batch"
    )
