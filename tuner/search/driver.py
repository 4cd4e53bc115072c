"""The driver of the searches for training layouts: best first, bounded, with a proof.

A search divides its space into nodes (degrees, options or both), each with a lower bound on the
step time of every decision in it. `BestFirst` visits nodes in the order of their bounds, in batches
that grow. A node above the threshold, which falls as solutions are found, is proven worse; one not
reached in time is open. So

    space = priced + bounded + illegal + open

counts every decision once, and the least bound of what was priced or is open bounds the search.
What a node is, how it is priced and what its children are is the business of each search.

Letters: N nodes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.family import OPTIMALITY_TOLERANCE
from tuner.arrays import Floats, Ints
from tuner.plans.train import Certificate, Space
from tuner.search.layout_groups import Layout, rows_of_layouts
from tuner.search.settings import SearchSettings

ONE_BY_ONE = (1, 1)
"""Batches of a single node."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proof:
    """What a search proves about its space."""

    bound_s: float
    """Lower bound of all steps below `below_s`, seconds; infinite if there are none."""
    complete_s: float
    """Step time in seconds up to which the search found every row."""
    counts: Space
    solve_s: float
    """Seconds that the search took."""

    def certify(
        self,
        objective_s: float | None,
        *,
        decision_s: float | None = None,
        within_band: int = 0,
        within_band_is_least: bool = False,
        method: str,
    ) -> Certificate:
        """State what is proven of the fastest decision, or that none was found.

        Args:
            objective_s: seconds of a step of the fastest; None: none was found.
            decision_s: step of a decision that is preferred to the fastest.
            within_band: number of ties.
            within_band_is_least: whether that number is a minimum.
            method: name of the search.
        """
        bound_s = self.bound_s
        if objective_s is None:
            is_known = not self.counts.open
            status, gap = ("infeasible", 0.0) if is_known else ("unknown", 1.0)
            bound_s = math.inf if is_known else bound_s
        else:
            gap = _gap_ratio(objective_s, bound_s=bound_s)
            status = "optimal" if gap <= OPTIMALITY_TOLERANCE else "feasible"
            bound_s = min(bound_s, objective_s)
        return Certificate.model_validate(
            {
                "status": status,
                "objective": objective_s,
                "bound": bound_s if math.isfinite(bound_s) else None,
                "gap_ratio": gap,
                "decision_gap_ratio": (
                    None if decision_s is None else _gap_ratio(decision_s, bound_s=bound_s)
                ),
                "space": self.counts,
                "within_band": within_band,
                "within_band_is_least": within_band_is_least,
                "solve_s": self.solve_s,
                "method": method,
            }
        )


class BestFirst(ABC):
    """The state of one search; lives as long as the call that made it."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self.begun = self.deadline = settings.begin()
        self.bound_s = math.inf
        """Least bound of what was priced."""
        self.open_s = math.inf
        """Least bound of what is open."""
        self.priced = 0
        self.open = 0

    @abstractmethod
    def ranked(self) -> tuple[Sequence[float] | Floats, Iterable[Layout]]:
        """Return the steps of the solutions in seconds and their layouts, fastest first."""

    def best_s(self) -> float:
        """Return the seconds of the fastest step found."""
        steps_s, _ = self.ranked()
        return float(steps_s[0]) if len(steps_s) else math.inf

    def tie_s(self) -> float:
        """Return the longest step time that ties with the fastest, in seconds."""
        return self.best_s() * (1.0 + self.settings.band_ratio)

    def threshold_s(self) -> float:
        """Return the step time above which nothing is of interest.

        The row that completes `top` layouts or the slowest tie, at most `below_s`.
        """
        steps_s, layouts = self.ranked()
        rows = rows_of_layouts(layouts, top=self.settings.top)
        if rows is None:
            return self.settings.below_s
        return min(max(float(steps_s[rows - 1]), self.tie_s()), self.settings.below_s)

    def within(
        self, bound_s_N: Floats, incumbent_s_N: Floats | float = math.inf
    ) -> npt.NDArray[np.bool_]:
        """Return which nodes may hold something of interest.

        Args:
            bound_s_N: their lower bounds in seconds.
            incumbent_s_N: seconds that no bound may exceed, either.
        """
        within: npt.NDArray[np.bool_] = bound_s_N <= np.minimum(self.threshold_s(), incumbent_s_N)
        return within

    def best_first(
        self,
        bound_s_N: Floats,
        *,
        sizes: tuple[int, int],
        weight_N: Ints | None = None,
        incumbent_s: Callable[[Ints], Floats] | None = None,
        count: Callable[[Ints], int] | None = None,
    ) -> Iterator[Ints]:
        """Yield nodes in batches, best first, pruned at the threshold of the moment.

        Args:
            bound_s_N: lower bounds in seconds.
            sizes: the first batch and the largest one; sizes double from one to the other.
            weight_N: contribution of each node to the size of a batch; None: 1.
            incumbent_s: seconds that the bounds of some nodes may not exceed, either.
            count: decisions in some nodes, left open when time is up; None: the time limit is
                ignored.
        """
        order = np.argsort(bound_s_N, kind="stable")
        weights_N = np.ones_like(order) if weight_N is None else weight_N
        total_N = np.cumsum(weights_N[order])
        start, (size, largest) = 0, sizes
        while start < len(order) and bound_s_N[order[start]] <= self.threshold_s():
            is_over = count is not None and self.deadline.is_over
            done = int(total_N[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(total_N, done + size, side="right")))
            batch = order[start : len(order) if is_over else stop]
            start, size = stop, min(2 * size, largest)
            incumbent_s_N = math.inf if incumbent_s is None else incumbent_s(batch)
            batch = batch[self.within(bound_s_N[batch], incumbent_s_N)]
            if count is not None and is_over:
                self.leave_open(count(batch), float(bound_s_N[batch].min(initial=math.inf)))
                return
            if len(batch):
                yield batch

    def leave_open(self, count: int, bound_s: float) -> None:
        """Count decisions of which only the bound is known."""
        self.open += count
        self.open_s = min(self.open_s, bound_s)

    def prove(self, *, legal: int, illegal: int) -> Proof:
        """State what the search proves, given the size of its space."""
        return Proof(
            bound_s=min(self.bound_s, self.open_s, self.best_s()),
            complete_s=min(self.threshold_s(), self.open_s),
            counts=Space(
                priced=self.priced,
                bounded=max(0, legal - self.priced - self.open),
                illegal=illegal,
                open=self.open,
            ),
            solve_s=self.begun.elapsed_s,
        )


def _gap_ratio(objective_s: float, *, bound_s: float) -> float:
    """Return how far an objective may be above the optimum, as a share of the objective."""
    return max(0.0, 1.0 - bound_s / objective_s)
