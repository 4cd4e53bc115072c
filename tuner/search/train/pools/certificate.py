"""What the search over pools proves, in seconds of a step: the certificate and its ties."""

import math
from collections.abc import Iterator, Mapping, Sequence

from tuner.plans.train import Band, Certificate, Preference
from tuner.search.certificate import certify
from tuner.search.ratios import is_tie
from tuner.search.train.pools.risk import (
    PoolsDecision,
    PricedRisk,
    decision_with_headroom,
    price_risks,
)
from tuner.search.train.pools.search import PoolsSearchOutcome
from tuner.search.train.pools.to_plan import SimulatedChain, to_decision
from tuner.search.train.pools.whole_run import effective_step_s
from tuner.search.train.preference import (
    LESS_EXPECTED,
    is_excluded,
    less_chance_words,
    memory_step,
)


def to_certificate(outcome: PoolsSearchOutcome, order: Sequence[SimulatedChain]) -> Certificate:
    """State what the search proves of the fastest chain, and of the chosen one, the first.

    With failures another chain than the fastest may be first; no bound covers failures.
    """
    if not order:
        return certify(
            outcome.counts,
            objective_s=None,
            bound_s=outcome.bound_s if outcome.counts.open else math.inf,
            solve_s=outcome.solve_s,
            method="partition",
        )
    chosen, fastest = order[0], fastest_chain(order)
    return certify(
        outcome.counts,
        objective_s=fastest.objective_s,
        bound_s=outcome.bound_s,
        decision_s=None if chosen is fastest else chosen.objective_s,
        within_band=sum(is_tie(ratio_band(outcome, chosen, one)) for one in order[1:]),
        within_band_is_least=(
            chosen.objective_s * outcome.problem.ratios.farthest > outcome.complete_s
        ),
        solve_s=outcome.solve_s,
        method="partition",
    )


def to_preference(
    outcome: PoolsSearchOutcome,
    order: Sequence[SimulatedChain],
    risks: Mapping[PoolsDecision, PricedRisk],
) -> Preference | None:
    """Explain why the fastest chain was not chosen; None where it was."""
    chosen, fastest = order[0], fastest_chain(order)
    if chosen is fastest:
        return None
    own, other = risks[chosen], risks[fastest]
    has_fallback = own.has_fallback
    tried_first_s = None
    if is_excluded(other.chance, beside=own.chance):
        tries = dict.fromkeys((fastest, chosen, decision_with_headroom(risks) or chosen))
        tried_first_s = price_risks(tuple(tries), outcome.problem)[fastest].expected_s
    return Preference(
        fastest=to_decision(fastest.chain, outcome.problem, outcome.space.options),
        fastest_step_s=fastest.objective_s,
        slower_ratio=max(0.0, chosen.objective_s / fastest.objective_s - 1.0),
        reasons=tuple(_reasons(outcome, order, risks)) or (LESS_EXPECTED,),
        expected_step_s=own.expected_s if has_fallback else None,
        fastest_expected_step_s=other.expected_s if has_fallback else None,
        fastest_out_of_memory_probability=other.chance,
        fastest_tried_first_step_s=tried_first_s,
    )


def _reasons(
    outcome: PoolsSearchOutcome,
    order: Sequence[SimulatedChain],
    risks: Mapping[PoolsDecision, PricedRisk],
) -> Iterator[str]:
    """Advantages of the chosen chain over the fastest."""
    tries = order[0], fastest_chain(order)
    chance, other = (risks[one].chance for one in tries)
    if memory_step(chance) < memory_step(other):
        yield less_chance_words(chance, other=other)
    own_s, other_s = (
        effective_step_s(one.chain, outcome.problem, step_s=one.objective_s) for one in tries
    )
    if own_s < other_s:
        yield "less wall clock per step with failures"


def ratio_band(outcome: PoolsSearchOutcome, chosen: SimulatedChain, other: SimulatedChain) -> Band:
    """Return the band of the measured ratio of another chain's step to the chosen one's."""
    problem, options = outcome.problem, outcome.space.options
    ratio = other.objective_s / chosen.objective_s
    if chosen.chain.pool_S != other.chain.pool_S:
        low, high = problem.ratios.other_kernels
        return ratio * low, ratio * high
    decisions = [to_decision(one.chain, problem, options) for one in (chosen, other)]
    return problem.ratios.between(*decisions, ratio=ratio)


def fastest_chain(order: Sequence[SimulatedChain]) -> SimulatedChain:
    """The chain with the shortest step; the first of equals."""
    return min(order, key=lambda one: one.objective_s)
