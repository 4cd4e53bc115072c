"""What may be launched around a plan."""

from pathlib import Path

from tests.expect import present
from tests.tuner.verify.testing import DecisionSpace
from tuner.engines.targets import programs
from tuner.spec.refusals import refusals
from tuner.verify.space import TrainSpace


def test_the_plans_own_decision_is_first_and_its_candidates_are_priced_as_it_priced_them(
    bound_plan: Path, space: DecisionSpace
) -> None:
    one = space(bound_plan)
    plan = one.plan
    assert plan.decision is not None
    assert next(iter(one.points())) == plan.decision
    assert one.predicted(plan.decision) == plan.predicted
    for other in plan.runners_up:
        assert one.predicted(other.decision) == other.predicted
        assert one.points()[other.decision].predicted[0] == other.predicted.step_time_s


def test_every_point_fits_and_can_be_launched(bound_plan: Path, space: DecisionSpace) -> None:
    one = space(bound_plan)
    assert "memory_per_device" in one.plan.binding_constraint
    assert "megatron-lm" in one.plan.emit
    capable = programs(one.plan.emit).capabilities()
    for decision, point in one.points().items():
        assert point.predicted[1] <= 1.0
        assert not refusals(capable, model=one.plan.model, decision=decision)
    assert len({decision.chunks for decision in one.points()}) >= 3
    # Megatron-LM 0.16 has no chunks.
    older = space(bound_plan, emit=("reference", "megatron-lm-0.16"))
    plan = older.plan
    named = {present(plan.decision).chunks, *(other.decision.chunks for other in plan.runners_up)}
    near = {one.chunks for one in older.points()} - named
    assert all(set(chunks) == {1} for chunks in near)


def test_degrees_that_a_target_lacks_make_no_neighbour(
    bound_plan: Path, space: DecisionSpace
) -> None:
    sharded = present(space(bound_plan).plan.decision).model_copy(update={"zero_stage": 2})
    points = space(bound_plan, decision=sharded).points()
    assert {other for other in points if other.zero_stage == 2} <= {sharded}


def test_a_plan_of_an_engine_is_tried_with_other_buckets_where_it_has_them(
    bound_plan: Path, space: DecisionSpace
) -> None:
    plan = space(bound_plan).plan
    update = {"overlap_grad_reduce": True, "ddp_bucket_size": 80_000_000, "zero_stage": 0}
    decision = present(plan.decision).model_copy(update=update)
    for target, sizes in (
        ("megatron-lm", [80_000_000, 40_000_000, 160_000_000]),
        ("torchtitan", [80_000_000]),
    ):
        of = plan.model_copy(update={"decision": decision, "emit": (target,)})
        points = TrainSpace(plan=of).points()
        assert [one.ddp_bucket_size for one in points if one.ddp_bucket_size] == sizes
        own = points[decision].predicted
        assert all(points[one].predicted == own for one in points if one.ddp_bucket_size)
