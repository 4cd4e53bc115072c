"""Order of all decisions, over pools and on single ones, with the risk of running out of memory.

Priced as on one pool (memory_risk.py): a run that runs out of memory continues with a decision that
has more headroom, on whichever pools. Decisions that run out more likely than not come last; if all
do, those with about the lowest chance count as fit. Among equally fit ones, the least wall clock
per step comes first, failures included.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.search.train.memory_risk import (
    SMALL,
    Chances,
    MemoryForecast,
    loss_prices,
)
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.single_pool import SinglePoolDecision
from tuner.search.train.pools.to_plan import SimulatedChain, chain_memory_risk
from tuner.search.train.pools.whole_run import effective_step_s
from tuner.search.train.preference import fit_C

PoolsDecision = SimulatedChain | SinglePoolDecision
"""A decision that was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRisk:
    """A decision's memory risk, relative to the others."""

    expected_s: float
    """Seconds of a step with what running out of memory is expected to cost."""
    effective_s: float
    """The same in wall clock, failures included."""
    chance: float
    """Of running out of memory."""
    is_fit: bool
    """Runs out less likely than not; or, if none does, its chance is about the lowest."""
    has_fallback: bool
    """Some decision has headroom."""


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
    risks = [_risk(one, problem) for one in decisions]
    chances = Chances(
        at_start_C=np.array([risk.out_of_memory_at_start_probability for risk in risks]),
        ever_C=np.array([risk.out_of_memory_probability for risk in risks]),
    )
    step_s = np.array([one.objective_s for one in decisions])
    expected_s = loss_prices(problem.specs[0].goal).expected_s(step_s, chances)
    is_fit_C = fit_C(chances.ever_C)
    return {
        one: PricedRisk(
            expected_s=float(expected_s[at]),
            effective_s=_wall_clock_s(one, problem, step_s=float(expected_s[at])),
            chance=float(chances.ever_C[at]),
            is_fit=bool(is_fit_C[at]),
            has_fallback=bool((chances.ever_C <= SMALL).any()),
        )
        for at, one in enumerate(decisions)
    }


def sort_decisions(risks: Mapping[PoolsDecision, PricedRisk]) -> list[PoolsDecision]:
    """Best first; single pools first among equals."""
    return sorted(
        risks,
        key=lambda one: (
            not risks[one].is_fit,
            risks[one].effective_s,
            isinstance(one, SimulatedChain),
            one.objective_s,
        ),
    )


def decision_with_headroom(risks: Mapping[PoolsDecision, PricedRisk]) -> PoolsDecision | None:
    """The shortest step with headroom; None where every decision may run out of memory."""
    roomy: Iterable[PoolsDecision] = (one for one, risk in risks.items() if risk.chance <= SMALL)
    return min(roomy, key=lambda one: one.objective_s, default=None)


def _risk(one: PoolsDecision, problem: PoolsProblem) -> MemoryForecast:
    return (
        one.risk if isinstance(one, SinglePoolDecision) else chain_memory_risk(one.chain, problem)
    )


def _wall_clock_s(one: PoolsDecision, problem: PoolsProblem, *, step_s: float) -> float:
    if isinstance(one, SinglePoolDecision):
        return one.wall_clock_s(step_s)
    return effective_step_s(one.chain, problem, step_s=step_s)
