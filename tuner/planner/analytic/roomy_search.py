"""Decisions that hardly run out of memory, searched for beyond the rows next to the fastest.

A search keeps the rows whose best way, as full as the memory limit allows, is near the fastest.
What has more room and takes a few percent longer is seldom among them, so it is searched for under
the memory limit at which the chance of running out is `SMALL`.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from tuner.planner.analytic.found import Found, Search
from tuner.planner.analytic.memory_risk import SMALL, chances
from tuner.planner.analytic.preferring import (
    MOST_SLOWER_RATIO,
    TOLERANCE_RATIO,
    chances_of,
    roomier,
    uneven_bytes_of,
)
from tuner.planner.analytic.search import Settings, search
from tuner.planner.progress import Told, unwatched

MOST_SEARCHES: Final = 3
"""Under ever lower limits, where what was found still runs out: its peak errs or grows more."""

PEAKS: Final = 2048
"""Shares of a device's memory that are tried as a limit."""


def roomy_search(found: Search, settings: Settings, *, full: Found, step_s: float) -> Search | None:
    """Search for decisions with room whose steps take at most `MOST_SLOWER_RATIO` longer.

    Args:
        found: the search that was made.
        settings: of it.
        full: a decision that may run out, one column.
        step_s: of that decision.

    Returns:
        The last search that was made; it may have found nothing. None where `full` has room.
    """
    if float(chances_of(found, full).ever_C[0]) <= SMALL:
        return None
    settings.watch(Told(stage="memory", text="searching for decisions with more room"))
    quiet = replace(
        settings,
        top=1,
        band_ratio=TOLERANCE_RATIO,
        below_s=step_s * (1.0 + MOST_SLOWER_RATIO),
        time_limit_s=settings.time_limit_s / 4.0,
        watch=unwatched,
    )
    again, one = found, full
    for _ in range(MOST_SEARCHES):
        limit_bytes = min(_limit_bytes(again, one), again.question.memory_limit_bytes)
        question = replace(
            found.question,
            memory_limit_bytes=limit_bytes,
            usable_memory_ratio=limit_bytes / found.question.capacity_bytes,
        )
        again = search(question, quiet)
        if again.found is None or roomier(again, step_s=step_s) is not None:
            return again
        one = again.found.taken(np.array([0]))
    return again


def _limit_bytes(found: Search, one: Found) -> float:
    """The largest peak with a small chance, were it to err and grow as one decision's does."""
    capacity_bytes = found.question.capacity_bytes
    peaks = capacity_bytes * np.arange(1, PEAKS + 1) / PEAKS
    uneven_ratio = uneven_bytes_of(found, one) / one.peak_bytes
    ever = chances(
        peaks,
        capacity_bytes=capacity_bytes,
        software=found.question.software,
        pipeline_C=int(one.candidates.rows["pipeline"][0]),
        uneven_bytes_C=peaks * uneven_ratio,
    ).ever_C
    return float(peaks[ever <= SMALL].max(initial=0.0))
