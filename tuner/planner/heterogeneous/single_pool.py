"""What each pool does without the others, and the plan where one is better off alone.

A pool alone is searched as any single pool is, interleaved schedules included. The spare nodes that
it keeps back are its own share (spares.py); those of the pools left out are not needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from tuner.placement import Alone, Placement, StagePlacement
from tuner.plan import Plan, Provenance, TrainDecision
from tuner.planner.analytic.build_problem import Site
from tuner.planner.analytic.finalists import played_s
from tuner.planner.analytic.headroom_search import roomy_searches
from tuner.planner.analytic.incumbents import Found, Search
from tuner.planner.analytic.memory_risk import MemoryForecast, loss_prices
from tuner.planner.analytic.plan_fields import Teller, effective_step_s
from tuner.planner.analytic.plan_train import make_analytic_plan
from tuner.planner.analytic.preference import TOLERANCE_RATIO, least_expected, roomier
from tuner.planner.analytic.search import Settings as PoolSettings
from tuner.planner.analytic.search import search
from tuner.planner.analytic.search_result import Detail, decision_of, detail_of
from tuner.planner.heterogeneous.build_problem import PoolsQuestion
from tuner.planner.heterogeneous.search import Settings
from tuner.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecisionAlone:
    """A decision that was found on one pool, its schedule played."""

    index: int
    """Of the pool in the cluster."""
    spec: Spec
    site: Site
    decision: TrainDecision
    detail: Detail
    objective_s: float
    """Seconds of a step, the larger of closed form and play."""
    risk: MemoryForecast

    @property
    def peak_bytes(self) -> int:
        """Of the fullest device."""
        return round(float(self.detail.memory.total_PC.max()))

    def wall_clock_s(self, step_s: float) -> float:
        """Wall clock per step with failures, of a step of so many seconds."""
        return effective_step_s(self.spec, self.site, self.detail, step_s=step_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolAlone:
    """The best that is found on one pool."""

    told: Alone
    decisions: tuple[DecisionAlone, ...] = ()
    """The one whose step is expected to be the shortest, then the fastest that hardly runs out of
    memory where that is another; none where the model does not fit."""
    complete_s: float = inf
    """Seconds of a step up to which every decision that hardly runs out was searched for."""


def each_alone(question: PoolsQuestion, settings: Settings) -> tuple[PoolAlone, ...]:
    """Search every pool by itself."""
    # All pools one by one take no longer than the search over all of them may.
    share_s = settings.time_limit_s / question.num_pools
    settings_of = PoolSettings(
        top=1, band_ratio=TOLERANCE_RATIO, time_limit_s=share_s, clock=settings.clock
    )
    return tuple(_alone(question, index, settings_of) for index in range(question.num_pools))


def _alone(question: PoolsQuestion, index: int, settings: PoolSettings) -> PoolAlone:
    own, site = question.of_pool[index], question.sites[index]
    result = search(own, settings)
    told = Alone(pool=site.pool.name, devices=own.num_devices, step_time_s=None)
    if result.found is None:
        return PoolAlone(told=told, complete_s=result.complete_s)
    fastest = result.found.taken(np.array([0]))
    step_s = float(fastest.step_s[0])
    rooms = roomy_searches(result, settings, full=fastest, step_s=step_s)
    prices = loss_prices(question.specs[index].goal)
    least = least_expected(result, prices=prices, rooms=rooms.searches)
    roomy = roomier(result, step_s=float(least.row.step_s[0]), rooms=rooms.searches)
    rows = (least.row,) if roomy is None else (least.row, roomy)
    every = [_decision(question, index, result, row) for row in rows]
    decisions = tuple(one for one in every if one is every[0] or one.decision != every[0].decision)
    best = decisions[0]
    return PoolAlone(
        told=_told(told, best.objective_s, best.risk.out_of_memory_probability),
        decisions=decisions,
        complete_s=inf if rooms.complete_s is None else rooms.complete_s,
    )


def _decision(question: PoolsQuestion, index: int, result: Search, row: Found) -> DecisionAlone:
    spec, site = question.specs[index], question.sites[index]
    found = replace(result, found=row)
    detail = detail_of(found, 0)
    teller = Teller(
        spec=spec, site=site, search=found, band=question.bands[index], ratios=question.ratios
    )
    return DecisionAlone(
        index=index,
        spec=spec,
        site=site,
        decision=TrainDecision.model_validate(decision_of(found, 0)),
        detail=detail,
        objective_s=max(float(row.step_s[0]), played_s(detail)),
        risk=teller.risk(detail),
    )


def plan_alone(
    question: PoolsQuestion, index: int, *, settings: Settings, provenance: Provenance
) -> Plan:
    """Plan on one of the pools; its plan says which devices of the cluster are left unused."""
    spec, site = question.specs[index], question.sites[index]
    plan = make_analytic_plan(
        spec,
        site,
        settings=PoolSettings(
            top=settings.top, time_limit_s=settings.time_limit_s, clock=settings.clock
        ),
        provenance=provenance,
    )
    made = plan.decision
    if made is None:
        return plan
    pool = site.pool
    devices = made.num_devices // made.pipeline_model_parallel_size
    placement = Placement(
        stages=tuple(
            StagePlacement(pool=pool.name, layers=layers, devices=devices)
            for layers in made.pipeline_layout
        ),
        hosts=tuple(
            f"{pool.name}-{node}" for node in range(-(-made.num_devices // pool.devices_per_node))
        ),
        unused_devices=_unused(question, index, made.num_devices),
    )
    return plan.model_copy(update={"placement": placement})


def told_of(alone: Sequence[PoolAlone], plan: Plan) -> tuple[Alone, ...]:
    """In the words of a plan; of a pool that is planned alone what the plan itself expects."""
    used = {stage.pool for stage in plan.placement.stages} if plan.placement else set()
    planned = plan.predicted if len(used) == 1 else None
    return tuple(
        one.told
        if planned is None or one.told.pool not in used
        else _told(one.told, planned.step_time_s, planned.out_of_memory_probability)
        for one in alone
    )


def _told(told: Alone, step_s: float, chance: float | None) -> Alone:
    return told.model_copy(update={"step_time_s": step_s, "out_of_memory_probability": chance})


def _unused(question: PoolsQuestion, index: int, num_devices: int) -> dict[str, int]:
    unused = {}
    for other, site in enumerate(question.sites):
        left = site.pool.num_devices - (num_devices if other == index else 0)
        if left:
            unused[site.pool.name] = left
    return unused
