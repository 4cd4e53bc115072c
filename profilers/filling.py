"""The second round: sizes between those of the grids, over all tables at once, until time is up.

Time goes to the tables in proportion to weight times error, the error being that of points
predicted from the others: a table that is known well has little to gain from more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from profilers.adaptive import Infill
from profilers.schedule import Plan, Step

FILL_S = 0.03
"""Time for repeats of one size: another size tells more than the same one again."""
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
