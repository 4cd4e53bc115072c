"""Smaller jobs keep what decides kernels and exchanges, and stay launchable."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profilers.steps.config import LayerKind, Recompute
from tests.expect import present
from tuner.config.train import TrainDecision
from tuner.engines.reference.step_config import step_config
from tuner.plans.train import Plan
from tuner.spec.model import ModelSpec
from tuner.verify.budget.scale import launchable_scales, scaled_plan
from tuner.verify.space import TrainSpace

DENSE, MOE = LayerKind.DENSE, LayerKind.MOE


@pytest.fixture
def job(wide: Any) -> Callable[..., tuple[Plan, TrainDecision]]:
    """A plan with a decision of its own: job(layers, data=8, expert=4, ...)."""

    def made(
        kinds: tuple[LayerKind, ...] = (MOE,) * 8,
        *,
        layout: tuple[int, ...] = (8,),
        virtual: int = 1,
        data: int = 8,
        expert: int = 4,
        **changes: Any,
    ) -> tuple[Plan, TrainDecision]:
        space: TrainSpace = wide.space
        plan = space.plan
        model: ModelSpec = plan.model.model_copy(
            update={
                "num_layers": len(kinds),
                "layers": kinds,
                "windowed": (False,) * len(kinds),
                "dense_ffn_size": 128,
            }
        )
        fields = present(plan.decision).model_dump() | {
            "tensor_model_parallel_size": 1,
            "sequence_parallel": False,
            "pipeline_model_parallel_size": len(layout) // virtual,
            "virtual_pipeline_model_parallel_size": virtual,
            "data_parallel_size": data,
            "expert_model_parallel_size": expert,
            "expert_data_parallel_size": data // expert,
            "recompute": Recompute.NONE,
            "recompute_modules": (),
            "stage_recompute": (Recompute.NONE,) * len(layout),
            "chunks": (1,) * len(layout),
            "pipeline_layout": layout,
            "zero_stage": 0,
        }
        decision = TrainDecision.model_validate(fields | changes)
        ratios = tuple((float(row), *(0.0,) * 7) for row in range(kinds.count(MOE)))
        return plan.model_copy(
            update={"model": model, "decision": decision, "load_ratio": ratios}
        ), decision

    return made


Job = Callable[..., tuple[Plan, TrainDecision]]


def test_groups_micro_batches_and_kernels_stay(job: Job) -> None:
    plan, decision = job()
    scales = launchable_scales(plan, decision, max_devices=16)
    assert {one.num_devices for one in scales} == {8, 4}
    for scale in scales:
        small = scale.decision
        assert small.expert_model_parallel_size == 4
        assert small.micro_batch_size == decision.micro_batch_size
        before = decision.num_microbatches(plan.goal.global_batch_size)
        assert small.num_microbatches(scale.global_batch_size) == before
        assert small != decision
    assert scales == tuple(sorted(scales, key=lambda one: (-one.num_devices, -len(one.layers))))


def test_every_smaller_job_is_one_that_the_reference_step_accepts(wide: Any) -> None:
    plan: Plan = wide.plan
    decisions = [plan.decision, *(one.decision for one in plan.runners_up)]
    seen = 0
    for decision in decisions:
        assert decision is not None
        for scale in launchable_scales(plan, decision, max_devices=16):
            shrunk = scaled_plan(plan, scale)
            config = step_config(shrunk, scale.decision, steps=3, warmup_steps=1)
            assert config.parallelism.world == scale.num_devices
            assert shrunk.cluster.num_devices >= scale.num_devices
            assert Plan.model_validate(shrunk.model_dump()) == shrunk
            seen += 1
    assert seen > 20


def test_experts_need_their_group_whole(job: Job) -> None:
    plan, decision = job(data=8, expert=8)
    assert {one.num_devices for one in launchable_scales(plan, decision, max_devices=16)} == {8}
    assert launchable_scales(plan, decision, max_devices=4) == ()


def test_gradients_stay_summed_and_a_pipeline_stays_one(job: Job) -> None:
    plan, decision = job(layout=(2, 2, 2, 2), data=4, expert=2)
    scales = launchable_scales(plan, decision, max_devices=16)
    assert {one.decision.data_parallel_size for one in scales} == {4, 2}
    assert {one.decision.pipeline_model_parallel_size for one in scales} == {4, 2}
    # The first and the last stage hold embedding and loss.
    halves = [one for one in scales if one.decision.pipeline_model_parallel_size == 2]
    assert all(one.layers[0] < 2 and one.layers[-1] >= 6 for one in halves)


def test_every_stage_keeps_a_layer_of_each_of_its_kinds(job: Job) -> None:
    kinds = (DENSE, MOE, MOE, MOE, MOE, MOE, MOE, MOE)
    plan, decision = job(kinds, layout=(4, 4), data=4, expert=2)
    scales = launchable_scales(plan, decision, max_devices=16)
    fewest = min(scales, key=lambda one: len(one.layers))
    assert fewest.decision.pipeline_layout == (2, 2)
    assert fewest.layers[0] == 0
    assert Counter(kinds[layer] for layer in fewest.layers[:2]) == {DENSE: 1, MOE: 1}


def test_recorded_loads_come_along_with_their_layers(job: Job) -> None:
    kinds = (DENSE, MOE, MOE, MOE, MOE, MOE, MOE, MOE)
    plan, decision = job(kinds)
    for scale in launchable_scales(plan, decision, max_devices=16):
        shrunk = scaled_plan(plan, scale)
        # Row r of the loads begins with r, and layer 1 is the first with experts.
        rows = [row[0] for row in shrunk.load_ratio]
        assert rows == [layer - 1 for layer in scale.layers if layer]
        assert len(rows) == shrunk.model.num_moe_layers


@given(
    pattern=st.lists(st.sampled_from((DENSE, MOE)), min_size=4, max_size=16),
    cut=st.data(),
)
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_layers_are_kept_in_order_and_once(
    job: Job, pattern: list[LayerKind], cut: st.DataObject
) -> None:
    kinds = (MOE, *pattern)
    first = cut.draw(st.integers(1, len(kinds) - 1))
    layout = (first, len(kinds) - first)
    plan, decision = job(kinds, layout=layout, data=4, expert=2)
    for scale in launchable_scales(plan, decision, max_devices=16):
        assert list(scale.layers) == sorted(set(scale.layers))
        assert sum(scale.decision.pipeline_layout) == len(scale.layers)
        kept_first = scale.layers[: scale.decision.pipeline_layout[0]]
        assert {kinds[one] for one in kept_first} == set(kinds[:first])
        assert all(one < first for one in kept_first)


def test_partial_recomputation_and_copies_shrink_with_the_job(job: Job) -> None:
    plan, decision = job(
        recompute=Recompute.FULL, stage_recompute=(Recompute.FULL,), recompute_num_layers=4
    )
    # The reference step has no partial recomputation, so nothing it accepts is smaller.
    assert launchable_scales(plan, decision, max_devices=16) == ()
    able = plan.model_copy(update={"emit": ("megatron-lm",)})
    by_layers = {
        len(one.layers): one.decision.recompute_num_layers
        for one in launchable_scales(able, decision, max_devices=16)
    }
    assert by_layers == {8: 4, 4: 2, 2: 1, 1: 1}


def test_several_pools_have_no_smaller_job(job: Job) -> None:
    plan, decision = job()
    (pool,) = plan.cluster.pools
    other = pool.model_copy(update={"name": "other"})
    unlike = plan.cluster.model_copy(update={"pools": (pool, other)})
    plan = plan.model_copy(update={"cluster": unlike})
    assert launchable_scales(plan, decision, max_devices=16) == ()
