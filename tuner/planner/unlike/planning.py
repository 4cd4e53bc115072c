"""From a spec with several pools to a plan: over all of them together, or over the best one alone.

The chains that the search found are played pass by pass, and the fastest is set against the best
plan of each single pool, which may use what a chain over pools cannot (interleaved schedules).
Where a pool alone is as fast, the plan is that pool's and the others are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tuner.costs.analytic.calibration import Residuals
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.placement import Alone, Placement, StagePlacement
from tuner.plan import Alternative, Certificate, Plan, Provenance, Space, TrainPrediction
from tuner.planner.analytic.answer import PROVEN_GAP_RATIO
from tuner.planner.analytic.asking import Site, site_of
from tuner.planner.analytic.extrapolation import asked_beyond, provenance_of
from tuner.planner.analytic.planning import make_analytic_plan
from tuner.planner.analytic.search import Settings as PoolSettings
from tuner.planner.analytic.search import search as search_pool
from tuner.planner.reasons import why_lost
from tuner.planner.unlike.asked import PoolsQuestion, pools_question
from tuner.planner.unlike.search import Search, Settings, most_layers, search
from tuner.planner.unlike.told import (
    Played,
    band_over,
    decision_of,
    placement_of,
    played,
    prediction_of,
)
from tuner.spec.cluster import Cluster
from tuner.spec.spec import Spec
from tuner.units import format_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OverPools:
    """A plan and where its stages run."""

    plan: Plan
    """Of all pools, or of the one that is better alone; `plan.cluster` holds what it uses."""
    placement: Placement | None
    """Absent where nothing fits."""


def plan_over_pools(
    spec: Spec,
    *,
    residuals: Residuals | None,
    settings: Settings,
    provenance: Provenance,
    measured: Mapping[str, MeasuredProfile] | None = None,
) -> OverPools:
    """Plan a training run over pools of unlike devices.

    Args:
        spec: with `device` on every pool and links between them.
        residuals: corrections and bands; None prices with the generic constants.
        settings: how to search; the time limit holds for all pools together, and once more for
            each alone in turn.
        provenance: what the plan rests on.
        measured: profiles of pools, by name; the others are planned on datasheets.

    Raises:
        SpecError: the spec asks for what no device or target can do, or leaves a pool unjoined.
        UnknownDeviceError: a device has no description.
    """
    question = pools_question(spec, residuals=residuals, measured=measured or {})
    found = search(question, settings)
    question = question.with_extrapolation()
    found = replace(found, question=question)
    alone = _alone(question, settings)
    order = sorted((played(chain) for chain in found.chains), key=lambda one: one.objective_s)
    fastest = min(
        (one for one in alone if one.step_time_s is not None),
        key=lambda one: one.step_time_s or 0.0,
        default=None,
    )
    if fastest is not None and (
        not order
        or (fastest.step_time_s or 0.0) <= order[0].objective_s
        or len(set(order[0].chain.pool_S)) == 1
    ):
        (pool,) = (pool for pool in spec.cluster.pools if pool.name == fastest.pool)
        site = site_of(pool, residuals=residuals, measured=(measured or {}).get(pool.name))
        return _of_one_pool(spec, site, alone, order, settings, provenance)
    return _together(spec, found, order, alone, provenance, top=settings.top)


def _alone(question: PoolsQuestion, settings: Settings) -> tuple[Alone, ...]:
    found = []
    # All pools one by one take no longer than the search over all of them may.
    share_s = settings.time_limit_s / question.num_pools
    for pool, own in zip(question.cluster.pools, question.of_pool, strict=True):
        result = search_pool(
            own, PoolSettings(top=1, time_limit_s=share_s, clock=settings.clock)
        ).found
        found.append(
            Alone(
                pool=pool.name,
                devices=own.num_devices,
                step_time_s=None if result is None else float(result.step_s[0]),
            )
        )
    return tuple(found)


def _of_one_pool(
    spec: Spec,
    site: Site,
    alone: tuple[Alone, ...],
    order: list[Played],
    settings: Settings,
    provenance: Provenance,
) -> OverPools:
    pool = site.pool
    together = next((one for one in order if len(set(one.chain.pool_S)) > 1), None)
    told = (
        f"over all pools a step takes {format_s(together.objective_s)}"
        if together is not None
        else "no stages over several pools fit or are near as fast"
    )
    note = f"only pool {pool.name!r} is used; {told}"
    plan = make_analytic_plan(
        spec.model_copy(update={"cluster": Cluster(pools=(pool,))}),
        site,
        settings=PoolSettings(
            top=settings.top, time_limit_s=settings.time_limit_s, clock=settings.clock
        ),
        provenance=provenance.model_copy(update={"notes": (*provenance.notes, note)}),
    )
    if plan.decision is None:
        return OverPools(plan=plan, placement=None)
    made = plan.decision
    devices = made.num_devices // made.pipeline_model_parallel_size
    return OverPools(
        plan=plan,
        placement=Placement(
            stages=tuple(
                StagePlacement(pool=pool.name, layers=layers, devices=devices)
                for layers in made.pipeline_layout
            ),
            hosts=tuple(
                f"{pool.name}-{node}"
                for node in range(-(-made.num_devices // pool.devices_per_node))
            ),
            unused_devices={
                other.name: left
                for other in spec.cluster.pools
                if (left := other.num_devices - (made.num_devices if other == pool else 0))
            },
            alone=alone,
        ),
    )


def _together(
    spec: Spec,
    found: Search,
    order: list[Played],
    alone: tuple[Alone, ...],
    provenance: Provenance,
    *,
    top: int,
) -> OverPools:
    question, ways = found.question, found.space.ways
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
        nothing = {
            "decision": None,
            "predicted": None,
            "binding_constraint": _in_the_way(found),
            "alternatives": (),
        }
        return OverPools(plan=Plan.model_validate(common | nothing), placement=None)
    best, *others = order
    predicted = prediction_of(best, question)
    plan = Plan.model_validate(
        common
        | {
            "decision": decision_of(best.chain, question, ways),
            "predicted": predicted,
            "binding_constraint": _pace(best, question),
            "alternatives": tuple(_alternative(one, predicted, found) for one in others[: top - 1]),
        }
    )
    placement = placement_of(best.chain, question).model_copy(update={"alone": alone})
    return OverPools(plan=plan, placement=placement)


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


def certificate_of(found: Search, order: list[Played]) -> Certificate:
    """State what the search proves of the best chain."""
    counts = found.counts
    space = Space(
        priced=counts.priced, bounded=counts.bounded, illegal=counts.illegal, open=counts.open
    )
    common = {"space": space, "solve_s": found.solve_s, "method": "partition"}
    if not order:
        proven = found.bound_s == float("inf")
        return Certificate.model_validate(
            common
            | {
                "status": "infeasible" if proven else "unknown",
                "objective": None,
                "bound": None if proven else found.bound_s,
                "gap_ratio": 0.0 if proven else 1.0,
                "within_band": 0,
            }
        )
    best_s = order[0].objective_s
    gap_ratio = max(0.0, 1.0 - found.bound_s / best_s)
    band = band_over(found.question, sorted(set(order[0].chain.pool_S)))
    within = sum(one.objective_s <= best_s * band[1] / band[0] for one in order[1:])
    return Certificate.model_validate(
        common
        | {
            "status": "optimal" if gap_ratio <= PROVEN_GAP_RATIO else "feasible",
            "objective": best_s,
            "bound": min(found.bound_s, best_s),
            "gap_ratio": gap_ratio,
            "within_band": within,
        }
    )


def _alternative(one: Played, chosen: TrainPrediction, found: Search) -> Alternative:
    predicted = prediction_of(one, found.question)
    band = chosen.step_time_s_band
    return Alternative(
        decision=decision_of(one.chain, found.question, found.space.ways),
        predicted=predicted,
        within_band=predicted.step_time_s * band[0] <= chosen.step_time_s * band[1],
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


def _in_the_way(found: Search) -> str:
    """Name what rules out everything: pool by pool where it is memory, else the commonest rule."""
    if not found.space.num_legal:
        rule, _ = max(found.space.illegal.items(), key=lambda item: item[1])
        return rule
    rooms = most_layers(found.question, found.space)
    layers = found.question.alike.model.num_layers
    each = ", ".join(
        f"pool {pool.name!r} has room for {room}"
        for pool, room in zip(found.question.cluster.pools, rooms, strict=True)
    )
    return f"memory_per_device: of {layers} layers, {each} at the leanest"
