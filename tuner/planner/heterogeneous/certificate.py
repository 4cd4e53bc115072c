"""What the search over pools proves, in seconds of a step: the certificate and its ties."""

from collections.abc import Iterator, Mapping, Sequence

from tuner.plan import Band, Certificate, Preference, Space
from tuner.planner.analytic.preference import (
    LESS_EXPECTED,
    is_excluded,
    less_chance_words,
    memory_step,
)
from tuner.planner.analytic.search_result import PROVEN_GAP_RATIO
from tuner.planner.heterogeneous.risk import Decided, Priced, fastest_with_room, priced
from tuner.planner.heterogeneous.search import Search
from tuner.planner.heterogeneous.to_plan import Played, decision_of
from tuner.planner.heterogeneous.whole_run import effective_step_s
from tuner.planner.ratios import is_tie


def certificate_of(found: Search, order: Sequence[Played]) -> Certificate:
    """State what the search proves of the fastest chain, and of the chosen one, which is first.

    Failures may put another chain first than the fastest; no bound is proven on them.
    """
    counts = found.counts
    space = Space(
        priced=counts.priced, bounded=counts.bounded, illegal=counts.illegal, open=counts.open
    )
    common = {"space": space, "solve_s": found.solve_s, "method": "partition"}
    if not order:
        is_proven = not counts.open
        return Certificate.model_validate(
            common
            | {
                "status": "infeasible" if is_proven else "unknown",
                "objective": None,
                "bound": None if is_proven else found.bound_s,
                "gap_ratio": 0.0 if is_proven else 1.0,
                "within_band": 0,
            }
        )
    chosen, fastest = order[0], fastest_of(order)
    gap_ratio = _gap_ratio(found, fastest)
    farthest_s = chosen.objective_s * found.question.ratios.farthest
    return Certificate.model_validate(
        common
        | {
            "status": "optimal" if gap_ratio <= PROVEN_GAP_RATIO else "feasible",
            "objective": fastest.objective_s,
            "bound": min(found.bound_s, fastest.objective_s),
            "gap_ratio": gap_ratio,
            "decision_gap_ratio": None if chosen is fastest else _gap_ratio(found, chosen),
            "within_band": sum(is_tie(ratio_band(found, chosen, one)) for one in order[1:]),
            "within_band_is_least": farthest_s > found.complete_s,
        }
    )


def preference_of(
    found: Search, order: Sequence[Played], risks: Mapping[Decided, Priced]
) -> Preference | None:
    """Say why the fastest chain was not chosen; None where it was."""
    chosen, fastest = order[0], fastest_of(order)
    if chosen is fastest:
        return None
    own, other = risks[chosen], risks[fastest]
    has_fallback = own.has_fallback
    tried_first_s = None
    if is_excluded(other.chance, beside=own.chance):
        tries = dict.fromkeys((fastest, chosen, fastest_with_room(risks) or chosen))
        tried_first_s = priced(tuple(tries), found.question)[fastest].expected_s
    return Preference(
        fastest=decision_of(fastest.chain, found.question, found.space.ways),
        fastest_step_s=fastest.objective_s,
        slower_ratio=max(0.0, chosen.objective_s / fastest.objective_s - 1.0),
        reasons=tuple(_reasons(found, order, risks)) or (LESS_EXPECTED,),
        expected_step_s=own.expected_s if has_fallback else None,
        fastest_expected_step_s=other.expected_s if has_fallback else None,
        fastest_out_of_memory_probability=other.chance,
        fastest_tried_first_step_s=tried_first_s,
    )


def _reasons(
    found: Search, order: Sequence[Played], risks: Mapping[Decided, Priced]
) -> Iterator[str]:
    """What is better about the chosen chain than about the fastest."""
    tries = order[0], fastest_of(order)
    chance, other = (risks[one].chance for one in tries)
    if memory_step(chance) < memory_step(other):
        yield less_chance_words(chance, other=other)
    own_s, other_s = (
        effective_step_s(one.chain, found.question, step_s=one.objective_s) for one in tries
    )
    if own_s < other_s:
        yield "less wall clock per step with failures"


def ratio_band(found: Search, chosen: Played, other: Played) -> Band:
    """Return another chain's seconds over the chosen one's, as they may measure."""
    question, ways = found.question, found.space.ways
    ratio = other.objective_s / chosen.objective_s
    if chosen.chain.pool_S != other.chain.pool_S:
        low, high = question.ratios.other_kernels
        return ratio * low, ratio * high
    decisions = [decision_of(one.chain, question, ways) for one in (chosen, other)]
    return question.ratios.between(*decisions, ratio=ratio)


def fastest_of(order: Sequence[Played]) -> Played:
    """The first of the shortest steps."""
    return min(order, key=lambda one: one.objective_s)


def _gap_ratio(found: Search, one: Played) -> float:
    return max(0.0, 1.0 - found.bound_s / one.objective_s)
