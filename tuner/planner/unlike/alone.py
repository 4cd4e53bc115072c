"""What each pool does without the others, and the plan where one is better off alone.

A pool alone is searched as any single pool is, interleaved schedules included. The spare nodes that
it keeps back are its own share (spares.py); those of the pools left out are not needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from tuner.placement import Alone, Placement, StagePlacement
from tuner.plan import Plan, Provenance
from tuner.planner.analytic.answer import detail_of
from tuner.planner.analytic.memory_risk import loss_prices
from tuner.planner.analytic.planning import make_analytic_plan
from tuner.planner.analytic.preferring import TOLERANCE_RATIO, least_expected
from tuner.planner.analytic.roomy_search import roomy_searches
from tuner.planner.analytic.search import Settings as PoolSettings
from tuner.planner.analytic.search import search
from tuner.planner.analytic.telling import effective_step_s
from tuner.planner.unlike.asked import PoolsQuestion
from tuner.planner.unlike.search import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAlone:
    """The best that is found on one pool."""

    index: int
    """Of the pool in the cluster."""
    told: Alone
    effective_step_s: float = inf
    """Wall clock per step with failures and with what running out of memory costs on average;
    infinite where the model does not fit."""
    step_s: float = inf
    """Seconds of a step of the decision that this is of."""
    chance: float = 1.0
    """Of its running out of memory."""


def each_alone(question: PoolsQuestion, settings: Settings) -> tuple[PoolAlone, ...]:
    """Search every pool by itself."""
    found = []
    # All pools one by one take no longer than the search over all of them may.
    share_s = settings.time_limit_s / question.num_pools
    for index, own in enumerate(question.of_pool):
        spec, site = question.specs[index], question.sites[index]
        settings_of = PoolSettings(
            top=1, band_ratio=TOLERANCE_RATIO, time_limit_s=share_s, clock=settings.clock
        )
        result = search(own, settings_of)
        told = Alone(pool=site.pool.name, devices=own.num_devices, step_time_s=None)
        if result.found is None:
            found.append(PoolAlone(index=index, told=told))
            continue
        step_s = float(result.found.step_s[0])
        fastest = result.found.taken(np.array([0]))
        rooms = roomy_searches(result, settings_of, full=fastest, step_s=step_s)
        least = least_expected(result, prices=loss_prices(spec.goal), rooms=rooms.searches)
        detail = detail_of(replace(result, found=least.row), 0)
        found.append(
            PoolAlone(
                index=index,
                told=told.model_copy(update={"step_time_s": step_s}),
                effective_step_s=effective_step_s(spec, site, detail, step_s=least.expected_s),
                step_s=float(least.row.step_s[0]),
                chance=least.chance,
            )
        )
    return tuple(found)


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


def told_of(alone: Sequence[PoolAlone]) -> tuple[Alone, ...]:
    """In the words of a plan."""
    return tuple(one.told for one in alone)


def _unused(question: PoolsQuestion, index: int, num_devices: int) -> dict[str, int]:
    unused = {}
    for other, site in enumerate(question.sites):
        left = site.pool.num_devices - (num_devices if other == index else 0)
        if left:
            unused[site.pool.name] = left
    return unused
