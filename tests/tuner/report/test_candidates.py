from pathlib import Path

from tests.expect import present
from tuner.config.train_words import short_decision, train_words
from tuner.goals.train_folder import read_plan
from tuner.report.candidates import candidates_figure, rivals_table


def test_every_stored_candidate_is_drawn_once_in_its_group(train_folder: Path) -> None:
    plan = read_plan(train_folder)
    assert plan.predicted is not None
    figure = candidates_figure(plan, plan.predicted)
    points = {trace["name"]: len(trace["x"]) for trace in figure.traces}
    ties = sum(one.within_band for one in plan.alternatives)
    assert points["the plan"] == 1
    assert points.get("tie: within the error band", 0) == ties
    assert points.get("runner-up", 0) == len(plan.alternatives) - ties
    assert points["Pareto front"] == len(plan.pareto)
    chosen = next(trace for trace in figure.traces if trace["name"] == "the plan")
    assert chosen["y"] == [plan.predicted.step_time_s]
    for part in train_words(present(plan.decision)).split(", "):
        assert part in chosen["hovertext"][0]


def test_the_front_trades_memory_for_time(train_folder: Path) -> None:
    plan = read_plan(train_folder)
    figure = candidates_figure(plan, present(plan.predicted))
    front = next(trace for trace in figure.traces if trace["name"] == "Pareto front")
    assert list(front["x"]) == sorted(front["x"])
    assert list(front["y"]) == sorted(front["y"], reverse=True)


def test_every_rival_is_listed_with_why_it_lost(train_folder: Path) -> None:
    plan = read_plan(train_folder)
    chosen, *rivals = rivals_table(plan, present(plan.predicted)).rows
    assert chosen[-1].text.startswith("chosen")
    assert len(rivals) == len(plan.alternatives) > 0
    for row, other in zip(rivals, plan.alternatives, strict=True):
        assert row[0].text == short_decision(other.decision)
        assert other.lost_by in row[-1].text
        assert ("tie: " in row[-1].text) == other.within_band
