from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tests.rows import each_row
from tests.tuner.models import example_model
from tuner.catalog.manifest import Capabilities
from tuner.catalog.programs import WRAPPERS, DeviceKind
from tuner.catalog.rules.decision import global_chunks, global_recompute
from tuner.config.train import TrainDecision
from tuner.engines.deepspeed import capabilities as deepspeed
from tuner.engines.targets import TARGETS, programs
from tuner.errors import UnknownTargetError
from tuner.spec.features import ModelFeature, features
from tuner.spec.model import ModelSpec
from tuner.spec.refusals import refusals

REFERENCE, MEGATRON = TARGETS["reference"], TARGETS["megatron-lm"]


TINY = example_model("tiny-moe")


def _decision(**changes: Any) -> TrainDecision:
    """Return DP 4, EP 4 on one stage of 4 layers, except for the changes; EDP follows."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 4,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
        "micro_batch_size": 1,
        "zero_stage": 1,
        "recompute": "none",
        "stage_recompute": ("none",),
        "chunks": (1,),
        "pipeline_layout": (4,),
        **changes,
    }
    attention = ("tensor_model_parallel_size", "context_parallel_size", "data_parallel_size")
    inside = fields[attention[0]] * fields[attention[1]] * fields[attention[2]]
    experts = fields["expert_tensor_parallel_size"] * fields["expert_model_parallel_size"]
    fields.setdefault("expert_data_parallel_size", inside // experts)
    return TrainDecision.model_validate(fields)


TWO_STAGES: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "pipeline_layout": (2, 2),
    "stage_recompute": ("none", "none"),
    "chunks": (1, 1),
}

# Layers 0-2 of DeepSeek-V3 are dense: no expert is there to recompute or to chunk.
DENSE_STAGES: dict[str, Any] = {
    "pipeline_model_parallel_size": 3,
    "pipeline_layout": (3, 0, 58),
    "stage_recompute": ("none", "full", "selective"),
    "chunks": (1, 8, 4),
}
SHARDED: dict[str, Any] = {"zero_stage": 3}
SELECTIVE: dict[str, Any] = {"stage_recompute": ("selective",)}
OVERLAP: dict[str, Any] = {"a2a_overlap": True}


@each_row("target", TARGETS)
def test_a_plain_decision_can_be_launched_everywhere(target: str) -> None:
    # torchtitan always shards: gradients and optimizer state at least.
    stage = 1 if 1 in TARGETS[target].zero_stages else 3
    changes = {} if TARGETS[target].expert_parallel else {"expert_model_parallel_size": 1}
    assert (
        refusals(
            TARGETS[target],
            model=TINY,
            decision=_decision(zero_stage=stage, sequence_parallel=False, **changes),
        )
        == ()
    )


@each_row(
    ("target", "changes", "rule"),
    [
        ("reference", {"zero_stage": 2}, "zero_stage 2 is not one of 0, 1, 3"),
        ("reference", TWO_STAGES | {"zero_stage": 3}, "zero_stage 3 needs pipeline"),
        ("megatron-lm", TWO_STAGES | {"zero_stage": 3}, "with a pipeline one of 0, 1"),
        ("reference", {"context_parallel_size": 2}, "no context parallelism"),
        ("reference", {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2}, "split"),
        (
            "reference",
            {"tensor_model_parallel_size": 8, "data_parallel_size": 1},
            "tensor_model_parallel_size 8 must divide the 4 key-value heads",
        ),
        (
            "reference",
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            "sequence_parallel must be true",
        ),
        (
            "megatron-lm",
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            "MoE layers under tensor parallelism need sequence_parallel",
        ),
        (
            "megatron-lm",
            TWO_STAGES | {"stage_recompute": ("none", "full")},
            "all stages must agree",
        ),
        (
            "megatron-lm",
            TWO_STAGES | {"stage_recompute": ("selective",) * 2, "chunks": (2, 4)},
            "chunk count is one setting",
        ),
        (
            "megatron-lm",
            {"stage_recompute": ("full",), "chunks": (2,)},
            "more than one chunk needs recompute selective",
        ),
        (
            "megatron-lm-0.16",
            {"stage_recompute": ("selective",), "chunks": (2,)},
            "chunks 2 exceeds 1 (core 0.16 and 0.17)",
        ),
        ("reference", {"chunks": (2,)}, "more than one chunk needs recompute full or selective"),
        (
            "reference",
            {"stage_recompute": ("selective",), "chunks": (65,)},
            "chunks 65 exceeds 64",
        ),
        ("reference", {"a2a_overlap": True}, "a2a_overlap"),
        ("reference", {"fp8_recipe": "mxfp8"}, "'mxfp8' is not one of bf16, fp32"),
        ("reference", {"mtp_num_layers": 1}, "mtp_num_layers must be 0"),
        ("megatron-lm", {"schedule": "zero_bubble"}, "schedule zero_bubble is not one of 1f1b"),
        ("megatron-lm", {"schedule": "interleaved"}, "parallel_size above 1"),
        ("megatron-lm", TWO_STAGES | OVERLAP, "needs virtual_pipeline_model_parallel_size above 1"),
        ("megatron-lm", OVERLAP | {"stage_recompute": ("full",)}, "a2a_overlap needs recompute"),
        ("megatron-lm", OVERLAP | SELECTIVE, "a2a_overlap cannot recompute moe"),
        ("megatron-lm", OVERLAP | {"dispatcher": "allgather"}, "needs dispatcher alltoall, deepep"),
        ("megatron-lm", OVERLAP | {"mtp_num_layers": 2}, "mtp_num_layers 1 at most"),
        (
            "megatron-lm",
            OVERLAP | {"expert_model_parallel_size": 1},
            "a2a_overlap needs expert_model_parallel_size above 1",
        ),
        ("megatron-lm-0.16", OVERLAP | {"mtp_num_layers": 1}, "needs pipeline_model_parallel_size"),
        (
            "megatron-lm",
            {"dispatcher": "deepep", "expert_model_parallel_size": 1},
            "dispatcher deepep needs expert_model_parallel_size above 1",
        ),
        (
            "megatron-lm",
            SELECTIVE | {"recompute_modules": ("moe_act",), "fp8_recipe": "fp8-delayed"},
            "fp8-delayed cannot recompute moe_act",
        ),
        (
            "megatron-lm",
            SELECTIVE | {"recompute_modules": ("mla_up_proj",)},
            "mla_up_proj needs latent attention",
        ),
        (
            "megatron-lm",
            SELECTIVE | {"recompute_modules": ("moe_act",), "chunks": (2,)},
            "more than one chunk needs recompute_modules moe",
        ),
        ("megatron-lm", {"recompute_num_layers": 2}, "needs recompute full on every stage"),
        ("megatron-lm", {"cuda_graph": "full_iteration"}, "with experts needs dispatcher hybridep"),
        (
            "megatron-lm-0.16",
            {"cuda_graph": "full_iteration"},
            "needs a model without experts",
        ),
        ("megatron-lm", SELECTIVE | {"cuda_graph": "partial"}, "partial cannot recompute moe"),
        (
            "megatron-lm",
            {"cuda_graph": "partial", "stage_recompute": ("full",)},
            "cuda_graph partial needs recompute none, selective",
        ),
        ("megatron-lm", {"optimizer_offload": True, "zero_stage": 0}, "needs zero_stage 1"),
        (
            "megatron-lm",
            {"activation_offload": True, "stage_recompute": ("full",)},
            "activation_offload needs recompute none, selective",
        ),
        ("megatron-lm", {"overlap_param_gather": True}, "needs overlap_grad_reduce"),
        ("megatron-lm", {"ddp_bucket_size": 10_000_000}, "needs overlap_grad_reduce"),
        (
            "deepspeed",
            {"ddp_bucket_size": 10_000_000, "overlap_grad_reduce": True},
            "ddp_bucket_size is not offered",
        ),
        ("megatron-lm", {"rank_order": "dp-tp"}, "rank_order 'dp-tp' is not one of tp-cp-ep-dp-pp"),
        ("torchtitan", {"zero_stage": 1}, "zero_stage 1 is not one of 0, 2, 3"),
        ("torchtitan", {"zero_stage": 0}, "must divide the 1 context and tensor ranks"),
        ("torchtitan", SHARDED | SELECTIVE, "recompute selective is not one of full, none"),
        ("torchtitan", SHARDED | {"dispatcher": "allgather"}, "dispatcher allgather is not one"),
        ("torchtitan", SHARDED | {"gradient_bytes": 2}, "gradient_bytes 2 is not one of 4"),
        (
            "torchtitan",
            SHARDED | TWO_STAGES | {"schedule": "zero_bubble"},
            "zero_bubble needs virtual_pipeline_model_parallel_size above 1",
        ),
        ("deepspeed", TWO_STAGES | SHARDED, "zero_stage 3 needs pipeline_model_parallel_size 1"),
        ("deepspeed", TWO_STAGES | {"pipeline_layout": (1, 3)}, "same number of layers"),
        (
            "deepspeed",
            TWO_STAGES | {"dispatcher": "deepep"},
            "dispatcher deepep needs pipeline_model_parallel_size 1; with a pipeline one of all",
        ),
        (
            "deepspeed",
            {"tensor_model_parallel_size": 2},
            "tensor ranks cannot share the sequence",
        ),
        (
            "deepspeed",
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": False,
                "optimizer_offload": True,
            },
            "optimizer_offload with experts needs tensor_model_parallel_size 1",
        ),
        (
            "deepspeed",
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": False,
                "expert_model_parallel_size": 1,
            },
            "tensor parallelism with experts needs expert_model_parallel_size above 1",
        ),
    ],
)
def test_a_refusal_names_the_target_and_the_rule(
    target: str, changes: dict[str, Any], rule: str
) -> None:
    (line,) = refusals(TARGETS[target], model=TINY, decision=_decision(**changes))
    assert line.startswith(f"{target}: ")
    assert rule in line
    assert "\n" not in line


@each_row(
    ("target", "changes"),
    [
        ("reference", {"zero_stage": 3}),
        ("reference", {"data_parallel_size": 2, "tensor_model_parallel_size": 2}),
        ("reference", TWO_STAGES | {"stage_recompute": ("selective", "full"), "chunks": (3, 5)}),
        ("reference", TWO_STAGES | {"pipeline_layout": (1, 3)}),
        ("megatron-lm", {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2}),
        ("megatron-lm", {"context_parallel_size": 2}),
        ("megatron-lm", {"tensor_model_parallel_size": 8, "data_parallel_size": 1}),
        ("megatron-lm", {"stage_recompute": ("selective",), "chunks": (3,)}),
        ("megatron-lm", TWO_STAGES | {"pipeline_layout": (0, 4)}),
        ("megatron-lm", {"mtp_num_layers": 1}),
        ("megatron-lm", {"zero_stage": 3}),
        ("megatron-lm", {"dispatcher": "hybridep", "cuda_graph": "full_iteration"}),
        ("megatron-lm", OVERLAP | {"cuda_graph": "partial", "dispatcher": "deepep"}),
        ("megatron-lm", SELECTIVE | {"recompute_modules": ("moe_act", "core_attn")}),
        ("megatron-lm", {"optimizer_offload": True, "activation_offload": True}),
        ("megatron-lm", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
        ("megatron-lm", {"rank_order": "tp-cp-ep-pp-dp", "gradient_bytes": 2}),
        ("megatron-lm", {"stage_recompute": ("full",), "recompute_num_layers": 2}),
        ("megatron-bridge", {"fp8_recipe": "mxfp8", "mtp_num_layers": 1}),
        ("torchtitan", SHARDED | {"context_parallel_size": 2}),
        ("torchtitan", SHARDED | {"expert_model_parallel_size": 1, "stage_recompute": ("full",)}),
        ("deepspeed", {"dispatcher": "deepep", "zero_stage": 3, "optimizer_offload": True}),
        ("deepspeed", TWO_STAGES),
    ],
)
def test_what_a_target_can_express_is_not_refused(target: str, changes: dict[str, Any]) -> None:
    assert refusals(TARGETS[target], model=TINY, decision=_decision(**changes)) == ()


@each_row(
    ("name", "expected"),
    [
        ("mixtral-8x7b", set()),
        ("llama-3.1-8b", set()),
        ("qwen3-30b-a3b", {ModelFeature.QK_NORM_HEAD}),
        ("olmoe-1b-7b", {ModelFeature.QK_NORM_FULL, ModelFeature.SOFTMAX_UNNORMALISED}),
        (
            "deepseek-v3",
            {
                ModelFeature.MLA,
                ModelFeature.SIGMOID,
                ModelFeature.SIGMOID_CORRECTION,
                ModelFeature.GROUPED_ROUTING,
            },
        ),
        (
            "gpt-oss-20b",
            {
                ModelFeature.QKV_BIAS,
                ModelFeature.OUTPUT_BIAS,
                ModelFeature.SINKS,
                ModelFeature.SLIDING_WINDOW,
                ModelFeature.EXPERT_BIAS,
                ModelFeature.ROUTER_BIAS,
            },
        ),
    ],
)
def test_features_of_public_models(name: str, expected: set[ModelFeature]) -> None:
    assert features(example_model(name)) == expected


DEEPSEEK, GPT, OLMOE = map(example_model, ("deepseek-v3", "gpt-oss-20b", "olmoe-1b-7b"))
TIED = TINY.model_copy(update={"tie_word_embeddings": True})
SOME_BIASES = GPT.model_copy(
    update={"attention": GPT.attention.model_copy(update={"output_bias": False})}
)


@each_row(
    ("target", "model", "changes", "rules"),
    [
        ("megatron-lm", TIED, TWO_STAGES, ()),
        (
            "reference",
            TIED,
            TWO_STAGES,
            ("reference: tied embeddings need pipeline_model_parallel_size 1",),
        ),
        ("reference", DEEPSEEK, {}, ("",) * len(features(DEEPSEEK))),
        ("megatron-lm", DEEPSEEK, {}, ()),
        ("megatron-lm", GPT, SHARDED, ()),
        ("megatron-lm", OLMOE, SHARDED, ("norms over all heads",)),
        ("megatron-bridge", OLMOE, SHARDED, ()),
        ("torchtitan", GPT, SHARDED, ()),
        ("deepspeed", DEEPSEEK, SHARDED, ()),
        # Biases of some projections only have no switch.
        ("megatron-lm", SOME_BIASES, {}, ("biases are everywhere or nowhere",)),
        (
            "megatron-lm",
            GPT,
            {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2},
            ("expert_tensor_parallel_size must be 1",),
        ),
        ("megatron-lm", DEEPSEEK, DENSE_STAGES, ()),
    ],
)
def test_what_of_a_model_a_target_builds(
    target: str, model: ModelSpec, changes: dict[str, Any], rules: tuple[str, ...]
) -> None:
    decision = _decision(**{"pipeline_layout": (model.num_layers,), **changes})
    lines = refusals(TARGETS[target], model=model, decision=decision)
    assert len(lines) == len(rules)
    assert all(rule in line for rule, line in zip(rules, lines, strict=True))


def test_a_dense_stage_agrees_with_selective_recomputation_elsewhere() -> None:
    decision = _decision(**DENSE_STAGES)
    assert global_recompute(DEEPSEEK, decision) is Recompute.SELECTIVE
    assert global_chunks(DEEPSEEK, decision) == 4


@each_row("target", sorted(set(TARGETS) - WRAPPERS - {"reference", "torchrun"}))
def test_a_manifest_says_which_release_it_is_and_where_it_was_read(target: str) -> None:
    manifest = TARGETS[target]
    assert any(letter.isdigit() for letter in manifest.release)
    assert manifest.source.startswith(("github.com/", "pypi.org/"))


def test_an_unknown_target_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownTargetError, match=r"'megatron'; there are reference, .*slurm"):
        programs(["reference", "megatron"]).capabilities()


def test_a_wrapper_limits_nothing_but_brings_a_program() -> None:
    assert programs(["slurm", "megatron-lm", "slurm"]).chosen == ("megatron-lm",)
    assert programs(["slurm"]).chosen == ("reference",)
    kinds: tuple[DeviceKind, ...] = ("cuda", "cpu")
    for name, target in TARGETS.items():
        # Nor does it take away what few programs can.
        for kind in kinds:
            with_wrapper = programs([name, "slurm"]).capabilities(device_kind=kind)
            assert with_wrapper == programs([name]).capabilities(device_kind=kind), name
        assert name in WRAPPERS or programs([name, "slurm"]).capabilities() is target
    assert programs(["slurm"]).capabilities() is REFERENCE


def _without_parts(capabilities: Capabilities) -> Capabilities:
    return Capabilities(
        **{
            name: getattr(capabilities, name)
            for name in Capabilities.__dataclass_fields__
            if name != "parts"
        }
    )


@st.composite
def _decisions(draw: st.DrawFn) -> TrainDecision:
    stages = draw(st.sampled_from([1, 2, 4]))
    virtual = draw(st.sampled_from([1, 2])) if stages == 2 else 1
    entries = stages * virtual
    each = st.lists(st.sampled_from(list(Recompute)), min_size=entries, max_size=entries)
    counts = st.lists(st.sampled_from([1, 2, 3, 65]), min_size=entries, max_size=entries)
    layout = [4 // entries] * entries
    if entries > 1 and draw(st.booleans()):
        layout[0], layout[1] = layout[0] + layout[1], 0
    tensor = draw(st.sampled_from([1, 2, 8]))
    split = draw(st.sampled_from([1, 2]))
    return _decision(
        tensor_model_parallel_size=tensor,
        context_parallel_size=draw(st.sampled_from([1, 2])),
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        expert_tensor_parallel_size=split,
        expert_model_parallel_size=4 // split,
        sequence_parallel=draw(st.booleans()),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        stage_recompute=tuple(draw(each)),
        chunks=tuple(draw(counts)),
        pipeline_layout=tuple(layout),
        mtp_num_layers=draw(st.sampled_from([0, 1, 2])),
        dispatcher=draw(st.sampled_from(["alltoall", "allgather", "deepep", "hybridep"])),
        a2a_overlap=draw(st.booleans()),
        recompute_modules=draw(st.sampled_from([(), ("moe",), ("moe_act", "core_attn")])),
        recompute_num_layers=draw(st.sampled_from([None, None, 2])),
        schedule=draw(st.sampled_from([None, "1f1b", "interleaved", "zero_bubble"])),
        cuda_graph=draw(st.sampled_from(["none", "partial", "full_iteration"])),
        rank_order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])),
        overlap_grad_reduce=draw(st.booleans()),
        ddp_bucket_size=draw(st.sampled_from((None, 80_000_000))),
        overlap_param_gather=draw(st.booleans()),
        gradient_bytes=draw(st.sampled_from([2, 4])),
        optimizer_offload=draw(st.booleans()),
        activation_offload=draw(st.booleans()),
        fp8_recipe=draw(st.sampled_from(["", "fp8-delayed", "mxfp8"])),
    )


@given(decision=_decisions(), pair=st.sampled_from(list(combinations(TARGETS, 2))))
@settings(deadline=None, max_examples=150)
def test_targets_together_refuse_what_any_of_them_refuses(
    decision: TrainDecision, pair: tuple[str, str]
) -> None:
    both = programs(pair).capabilities()
    single = [
        refusals(TARGETS[name], model=TINY, decision=decision) for name in programs(pair).chosen
    ]
    assert set(refusals(both, model=TINY, decision=decision)) == {
        line for lines in single for line in lines
    }
    # The merged fields alone, which limit the search, say the same.
    assert bool(refusals(_without_parts(both), model=TINY, decision=decision)) == any(single)


def test_only_the_reference_step_dispatches_hop_by_hop() -> None:
    able = {name for name, target in TARGETS.items() if "hierarchical" in target.dispatchers}
    assert able == {"reference", "torchrun", "slurm"}
    assert "hierarchical" in programs(["reference", "slurm"]).capabilities().dispatchers
    assert "hierarchical" not in programs(["reference", "megatron-lm"]).capabilities().dispatchers


def test_checkpoints_hold_what_the_precision_leaves() -> None:
    # Bytes of a parameter in files of save_checkpoint, DeepSpeed 0.19.8 on two ranks: 13,510,912
    # parameters of tiny-moe, and some kilobytes of names.
    files = {
        "bf16": (189_219_913, 189_179_235, 189_179_939, 162_183_884),
        "fp32": (162_186_215, 216_201_535, 216_201_535, 162_183_528),
    }
    for precision, sizes in files.items():
        for zero_stage, size in enumerate(sizes):
            (saved,) = (one.saved_bytes(None, zero_stage, precision) for one in deepspeed.TARGETS)
            assert saved.trained == pytest.approx(size / 13_510_912, rel=0.001), precision
    # Of several targets the larger.
    of_two = programs(("torchtitan", "deepspeed")).saved_bytes(
        adapters=None, zero_stage=2, precision="fp32"
    )
    assert (of_two.trained, of_two.frozen) == (16.0, 8.0)
