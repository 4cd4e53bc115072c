"""Lines about a running search, for whoever watches it."""

import math

from tuner.planner.analytic.degrees import Degrees
from tuner.planner.analytic.incumbents import Search
from tuner.planner.progress import Told
from tuner.units import format_count, format_ratio, format_s


def counted(legal: int, illegal: int, degrees: Degrees) -> Told:
    """The space before anything is priced."""
    return Told(
        stage="space",
        text=f"{format_count(legal)} legal decisions of {format_count(legal + illegal)}, in "
        f"{format_count(degrees.num_legal)} combinations of degrees",
    )


def opened(cells: int, least_s: float) -> Told:
    """Every cell has its bound."""
    bound = f", none below {format_s(least_s)}" if cells else ""
    return Told(stage="bounds", text=f"{format_count(cells)} cells of degrees bounded{bound}")


def passing(done: str, *, best_s: float, bound_s: float, priced: int) -> Told:
    """Between two batches."""
    text = f"{done}, {priced} decisions priced, {_incumbent(best_s, bound_s)}"
    return Told(stage="search", text=text, is_passing=True)


def ended(search: Search) -> Told:
    """What the search came to."""
    best_s = math.inf if search.found is None else float(search.found.step_s[0])
    counts = search.counts
    left = f", {format_count(counts.open)} left open" if counts.open else ""
    return Told(
        stage="search",
        text=f"{counts.priced} priced, {format_count(counts.bounded)} bounded{left}, "
        f"{_incumbent(best_s, search.bound_s)}",
    )


def _incumbent(best_s: float, bound_s: float) -> str:
    if math.isinf(best_s):
        return "nothing that fits"
    gap = max(0.0, 1.0 - min(bound_s, best_s) / best_s)
    return f"best {format_s(best_s)}, gap {format_ratio(gap)}"
