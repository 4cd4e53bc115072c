"""More nodes, or more memory, where every decision found runs out of memory more likely than not.

There is a plan then, but nobody should count on it. What is offered is what would be were predicted
peaks allowed only the share of a device's memory with which they hardly run out.
"""

from dataclasses import replace

from tuner.plan import Band, Relaxation
from tuner.planner.analytic.asking import Site, question_of
from tuner.planner.analytic.more_nodes import more_nodes
from tuner.planner.analytic.relaxing import MEMORY_LIMIT, memory_that_would_do
from tuner.planner.analytic.search import Settings
from tuner.spec.spec import Spec
from tuner.units import format_bytes


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
    needed_bytes = memory_that_would_do(question)
    nodes = more_nodes(spec, roomy, settings=settings, band=band)
    if needed_bytes <= question.memory_limit_bytes:
        return nodes
    memory = Relaxation(
        limit=MEMORY_LIMIT,
        change=(
            f"{format_bytes(int(needed_bytes / room_ratio))} per device instead of "
            f"{format_bytes(int(question.capacity_bytes))}"
        ),
    )
    return (*nodes, memory)
