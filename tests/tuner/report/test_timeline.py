from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.goals.train_folder import read_plan
from tuner.plans.train import Plan, StagePrediction, TrainPrediction
from tuner.report.timeline import MAX_PASSES_PER_RANK, timeline_figure


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
    assert plan.decision is not None
    assert plan.predicted is not None
    decision = plan.decision.model_copy(
        update={
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 1,
            "micro_batch_size": 1,
            "data_parallel_size": 1,
            "schedule": "1f1b",
        }
    )
    predicted = plan.predicted.model_copy(
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
    assert plan.predicted is not None
    figure = timeline_figure(plan, plan.predicted)
    assert figure is not None
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
    assert bars["waiting (bubble)"] == [
        ("rank 0", 2.0, 2.0),
        ("rank 0", 6.0, 1.0),
        ("rank 1", 0.0, 1.0),
        ("rank 1", 7.0, 2.0),
    ]
    assert bars["once per step"] == [("rank 0", 9.0, 0.5), ("rank 1", 9.0, 0.5)]


def test_causes_take_their_share_of_every_pass(train_folder: Path) -> None:
    # A rank works 2 x 3 s; 0.6 s exposed exchange is a tenth of it, 1 s recomputation a quarter
    # of the 4 s backward.
    bars = drawn(plan_of(train_folder, microbatches=2, step_s=9.0, expert=0.6, recompute=1.0))
    spent = {kind: sum(length for *_, length in own) for kind, own in bars.items()}
    assert spent["communication"] == pytest.approx(2 * 0.6)
    assert spent["recompute"] == pytest.approx(2 * 1.0)
    assert spent["forward"] + spent["backward"] == pytest.approx(2 * (6.0 - 0.6 - 1.0))
    assert "once per step" not in bars
    assert ("rank 0", 4.0, 0.5) in bars["recompute"]


def test_start_and_end_of_a_long_step_are_drawn(train_folder: Path) -> None:
    plan = plan_of(train_folder, microbatches=MAX_PASSES_PER_RANK, step_s=1000.0)
    assert plan.predicted is not None
    figure = timeline_figure(plan, plan.predicted)
    assert figure is not None
    assert "start and end are drawn" in figure.reading
    (start, end) = (figure.layout["xaxis"]["range"], figure.layout["xaxis2"]["range"])
    assert start[0] == 0.0
    assert start[1] < end[0]
    assert end[1] == 1000.0
    bars = sum(len(trace["x"]) for trace in figure.traces)
    assert bars < 8 * MAX_PASSES_PER_RANK
    busy = {row[0].text: [cell.value for cell in row[2:4]] for row in figure.table.rows}
    assert busy["rank 1"] == pytest.approx([MAX_PASSES_PER_RANK * 1.0, MAX_PASSES_PER_RANK * 2.0])


def test_windows_never_overlap(train_folder: Path) -> None:
    # So many ranks that neither end may show more than a few passes.
    plan = plan_of(train_folder, microbatches=20, step_s=900.0)
    assert plan.decision is not None
    assert plan.predicted is not None
    ranks = 64
    wide = plan.decision.model_copy(
        update={"pipeline_model_parallel_size": ranks, "pipeline_layout": (1,) * ranks}
    )
    predicted = plan.predicted.model_copy(update={"stages": (stage(1.0, 2.0),) * ranks})
    figure = timeline_figure(
        plan.model_copy(update={"decision": wide, "predicted": predicted}), predicted
    )
    assert figure is not None
    ranges = [figure.layout[name]["range"] for name in ("xaxis", "xaxis2") if name in figure.layout]
    assert all(low < high for low, high in ranges)
    assert all(one[1] < other[0] for one, other in pairwise(ranges))


@each_row(
    "changes",
    [
        {"schedule": "zero_bubble"},
        {"virtual_pipeline_model_parallel_size": 2, "micro_batch_size": 1},
    ],
)
def test_what_cannot_be_simulated_is_not_drawn(train_folder: Path, changes: dict[str, Any]) -> None:
    plan = plan_of(train_folder, microbatches=3, step_s=9.0)
    assert plan.decision is not None
    assert plan.predicted is not None
    plan = plan.model_copy(update={"decision": plan.decision.model_copy(update=changes)})
    predicted: TrainPrediction = plan.predicted  # type: ignore[assignment]  # asserted above
    assert timeline_figure(plan, predicted) is None
