"""Expert placements, from the spec to the report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tuner.config.place import PlaceDecision
from tuner.config.train_words import runs
from tuner.goals.goal import (
    MOST_RIVALS,
    Figures,
    Goal,
    PlannedSpec,
    use_planned_profiles,
)
from tuner.goals.place_folder import read_place_plan, write_place_plan
from tuner.goals.place_plan import place
from tuner.goals.plan_ratios import place_ratio_band
from tuner.goals.stored_figures import place_figures
from tuner.goals.wanted_sizes import place_sizes
from tuner.plans.place import PlacePlan
from tuner.plans.what_if import LimitChange, Rival, Why
from tuner.spec.place import Objective
from tuner.spec.spec_file import Keys
from tuner.units import spans
from tuner.verify.placement_records import PlaceVerified


class ExplainedPlacePlan(PlacePlan):
    """Output of `moetune explain --json` for a placement: `plan.json` and its explanation."""

    why: Why


def _spec(plan: PlacePlan, keys: Keys, used: Path) -> PlannedSpec:
    goal = keys["goal"]
    for written, workload in zip(goal["workloads"], plan.goal.workloads, strict=True):
        written["path"] = str(workload.path.absolute())
    if plan.goal.current is not None:
        goal["current"] = str(used / f"current{plan.goal.current.suffix}")
    if plan.cluster is not None:
        use_planned_profiles(keys, plan.cluster)
    return PlannedSpec(keys=keys, cluster=plan.cluster, memory_bytes={})


def placement_words(decision: PlaceDecision) -> str:
    """Name a placement, e.g. `64 experts on 8 ranks x 9 slots, 8 a node, layers 1-26 of 27`.

    It does not list where experts are; `differences` counts what moved.
    """
    d = decision
    is_uniform = len(set(d.slots_per_rank)) == 1
    slots = str(d.slots_per_rank[0]) if is_uniform else runs(d.slots_per_rank)
    of = "" if d.num_layers is None else f" of {d.num_layers}"
    return (
        f"{d.num_experts} experts on {d.ranks} ranks x {slots} slots, {d.ranks_per_node} a node, "
        f"layers {spans(d.layer_ids)}{of}"
    )


def _differences(before: PlaceDecision, after: PlaceDecision) -> tuple[str, ...]:
    """Return how many slots hold another expert, where the shape is the same."""
    shapes = placement_words(before), placement_words(after)
    if shapes[0] != shapes[1]:
        return (f"{shapes[0]} -> {shapes[1]}",)
    moved = sum(
        old != new
        for old_layer, new_layer in zip(
            before.physical_to_logical, after.physical_to_logical, strict=True
        )
        for old, new in zip(old_layer, new_layer, strict=True)
    )
    return (f"{moved} slots hold another expert",) if moved else ()


def _figures(plan: PlacePlan) -> Figures | None:
    predicted, objective, decision = plan.predicted, plan.certificate.objective, plan.decision
    if predicted is None or decision is None or objective is None:
        return None
    values = {"objective": objective}
    values |= {f"imbalance:{name}": ratio for name, ratio in predicted.imbalance.items()}
    values |= {
        f"layer_time_s:{layer_time.workload}": layer_time.after_s
        for layer_time in predicted.layer_times
    }
    bands = {f"imbalance:{name}": band for name, band in predicted.imbalance_band.items()}
    bands |= {
        f"layer_time_s:{layer_time.workload}": layer_time.after_s_band
        for layer_time in predicted.layer_times
    }
    if plan.goal.objective is not Objective.BALANCE:
        return Figures(values, bands, objective="objective", more_is_better=False)
    weights = {workload.name: workload.weight for workload in plan.goal.workloads}
    mean = sum(weights[name] * ratio for name, ratio in predicted.imbalance.items())
    values["busiest_rank_ratio"] = mean / sum(weights.values()) / decision.ranks
    return Figures(values, bands, objective="busiest_rank_ratio", more_is_better=False)


def _rivals(plan: PlacePlan) -> tuple[Rival, ...]:
    return tuple(
        Rival(
            decision=alternative.method,
            within_band=False,
            lost_by=alternative.lost_by,
            figures={
                "objective": alternative.objective,
                **{f"imbalance:{name}": ratio for name, ratio in alternative.imbalance.items()},
            },
        )
        for alternative in plan.alternatives[:MOST_RIVALS]
    )


def _usual_changes(plan: PlacePlan) -> tuple[LimitChange, ...]:
    usual = [("nodes", "+1"), ("slots", "+1"), ("slots", "-1")]
    usual += [("bandwidth", "x2")] * (plan.cluster is not None)
    return tuple(LimitChange(key=key, value=value) for key, value in usual)


def _seconds(plan: PlacePlan) -> Mapping[str, float]:
    """Return the parts of the expert layers by workload."""
    times = () if plan.predicted is None else plan.predicted.layer_times
    return {
        f"{part} of {layer_time.workload}": seconds
        for layer_time in times
        for part, seconds in (
            ("experts", layer_time.experts_after_s),
            ("exchange", layer_time.exchange_after_s),
            ("rest", layer_time.after_s - layer_time.experts_after_s - layer_time.exchange_after_s),
        )
    }


GOAL: Final = Goal(
    kind="place",
    plan_type=PlacePlan,
    explained=ExplainedPlacePlan,
    plan=place,
    write=lambda folder, made: write_place_plan(folder, made.plan, spec=made.spec, maps=made.maps),
    read=read_place_plan,
    verified=PlaceVerified,
    spec=_spec,
    words=placement_words,
    differences=_differences,
    figures=_figures,
    rivals=_rivals,
    changes=("nodes", "bandwidth", "slots"),
    usual_changes=_usual_changes,
    wanted_sizes=place_sizes,
    ratio_band=place_ratio_band,
    stored_figures=place_figures,
    seconds=_seconds,
)
