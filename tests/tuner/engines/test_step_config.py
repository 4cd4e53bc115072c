import pytest

from profilers.steps.config import Dispatcher, Recompute, StepConfig
from tests.rows import each_row
from tests.tuner.engines.testing import sample_decision, sample_verified
from tests.tuner.models import example_model
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.reference.step_config import step_config, training_config

TINY = example_model("tiny-moe")


def test_the_configuration_says_what_the_plan_decided() -> None:
    decision = sample_decision(
        pipeline_layout=(1, 3), stage_recompute=("none", "selective"), chunks=(1, 8)
    )
    plan = sample_verified(TINY, decision).plan
    config = step_config(plan, decision, steps=5, warmup_steps=1)
    assert config.parallelism.world == decision.num_devices
    assert [stage.num_layers for stage in config.stages] == [1, 3]
    assert [stage.recompute for stage in config.stages] == [Recompute.NONE, Recompute.SELECTIVE]
    assert [stage.chunks for stage in config.stages] == [1, 8]
    each = decision.num_microbatches(plan.goal.global_batch_size)
    assert set(config.microbatches_by_rank) == {each}
    assert (config.steps, config.warmup_steps) == (5, 1)
    assert config.model.num_experts == 8
    assert config.routing.mode == "forced"
    assert StepConfig.model_validate_json(config.model_dump_json()) == config


def test_routing_reproduces_the_loads_that_were_priced() -> None:
    decision = sample_decision(pipeline_layout=(2, 2))
    loads = ((0.5, *(0.5 / 7,) * 7),) * 4
    plan = sample_verified(TINY, decision).plan.model_copy(update={"load_ratio": loads})
    assert step_config(plan, decision, steps=1, warmup_steps=0).routing.load_ratio == loads


def _trained(*, max_chunk_tokens: int | None, **changes: object) -> StepConfig:
    """Configuration of a real run when every stage has this much memory for a chunk."""
    verified = sample_verified(TINY, sample_decision(pipeline_layout=(2, 2), **changes))
    room = {"max_chunk_tokens": max_chunk_tokens}
    stages = tuple(stage.model_copy(update=room) for stage in verified.predicted.stages)
    predicted = verified.predicted.model_copy(update={"stages": stages})
    verified = verified.model_copy(update={"predicted": predicted})
    config = training_config(verified, steps=5, warmup_steps=1)
    # Copies are not validated when they are made: what is written must be readable.
    assert StepConfig.model_validate_json(config.model_dump_json()) == config
    return config


def test_a_real_run_learns_its_routing_and_chooses_its_chunks() -> None:
    config = _trained(max_chunk_tokens=700)
    assert config.routing.mode == "learned"
    assert config.routing.load_ratio == ()
    assert [stage.max_chunk_tokens for stage in config.stages] == [700, 700]
    assert [stage.chunks for stage in config.stages] == [4, 4]
    assert (config.steps, config.warmup_steps) == (5, 1)


@each_row("room", (0, None))
def test_without_memory_for_a_copy_the_planned_chunks_stay(room: int | None) -> None:
    config = _trained(max_chunk_tokens=room)
    assert [stage.max_chunk_tokens for stage in config.stages] == [None, None]
    assert [stage.chunks for stage in config.stages] == [4, 4]


def test_a_real_run_differs_from_the_verified_step_in_its_stages_and_routing_alone() -> None:
    verified = sample_verified(TINY, sample_decision(pipeline_layout=(2, 2)))
    step = step_config(verified.plan, verified.decision, steps=5, warmup_steps=1)
    training = training_config(verified, steps=5, warmup_steps=1)
    assert training.model_copy(update={"stages": step.stages, "routing": step.routing}) == step
    config = _trained(max_chunk_tokens=None, stage_recompute=("none", "none"), chunks=(1, 1))
    assert [stage.max_chunk_tokens for stage in config.stages] == [None, None]
    assert config.routing.mode == "learned"


def test_the_reference_step_has_its_nodes_devices_and_zero_stages() -> None:
    decision = sample_decision(pipeline_layout=(2, 2), zero_stage=2)
    plan = sample_verified(TINY, decision).plan
    with pytest.raises(ValueError, match="zero_stage 2"):
        step_config(plan, decision, steps=1, warmup_steps=0)
    decision = sample_decision(pipeline_layout=(2, 2))
    on_cpu = sample_verified(TINY, decision, device_kind="cpu").plan
    assert step_config(on_cpu, decision, steps=1, warmup_steps=0).device == "cpu"
    assert launch_shape(sample_verified(TINY, decision).plan, decision).device_kind == "cuda"
    decision = sample_decision(pipeline_layout=(2, 2), dispatcher="hierarchical")
    plan = sample_verified(TINY, decision, devices_per_node=2).plan
    parallelism = step_config(plan, decision, steps=1, warmup_steps=0).parallelism
    assert (parallelism.dispatcher, parallelism.ranks_per_node) == (Dispatcher.HIERARCHICAL, 2)


def test_a_job_takes_as_few_nodes_as_equal_nodes_allow() -> None:
    decision = sample_decision(pipeline_layout=(2, 2))
    # 16 devices: whole nodes where they fit, else the largest divisor (5 per node -> 4 used).
    expected = {8: (2, 8), 32: (1, 16), 5: (4, 4), 1: (16, 1), 3: (8, 2)}
    found = {}
    for devices_per_node in expected:
        plan = sample_verified(TINY, decision, devices_per_node=devices_per_node).plan
        shape = launch_shape(plan, decision)
        found[devices_per_node] = (shape.nodes, shape.devices_per_node)
        assert shape.num_devices == decision.num_devices
    assert found == expected
