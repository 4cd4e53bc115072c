"""Search for chains over pools with memory headroom, where the best one may run out of memory.

The search over pools keeps the fastest chain for each set of degrees, up to the memory limits. As
on one pool (../headroom_search.py) it is repeated under limits at which running out of memory
is unlikely on each pool; if its result is slower, also under those of CHANCES for faster chains;
and if no chain has headroom, the minimum-memory chain is solved. All results are kept.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.bisection import bisect
from tuner.search.settings import SearchSettings
from tuner.search.train.headroom_search import CHANCES
from tuner.search.train.memory_risk import SMALL, largest_peak_bytes
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.chains import Chain
from tuner.search.train.pools.min_memory import (
    best_chain,
    fit_anywhere,
    min_memory_candidates,
)
from tuner.search.train.pools.search import PoolsSearchOutcome, search
from tuner.search.train.pools.to_plan import (
    SimulatedChain,
    chain_memory_risk,
    simulate_chain,
    stage_uneven_bytes,
)
from tuner.search.train.preference import TOLERANCE_RATIO

MOST_SEARCHES: Final = 2
"""Searches under ever lower limits, where the peak of the result grows more than assumed."""

HALVINGS: Final = 10
"""Bisection steps for the least share of a device's memory: to a thousandth."""

MORE_RATIOS: Final = (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3)
"""Shares added to the least share of memory, tried in turn until whole layers fit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainHeadroom:
    """Chains with headroom."""

    chains: tuple[Chain, ...]
    complete_s: float
    """Seconds of a step up to which the search for chains with headroom is complete; infinite:
    complete."""


def search_chain_headroom(
    outcome: PoolsSearchOutcome,
    settings: SearchSettings,
    *,
    full: SimulatedChain,
    known_s: float = math.inf,
) -> ChainHeadroom | None:
    """Search for chains with headroom; None where `full` already has it.

    Args:
        outcome: of the main search.
        settings: of it; all searches together take half its time.
        full: a chain that may run out of memory.
        known_s: fastest known step with headroom; only faster ones are searched for.
    """
    if chain_memory_risk(full.chain, outcome.problem).out_of_memory_probability <= SMALL:
        return None
    return _ChainHeadroomSearch(outcome, settings, full).result(known_s)


def limit_to_chance(
    problem: PoolsProblem, simulated: SimulatedChain, *, chance: float
) -> PoolsProblem | None:
    """Lower the memory limits to those with a given out-of-memory chance.

    Peaks are assumed to grow with imbalance as those of a chain. None where no peak is that safe.
    """
    uneven_ratio = float(
        np.max(stage_uneven_bytes(simulated.chain, problem) / simulated.chain.price.bytes_S)
    )
    limits = [
        min(
            pool_problem.memory_limit_bytes,
            largest_peak_bytes(
                pool_problem.capacity_bytes,
                chance=chance,
                software=pool_problem.software,
                has_pipeline=True,
                uneven_ratio=uneven_ratio,
            ),
        )
        for pool_problem in problem.by_pool
    ]
    if not all(limits):
        return None
    return problem.changed(
        {"memory_limit_bytes": limit_bytes, "usable_memory_ratio": limit_bytes / on.capacity_bytes}
        for on, limit_bytes in zip(problem.by_pool, limits, strict=True)
    )


class _ChainHeadroomSearch:
    """Searches for headroom that share a time limit; lives as long as the call that made it."""

    def __init__(
        self, outcome: PoolsSearchOutcome, settings: SearchSettings, full: SimulatedChain
    ) -> None:
        self._outcome = outcome
        self._settings = settings
        self._full = full
        self._deadline = settings.begin(0.5)
        self._chains: list[Chain] = []

    def result(self, known_s: float) -> ChainHeadroom:
        """Run the searches."""
        complete_s = self._under(SMALL, below_s=known_s)
        fallback_s = min(known_s, self._least_s(SMALL))
        for chance in CHANCES:
            least_s = min(known_s, self._least_s(chance))
            # Only a step between the two can be better than both.
            if least_s > self._full.objective_s * (1.0 + TOLERANCE_RATIO):
                self._under(chance, below_s=least_s)
        if math.isinf(fallback_s):
            self._chains += self._min_memory_chain()
        return ChainHeadroom(chains=tuple(self._chains), complete_s=complete_s)

    def _least_s(self, chance: float) -> float:
        """The shortest step with at most this chance."""
        return min(
            (chain.price.step_s for chain in self._chains if self._chance(chain) <= chance),
            default=math.inf,
        )

    def _chance(self, chain: Chain) -> float:
        return chain_memory_risk(chain, self._outcome.problem).out_of_memory_probability

    def _under(self, chance: float, *, below_s: float) -> float:
        """Search under the limits of a chance; return up to which step that is complete."""
        limited, simulated = self._outcome.problem, self._full
        complete_s = 0.0
        for _ in range(MOST_SEARCHES):
            lower = limit_to_chance(limited, simulated, chance=chance)
            if lower is None:
                return math.inf
            limited = lower
            left = self._settings.until(self._deadline)
            retry = search(limited, replace(left, top=1, below_s=below_s))
            complete_s = retry.proof.complete_s
            self._chains += retry.chains
            if not retry.chains:
                break
            simulated = min(
                (simulate_chain(chain) for chain in retry.chains),
                key=lambda candidate: candidate.objective_s,
            )
            if self._chance(simulated.chain) <= chance:
                break
        return complete_s

    def _min_memory_chain(self) -> list[Chain]:
        """The chain whose peak devices have the largest share of memory to spare."""
        problem = self._outcome.problem
        candidates = min_memory_candidates(problem, self._outcome.space)
        least = bisect(
            lambda share: fit_anywhere(candidates, _with_share(problem, share)),
            0.0,
            1.0,
            halvings=HALVINGS,
        )
        chains = (
            best_chain(
                candidates, _with_share(problem, least * (1.0 + ratio)), deadline=self._deadline
            )
            for ratio in MORE_RATIOS
        )
        return list(itertools.islice(filter(None, chains), 1))


def _with_share(problem: PoolsProblem, ratio: float) -> PoolsProblem:
    """Limit peaks to a share of each device's memory, and to its limit."""
    return problem.changed(
        {"memory_limit_bytes": min(on.memory_limit_bytes, ratio * on.capacity_bytes)}
        for on in problem.by_pool
    )
