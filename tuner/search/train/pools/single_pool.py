"""The single-pool baseline of each pool, and the plan on one pool where that is better.

A single pool is searched like any cluster of one pool, interleaved schedules included. It keeps its
own share of the spare nodes (build_problem.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from tuner.config.train import TrainDecision
from tuner.plans.stage_placement import SinglePoolBaseline, StageDevices, StagePlacement
from tuner.plans.train import Plan, Provenance
from tuner.search.progress import ignore_progress
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import PricedPool
from tuner.search.train.finalists import simulated_s
from tuner.search.train.headroom_search import search_headroom
from tuner.search.train.memory_risk import MemoryForecast, loss_prices
from tuner.search.train.plan_fields import PlanFormatter, effective_step_s
from tuner.search.train.plan_train import make_analytic_plan
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.preference import (
    TOLERANCE_RATIO,
    fastest_with_headroom,
    find_least_expected,
)
from tuner.search.train.search import search
from tuner.search.train.search_result import (
    Detail,
    SearchOutcome,
    Solutions,
    price_solution,
    solution_fields,
)
from tuner.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SinglePoolDecision:
    """The best decision on one pool, its schedule simulated."""

    index: int
    """Position of the pool in the cluster."""
    spec: Spec
    priced_pool: PricedPool
    decision: TrainDecision
    detail: Detail
    objective_s: float
    """Seconds of a step, the larger of closed form and simulation."""
    risk: MemoryForecast

    @property
    def peak_bytes(self) -> int:
        """Peak of all devices."""
        return round(float(self.detail.memory.total_PC.max()))

    def wall_clock_s(self, step_s: float) -> float:
        """Wall clock per step with failures, for a step of so many seconds."""
        return effective_step_s(self.spec, self.priced_pool, self.detail, step_s=step_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SinglePoolResult:
    """The best decisions on one pool."""

    baseline: SinglePoolBaseline
    decisions: tuple[SinglePoolDecision, ...] = ()
    """The one with the least expected step, then the fastest with headroom if that is another; none
    where the model does not fit."""
    complete_s: float = inf
    """Seconds of a step up to which the search for decisions with headroom is complete."""


def search_single_pools(
    problem: PoolsProblem, settings: SearchSettings
) -> tuple[SinglePoolResult, ...]:
    """Search every pool by itself."""
    # All single pools together have the time limit of the search over pools.
    share_s = settings.time_limit_s / problem.num_pools
    pool_settings = replace(
        settings,
        top=1,
        band_ratio=TOLERANCE_RATIO,
        time_limit_s=share_s,
        watch=ignore_progress,
    )
    return tuple(
        _search_single_pool(problem, index, pool_settings) for index in range(problem.num_pools)
    )


def _search_single_pool(
    problem: PoolsProblem, index: int, settings: SearchSettings
) -> SinglePoolResult:
    pool_problem, priced_pool = problem.by_pool[index], problem.priced_pools[index]
    result = search(pool_problem, settings)
    baseline = SinglePoolBaseline(
        pool=priced_pool.pool.name, devices=pool_problem.num_devices, step_time_s=None
    )
    if result.solutions is None:
        return SinglePoolResult(baseline=baseline, complete_s=result.proof.complete_s)
    fastest = result.solutions.taken(np.array([0]))
    step_s = float(fastest.step_s[0])
    headroom = search_headroom(result, settings, full=fastest, step_s=step_s)
    prices = loss_prices(problem.specs[index].goal)
    least = find_least_expected(result, prices=prices, headroom=headroom.searches)
    roomy = fastest_with_headroom(
        result, step_s=float(least.row.step_s[0]), headroom=headroom.searches
    )
    rows = (least.row,) if roomy is None else (least.row, roomy)
    every = [_decision(problem, index, result, row) for row in rows]
    decisions = tuple(
        candidate
        for candidate in every
        if candidate is every[0] or candidate.decision != every[0].decision
    )
    best = decisions[0]
    return SinglePoolResult(
        baseline=_with_prediction(baseline, best.objective_s, best.risk.out_of_memory_probability),
        decisions=decisions,
        complete_s=inf if headroom.complete_s is None else headroom.complete_s,
    )


def _decision(
    problem: PoolsProblem, index: int, result: SearchOutcome, row: Solutions
) -> SinglePoolDecision:
    spec, priced_pool = problem.specs[index], problem.priced_pools[index]
    outcome = replace(result, solutions=row)
    detail = price_solution(outcome, 0)
    formatter = PlanFormatter(
        spec=spec,
        priced_pool=priced_pool,
        search=outcome,
        band=problem.bands[index],
        ratios=problem.ratios,
    )
    return SinglePoolDecision(
        index=index,
        spec=spec,
        priced_pool=priced_pool,
        decision=TrainDecision.model_validate(solution_fields(outcome, 0)),
        detail=detail,
        objective_s=max(float(row.step_s[0]), simulated_s(detail)),
        risk=formatter.risk(detail),
    )


def plan_single_pool(
    problem: PoolsProblem, index: int, *, settings: SearchSettings, provenance: Provenance
) -> Plan:
    """Plan on one of the pools; the plan names the unused devices of the cluster."""
    spec, priced_pool = problem.specs[index], problem.priced_pools[index]
    plan = make_analytic_plan(
        spec,
        priced_pool,
        settings=replace(settings, processes=1, watch=ignore_progress),
        provenance=provenance,
    )
    made = plan.decision
    if made is None:
        return plan
    pool = priced_pool.pool
    devices = made.num_devices // made.pipeline_model_parallel_size
    placement = StagePlacement(
        stages=tuple(
            StageDevices(pool=pool.name, layers=layers, devices=devices)
            for layers in made.pipeline_layout
        ),
        hosts=tuple(
            f"{pool.name}-{node}" for node in range(-(-made.num_devices // pool.devices_per_node))
        ),
        unused_devices=_unused(problem, index, made.num_devices),
    )
    return plan.model_copy(update={"placement": placement})


def to_single_pool_baselines(
    single_pools: Sequence[SinglePoolResult], plan: Plan
) -> tuple[SinglePoolBaseline, ...]:
    """Format the baselines for the plan; the used pool's figures are those of the plan itself."""
    used = {stage.pool for stage in plan.placement.stages} if plan.placement else set()
    planned = plan.predicted if len(used) == 1 else None
    return tuple(
        pool.baseline
        if planned is None or pool.baseline.pool not in used
        else _with_prediction(pool.baseline, planned.step_time_s, planned.out_of_memory_probability)
        for pool in single_pools
    )


def _with_prediction(
    baseline: SinglePoolBaseline, step_s: float, chance: float | None
) -> SinglePoolBaseline:
    return baseline.model_copy(update={"step_time_s": step_s, "out_of_memory_probability": chance})


def _unused(problem: PoolsProblem, index: int, num_devices: int) -> dict[str, int]:
    unused = {}
    for position, priced_pool in enumerate(problem.priced_pools):
        left = priced_pool.pool.num_devices - (num_devices if position == index else 0)
        if left:
            unused[priced_pool.pool.name] = left
    return unused
