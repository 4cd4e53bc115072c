"""Two training decisions that differ in any field read differently wherever decisions are named."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.expect import present
from tests.tuner.engines.testing import sample_verified
from tuner.cli.plan_text import explanation, plan_text
from tuner.config.train import TrainDecision
from tuner.config.train_words import train_words
from tuner.engines.statement import statement
from tuner.goals.registry import load_goal
from tuner.plans.train import Alternative, Plan, VerifiedPlan
from tuner.report.candidates import rivals_table
from tuner.report.train_page import decision_facts, decision_section

GOAL = load_goal("train")


def _plan(pair: Any, decision: TrainDecision, other: TrainDecision) -> Plan:
    plan = sample_verified(pair.model, decision).plan
    assert plan.predicted is not None
    beside = Alternative(
        decision=other,
        predicted=sample_verified(pair.model, other).predicted,
        within_band=True,
        lost_by="nothing",
    )
    return plan.model_copy(update={"alternatives": (beside,)})


def _section(plan: Plan, decision: TrainDecision) -> str:
    return str(decision_section(plan, decision).blocks)


def _candidate(plan: Plan) -> str:
    return str(rivals_table(plan, present(plan.predicted)).rows)


def _stated(plan: Plan, decision: TrainDecision) -> str:
    predicted = sample_verified(plan.model, decision).predicted
    return str(
        statement(VerifiedPlan(plan=plan, decision=decision, predicted=predicted, waived="test"))
    )


OF_DECISION: Mapping[str, Callable[[Plan, TrainDecision], str]] = {
    "a cell of explain": lambda plan, decision: GOAL.words(decision),
    "the lines of a plan": lambda plan, decision: str(list(decision_facts(decision))),
    "a cell of the report": lambda plan, decision: train_words(decision),
    "the report's section": _section,
    "the head of emitted files": _stated,
}
OF_PLAN: Mapping[str, Callable[[Plan], str]] = {
    "plan": lambda plan: plan_text(plan, folder=Path("plan")),
    "explain": explanation,
    "the report's candidates": _candidate,
}


def test_every_field_has_a_pair_of_decisions(pairs: Any, follows: Any) -> None:
    assert {pair.field for pair in pairs} | set(follows) == set(TrainDecision.model_fields)
    for pair in pairs:
        assert getattr(pair.before, pair.field) != getattr(pair.after, pair.field), pair.field


def test_what_follows_from_other_fields_is_said_by_them(pairs: Any, follows: Any) -> None:
    for pair in pairs:
        for one in (pair.before, pair.after):
            ranks = one.tensor_model_parallel_size * one.context_parallel_size
            ranks *= one.data_parallel_size
            experts = one.expert_model_parallel_size * one.expert_tensor_parallel_size
            levels = ["none", "selective", "full"]
            said = {
                "expert_data_parallel_size": ranks // experts,
                "recompute": max((level.value for level in one.stage_recompute), key=levels.index),
            }
            assert said.keys() == follows.keys()
            assert {name: getattr(one, name) for name in said} == said, pair.field


def test_decisions_that_differ_in_a_field_read_differently(pairs: Any, none_of: Any) -> None:
    failures = []
    for pair in pairs:
        before = _plan(pair, pair.before, pair.after)
        after = _plan(pair, pair.after, pair.before)
        failures += [
            f"{name}: {pair.field} {getattr(pair.before, pair.field)} and "
            f"{getattr(pair.after, pair.field)} read alike"
            for name, say in OF_DECISION.items()
            if say(before, pair.before) == say(before, pair.after)
        ]
        failures += [
            f"{name}: plans that differ in {pair.field} read alike"
            for name, tell in OF_PLAN.items()
            if tell(before) == tell(after)
        ]
        if not GOAL.differences(pair.before, pair.after):
            failures.append(f"explain's changes: none where {pair.field} differs")
    none_of(failures)
