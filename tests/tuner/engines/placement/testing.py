"""A verified placement of round numbers, for tests of emitters."""

from pathlib import Path
from typing import Any

from tuner.config.place import PlaceDecision
from tuner.plans.place import (
    PassSpread,
    PlaceCertificate,
    PlacePlan,
    PlacePrediction,
    PlaceProvenance,
    Verdict,
    VerifiedPlacement,
    WorkloadOutcome,
)
from tuner.spec.place import Dispatch, PlaceGoal, RecordedWorkload


def sample_decision(**changes: Any) -> PlaceDecision:
    """Return six experts in eight slots on four ranks, in decoder layers 1 and 3 of four."""
    fields: dict[str, Any] = {
        "physical_to_logical": ((0, 1, 2, 3, 4, 5, 0, 2), (5, 4, 3, 2, 1, 0, 4, 1)),
        "layer_ids": (1, 3),
        "num_experts": 6,
        "num_layers": 4,
        "ranks": 4,
        "ranks_per_node": 4,
        "slots_per_rank": (2, 2, 2, 2),
    }
    return PlaceDecision.model_validate(fields | changes)


def without_replicas(**changes: Any) -> PlaceDecision:
    """Return the same with six slots on three ranks."""
    rows = ((5, 0, 4, 1, 3, 2), (2, 1, 0, 5, 4, 3))
    fields: dict[str, Any] = {
        "physical_to_logical": rows,
        "ranks": 3,
        "ranks_per_node": 3,
        "slots_per_rank": (2, 2, 2),
    }
    return sample_decision(**(fields | changes))


def sample_placement(
    decision: PlaceDecision,
    *,
    workload: str = "chat",
    waived: str = "",
    dispatch: Dispatch | None = None,
) -> VerifiedPlacement:
    """Return a placement that a plan of round numbers supports."""
    spread = PassSpread(p50=1.1, p99=1.3)
    plan = PlacePlan(
        goal=PlaceGoal(
            kind="place",
            ranks=decision.ranks,
            ranks_per_node=decision.ranks_per_node,
            # Built unchecked: emitters must not rest on what readers of specs refuse.
            workloads=(
                RecordedWorkload.model_construct(name=workload, path=Path("chat.json"), weight=1.0),
            ),
            dispatch=dispatch,
        ),
        emit=("eplb",),
        decision=decision,
        predicted=PlacePrediction(
            imbalance={workload: 1.1},
            imbalance_band={workload: (1.0, 1.3)},
            outcomes=(
                WorkloadOutcome(
                    workload=workload,
                    passes_planned_from=4,
                    passes_judged=4,
                    imbalance_before=1.5,
                    imbalance_rule=1.2,
                    imbalance_after=1.1,
                    pass_before=spread,
                    pass_after=spread,
                ),
            ),
        ),
        verdict=Verdict(word="worth it", reason="It gains.", gain_ratio=0.2, noise_ratio=0.01),
        certificate=PlaceCertificate(
            status="feasible",
            objective=1.1,
            bound=1.0,
            gap_ratio=0.1,
            solve_s=0.5,
            method="local_search",
        ),
        binding_constraint="slots",
        provenance=PlaceProvenance(
            moetune_version="0.1.0", spec_sha256="0" * 64, recording_sha256={}
        ),
    )
    return VerifiedPlacement(plan=plan, decision=decision, waived=waived)
