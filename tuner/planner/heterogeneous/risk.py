"""One order of all that was found, chains over pools and pools alone, running out of memory priced.

Priced as on one pool (memory_risk.py): what runs out goes on with another decision that was found
and has more room, whichever pools that runs on. One that runs out more likely than not comes after
all that do not; where every one does, those of about the least chance count as fit. Among what is
as fit, the least wall clock per step comes first, failures included.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.planner.analytic.memory_risk import (
    SMALL,
    Chances,
    MemoryForecast,
    loss_prices,
)
from tuner.planner.analytic.preference import fit_C
from tuner.planner.heterogeneous.build_problem import PoolsQuestion
from tuner.planner.heterogeneous.single_pool import DecisionAlone
from tuner.planner.heterogeneous.to_plan import Played, risk_of
from tuner.planner.heterogeneous.whole_run import effective_step_s

Decided = Played | DecisionAlone
"""A decision that was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A decision's risk, beside that of the others."""

    expected_s: float
    """Seconds of a step with what running out of memory is expected to cost."""
    effective_s: float
    """The same in wall clock, failures included."""
    chance: float
    """Of running out."""
    is_fit: bool
    """It runs out less likely than not, or nothing found does and few are less likely to."""
    has_fallback: bool
    """Something found hardly runs out."""


def priced(every: Sequence[Decided], question: PoolsQuestion) -> Mapping[Decided, Priced]:
    """Add to steps what running out of memory is expected to cost, each beside all others.

    Args:
        every: what was found.
        question: it answers.
    """
    if not every:
        return {}
    risks = [_risk(one, question) for one in every]
    found = Chances(
        at_start_C=np.array([risk.out_of_memory_at_start_probability for risk in risks]),
        ever_C=np.array([risk.out_of_memory_probability for risk in risks]),
    )
    step_s = np.array([one.objective_s for one in every])
    expected_s = loss_prices(question.specs[0].goal).expected_s(step_s, found)
    is_fit_C = fit_C(found.ever_C)
    return {
        one: Priced(
            expected_s=float(expected_s[at]),
            effective_s=_wall_clock_s(one, question, step_s=float(expected_s[at])),
            chance=float(found.ever_C[at]),
            is_fit=bool(is_fit_C[at]),
            has_fallback=bool((found.ever_C <= SMALL).any()),
        )
        for at, one in enumerate(every)
    }


def in_order(risks: Mapping[Decided, Priced]) -> list[Decided]:
    """Best first; of equals a pool alone."""
    return sorted(
        risks,
        key=lambda one: (
            not risks[one].is_fit,
            risks[one].effective_s,
            isinstance(one, Played),
            one.objective_s,
        ),
    )


def fastest_with_room(risks: Mapping[Decided, Priced]) -> Decided | None:
    """The shortest step of what hardly runs out; None where all that was found may."""
    roomy: Iterable[Decided] = (one for one, risk in risks.items() if risk.chance <= SMALL)
    return min(roomy, key=lambda one: one.objective_s, default=None)


def _risk(one: Decided, question: PoolsQuestion) -> MemoryForecast:
    return one.risk if isinstance(one, DecisionAlone) else risk_of(one.chain, question)


def _wall_clock_s(one: Decided, question: PoolsQuestion, *, step_s: float) -> float:
    if isinstance(one, DecisionAlone):
        return one.wall_clock_s(step_s)
    return effective_step_s(one.chain, question, step_s=step_s)
