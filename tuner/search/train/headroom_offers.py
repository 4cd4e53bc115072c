"""Offer more nodes or memory where every decision found will probably run out of memory.

There is a plan then, but nobody should rely on it. The offers limit predicted peaks to the share of
a device's memory at which running out is unlikely.
"""

from dataclasses import replace

from tuner.plans.train import Band, Relaxation, TrainPrediction
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import PricedPool, build_problem
from tuner.search.train.incumbents import SearchOutcome
from tuner.search.train.more_nodes import more_nodes
from tuner.search.train.plan_fields import PlanFormatter
from tuner.search.train.relaxations import least_sufficient_memory, more_memory
from tuner.search.train.search_result import price_solution
from tuner.search.train.ties import pool_ratios
from tuner.spec.spec import Spec


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
        one = PlanFormatter(spec=spec, priced_pool=roomy, search=outcome, band=band, ratios=ratios)
        return one.prediction(price_solution(outcome, 0))

    return (*nodes, more_memory(problem, settings.until(deadline), predict=predict))
