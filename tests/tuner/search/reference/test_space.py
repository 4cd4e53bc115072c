import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from profilers.steps.run import refusal
from tests.rows import Failures
from tests.tuner.engines.testing import sample_verified
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.engines.reference.step_config import step_config
from tuner.engines.targets import programs
from tuner.search.reference.decisions import RecomputeOption, decision
from tuner.search.reference.plan_profiled import blocking_rules
from tuner.search.reference.space import enumerate_degrees
from tuner.search.train.rules import BATCH_RULES
from tuner.spec.goal import TrainGoal
from tuner.spec.refusals import refusals
from tuner.spec.search import Search
from tuner.spec.tune import Adapters

Make = Callable[..., Workload]
REFERENCE = programs(["reference"]).capabilities()


def _size_of_the_product(*, devices: int, layers: int, batch: int) -> int:
    """The whole space by counting up every factor, without asking which divide."""
    actual = 0
    for tensor in range(1, devices + 1):
        for pipeline in range(1, devices + 1):
            for data in range(1, devices + 1):
                if tensor * pipeline * data != devices:
                    continue
                experts = sum((tensor * data) % e == 0 for e in range(1, tensor * data + 1))
                virtual = 1 if pipeline == 1 else max(1, layers // pipeline)
                micro = sum(1 << bit <= batch for bit in range(batch + 1))
                actual += experts * virtual * micro * 4  # ZeRO stages 0 to 3
    return actual


def test_legal_and_illegal_add_up_to_the_whole_product(tiny_work: Make, failures: Failures) -> None:
    for devices, (layers, batch) in itertools.product((1, 2, 4, 6, 8), ((4, 8), (3, 6))):
        work = tiny_work(layers="m" * layers, batch={"global_batch_size": batch})
        actual = enumerate_degrees(
            work, num_devices=devices, capabilities=REFERENCE, search=Search()
        )
        with failures.of(devices, layers, batch):
            whole = _size_of_the_product(devices=devices, layers=layers, batch=batch)
            assert len(actual.legal) + actual.num_illegal == whole
            assert len(set(actual.legal)) == len(actual.legal)


def test_a_target_of_equal_replicas_divides_the_batch(tiny_work: Make) -> None:
    work = tiny_work(batch={"global_batch_size": 6})
    assert not programs(["reference", "torchtitan"]).capabilities().unequal_microbatches
    assert programs(["reference", "slurm"]).capabilities().unequal_microbatches
    legal = {
        able: enumerate_degrees(work, num_devices=4, capabilities=one, search=Search()).legal
        for able, one in (
            (True, REFERENCE),
            (False, replace(REFERENCE, unequal_microbatches=False)),
        )
    }
    further = set(legal[True]) - set(legal[False])
    # 2+2+1+1, and 2+1 of two sequences each.
    assert {(one.data, one.micro_batch_size) for one in further} == {(4, 1), (2, 2)}
    assert set(legal[False]) < set(legal[True])


@pytest.mark.parametrize("devices", [2, 4, 6, 8])
def test_nothing_legal_is_unlaunchable(tiny_work: Make, devices: int) -> None:
    plain: dict[str, Any] = {}
    tied = {"tie_word_embeddings": True}
    dense_and_shared = {"layers": "dmm", "moe": {"shared_ffn_size": 32}}
    for model in (plain, tied, dense_and_shared):
        _assert_launchable(tiny_work(**model), devices=devices)


def _assert_launchable(work: Workload, *, devices: int) -> None:
    legal = enumerate_degrees(
        work, num_devices=devices, capabilities=REFERENCE, search=Search()
    ).legal
    assert legal
    goal = TrainGoal(
        kind="train",
        sequence_length=work.sequence_length,
        global_batch_size=work.global_batch_size,
    )
    for degrees in legal:
        stages = degrees.num_stages
        layers = tuple(
            work.model.num_layers // stages + (stage < work.model.num_layers % stages)
            for stage in range(stages)
        )
        expected = [RecomputeOption(recompute=Recompute.SELECTIVE, chunks=2)] * stages
        chosen = decision(degrees, layers=layers, options=expected)
        assert refusals(REFERENCE, model=work.model, decision=chosen) == ()
        plan = sample_verified(work.model, chosen, devices_per_node=devices, device_kind="cpu").plan
        plan = plan.model_copy(update={"goal": goal})
        config = step_config(plan, chosen, steps=1, warmup_steps=0)
        assert refusal(config) is None
        assert config.parallelism.world == devices


RULES: tuple[tuple[dict[str, Any], dict[str, int], str], ...] = (
    ({}, {"tensor": 4}, "does not divide the attention heads"),
    ({"layers": "dm", "dense_ffn_size": 33}, {"tensor": 2}, "the feed-forward width"),
    ({"moe": {"shared_ffn_size": 33}}, {"tensor": 2}, "the shared expert's width"),
    ({"batch": {"sequence_length": 65}}, {"tensor": 2}, "does not divide the sequence"),
    ({"layers": "dd"}, {"data": 2, "expert": 2}, "a model without experts"),
    ({"moe": {"num_experts": 6}}, {"data": 4, "expert": 4}, "does not divide the experts"),
    ({"layers": "mm"}, {"pipeline": 4}, "more pipeline stages than layers"),
    ({"tie_word_embeddings": True}, {"pipeline": 2}, "tied embeddings"),
    ({}, {"data": 2, "micro_batch_size": 8}, "data_parallel_size exceeds global_batch_size"),
    (
        {"batch": {"global_batch_size": 30}},
        {"micro_batch_size": 4},
        "micro_batch_size does not divide global_batch_size",
    ),
    (
        {"batch": {"global_batch_size": 9}},
        {"data": 2, "pipeline": 2, "expert": 2, "micro_batch_size": 1},
        "replicas of one expert group run unequal numbers",
    ),
    ({}, {"pipeline": 2, "virtual_pipeline": 2, "micro_batch_size": 8}, "interleaving needs"),
    ({}, {"data": 2, "zero_stage": 2}, "no such zero_stage"),
    ({}, {"data": 2, "pipeline": 2, "zero_stage": 3}, "zero_stage with pipeline"),
    ({}, {"zero_stage": 1}, "shards nothing"),
)
"""Model and degrees, and the rule that leaves them out."""


def test_each_rule_has_its_count(tiny_work: Make, cut: Callable[..., StepDegrees]) -> None:
    for changes, degrees, rule in RULES:
        wanted = cut(**degrees)
        limits = Search(
            tensor_model_parallel_size=(wanted.tensor,),
            pipeline_model_parallel_size=(wanted.pipeline,),
            virtual_pipeline_model_parallel_size=(wanted.virtual_pipeline,),
            data_parallel_size=(wanted.data,),
            expert_model_parallel_size=(wanted.expert,),
            micro_batch_size=(wanted.micro_batch_size,),
            zero_stage=(wanted.zero_stage,),
        )
        actual = enumerate_degrees(
            tiny_work(**changes), num_devices=wanted.world, capabilities=REFERENCE, search=limits
        )
        assert wanted not in actual.legal, (
            rule,
            actual.illegal,
        )
        assert any(rule in broken for broken in actual.illegal), (
            rule,
            actual.illegal,
        )


def test_a_batch_that_would_do_is_legal(tiny_work: Make) -> None:
    # Sequences, replicas, sequences of a micro-batch, pipeline and virtual degree; the nearest
    # batch with equal replicas.
    for batch, data, micro, pipeline, virtual, other in (
        (30, 2, 4, 1, 1, 32),
        (30, 8, 4, 1, 1, 32),
        (12, 8, 2, 1, 1, 16),
        (8, 2, 8, 2, 2, 32),
    ):
        limits = Search(
            data_parallel_size=(data,),
            micro_batch_size=(micro,),
            pipeline_model_parallel_size=(pipeline,),
            virtual_pipeline_model_parallel_size=(virtual,),
        )
        found = [
            enumerate_degrees(
                tiny_work(batch={"global_batch_size": sequences}),
                num_devices=data * pipeline,
                capabilities=REFERENCE,
                search=limits,
            )
            for sequences in (batch, other)
        ]
        assert not found[0].legal
        named = blocking_rules(found[0], global_batch_size=batch)
        (rule,) = [one for one in named if one.limit in BATCH_RULES]
        assert rule.change.endswith(f"; global_batch_size {other} instead of {batch} would do")
        assert found[1].legal


@given(
    tensor=st.sampled_from([None, (1,), (1, 2), (2,)]),
    pipeline=st.sampled_from([None, (1,), (2, 4)]),
    expert=st.sampled_from([None, (1, 4), (8,)]),
    micro=st.sampled_from([None, (1,), (2, 4)]),
    zero=st.sampled_from([None, (0,), (1, 3)]),
)
@settings(deadline=None, max_examples=16)
def test_limits_choose_among_the_legal_and_change_nothing_else(
    tiny_work: Make,
    tensor: tuple[int, ...] | None,
    pipeline: tuple[int, ...] | None,
    expert: tuple[int, ...] | None,
    micro: tuple[int, ...] | None,
    zero: Any,
) -> None:
    limits = Search(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        micro_batch_size=micro,
        zero_stage=zero,
    )
    free, limited = (
        enumerate_degrees(tiny_work(), num_devices=8, capabilities=REFERENCE, search=search)
        for search in (Search(), limits)
    )
    assert limited.legal == tuple(
        one
        for one in free.legal
        if (tensor is None or one.tensor in tensor)
        and (pipeline is None or one.pipeline in pipeline)
        and (expert is None or one.expert in expert)
        and (micro is None or one.micro_batch_size in micro)
        and (zero is None or one.zero_stage in zero)
    )
    assert len(limited.legal) + limited.num_illegal == len(free.legal) + free.num_illegal


def test_a_target_without_folding_keeps_expert_groups_inside_the_data_ranks(
    tiny_work: Make,
) -> None:
    free, limited = (
        enumerate_degrees(tiny_work(), num_devices=4, capabilities=target, search=Search()).legal
        for target in (REFERENCE, replace(REFERENCE, expert_folding=False))
    )
    assert limited == tuple(one for one in free if one.expert <= one.data)
    assert len(limited) < len(free)


def test_what_the_reference_step_lacks_leaves_nothing(tiny_work: Make) -> None:
    for limits in (Search(context_parallel_size=(2,)), Search(expert_tensor_parallel_size=(2,))):
        actual = enumerate_degrees(
            tiny_work(), num_devices=4, capabilities=REFERENCE, search=limits
        )
        assert actual.legal == ()
        assert any("leaves it out" in rule for rule in actual.illegal)


def test_expert_groups_that_exceed_a_node_can_be_served_hop_by_hop(tiny_work: Make) -> None:
    def legal(ranks_per_node: int | None, **limits: object) -> list[StepDegrees]:
        actual = enumerate_degrees(
            tiny_work(),
            num_devices=8,
            capabilities=REFERENCE,
            search=Search.model_validate(limits),
            ranks_per_node=ranks_per_node,
        )
        return [one for one in actual.legal if one.ranks_per_node is not None]

    assert legal(None) == legal(8) == []
    actual = legal(2)
    assert {one.expert for one in actual} == {4, 8}
    assert {one.ranks_per_node for one in actual} == {2}
    assert legal(2, dispatcher="alltoall") == []
    assert legal(2, dispatcher="hierarchical") == actual


def test_hops_need_nodes_that_fill_expert_groups_and_a_target_that_has_them(
    tiny_work: Make,
) -> None:
    actual = enumerate_degrees(
        tiny_work(),
        num_devices=8,
        capabilities=REFERENCE,
        search=Search(dispatcher=("hierarchical",)),
        ranks_per_node=3,
    )
    assert actual.legal == ()
    assert actual.illegal["hierarchical dispatch needs expert groups that fill their nodes"] > 0
    others = enumerate_degrees(
        tiny_work(),
        num_devices=8,
        capabilities=programs(["reference", "megatron-lm"]).capabilities(),
        search=Search(),
        ranks_per_node=2,
    )
    assert others.illegal["the target has no dispatcher hierarchical"] > 0
    assert all(one.ranks_per_node is None for one in others.legal)


def test_what_adapters_alone_leave_out_is_named_so(tiny_work: Make) -> None:
    tune = Adapters(method="lora", rank=4)
    work = tiny_work(batch={"tune": tune})
    found = {
        target: enumerate_degrees(
            work,
            num_devices=8,
            capabilities=programs((target,)).launchable(
                model=work.model, precision="bf16", adapters=tune
            ),
            search=Search(),
            ranks_per_node=2,
        )
        for target in ("reference", "transformers-peft")
    }
    for lacking in (
        "tensor parallelism",
        "pipeline parallelism",
        # Its price does not know what is trained.
        "dispatcher hierarchical",
    ):
        assert found["reference"].illegal[f"the target has no {lacking} beside adapters"] > 0
        assert found["transformers-peft"].illegal[f"the target has no {lacking}"] > 0
    assert all(one.ranks_per_node is None for one in found["reference"].legal)
    assert not any("beside adapters" in rule for rule in found["transformers-peft"].illegal)
