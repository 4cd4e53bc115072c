from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.rows import each_row
from tuner.goals.train_folder import read_plan
from tuner.plans.train import Plan, StagePrediction, TrainPrediction
from tuner.report.timeline import MOST_DRAWN, timeline_figure


def stage(forward_s: float, backward_s: float) -> StagePrediction:
    return StagePrediction(
        layers=1,
        forward_s=forward_s,
        backward_s=backward_s,
        parameter_bytes=1,
        gradient_bytes=1,
        optimizer_bytes=1,
        activation_bytes=1,
        other_bytes=1,
    )


def plan_of(folder: Path, *, microbatches: int, step_s: float, **causes: float) -> Plan:
    """Two alike stages on two ranks, 1 s forward and 2 s backward."""
    plan = read_plan(folder)
    decision = present(plan.decision).model_copy(
        update={
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 1,
            "micro_batch_size": 1,
            "data_parallel_size": 1,
            "schedule": "1f1b",
        }
    )
    predicted = present(plan.predicted).model_copy(
        update={
            "stages": (stage(1.0, 2.0), stage(1.0, 2.0)),
            "step_time_s": step_s,
            "breakdown_s": causes,
        }
    )
    goal = plan.goal.model_copy(update={"global_batch_size": microbatches})
    return plan.model_copy(update={"decision": decision, "predicted": predicted, "goal": goal})


def drawn(plan: Plan) -> dict[str, list[tuple[str, float, float]]]:
    """Return rank, start and length of every bar, by what it is."""
    figure = present(timeline_figure(plan, present(plan.predicted)))
    bars: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for trace in figure.traces:
        bars[trace["name"]] += zip(trace["y"], trace["base"], trace["x"], strict=True)
    return {kind: sorted(own) for kind, own in bars.items()}


def test_two_micro_batches_through_two_stages_by_hand(train_folder: Path) -> None:
    # Rank 0: F 0-1, F 1-2, waits, B 4-6, waits, B 7-9. Rank 1: waits, F 1-2, B 2-4, F 4-5, B 5-7.
    bars = drawn(plan_of(train_folder, microbatches=2, step_s=9.5))
    assert bars["forward"] == [
        ("rank 0", 0.0, 1.0),
        ("rank 0", 1.0, 1.0),
        ("rank 1", 1.0, 1.0),
        ("rank 1", 4.0, 1.0),
    ]
    assert bars["backward"] == [
        ("rank 0", 4.0, 2.0),
        ("rank 0", 7.0, 2.0),
        ("rank 1", 2.0, 2.0),
        ("rank 1", 5.0, 2.0),
    ]
    assert bars["once per step"] == [("rank 0", 9.0, 0.5), ("rank 1", 9.0, 0.5)]


def test_the_start_of_a_long_step_is_drawn(train_folder: Path) -> None:
    plan = plan_of(train_folder, microbatches=MOST_DRAWN, step_s=1000.0)
    figure = present(timeline_figure(plan, present(plan.predicted)))
    assert "The start of the step is drawn" in figure.reading
    assert 0.0 < figure.layout["xaxis"]["range"][1] < 100.0
    assert sum(len(trace["x"]) for trace in figure.traces) <= 2 * MOST_DRAWN
    # A rank works 72 x 3 s, and the other's first forward and last backward pass make 219 s.
    for row in figure.table.rows:
        assert [cell.value for cell in row[2:]] == pytest.approx([72.0, 144.0, 3.0, 781.0])


@each_row(
    "changes",
    [
        {"schedule": "zero_bubble"},
        {"virtual_pipeline_model_parallel_size": 2, "micro_batch_size": 1},
    ],
)
def test_what_cannot_be_simulated_is_not_drawn(train_folder: Path, changes: dict[str, Any]) -> None:
    plan = plan_of(train_folder, microbatches=3, step_s=9.0)
    plan = plan.model_copy(update={"decision": present(plan.decision).model_copy(update=changes)})
    predicted: TrainPrediction = present(plan.predicted)
    assert timeline_figure(plan, predicted) is None
