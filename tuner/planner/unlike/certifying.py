"""What the search over pools proves, in seconds of a step: the certificate and its ties."""

from collections.abc import Mapping, Sequence

from tuner.plan import Band, Certificate, Preference, Space
from tuner.planner.analytic.answer import PROVEN_GAP_RATIO
from tuner.planner.ratios import is_tie
from tuner.planner.unlike.risk import Decided, Priced
from tuner.planner.unlike.search import Search
from tuner.planner.unlike.told import Played, decision_of


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
    expected = [risks[one] for one in (chosen, fastest)]
    has_less_risk = expected[0].chance < expected[1].chance
    has_failures = found.question.specs[0].goal.reliability is not None
    return Preference(
        fastest=decision_of(fastest.chain, found.question, found.space.ways),
        fastest_step_s=fastest.objective_s,
        slower_ratio=max(0.0, chosen.objective_s / fastest.objective_s - 1.0),
        reasons=(
            *(("less chance of running out of memory",) if has_less_risk else ()),
            *(("less wall clock per step with failures",) if has_failures else ()),
        ),
        expected_step_s=expected[0].expected_s if expected[0].has_fallback else None,
        fastest_expected_step_s=expected[1].expected_s if expected[1].has_fallback else None,
        fastest_out_of_memory_probability=expected[1].chance,
    )


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
