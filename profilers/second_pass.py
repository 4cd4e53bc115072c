"""The second round, over all tables at once, until time is up: first what is lacking, then more.

A table that was cut short is known worst of all: its curve ends where the measuring did. So the one
that lacks the largest share of its cases comes first, for at most `LATE_RATIO` of the round. Then
come sizes between those of the grids, and time goes to the tables in proportion to weight times
error, the error being that of points predicted from the others: a table that is known well has
little to gain from more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from profilers.adaptive import Infill
from profilers.schedule import Plan, Step

FILL_S = 0.008
"""Time for repeats of one size, here and in a grid that is filled up here: another size, or another
visit, tells more."""
LATE_RATIO = 0.5
"""Of the time of the round, at most, for cases that the first one skipped."""
MAX_MISSES = 8
"""Sizes in a row that would not end in time: then the table is left as it is."""


@dataclass(slots=True, kw_only=True)
class Fill:
    """One table of the round."""

    weight: float
    plan: Plan
    infill: Infill
    spent_s: float = 0.0
    misses: int = 0

    @property
    def claim(self) -> float:
        """Time it has had over time it deserves; the smallest comes next."""
        return self.spent_s / (self.weight * max(self.infill.error_ratio, 1e-3))


def next_late(plans: Sequence[Plan], *, left_s: float) -> tuple[int, Step] | None:
    """Choose a table, by its place, and a case that its first round skipped; None: there is none.

    Args:
        plans: of every table.
        left_s: how long the case may take.
    """
    lacking = [(-plan.lacking_ratio, place) for place, plan in enumerate(plans) if plan.skipped]
    for _, place in sorted(lacking):
        if left_s > 0.0 and (step := plans[place].late(left_s=left_s)):
            return place, step
    return None


def next_fill(fills: Sequence[Fill | None], *, left_s: float) -> tuple[int, Step] | None:
    """Choose a table, by its place, and the size to measure in it; None ends the round."""
    while left_s > 0.0:
        open_fills = [
            (fill.claim, place)
            for place, fill in enumerate(fills)
            if fill is not None and fill.misses < MAX_MISSES
        ]
        if not open_fills:
            return None
        _, place = min(open_fills)
        fill = fills[place]
        if fill is None:
            return None
        case = fill.infill.next()
        if case is None:
            fill.misses = MAX_MISSES
        elif fill.plan.expected_s(case) > left_s:
            fill.misses += 1
        else:
            fill.misses = 0
            return place, Step(case=case, budget_s=min(FILL_S, left_s))
    return None
