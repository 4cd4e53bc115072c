"""More nodes, or more memory, where every decision found runs out of memory more likely than not.

There is a plan then, but nobody should count on it. What is offered is what would be were predicted
peaks allowed only the share of a device's memory with which they hardly run out.
"""

from dataclasses import replace

from tuner.plan import Band, Relaxation, TrainPrediction
from tuner.planner.analytic.build_problem import Site, question_of
from tuner.planner.analytic.incumbents import Search
from tuner.planner.analytic.more_nodes import more_nodes
from tuner.planner.analytic.plan_fields import Teller
from tuner.planner.analytic.relaxations import memory_that_would_do, more_memory
from tuner.planner.analytic.search import Settings
from tuner.planner.analytic.search_result import detail_of
from tuner.planner.analytic.ties import ratios_on
from tuner.spec.spec import Spec


def more_room(
    spec: Spec, site: Site, *, room_ratio: float, settings: Settings, band: Band
) -> tuple[Relaxation, ...]:
    """Return nodes, then memory, with which something found hardly runs out.

    Args:
        spec: with one pool.
        site: of the pool.
        room_ratio: share of a device's memory that a predicted peak may take and hardly run out.
        settings: of the search.
        band: of a step, measured over predicted.
    """
    pool = site.pool.model_copy(update={"usable_memory_ratio": room_ratio})
    roomy = replace(site, pool=pool)
    question = question_of(spec, roomy)
    begun_s = settings.clock()
    nodes = more_nodes(spec, roomy, settings=settings, band=band)
    if memory_that_would_do(question) <= question.memory_limit_bytes:
        return nodes

    def predict(again: Search) -> TrainPrediction:
        ratios = ratios_on(spec, roomy, band=band)
        one = Teller(spec=spec, site=roomy, search=again, band=band, ratios=ratios)
        return one.prediction(detail_of(again, 0))

    return (*nodes, more_memory(question, settings.since(begun_s), predict=predict))
