"""What running out of memory is expected to cost chains over pools, beside a slower step.

Priced is what a chain loses by itself (memory_risk.py); what is run after it ran out is not
searched for over pools, so that it is taken to be as fast.
"""

from dataclasses import dataclass

from tuner.planner.analytic.memory_risk import MemoryForecast, loss_prices
from tuner.planner.unlike.asked import PoolsQuestion
from tuner.planner.unlike.told import Played, risk_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A step and its risk."""

    step_s: float
    """With what running out of memory is expected to cost."""
    chance: float


def priced(one: Played, question: PoolsQuestion) -> Priced:
    """Add to a played step what running out of memory is expected to cost."""
    risk = risk_of(one.chain, question)
    step_s = with_loss_s(one.objective_s, risk, question)
    return Priced(step_s=step_s, chance=risk.out_of_memory_probability)


def with_loss_s(step_s: float, risk: MemoryForecast, question: PoolsQuestion) -> float:
    """Spread the expected loss over the steps of the run."""
    run_s = loss_prices(question.specs[0].goal).run_s(step_s)
    return step_s * (1.0 + risk.out_of_memory_loss_s / run_s)
