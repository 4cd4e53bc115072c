"""Expert loads that a goal names: a recorded routing, and the placement that serves it."""

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from profilers.errors import first_problem
from tuner.config.place import PlaceDecision
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.errors import SpecError
from tuner.plans.place import PlacePlan
from tuner.spec.files import read_small_text, shown_path
from tuner.spec.model import ModelSpec
from tuner.spec.place_recordings import check_model
from tuner.spec.routing import RoutingRecord, read_routing
from tuner.spec.serving.goal import ServeGoal

MOST_PLAN_BYTES = 64_000_000


def expert_loads(goal: ServeGoal, model: ModelSpec) -> ExpertLoads | None:
    """Return the loads that a goal names, None where it names none.

    Raises:
        SpecError: a file cannot be read, or disagrees with the model or with the other.
    """
    if goal.routing is None:
        if goal.placement is not None:
            raise SpecError("goal.placement: needs goal.routing, the loads that it was made for")
        return None
    source = shown_path(goal.routing.path)
    record = read_routing(goal.routing.path)
    check_model(model, experts=record.num_experts, layers=record.layer_ids, source=source)
    moe = model.moe
    if moe is None:
        raise SpecError(f"{source}: {model.name} has no experts")
    if record.top_k not in (None, moe.top_k):
        raise SpecError(
            f"{source}: top_k: {record.top_k} experts a token were recorded, {model.name} has"
            f" {moe.top_k}; record this model"
        )
    share_LE = np.array(record.of_phase(goal.routing.phase), dtype=np.float64)
    share_LE = share_LE / share_LE.sum(axis=1, keepdims=True)
    if goal.placement is None:
        return ExpertLoads(share_LE=share_LE, top_k=moe.computed_top_k)
    placed = read_placement(goal.placement)
    rows = _rows(placed, record, shown_path(goal.placement))
    return ExpertLoads(
        share_LE=share_LE,
        top_k=moe.computed_top_k,
        expert_LS=np.array([placed.physical_to_logical[row] for row in rows], dtype=np.int64),
        slots_R=placed.slots_per_rank,
    )


def read_placement(path: Path) -> PlaceDecision:
    """Read the decision of a placement's plan, named by its folder or its `plan.json`.

    Raises:
        SpecError: it is no such plan, or decides nothing.
    """
    file = path / "plan.json" if path.is_dir() else path
    text = read_small_text(file, what="placement", most_bytes=MOST_PLAN_BYTES)
    source = shown_path(file)
    try:
        plan = PlacePlan.model_validate_json(text)
    except ValidationError as error:
        raise SpecError(
            f"goal.placement: {source}: {first_problem(error)}; name the plan of a goal of kind"
            " 'place'"
        ) from error
    if plan.decision is None:
        raise SpecError(f"goal.placement: {source}: the plan decides nothing; relax its goal")
    return plan.decision


def _rows(placed: PlaceDecision, record: RoutingRecord, source: str) -> list[int]:
    """Rows of the placement, in the order of the recorded layers."""
    if placed.num_experts != record.num_experts:
        raise SpecError(
            f"goal.placement: {source}: {placed.num_experts} experts were placed,"
            f" {record.num_experts} recorded; place this recording"
        )
    row_of_layer = {layer: row for row, layer in enumerate(placed.layer_ids)}
    missing = [layer for layer in record.layer_ids if layer not in row_of_layer]
    if missing:
        raise SpecError(
            f"goal.placement: {source}: layer {missing[0]} was recorded and not placed; place"
            " every recorded layer"
        )
    return [row_of_layer[layer] for layer in record.layer_ids]
