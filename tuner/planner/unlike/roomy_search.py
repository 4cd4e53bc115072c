"""Chains over pools that hardly run out of memory, searched for where the best one may.

The search over pools keeps the fastest chain of each degrees, as full as the memory limits allow.
Once more it searches under the limits at which the chance of running out is small on each pool.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from tuner.planner.analytic.memory_risk import SMALL, largest_peak_bytes
from tuner.planner.unlike.asked import PoolsQuestion
from tuner.planner.unlike.search import Search, Settings, search
from tuner.planner.unlike.told import Played, played, risk_of, uneven_bytes_of

MOST_SEARCHES: Final = 2
"""Under ever lower limits, where the peak of what was found grows more."""


def roomy_search(found: Search, settings: Settings, *, full: Played) -> Search | None:
    """Search for chains with room; the last search made, None where the chain has room.

    Args:
        found: the search that was made.
        settings: of it; all searches together take half its time.
        full: a chain that may run out.
    """
    question, again, one = found.question, None, full
    for _ in range(MOST_SEARCHES):
        if risk_of(one.chain, question).out_of_memory_probability <= SMALL:
            return again
        limits = _limits_bytes(question, one)
        if not all(limits):
            return again
        roomy = replace(
            question,
            of_pool=tuple(
                replace(
                    own,
                    memory_limit_bytes=limit_bytes,
                    usable_memory_ratio=limit_bytes / own.capacity_bytes,
                )
                for own, limit_bytes in zip(question.of_pool, limits, strict=True)
            ),
        )
        share_s = settings.time_limit_s / 2.0 / MOST_SEARCHES
        again = search(roomy, replace(settings, top=1, time_limit_s=share_s))
        if not again.chains:
            return again
        one = min((played(chain) for chain in again.chains), key=lambda each: each.objective_s)
    return again


def _limits_bytes(question: PoolsQuestion, one: Played) -> tuple[float, ...]:
    """Of each pool the largest peak with a small chance, were it to grow as a chain's does."""
    uneven_ratio = float(np.max(uneven_bytes_of(one.chain, question) / one.chain.price.bytes_S))
    return tuple(
        min(
            own.memory_limit_bytes,
            largest_peak_bytes(
                own.capacity_bytes,
                chance=SMALL,
                software=own.software,
                has_pipeline=True,
                uneven_ratio=uneven_ratio,
            ),
        )
        for own in question.of_pool
    )
