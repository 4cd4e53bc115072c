"""Ranking of all decisions: chains over pools and single pools, with a search for headroom.

Chains over pools are simulated pass by pass and compared with the best of each single pool. Where
the best chain may run out of memory, chains with more headroom are searched for and ranked too.

Risks are priced as on one pool (memory_risk.py): a run that runs out of memory continues with a
decision that has more headroom, on whichever pools. Decisions that run out more likely than not
come last; if all do, those with about the lowest chance count as fit. Among equally fit ones, the
least wall clock per step comes first, failures included.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.search.progress import PlanningEvent
from tuner.search.settings import SearchSettings
from tuner.search.train.memory_risk import (
    SMALL,
    Chances,
    MemoryForecast,
    loss_prices,
)
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.chains import Chain
from tuner.search.train.pools.headroom_search import search_chain_headroom
from tuner.search.train.pools.search import PoolsSearchOutcome
from tuner.search.train.pools.single_pool import SinglePoolDecision, SinglePoolResult
from tuner.search.train.pools.to_plan import (
    SimulatedChain,
    chain_memory_risk,
    effective_step_s,
    simulate_chain,
)
from tuner.search.train.preference import TOLERANCE_RATIO, fit_C

PoolsDecision = SimulatedChain | SinglePoolDecision
"""A decision that was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRisk:
    """A decision's memory risk, relative to the others."""

    expected_s: float
    """Seconds of a step with what running out of memory is expected to cost."""
    effective_s: float
    """`expected_s` in wall clock, failures included."""
    chance: float
    """Probability of running out of memory."""
    is_fit: bool
    """Whether it runs out less likely than not; or, if none does, whether its chance is about the
    lowest."""
    has_fallback: bool
    """Whether some decision has headroom."""


def price_risks(
    decisions: Sequence[PoolsDecision], problem: PoolsProblem
) -> Mapping[PoolsDecision, PricedRisk]:
    """Add the expected cost of running out of memory to steps, with the others as fallbacks.

    Args:
        decisions: all of them.
        problem: of the search.
    """
    if not decisions:
        return {}
    risks = [_risk(decision, problem) for decision in decisions]
    chances = Chances(
        at_start_C=np.array([risk.out_of_memory_at_start_probability for risk in risks]),
        ever_C=np.array([risk.out_of_memory_probability for risk in risks]),
    )
    step_s = np.array([decision.objective_s for decision in decisions])
    expected_s = loss_prices(problem.specs[0].goal).expected_s(step_s, chances)
    is_fit_C = fit_C(chances.ever_C)
    return {
        decision: PricedRisk(
            expected_s=float(expected_s[at]),
            effective_s=_wall_clock_s(decision, problem, step_s=float(expected_s[at])),
            chance=float(chances.ever_C[at]),
            is_fit=bool(is_fit_C[at]),
            has_fallback=bool((chances.ever_C <= SMALL).any()),
        )
        for at, decision in enumerate(decisions)
    }


def sort_decisions(risks: Mapping[PoolsDecision, PricedRisk]) -> list[PoolsDecision]:
    """Best first; single pools first among equals."""
    return sorted(
        risks,
        key=lambda decision: (
            not risks[decision].is_fit,
            risks[decision].effective_s,
            isinstance(decision, SimulatedChain),
            decision.objective_s,
        ),
    )


def decision_with_headroom(risks: Mapping[PoolsDecision, PricedRisk]) -> PoolsDecision | None:
    """The shortest step with headroom; None where every decision may run out of memory."""
    roomy: Iterable[PoolsDecision] = (
        decision for decision, risk in risks.items() if risk.chance <= SMALL
    )
    return min(roomy, key=lambda decision: decision.objective_s, default=None)


def _risk(decision: PoolsDecision, problem: PoolsProblem) -> MemoryForecast:
    return (
        decision.risk
        if isinstance(decision, SinglePoolDecision)
        else chain_memory_risk(decision.chain, problem)
    )


def _wall_clock_s(decision: PoolsDecision, problem: PoolsProblem, *, step_s: float) -> float:
    if isinstance(decision, SinglePoolDecision):
        return decision.wall_clock_s(step_s)
    return effective_step_s(decision.chain, problem, step_s=step_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranking:
    """All decisions with their risks."""

    order: list[PoolsDecision]
    """Best first; decisions that run out of memory more likely than not come last."""
    risks: Mapping[PoolsDecision, PricedRisk]
    complete_s: float | None
    """Seconds of a step up to which the search for decisions with headroom is complete; infinite:
    complete. None: there was no such search."""

    @property
    def best(self) -> PoolsDecision | None:
        """The decision to plan; None where nothing fits.

        A chain on one pool is replaced by the result of that pool's own search if that is about as
        fast and fits: the single-pool planner also optimises the layers per stage.
        """
        if not self.order:
            return None
        best, *others = self.order
        if not isinstance(best, SimulatedChain) or is_over_several(best):
            return best
        most_s = self.risks[best].effective_s * (1.0 + TOLERANCE_RATIO)
        for decision in others:
            risk = self.risks[decision]
            if _is_single_pool_of(decision, best) and risk.is_fit and risk.effective_s <= most_s:
                return decision
        return best

    @property
    def chains(self) -> list[SimulatedChain]:
        """The chains, in the same order."""
        return [decision for decision in self.order if isinstance(decision, SimulatedChain)]


def is_over_several(simulated: SimulatedChain) -> bool:
    """Return whether a chain runs on more than one pool."""
    return len(set(simulated.chain.pool_S)) > 1


def _is_single_pool_of(decision: PoolsDecision, chain: SimulatedChain) -> bool:
    return isinstance(decision, SinglePoolDecision) and decision.index == chain.chain.pool_S[0]


def rank_decisions(
    outcome: PoolsSearchOutcome,
    settings: SearchSettings,
    *,
    single_pools: Sequence[SinglePoolResult],
) -> Ranking:
    """Simulate the chains, search for headroom where the best chain lacks it, and rank all."""
    problem = outcome.problem
    every: list[PoolsDecision] = [decision for pool in single_pools for decision in pool.decisions]
    every += [simulate_chain(chain) for chain in outcome.chains]
    risks = price_risks(every, problem)
    ranking = Ranking(order=sort_decisions(risks), risks=risks, complete_s=None)
    single_pools_s = min(pool.complete_s for pool in single_pools)
    if not ranking.chains:
        return replace(ranking, complete_s=min(outcome.proof.complete_s, single_pools_s))
    first, fastest = ranking.chains[0], fastest_chain(ranking.chains)
    is_near = first.objective_s <= fastest.objective_s * (1.0 + TOLERANCE_RATIO)
    full = first if is_near else fastest
    if risks[full].chance <= SMALL:
        return ranking
    settings.watch(PlanningEvent(stage="memory", text="searching for chains with more headroom"))
    known = decision_with_headroom(risks)
    known_s = math.inf if known is None else known.objective_s
    rooms = search_chain_headroom(outcome, settings, full=full, known_s=known_s)
    if rooms is None:
        return ranking
    keys = {_key(simulated.chain) for simulated in ranking.chains}
    more = {_key(chain): chain for chain in rooms.chains if _key(chain) not in keys}
    risks = price_risks([*every, *(simulate_chain(chain) for chain in more.values())], problem)
    return Ranking(
        order=sort_decisions(risks), risks=risks, complete_s=min(rooms.complete_s, single_pools_s)
    )


def _key(chain: Chain) -> tuple[object, ...]:
    """Identify a chain by its decision."""
    row = chain.candidate.row
    values = (*row.rows.values(), *row.options.values())
    return chain.pool_S, chain.layers_S, tuple(int(column[0]) for column in values)


def fastest_chain(order: Sequence[SimulatedChain]) -> SimulatedChain:
    """The chain with the shortest step; the first of equals."""
    return min(order, key=lambda simulated: simulated.objective_s)
