"""More nodes of the same kind, where a model does not fit on those there are, or hardly.

Nodes can be had where the memory of a device cannot be changed, so they are offered first.
Multiples of the pool are tried in ascending order: a cheap check of the decision of least memory
(relaxations.py), then a search. If the smallest multiple needs offloading, the smallest that does
not is offered as well. Not covered: counts between the multiples, and whether they would be legal.

Where every decision found will probably run out of memory there is a plan, but nobody should rely
on it: nodes are offered then too, or memory, with which some peak is unlikely to be exceeded.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tuner.config.train import TrainDecision
from tuner.errors import SpecError
from tuner.plans.train import Band, Relaxation, TrainPrediction
from tuner.search.reasons import MULTIPLES
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import PricedPool, build_problem
from tuner.search.train.degrees import legal_degrees
from tuner.search.train.incumbents import SearchOutcome
from tuner.search.train.options import option_space
from tuner.search.train.plan_fields import PlanFormatter
from tuner.search.train.problem import TrainProblem
from tuner.search.train.relaxations import least_sufficient_memory, more_memory
from tuner.search.train.search import search
from tuner.search.train.search_result import price_solution, solution_fields
from tuner.search.train.space_size import space
from tuner.search.train.ties import pool_ratios
from tuner.spec.spec import Spec

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
    deadline = settings.begin()
    offers: list[Relaxation] = []
    for larger in _larger(priced_pool):
        left = replace(settings.until(deadline), top=1, band_ratio=0.0)
        if not left.time_limit_s:
            break
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
            outcome = search(limited, left)
            if outcome.solutions is not None:
                is_plain = limits == problem.limits
                note = "" if is_plain else OFFLOADED
                offers.append(_relaxation(spec, priced_pool, larger, outcome, band=band, note=note))
                if is_plain:
                    return tuple(offers)
                break
    return tuple(offers)


def _larger(priced_pool: PricedPool) -> Iterator[PricedPool]:
    for multiple in MULTIPLES:
        pool = priced_pool.pool.model_copy(update={"nodes": multiple * priced_pool.pool.nodes})
        yield replace(priced_pool, pool=pool)


def _may_fit(problem: TrainProblem) -> bool:
    """Return whether anything is legal, and the decision of least memory fits."""
    legal, _ = space(option_space(problem), legal_degrees(problem))
    return bool(legal) and least_sufficient_memory(problem) <= problem.memory_limit_bytes


def _relaxation(
    spec: Spec,
    priced_pool: PricedPool,
    larger: PricedPool,
    outcome: SearchOutcome,
    *,
    band: Band,
    note: str,
) -> Relaxation:
    ratios = pool_ratios(spec, larger, band=band)
    formatter = PlanFormatter(
        spec=spec, priced_pool=larger, search=outcome, band=band, ratios=ratios
    )
    nodes, devices = larger.pool.nodes, larger.pool.num_devices
    predicted = formatter.prediction(price_solution(outcome, 0))
    if predicted.host_memory is not None:
        note += f"; host memory: {predicted.host_memory.words}"
    return Relaxation(
        limit="nodes",
        change=f"{nodes} nodes instead of {priced_pool.pool.nodes}: {devices} devices{note}",
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
    problem = build_problem(spec, roomy)
    deadline = settings.begin()
    nodes = more_nodes(spec, roomy, settings=settings, band=band)
    if least_sufficient_memory(problem) <= problem.memory_limit_bytes:
        return nodes

    def predict(outcome: SearchOutcome) -> TrainPrediction:
        ratios = pool_ratios(spec, roomy, band=band)
        formatter = PlanFormatter(
            spec=spec, priced_pool=roomy, search=outcome, band=band, ratios=ratios
        )
        return formatter.prediction(price_solution(outcome, 0))

    return (*nodes, more_memory(problem, settings.until(deadline), predict=predict))
