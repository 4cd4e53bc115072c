"""The size of gradient buckets is stated where it pays, and reaches launch file and estimate."""

from pathlib import Path

import pytest

from tests.expect import present
from tests.printed import flat
from tests.tuner.models import MODELS, example_model
from tests.tuner.search.train.testing import planned
from tuner.cli.plan_text import explanation, plan_text
from tuner.costs.train.calibration import shipped
from tuner.engines.megatron_bridge.write import overrides
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.targets import programs
from tuner.engines.writers import emit
from tuner.estimate.estimate import estimate
from tuner.goals.registry import goal_of
from tuner.plans.train import Plan, VerifiedPlan
from tuner.search.train.gradient_buckets import LEAST_GAIN_RATIO, MENU
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.search import Search
from tuner.spec.spec import Spec
from tuner.units import format_ratio, format_s


def _spec(
    *,
    nodes: int,
    target: str = "megatron-lm",
    usable_memory_ratio: float = 0.95,
    tensor: tuple[int, ...] = (1,),
) -> Spec:
    pool = Pool(
        name="pool",
        device="h100-sxm",
        nodes=nodes,
        devices_per_node=8,
        nic=25e9,
        usable_memory_ratio=usable_memory_ratio,
    )
    return Spec(
        path=Path("spec.yaml"),
        model_path=MODELS / "llama-3.1-8b",
        model=example_model("llama-3.1-8b"),
        cluster=Cluster(pools=(pool,)),
        goal=TrainGoal(kind="train", sequence_length=4096, global_batch_size=nodes * 8),
        search=Search(
            zero_stage=(1,),
            tensor_model_parallel_size=tensor,
            context_parallel_size=(1,),
            pipeline_model_parallel_size=(1,),
        ),
        programs=programs((target,)),
    )


@pytest.fixture(scope="module")
def wide() -> Plan:
    """Llama 3.1 8B on 1,024 devices, where the engine's buckets hold an eighth of the gradients."""
    return planned(_spec(nodes=128))


def test_a_size_is_stated_where_it_saves_more_than_noise(wide: Plan) -> None:
    assert wide.predicted is not None
    assert present(wide.decision).ddp_bucket_size in MENU
    spec = _spec(nodes=128)
    arguments = emit("megatron-lm", VerifiedPlan.waive(wide, reason="a test"))[0].text
    stated = f"--ddp-bucket-size {present(wide.decision).ddp_bucket_size}\n"
    assert stated in arguments
    usual = estimate(
        spec, megatron.read(arguments.replace(stated, ""), source="args"), residuals=shipped()
    )
    assert usual.decision == present(wide.decision).model_copy(update={"ddp_bucket_size": None})
    assert LEAST_GAIN_RATIO <= 1.0 - wide.predicted.step_time_s / usual.step_time_s < 0.1
    assert usual.step_time_s == pytest.approx(wide.certificate.objective)
    (note,) = (note for note in wide.provenance.notes if "gradient buckets of" in note)
    assert f"predicted to save {format_s(usual.step_time_s - wide.predicted.step_time_s)}" in note
    assert sum(wide.predicted.breakdown_s.values()) == pytest.approx(wide.predicted.step_time_s)


def test_the_size_is_shown_and_launched_and_read_back_to_the_same_time(wide: Plan) -> None:
    decision = present(wide.decision)
    size = decision.ddp_bucket_size
    for text in (plan_text(wide, folder=Path("plan")), explanation(wide)):
        assert f"gradient buckets of {size} parameters" in flat(text)
    arguments = emit("megatron-lm", VerifiedPlan.waive(wide, reason="a test"))[0].text
    assert f"\n--ddp-bucket-size {size}\n" in arguments
    assert ("ddp.bucket_size", size) in overrides(wide.model, wide.goal, decision)
    spec = _spec(nodes=128)
    estimated = estimate(spec, megatron.read(arguments, source="args"), residuals=shipped())
    assert estimated.decision.ddp_bucket_size == size
    assert estimated.step_time_s == pytest.approx(present(wide.predicted).step_time_s, rel=1e-6)
    without = arguments.replace(f"--ddp-bucket-size {size}\n", "")
    usual = estimate(spec, megatron.read(without, source="args"), residuals=shipped())
    assert usual.step_time_s > estimated.step_time_s * (1 + LEAST_GAIN_RATIO / 2)
    (change,) = (one for one in usual.changes if "gradient buckets" in one.what[0])
    assert change.decision.ddp_bucket_size == size
    assert change.lines == (f"--ddp-bucket-size {size}",)
    assert change.step_time_s == pytest.approx(estimated.step_time_s)
    offered = [one.decision.ddp_bucket_size for one in estimated.changes]
    assert set(offered) <= {size}, "the plan's size is the best of the menu"


def test_whatever_a_step_is_compared_with_has_buckets_of_its_own_too(wide: Plan) -> None:
    step_s = present(wide.predicted).step_time_s
    assert present(wide.certificate.objective) > step_s
    assert present(goal_of(wide).figures(wide)).values["fastest_step_time_s"] == step_s
    tight = planned(_spec(nodes=128, usable_memory_ratio=0.6, tensor=(1, 2)))
    gain = format_ratio(1.0 - step_s / present(tight.predicted).step_time_s)
    would = f"the fastest step takes {format_s(step_s)}, {gain} less"
    assert would in tight.binding_constraint


def test_the_fastest_is_stated_with_its_buckets_where_another_is_preferred() -> None:
    plan = planned(_spec(nodes=128, usable_memory_ratio=0.4, tensor=(1, 2, 4)))
    one, predicted, objective_s = (
        present(plan.preferred),
        present(plan.predicted),
        present(plan.certificate.objective),
    )
    assert one.fastest.ddp_bucket_size in MENU
    (listed,) = (other for other in plan.runners_up if other.decision == one.fastest)
    assert one.fastest_step_s == pytest.approx(listed.predicted.step_time_s)
    assert one.fastest_step_s < objective_s * (1.0 - LEAST_GAIN_RATIO / 2)
    assert one.slower_ratio == pytest.approx(predicted.step_time_s / one.fastest_step_s - 1.0)
    for expected_s, step_s in (
        (one.expected_step_s, predicted.step_time_s),
        (one.fastest_expected_step_s, one.fastest_step_s),
    ):
        assert step_s <= present(expected_s) < step_s * 1.002


def test_no_size_is_stated_where_none_pays_or_the_target_has_none() -> None:
    for spec in (_spec(nodes=4), _spec(nodes=128, target="deepspeed")):
        plan = planned(spec)
        assert present(plan.decision).ddp_bucket_size is None
        assert not any("gradient buckets" in note for note in plan.provenance.notes)
