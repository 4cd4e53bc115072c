"""What running out of memory is expected to cost chains over pools, beside a slower step.

Priced as on one pool (memory_risk.py): a chain that runs out goes on with another that was found
and has more room, or with a pool alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.planner.analytic.memory_risk import LIKELY, SMALL, Chances, loss_prices
from tuner.planner.unlike.alone import PoolAlone
from tuner.planner.unlike.asked import PoolsQuestion
from tuner.planner.unlike.told import Played, risk_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A chain's risk, beside that of the others."""

    expected_s: float
    """Seconds of a step with what running out of memory is expected to cost."""
    chance: float
    is_fit: bool
    """It runs out less likely than not, or nothing found does."""
    has_fallback: bool
    """Something found hardly runs out."""


def priced(
    every: Sequence[Played], question: PoolsQuestion, *, alone: Sequence[PoolAlone] = ()
) -> Mapping[Played, Priced]:
    """Add to played steps what running out of memory is expected to cost.

    Args:
        every: chains that were found.
        question: they answer.
        alone: what each pool does without the others.
    """
    if not every:
        return {}
    risks = [risk_of(one.chain, question) for one in every]
    fitting = [one for one in alone if one.told.step_time_s is not None]
    others = [one.chance for one in fitting]
    # When a pool alone runs out is of no matter to the chains: its own price is not asked here.
    found = Chances(
        at_start_C=np.array([r.out_of_memory_at_start_probability for r in risks] + others),
        ever_C=np.array([r.out_of_memory_probability for r in risks] + others),
    )
    step_s = np.array([one.objective_s for one in every] + [one.step_s for one in fitting])
    expected_s = loss_prices(question.specs[0].goal).expected_s(step_s, found)
    most_chance = max(LIKELY, float(found.ever_C.min()))
    return {
        one: Priced(
            expected_s=float(expected_s[at]),
            chance=float(found.ever_C[at]),
            is_fit=bool(found.ever_C[at] <= most_chance),
            has_fallback=bool((found.ever_C <= SMALL).any()),
        )
        for at, one in enumerate(every)
    }
