"""From a spec with several pools to a plan: over all of them together, or over the best one alone.

The chains that the search found are played pass by pass; they and the best plan of each pool alone,
which may use what a chain over pools cannot (interleaved schedules), are ranked by wall clock per
step, failures and what running out of memory costs on average included: the pools together have
more devices to fail. Where the best chain may run out, chains with more room are searched for and
ranked beside it (roomy_search.py). Where a pool alone is as good, the plan is that pool's and the
others are left out. The search itself ranks by the step, so that no
bound is proven on what failures cost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.costs.analytic.calibration import Residuals
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.plan import Alternative, Plan, Provenance, Roomier, TrainPrediction
from tuner.planner.analytic.extrapolation import asked_beyond, provenance_of
from tuner.planner.analytic.memory_risk import LIKELY, SMALL, loss_prices
from tuner.planner.analytic.preferring import TOLERANCE_RATIO
from tuner.planner.analytic.releases import priced_release
from tuner.planner.layout_groups import by_layout, layout_of, rows_of_layouts
from tuner.planner.progress import Told, Watch, unwatched
from tuner.planner.ratios import is_tie
from tuner.planner.reasons import why_lost
from tuner.planner.unlike.alone import PoolAlone, each_alone, plan_alone, told_of
from tuner.planner.unlike.asked import PoolsQuestion, pools_question
from tuner.planner.unlike.certifying import certificate_of, fastest_of, preference_of, ratio_band
from tuner.planner.unlike.chains import Chain
from tuner.planner.unlike.relaxing import in_the_way, relaxations
from tuner.planner.unlike.risk import Priced, priced
from tuner.planner.unlike.roomy_search import roomy_search
from tuner.planner.unlike.running import effective_step_s
from tuner.planner.unlike.search import Search, Settings, search
from tuner.planner.unlike.told import (
    Played,
    decision_of,
    placement_of,
    played,
    prediction_of,
)
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
            each alone in turn, and for each way out where nothing fits.
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
    ranking = _ranked(found, settings, alone=alone, watch=watch)
    best_alone = min(alone, key=lambda one: one.effective_step_s)
    if best_alone.told.step_time_s is not None and not _is_better(ranking, best_alone, question):
        note = _why_alone(ranking, best_alone, question)
        plan = plan_alone(
            question,
            best_alone.index,
            settings=settings,
            provenance=provenance.model_copy(update={"notes": (*provenance.notes, note)}),
        )
    else:
        plan = _together(spec, found, ranking, provenance, settings=settings, watch=watch)
    if plan.placement is None:
        return plan
    placement = plan.placement.model_copy(update={"alone": told_of(alone)})
    return plan.model_copy(update={"placement": placement})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ranking:
    """Chains in order, with their risks."""

    order: list[Played]
    """Best first; what runs out more likely than not comes last."""
    risks: Mapping[Played, Priced]
    roomy: Search | None
    """The search for more room, where one was made."""


def _ranked(
    found: Search, settings: Settings, *, alone: Sequence[PoolAlone], watch: Watch
) -> _Ranking:
    """Play the chains that were found, search for more room where it is short, and order all."""
    question = found.question
    every = [played(chain) for chain in found.chains]
    risks = priced(every, question, alone=alone)
    order = _by_wall_clock(every, risks, question)
    if not order:
        return _Ranking(order=order, risks=risks, roomy=None)
    fastest = fastest_of(order)
    is_near = order[0].objective_s <= fastest.objective_s * (1.0 + TOLERANCE_RATIO)
    full = order[0] if is_near else fastest
    if risks[full].chance <= SMALL:
        return _Ranking(order=order, risks=risks, roomy=None)
    watch(Told(stage="memory", text="searching for chains with more room"))
    roomy = roomy_search(found, settings, full=full)
    known = {_key(one.chain) for one in every}
    chains = () if roomy is None else roomy.chains
    every += [played(chain) for chain in chains if _key(chain) not in known]
    risks = priced(every, question, alone=alone)
    return _Ranking(order=_by_wall_clock(every, risks, question), risks=risks, roomy=roomy)


def _key(chain: Chain) -> tuple[object, ...]:
    """What a chain decides."""
    candidate = chain.column.candidate
    columns = (*candidate.rows.values(), *candidate.ways.values())
    return chain.pool_S, chain.layers_S, tuple(int(column[0]) for column in columns)


def _by_wall_clock(
    every: Sequence[Played], risks: Mapping[Played, Priced], question: PoolsQuestion
) -> list[Played]:
    return sorted(
        every,
        key=lambda one: (
            not risks[one].is_fit,
            _wall_clock_s(one, risks, question),
            one.objective_s,
        ),
    )


def _wall_clock_s(one: Played, risks: Mapping[Played, Priced], question: PoolsQuestion) -> float:
    """Wall clock per step with failures and with what running out of memory costs on average."""
    return effective_step_s(one.chain, question, step_s=risks[one].expected_s)


def _is_better(ranking: _Ranking, alone: PoolAlone, question: PoolsQuestion) -> bool:
    """Whether the best chain runs on several pools and gains by it."""
    if not ranking.order or len(set(ranking.order[0].chain.pool_S)) == 1:
        return False
    best = ranking.order[0]
    if ranking.risks[best].is_fit != (alone.chance <= LIKELY):
        return ranking.risks[best].is_fit
    return _wall_clock_s(best, ranking.risks, question) < alone.effective_step_s


def _why_alone(ranking: _Ranking, alone: PoolAlone, question: PoolsQuestion) -> str:
    together = next((one for one in ranking.order if len(set(one.chain.pool_S)) > 1), None)
    told = "no stages over several pools fit or are near as fast"
    if together is not None:
        told = f"over all pools a step takes {format_s(together.objective_s)}"
        lasting_s = effective_step_s(together.chain, question, step_s=together.objective_s)
        if lasting_s > together.objective_s:
            told += f", {format_s(lasting_s)} of wall clock with failures"
        chance = ranking.risks[together].chance
        if chance > SMALL:
            told += f", with a {format_ratio(chance)} chance of running out of memory"
    return f"only pool {alone.told.pool!r} is used; {told}"


def _together(
    spec: Spec,
    found: Search,
    ranking: _Ranking,
    provenance: Provenance,
    *,
    settings: Settings,
    watch: Watch,
) -> Plan:
    question, ways, order = found.question, found.space.ways, ranking.order
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
    return Plan.model_validate(
        common
        | {
            "decision": decision,
            "predicted": predicted,
            "binding_constraint": _pace(best, question),
            "preferred": preference_of(found, order, ranking.risks),
            "roomier": _roomier(ranking, found, predicted),
            "no_roomier": _has_no_room(ranking),
            "roomier_within_ratio": _searched_ratio(ranking),
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


def _roomier(ranking: _Ranking, found: Search, predicted: TrainPrediction) -> Roomier | None:
    """Say what hardly running out of memory would cost, where the chosen chain may."""
    chosen, risks = ranking.order[0], ranking.risks
    with_room = [one for one in ranking.order if risks[one].chance <= SMALL]
    if risks[chosen].chance <= SMALL or not with_room:
        return None
    one = min(with_room, key=lambda each: each.objective_s)
    slower_ratio = max(0.0, one.objective_s / chosen.objective_s - 1.0)
    run_s = loss_prices(found.question.specs[0].goal).run_s(predicted.step_time_s)
    return Roomier(
        decision=decision_of(one.chain, found.question, found.space.ways),
        step_time_s=one.objective_s,
        slower_ratio=slower_ratio,
        slower_s=slower_ratio * run_s,
        peak_memory_bytes=round(max(one.chain.price.bytes_S)),
        out_of_memory_probability=risks[one].chance,
    )


def _has_no_room(ranking: _Ranking) -> bool:
    """Whether every chain was searched, and none hardly runs out."""
    if ranking.roomy is None or any(one.chance <= SMALL for one in ranking.risks.values()):
        return False
    return math.isinf(ranking.roomy.complete_s)


def _searched_ratio(ranking: _Ranking) -> float | None:
    """How much longer than the chosen chain's are steps that were searched for more room."""
    if ranking.roomy is None or ranking.risks[ranking.order[0]].chance <= SMALL:
        return None
    ratio = ranking.roomy.complete_s / ranking.order[0].objective_s - 1.0
    return ratio if 0.0 < ratio < math.inf else None


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
        f"stage {slowest} in pool {pools[best.chain.pool_S[slowest]].name!r} sets the pace: "
        f"{format_s(seconds[slowest])} a micro-batch"
    )
