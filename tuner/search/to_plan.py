"""Conversion of a training search to a plan: its proof and decision, or why there is none."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from solvers.family import OPTIMALITY_TOLERANCE
from tuner.config.train import TrainDecision
from tuner.plans.train import (
    Alternative,
    Band,
    Certificate,
    Plan,
    Provenance,
    Relaxation,
    Space,
    TrainPrediction,
)
from tuner.search.ratios import is_tie
from tuner.search.reasons import why_lost
from tuner.spec.spec import Spec


def certify(
    counts: Space,
    *,
    objective_s: float | None,
    bound_s: float,
    decision_s: float | None = None,
    within_band: int = 0,
    within_band_is_least: bool = False,
    solve_s: float,
    method: str,
) -> Certificate:
    """State what a search proves of its fastest decision, or of there being none.

    Args:
        counts: what became of every decision.
        objective_s: seconds of a step of the fastest; None: nothing fits.
        bound_s: no decision is faster; infinite without any that may fit.
        decision_s: of the plan's decision where that is not the fastest.
        within_band: ties.
        within_band_is_least: there may be more.
        solve_s: that the search took.
        method: of the search.
    """
    if objective_s is None:
        is_proven = not counts.open
        status, gap = ("infeasible", 0.0) if is_proven else ("unknown", 1.0)
    else:
        gap = gap_ratio(objective_s, bound_s=bound_s)
        status = "optimal" if gap <= OPTIMALITY_TOLERANCE else "feasible"
        bound_s = min(bound_s, objective_s)
    return Certificate.model_validate(
        {
            "status": status,
            "objective": objective_s,
            "bound": bound_s if math.isfinite(bound_s) else None,
            "gap_ratio": gap,
            "decision_gap_ratio": (
                None if decision_s is None else gap_ratio(decision_s, bound_s=bound_s)
            ),
            "space": counts,
            "within_band": within_band,
            "within_band_is_least": within_band_is_least,
            "solve_s": solve_s,
            "method": method,
        }
    )


def to_plan(spec: Spec, *, certificate: Certificate, provenance: Provenance, **fields: Any) -> Plan:
    """Make the plan of a spec; `fields` are those of `Plan` beside what the spec states."""
    stated = ("model", "cluster", "goal", "search", "emit")
    return Plan.model_validate(
        {name: getattr(spec, name) for name in stated}
        | {"certificate": certificate, "provenance": provenance}
        | fields
    )


def without_decision(
    spec: Spec,
    *,
    certificate: Certificate,
    provenance: Provenance,
    reason: str,
    relaxations: Sequence[Relaxation],
    **fields: Any,
) -> Plan:
    """Make the plan of a spec under which nothing fits, or nothing was found."""
    return to_plan(
        spec,
        certificate=certificate,
        provenance=provenance,
        decision=None,
        predicted=None,
        binding_constraint=reason,
        alternatives=(),
        relaxations=tuple(relaxations),
        **fields,
    )


def to_alternative(
    decision: TrainDecision,
    predicted: TrainPrediction,
    *,
    chosen: TrainPrediction,
    band: Band,
) -> Alternative:
    """Make a runner-up from its prediction and the band of its step over the chosen one's."""
    return Alternative(
        decision=decision,
        predicted=predicted,
        within_band=is_tie(band),
        ratio_band=band,
        lost_by=why_lost(chosen, predicted),
    )


def with_notes(provenance: Provenance, notes: Iterable[str]) -> Provenance:
    """Add notes."""
    return provenance.model_copy(update={"notes": (*provenance.notes, *notes)})


def gap_ratio(objective_s: float, *, bound_s: float) -> float:
    """Return how far an objective may be above the optimum, as a share of the objective."""
    return max(0.0, 1.0 - bound_s / objective_s)
