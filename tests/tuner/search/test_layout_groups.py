"""Runners-up are one for each layout; what runs a layout otherwise stays among the variants."""

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuner.engines.testing import sample_decision, sample_verified
from tuner.config.train import TrainDecision
from tuner.plans.train import Alternative, Plan
from tuner.search.layout_groups import (
    MOST_VARIANTS,
    Layout,
    by_layout,
    layout_of,
    rows_of_layouts,
    variants_of,
    variants_words,
)
from tuner.spec.huggingface.read import read_model

MODEL = Path(__file__).parents[3] / "examples" / "models" / "mixtral-8x7b"


def runner_up(decision: TrainDecision, *, step_s: float) -> Alternative:
    plan = sample_verified(read_model(MODEL), decision)
    predicted = plan.predicted.model_copy(update={"step_time_s": step_s})
    return Alternative(decision=decision, predicted=predicted, within_band=True, lost_by="time")


def decided(**changes: Any) -> TrainDecision:
    return sample_decision(**changes)


SPLIT = {"data_parallel_size": 4, "context_parallel_size": 2}


def test_execution_knobs_make_variants_and_degrees_make_layouts() -> None:
    own = decided()
    for same in ({"micro_batch_size": 2}, {"zero_stage": 0}, {"overlap_grad_reduce": True}):
        assert layout_of(decided(**same)) == layout_of(own)
    assert layout_of(decided(**SPLIT)) != layout_of(own)


def test_alternatives_are_one_for_each_other_layout() -> None:
    own = decided()
    ranked = [
        runner_up(decided(micro_batch_size=2), step_s=2.01),
        runner_up(decided(**SPLIT), step_s=2.0),
        runner_up(decided(**SPLIT, micro_batch_size=2), step_s=2.008),
        runner_up(decided(**SPLIT, zero_stage=0), step_s=1.996),
    ]
    groups = by_layout(own, ranked)
    (other,) = groups["alternatives"]
    # Rows are ranked by a closed form; played, a later one may be the fastest of its layout.
    assert other.decision == ranked[3].decision
    assert other.num_variants == 2
    assert [one.decision for one in groups["variants"]] == [
        ranked[place].decision for place in (1, 2, 0)
    ]
    plan: Plan = sample_verified(read_model(MODEL), own).plan.model_copy(update=groups)
    assert variants_words(plan, other) == "2 variants of this layout within 0.6 % of its step"
    assert [one.decision for one in variants_of(layout_of(own), plan.variants)] == [
        ranked[0].decision
    ]
    # Nothing that was found is lost to those who launch it, fastest first.
    steps_s = [one.predicted.step_time_s for one in plan.runners_up]
    assert steps_s == sorted(one.predicted.step_time_s for one in ranked)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from((1, 2, 4)), st.integers(1, 9)), max_size=12))
def test_alternatives_are_the_fastest_of_their_layouts_in_order(
    rows: list[tuple[int, int]],
) -> None:
    ranked = [
        runner_up(
            decided(context_parallel_size=context, data_parallel_size=8 // context),
            step_s=float(step_s),
        )
        for context, step_s in rows
    ]
    own = decided()
    groups = by_layout(own, ranked)
    fastest_s: dict[Layout, float] = {}
    for one in ranked:
        layout, step_s = layout_of(one.decision), one.predicted.step_time_s
        if layout != layout_of(own):
            fastest_s[layout] = min(step_s, fastest_s.get(layout, step_s))
    shown = [(layout_of(one.decision), one.predicted.step_time_s) for one in groups["alternatives"]]
    assert dict(shown) == fastest_s
    assert [step_s for _, step_s in shown] == sorted(fastest_s.values())


@given(
    layouts=st.lists(st.tuples(st.integers(1, 6)), max_size=60),
    top=st.integers(1, 8),
)
def test_rows_hold_as_many_layouts_as_requested(layouts: list[tuple[int]], top: int) -> None:
    rows = rows_of_layouts(layouts, top=top)
    if rows is None:
        assert len(set(layouts)) < top
        assert len(layouts) < MOST_VARIANTS * top
        return
    assert rows <= MOST_VARIANTS * top
    assert len(set(layouts[:rows])) == top or rows == MOST_VARIANTS * top
    assert len(set(layouts[: rows - 1])) < top
