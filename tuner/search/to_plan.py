"""Conversion of a training search to a plan: its proof and decision, or why there is none."""

from collections.abc import Iterable, Sequence
from typing import Any

from tuner.config.train import TrainDecision
from tuner.plans.train import (
    Alternative,
    Band,
    Certificate,
    Plan,
    Provenance,
    Relaxation,
    TrainPrediction,
)
from tuner.search.ratios import is_tie
from tuner.search.reasons import why_lost
from tuner.spec.spec import Spec


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
