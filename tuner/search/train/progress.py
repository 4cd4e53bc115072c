"""Progress events of a search."""

import math

from tuner.search.progress import PlanningEvent
from tuner.search.train.degrees import Degrees
from tuner.search.train.incumbents import SearchOutcome
from tuner.units import format_count, format_ratio, format_s


def space_event(legal: int, illegal: int, degrees: Degrees) -> PlanningEvent:
    """The size of the space, before anything is priced."""
    return PlanningEvent(
        stage="space",
        text=f"{format_count(legal)} legal decisions of {format_count(legal + illegal)}, in "
        f"{format_count(degrees.num_legal)} combinations of degrees",
    )


def bounds_event(partials: int, bound_s: float) -> PlanningEvent:
    """Every partial row has its bound."""
    bound = f", none below {format_s(bound_s)}" if partials else ""
    return PlanningEvent(
        stage="bounds", text=f"{format_count(partials)} partial rows of degrees bounded{bound}"
    )


def batch_event(done: str, *, best_s: float, bound_s: float, priced: int) -> PlanningEvent:
    """The state between two batches."""
    text = f"{done}, {priced} decisions priced, {_incumbent(best_s, bound_s)}"
    return PlanningEvent(stage="search", text=text)


def result_event(search: SearchOutcome) -> PlanningEvent:
    """The result of the search."""
    best_s = math.inf if search.solutions is None else float(search.solutions.step_s[0])
    counts = search.counts
    left = f", {format_count(counts.open)} left open" if counts.open else ""
    return PlanningEvent(
        stage="search",
        text=f"{counts.priced} priced, {format_count(counts.bounded)} bounded{left}, "
        f"{_incumbent(best_s, search.bound_s)}",
    )


def _incumbent(best_s: float, bound_s: float) -> str:
    if math.isinf(best_s):
        return "nothing that fits"
    gap = max(0.0, 1.0 - min(bound_s, best_s) / best_s)
    return f"best {format_s(best_s)}, gap {format_ratio(gap)}"
