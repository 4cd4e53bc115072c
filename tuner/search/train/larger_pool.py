"""More nodes of the same kind, or more memory, where a model does not fit in what there is.

Nodes can be had where the memory of a device cannot be changed, so they are offered first.
Multiples of the pool are tried in ascending order: a cheap check of the decision of least memory
(relaxations.py), then a search. If the smallest multiple needs offloading, the smallest that does
not is offered as well. Not covered: counts between the multiples, and whether they would be legal.

Where every decision found will probably run out of memory there is a plan, but nobody should rely
on it: nodes are offered then too, or memory, with which some peak is unlikely to be exceeded.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from tuner.config.host_memory import STATED_AS
from tuner.config.train import TrainDecision
from tuner.errors import SpecError
from tuner.plans.train import Band, Relaxation
from tuner.search.reasons import (
    HOST_LIMIT,
    MEMORY_LIMIT,
    MemoryOffer,
    memory_words,
    node_multiples,
    printed_bytes,
)
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import PricedPool, build_problem
from tuner.search.train.memory import host_bytes
from tuner.search.train.plan_fields import PlanFormatter
from tuner.search.train.problem import TrainProblem
from tuner.search.train.relaxations import least_sufficient_memory
from tuner.search.train.search import search
from tuner.search.train.search_result import SearchOutcome, price_solution, solution_fields
from tuner.search.train.space_size import has_legal
from tuner.search.train.ties import pool_ratios
from tuner.spec.spec import Spec
from tuner.units import format_bytes

OFFLOADED: Final = (
    "; fits there only with offloading or dropped tokens, which no published run prices"
)
"""Note on an offer that needs what only the user may ask for."""


def more_nodes(
    spec: Spec, priced_pool: PricedPool, *, settings: SearchSettings, band: Band
) -> tuple[Relaxation, ...]:
    """Return the smallest multiple of the pool's nodes on which something fits, if any does.

    If that needs what only the user may ask for, the smallest multiple without it follows.

    Args:
        spec: with one pool, on which nothing fits for lack of memory.
        priced_pool: that pool.
        settings: of the search; its time limit holds for all multiples together.
        band: of a step, measured over predicted.
    """
    deadline, pool = settings.begin(), priced_pool.pool
    offers: list[Relaxation] = []
    for change in deadline.before_end(node_multiples(pool, used_nodes=pool.nodes)):
        larger, left = replace(priced_pool, pool=change.apply(pool)), settings.until(deadline)
        try:
            problem = build_problem(spec, larger)
        except SpecError:
            continue
        # As the planner does: first without, then with what only the user may ask for.
        more = () if offers else (spec.search,)
        for limits in dict.fromkeys((problem.limits, *more)):
            limited = replace(problem, limits=limits)
            if not _may_fit(limited):
                continue
            outcome = search(limited, replace(left, top=1, band_ratio=0.0))
            if outcome.solutions is not None:
                words = change.words + OFFLOADED * (limits != problem.limits)
                offers.append(_relaxation(spec, larger, outcome, change.limit, words, band=band))
                if limits == problem.limits:
                    return tuple(offers)
                break
    return tuple(offers)


def _may_fit(problem: TrainProblem) -> bool:
    """Return whether anything is legal, and the decision of least memory fits."""
    return has_legal(problem) and least_sufficient_memory(problem) <= problem.memory_limit_bytes


def more_memory(
    spec: Spec,
    priced_pool: PricedPool,
    problem: TrainProblem,
    *,
    settings: SearchSettings,
    band: Band,
) -> Relaxation:
    """Find memory that is sufficient, and search with it.

    Args:
        spec: with one pool.
        priced_pool: that pool.
        problem: of the spec, in which nothing fits.
        settings: of the search with that memory.
        band: of a step, measured over predicted.
    """
    usable = least_sufficient_memory(problem)
    # Search with the printed size, which is the one that users will state.
    capacity = printed_bytes(usable / problem.usable_memory_ratio)
    relaxed = replace(problem, memory_limit_bytes=capacity * problem.usable_memory_ratio)
    outcome = search(relaxed, replace(settings, top=1, band_ratio=0.0))
    words = memory_words([MemoryOffer(capacity, problem.capacity_bytes)])
    return _relaxation(spec, priced_pool, outcome, MEMORY_LIMIT, words, band=band)


def more_host_memory(
    spec: Spec,
    priced_pool: PricedPool,
    problem: TrainProblem,
    *,
    settings: SearchSettings,
    band: Band,
) -> tuple[Relaxation, ...]:
    """Return the memory of hosts with which something fits; nothing where that is not short."""
    if problem.host_limit_bytes is None:
        return ()
    outcome = search(
        replace(problem, host_limit_bytes=None), replace(settings, top=1, band_ratio=0.0)
    )
    if outcome.solutions is None:
        return ()
    best = outcome.solutions.taken(np.array([0]))
    needed = host_bytes(problem, outcome.options, best.candidates, best.layers_PC)[0]
    words = (
        f"{format_bytes(printed_bytes(float(needed)))} of a node's memory instead of"
        f" {format_bytes(int(problem.host_limit_bytes))}: {STATED_AS}"
    )
    return (_relaxation(spec, priced_pool, outcome, HOST_LIMIT, words, band=band),)


def _relaxation(
    spec: Spec,
    priced_pool: PricedPool,
    outcome: SearchOutcome,
    limit: str,
    words: str,
    *,
    band: Band,
) -> Relaxation:
    """Return a change with the best decision of its search; without one where nothing fits."""
    if outcome.solutions is None:
        return Relaxation(limit=limit, change=words)
    ratios = pool_ratios(spec, priced_pool, band=band)
    formatter = PlanFormatter(
        spec=spec, priced_pool=priced_pool, search=outcome, band=band, ratios=ratios
    )
    predicted = formatter.prediction(price_solution(outcome, 0))
    if limit == "nodes" and predicted.host_memory is not None:
        words += f"; host memory: {predicted.host_memory.words}"
    return Relaxation(
        limit=limit,
        change=words,
        decision=TrainDecision.model_validate(solution_fields(outcome, 0)),
        predicted=predicted,
    )


def headroom_relaxations(
    spec: Spec,
    priced_pool: PricedPool,
    *,
    safe_peak_ratio: float,
    settings: SearchSettings,
    band: Band,
) -> tuple[Relaxation, ...]:
    """Return nodes, then memory, with which some decision is unlikely to run out.

    Args:
        spec: with one pool.
        priced_pool: that pool.
        safe_peak_ratio: share of a device's memory up to which a predicted peak is safe.
        settings: of the search.
        band: of a step, measured over predicted.
    """
    pool = priced_pool.pool.model_copy(update={"usable_memory_ratio": safe_peak_ratio})
    roomy = replace(priced_pool, pool=pool)
    problem, deadline = build_problem(spec, roomy), settings.begin()
    nodes = more_nodes(spec, roomy, settings=settings, band=band)
    if least_sufficient_memory(problem) <= problem.memory_limit_bytes:
        return nodes
    left = settings.until(deadline)
    return (*nodes, more_memory(spec, roomy, problem, settings=left, band=band))
