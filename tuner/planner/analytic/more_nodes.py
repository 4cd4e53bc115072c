"""More nodes of the same kind, on which a model fits that does not fit on those there are.

Nodes can be had where a device's memory cannot be changed, so they are offered first. Multiples of
the pool are tried in ascending order: a cheap look at the leanest decision (relaxations.py), then a
search of its own; nothing is guessed. Where the smallest needs offloading, the smallest that does
not is offered beside it. Not covered: counts between the multiples, and whether other
nodes than multiples would be legal.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tuner.errors import SpecError
from tuner.plan import Band, Relaxation, TrainDecision
from tuner.planner.analytic.build_problem import Site, question_of
from tuner.planner.analytic.degrees import legal_degrees
from tuner.planner.analytic.incumbents import Search
from tuner.planner.analytic.options import ways_of
from tuner.planner.analytic.plan_fields import Teller
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.relaxations import memory_that_would_do
from tuner.planner.analytic.search import Settings, search
from tuner.planner.analytic.search_result import decision_of, detail_of
from tuner.planner.analytic.space_size import space
from tuner.planner.analytic.ties import ratios_on
from tuner.planner.reasons import MULTIPLES
from tuner.spec.spec import Spec

OFFLOADED: Final = (
    "; fits there only with offloading or dropped tokens, which no published run prices, and host"
    " memory is not checked"
)
"""Beside an offer that needs what only the user may ask for."""


def more_nodes(spec: Spec, site: Site, *, settings: Settings, band: Band) -> tuple[Relaxation, ...]:
    """Return the smallest multiple of the pool's nodes on which something fits; none if none does.

    Where that needs what only the user may ask for, the smallest without follows.

    Args:
        spec: with one pool, on which nothing fits for lack of memory.
        site: of the pool.
        settings: of the search; its time limit holds for all multiples together.
        band: of a step, measured over predicted.
    """
    begun_s = settings.clock()
    offers: list[Relaxation] = []
    for larger in _larger(site):
        left_s = settings.time_limit_s - (settings.clock() - begun_s)
        if left_s <= 0.0:
            break
        try:
            question = question_of(spec, larger)
        except SpecError:
            continue
        # As the planner does: plainly first, then with what only the user may ask for.
        more = () if offers else (spec.search,)
        for asked in dict.fromkeys((question.limits, *more)):
            limited = replace(question, limits=asked)
            if not _may_fit(limited):
                continue
            found = search(limited, replace(settings, top=1, band_ratio=0.0, time_limit_s=left_s))
            if found.found is not None:
                is_plain = asked == question.limits
                note = "" if is_plain else OFFLOADED
                offers.append(_relaxation(spec, site, larger, found, band=band, note=note))
                if is_plain:
                    return tuple(offers)
                break
    return tuple(offers)


def _larger(site: Site) -> Iterator[Site]:
    for multiple in MULTIPLES:
        pool = site.pool.model_copy(update={"nodes": multiple * site.pool.nodes})
        yield replace(site, pool=pool)


def _may_fit(question: Question) -> bool:
    """Whether anything is legal, and the leanest decision that is found fits."""
    legal, _ = space(ways_of(question), legal_degrees(question))
    return bool(legal) and memory_that_would_do(question) <= question.memory_limit_bytes


def _relaxation(
    spec: Spec, site: Site, larger: Site, found: Search, *, band: Band, note: str
) -> Relaxation:
    ratios = ratios_on(spec, larger, band=band)
    teller = Teller(spec=spec, site=larger, search=found, band=band, ratios=ratios)
    nodes, each = larger.pool.nodes, larger.pool.devices_per_node
    return Relaxation(
        limit="nodes",
        change=f"{nodes} nodes instead of {site.pool.nodes}: {nodes * each} devices{note}",
        decision=TrainDecision.model_validate(decision_of(found, 0)),
        predicted=teller.prediction(detail_of(found, 0)),
    )
