"""What may be launched around a plan, and in which order its own proposals come."""

from collections.abc import Callable
from pathlib import Path

from tuner.engines.capabilities import intersection, refusals
from tuner.verify.neighbourhood import PLANNED, Neighbourhood, Point

DecisionSpace = Callable[..., Neighbourhood]


def _points(neighbourhood: Neighbourhood) -> list[Point]:
    return [
        Point(degrees=degrees, option=option)
        for degrees in neighbourhood.candidates
        for option in neighbourhood.option_names
    ]


def test_the_first_seed_is_the_plans_own_decision(bound_plan: Path, space: DecisionSpace) -> None:
    one = space(bound_plan)
    assert one.decision_at(one.seeds()[0]) == one.plan.decision


def test_the_first_eight_seeds_span_chunks_and_kinds_of_parallelism(
    bound_plan: Path, space: DecisionSpace
) -> None:
    one = space(bound_plan)
    assert "memory_per_device" in one.plan.binding_constraint
    first = [one.decision_at(seed) for seed in one.seeds()[:8]]
    launched = [decision for decision in first if decision is not None]
    assert len({chunks for decision in launched for chunks in decision.chunks}) >= 3
    assert any(decision.data_parallel_size == 2 for decision in launched)
    assert any(decision.expert_model_parallel_size == 2 for decision in launched)
    assert any(decision.pipeline_model_parallel_size == 2 for decision in launched)


def test_every_seed_fits_and_can_be_launched(bound_plan: Path, space: DecisionSpace) -> None:
    one = space(bound_plan)
    seeds = one.seeds()
    assert len(set(seeds)) == len(seeds)
    for seed in seeds:
        decision = one.decision_at(seed)
        assert decision is not None
        assert one.excess_bytes(decision) <= 0


def test_the_plans_candidates_are_priced_as_the_plan_priced_them(
    bound_plan: Path, space: DecisionSpace
) -> None:
    one = space(bound_plan)
    plan = one.plan
    assert plan.decision is not None
    assert one.predicted(plan.decision) == plan.predicted
    for other in plan.runners_up:
        assert one.predicted(other.decision) == other.predicted
        assert one.excess_bytes(other.decision) <= 0


def test_a_decision_finds_back_to_its_point(bound_plan: Path, space: DecisionSpace) -> None:
    one = space(bound_plan)
    result = 0
    for point in _points(one):
        decision = one.decision_at(point)
        if decision is not None:
            back = one.find_point(decision)
            assert back is not None
            assert one.decision_at(back) == decision
            result += 1
    assert result > 0
    strange = one.plan.decision
    assert strange is not None
    assert one.find_point(strange.model_copy(update={"micro_batch_size": 64})) is None
    assert one.find_point(strange.model_copy(update={"fp8_recipe": "x"})) is None


def test_what_a_target_cannot_launch_is_at_no_point(bound_plan: Path, space: DecisionSpace) -> None:
    one = space(bound_plan)
    assert "megatron-lm" in one.plan.emit
    capable = intersection(one.plan.emit)
    for point in _points(one):
        decision = one.decision_at(point)
        if point.option != PLANNED and decision is not None:
            assert not refusals(capable, model=one.plan.model, decision=decision)
    # Megatron-LM 0.16 has no chunks; the options that need them are not even listed.
    older = space(bound_plan, emit=("reference", "megatron-lm-0.16"))
    assert "selective/c1" in older.option_names
    assert "selective/c2" not in older.option_names


def test_degrees_that_a_target_lacks_make_no_neighbour(
    bound_plan: Path, space: DecisionSpace
) -> None:
    one = space(bound_plan)
    decision = one.plan.decision
    assert decision is not None
    sharded = decision.model_copy(update={"zero_stage": 2})
    other = space(bound_plan, decision=sharded)
    (name,) = (name for name, kept in other.candidates.items() if kept == sharded)
    assert other.decision_at(Point(degrees=name, option="none")) is None
    assert other.predicted_step_s(Point(degrees=name, option="none")) == float("inf")
