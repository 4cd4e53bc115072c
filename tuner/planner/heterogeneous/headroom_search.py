"""Chains over pools with more room, searched for where the best one may run out of memory.

The search over pools keeps the fastest chain of each degrees, as full as the memory limits allow.
As on one pool (analytic/headroom_search.py) it is made again under the limits at which running out
has a small chance on each pool; where what it finds takes longer, under those of CHANCES for what
is faster than that; and where nothing hardly runs out, what takes least memory is solved. Whatever
any of these finds is kept.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.planner.analytic.headroom_search import CHANCES
from tuner.planner.analytic.memory_risk import SMALL, largest_peak_bytes
from tuner.planner.analytic.preference import TOLERANCE_RATIO
from tuner.planner.heterogeneous.build_problem import PoolsQuestion
from tuner.planner.heterogeneous.chains import Chain
from tuner.planner.heterogeneous.min_memory import (
    Change,
    Deadline,
    best_chain,
    fit_anywhere,
    lean_columns,
)
from tuner.planner.heterogeneous.search import Search, Settings, search
from tuner.planner.heterogeneous.stage_prices import OnPool
from tuner.planner.heterogeneous.to_plan import Played, played, risk_of, uneven_bytes_of

MOST_SEARCHES: Final = 2
"""Under ever lower limits, where the peak of what was found grows more."""

HALVINGS: Final = 10
"""Of the range in which the least share of a device's memory lies: to a thousandth."""

MORE_RATIOS: Final = (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3)
"""Added to that share until the layers also fit whole."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rooms:
    """What was found with more room."""

    chains: tuple[Chain, ...]
    complete_s: float
    """Seconds of a step up to which every chain that hardly runs out was searched for; infinite
    where all were."""


def roomy_search(
    found: Search, settings: Settings, *, full: Played, known_s: float = math.inf
) -> Rooms | None:
    """Search for chains with room; None where the one that may run out does not.

    Args:
        found: the search that was made.
        settings: of it; all searches together take half its time.
        full: a chain that may run out.
        known_s: seconds of the fastest step known that hardly runs out; only what is faster is
            searched for.
    """
    if risk_of(full.chain, found.question).out_of_memory_probability <= SMALL:
        return None
    return _Looking(found, settings, full).result(known_s)


def with_chance(question: PoolsQuestion, one: Played, *, chance: float) -> PoolsQuestion | None:
    """Ask under the limits at which running out has a chance, were peaks to grow as a chain's does.

    None where no peak is as unlikely to run out.
    """
    uneven_ratio = float(np.max(uneven_bytes_of(one.chain, question) / one.chain.price.bytes_S))
    limits = [
        min(
            own.memory_limit_bytes,
            largest_peak_bytes(
                own.capacity_bytes,
                chance=chance,
                software=own.software,
                has_pipeline=True,
                uneven_ratio=uneven_ratio,
            ),
        )
        for own in question.of_pool
    ]
    if not all(limits):
        return None
    return replace(
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


class _Looking:
    """Searches for room that share a time limit; lives as long as the call that made it."""

    def __init__(self, found: Search, settings: Settings, full: Played) -> None:
        self._found = found
        self._settings = settings
        self._full = full
        self._end_s = settings.clock() + settings.time_limit_s / 2.0
        self._deadline = Deadline(method=settings.method, clock=settings.clock, end_s=self._end_s)
        self._chains: list[Chain] = []

    def result(self, known_s: float) -> Rooms:
        """Search."""
        complete_s = self._under(SMALL, below_s=known_s)
        fallback_s = min(known_s, self._least_s(SMALL))
        for chance in CHANCES:
            least_s = min(known_s, self._least_s(chance))
            # Only what is between the two can be better than both.
            if least_s > self._full.objective_s * (1.0 + TOLERANCE_RATIO):
                self._under(chance, below_s=least_s)
        if math.isinf(fallback_s):
            self._chains += self._leanest()
        return Rooms(chains=tuple(self._chains), complete_s=complete_s)

    def _least_s(self, chance: float) -> float:
        """The shortest step that was found with no larger chance."""
        return min(
            (one.price.step_s for one in self._chains if self._chance(one) <= chance),
            default=math.inf,
        )

    def _chance(self, chain: Chain) -> float:
        return risk_of(chain, self._found.question).out_of_memory_probability

    def _under(self, chance: float, *, below_s: float) -> float:
        """Search under the limits at which running out has a chance; say up to which step."""
        asked, one = self._found.question, self._full
        complete_s = 0.0
        for _ in range(MOST_SEARCHES):
            lower = with_chance(asked, one, chance=chance)
            if lower is None:
                return math.inf
            asked = lower
            left_s = max(0.0, self._end_s - self._settings.clock())
            again = search(
                asked, replace(self._settings, top=1, below_s=below_s, time_limit_s=left_s)
            )
            complete_s = again.complete_s
            self._chains += again.chains
            if not again.chains:
                break
            one = min((played(chain) for chain in again.chains), key=lambda each: each.objective_s)
            if self._chance(one.chain) <= chance:
                break
        return complete_s

    def _leanest(self) -> list[Chain]:
        """The chain whose fullest devices have most of their memory to spare."""
        question = self._found.question
        columns = lean_columns(question, self._found.space)
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            if fit_anywhere(columns, _with_share(middle)):
                high = middle
            else:
                low = middle
        for ratio in MORE_RATIOS:
            chain = best_chain(
                columns,
                _with_share(high * (1.0 + ratio)),
                cluster=question.cluster,
                deadline=self._deadline,
            )
            if chain is not None:
                return [chain]
        return []


def _with_share(ratio: float) -> Change:
    """Let peaks take a share of what each device has, and no more than its limit."""

    def change(on: OnPool) -> OnPool:
        own = on.question
        limit_bytes = min(own.memory_limit_bytes, ratio * own.capacity_bytes)
        return replace(on, question=replace(own, memory_limit_bytes=limit_bytes))

    return change
