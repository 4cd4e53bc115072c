"""The second pass, over all tables at once, until time is up: skipped cases, then sizes in between.

A table that was cut short is known worst of all: its curve ends where the measurement did. So the
one with the largest share of skipped cases comes first, for at most `SKIPPED_RATIO` of the pass.
Then come sizes between those of the grids, and tables get time in proportion to their weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from profilers.adaptive import Infill
from profilers.schedule import Step, TableSchedule

INFILL_S = 0.008
"""Time for repeats of one size, here and in a grid that is refined here: another size adds more."""
SKIPPED_RATIO = 0.5
"""Largest share of the pass's time for cases that the first pass skipped."""
MAX_MISSES = 8
"""Sizes in a row that would not end in time; after so many the table is left as it is."""


@dataclass(slots=True, kw_only=True)
class SecondPassTable:
    """One table of the second pass."""

    weight: float
    schedule: TableSchedule
    infill: Infill
    spent_s: float = 0.0
    misses: int = 0

    @property
    def spent_per_share(self) -> float:
        """Time spent over the share it deserves; the smallest comes next."""
        return self.spent_s / self.weight


def next_skipped(schedules: Sequence[TableSchedule], *, left_s: float) -> tuple[int, Step] | None:
    """Choose a table, by its index, and a case that its first pass skipped; None if there is none.

    Args:
        schedules: of every table.
        left_s: how long the case may take.
    """
    skipped = [
        (-schedule.skipped_ratio, place)
        for place, schedule in enumerate(schedules)
        if schedule.skipped
    ]
    for _, place in sorted(skipped):
        if left_s > 0.0 and (step := schedules[place].next_skipped(left_s=left_s)):
            return place, step
    return None


def next_infill(
    tables: Sequence[SecondPassTable | None], *, left_s: float
) -> tuple[int, Step] | None:
    """Choose a table, by its index, and the size to measure in it; None ends the pass."""
    while left_s > 0.0:
        open_tables = [
            (second_pass.spent_per_share, place)
            for place, second_pass in enumerate(tables)
            if second_pass is not None and second_pass.misses < MAX_MISSES
        ]
        if not open_tables:
            return None
        _, place = min(open_tables)
        second_pass = tables[place]
        if second_pass is None:
            return None
        case = second_pass.infill.next()
        if case is None:
            second_pass.misses = MAX_MISSES
        elif second_pass.schedule.expected_s(case) > left_s:
            second_pass.misses += 1
        else:
            second_pass.misses = 0
            return place, Step(case=case, budget_s=min(INFILL_S, left_s))
    return None
