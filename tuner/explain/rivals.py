"""The runners-up compared with the decision, term by term.

The terms of a training decision are the parts of its step, those of a deployment the parts of one
decode step of its slowest group. A placement's runners-up were compared by objective alone.
"""

from collections.abc import Mapping
from typing import Final

from tuner.explain.planned_spec import StoredPlan
from tuner.explain.words import words
from tuner.plans.place import PlacePlan
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.plans.train import Plan
from tuner.plans.what_if import Rival

MOST: Final = 5
"""Runners-up that are explained; the plan holds them all."""
SMALLEST_S: Final = 1e-9
"""Difference below which two terms are equal."""


def to_rivals(plan: StoredPlan) -> tuple[Rival, ...]:
    """Return the first runners-up of a plan; empty where nothing was chosen."""
    if isinstance(plan, Plan):
        return _training(plan)
    if isinstance(plan, ServePlan):
        return _deployment(plan)
    return _placement(plan)


def _training(plan: Plan) -> tuple[Rival, ...]:
    if plan.predicted is None:
        return ()
    chosen = plan.predicted
    return tuple(
        Rival(
            decision=words(other.decision),
            within_band=other.within_band,
            ratio_band=other.ratio_band,
            lost_by=other.lost_by,
            slower_s=other.predicted.step_time_s - chosen.step_time_s,
            terms_s=terms(chosen.breakdown_s, other.predicted.breakdown_s),
            figures={
                "step_time_s": other.predicted.step_time_s,
                "peak_memory_bytes": float(max(other.predicted.peak_memory_bytes)),
            },
        )
        for other in plan.alternatives[:MOST]
    )


def _deployment(plan: ServePlan) -> tuple[Rival, ...]:
    if plan.predicted is None:
        return ()
    before = plan.predicted.breakdown_s
    return tuple(
        Rival(
            decision=words(other.decision),
            within_band=other.within_band,
            lost_by=other.lost_by,
            slower_s=sum(other.predicted.breakdown_s.values()) - sum(before.values()),
            terms_s=terms(before, other.predicted.breakdown_s),
            figures=_served(other.predicted, num_devices=other.decision.num_devices),
        )
        for other in plan.alternatives[:MOST]
    )


def _served(predicted: ServePrediction, *, num_devices: int) -> dict[str, float]:
    figures = {
        "num_devices": float(num_devices),
        "ttft_p90_s": predicted.ttft_s.p90,
        "tpot_p90_s": predicted.tpot_s.p90,
        "goodput_per_device": predicted.goodput_per_device,
    }
    if predicted.cost_per_hour is not None:
        figures["cost_per_hour"] = predicted.cost_per_hour
    return figures


def _placement(plan: PlacePlan) -> tuple[Rival, ...]:
    return tuple(
        Rival(
            decision=other.method,
            within_band=False,
            lost_by=other.lost_by,
            figures={
                "objective": other.objective,
                **{f"imbalance:{name}": one for name, one in other.imbalance.items()},
            },
        )
        for other in plan.alternatives[:MOST]
    )


def terms(chosen: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the additional seconds of another decision by cause, the largest first."""
    by_term = {
        name: other.get(name, 0.0) - chosen.get(name, 0.0)
        for name in dict.fromkeys((*chosen, *other))
    }
    ordered = sorted(by_term.items(), key=lambda item: (-abs(item[1]), item[0]))
    return {name: seconds for name, seconds in ordered if abs(seconds) > SMALLEST_S}
