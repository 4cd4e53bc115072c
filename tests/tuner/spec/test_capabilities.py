from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tuner.errors import UnknownTargetError
from tuner.plan import TrainDecision
from tuner.spec.capabilities import (
    TARGETS,
    WRAPPERS,
    Capabilities,
    global_chunks,
    global_recompute,
    intersection,
    programs,
    refusals,
)
from tuner.spec.features import ModelFeature, features
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

MODELS = Path(__file__).parents[3] / "examples" / "models"
REFERENCE, MEGATRON = TARGETS["reference"], TARGETS["megatron-lm"]


def _model(name: str) -> ModelSpec:
    return read_model(MODELS / name / "config.json")


TINY = _model("tiny-moe")


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


@pytest.mark.parametrize("target", TARGETS)
def test_a_plain_decision_can_be_launched_everywhere(target: str) -> None:
    assert refusals(TARGETS[target], model=TINY, decision=_decision()) == ()


@pytest.mark.parametrize(
    ("target", "changes", "rule"),
    [
        ("reference", {"zero_stage": 2}, "zero_stage 2 is not one of 0, 1, 3"),
        ("reference", TWO_STAGES | {"zero_stage": 3}, "zero_stage 3 needs pipeline"),
        ("megatron-lm", {"zero_stage": 3}, "zero_stage 3 is not one of 0, 1"),
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
        ("reference", {"fp8_recipe": "mxfp8"}, "'mxfp8' needs fp8"),
        ("reference", {"mtp_num_layers": 1}, "mtp_num_layers must be 0"),
    ],
)
def test_a_refusal_names_the_target_and_the_rule(
    target: str, changes: dict[str, Any], rule: str
) -> None:
    (line,) = refusals(TARGETS[target], model=TINY, decision=_decision(**changes))
    assert line.startswith(f"{target}: ")
    assert rule in line
    assert "\n" not in line


@pytest.mark.parametrize(
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
    ],
)
def test_what_a_target_can_express_is_not_refused(target: str, changes: dict[str, Any]) -> None:
    assert refusals(TARGETS[target], model=TINY, decision=_decision(**changes)) == ()


def test_tied_embeddings_stay_on_one_stage_of_the_reference_step() -> None:
    tied = TINY.model_copy(update={"tie_word_embeddings": True})
    decision = _decision(**TWO_STAGES)
    assert refusals(MEGATRON, model=tied, decision=decision) == ()
    (line,) = refusals(REFERENCE, model=tied, decision=decision)
    assert line == "reference: tied embeddings need pipeline_model_parallel_size 1"


@pytest.mark.parametrize(
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
    assert features(_model(name)) == expected


def test_every_feature_outside_the_reference_step_is_refused_by_name() -> None:
    model = _model("deepseek-v3")
    decision = _decision(pipeline_layout=(61,))
    lines = refusals(REFERENCE, model=model, decision=decision)
    assert len(lines) == len(features(model))
    assert refusals(MEGATRON, model=model, decision=decision) == ()


def test_a_dense_stage_agrees_with_selective_recomputation_elsewhere() -> None:
    # Layers 0-2 of DeepSeek-V3 are dense: no expert is there to recompute or to chunk.
    model = _model("deepseek-v3")
    decision = _decision(
        pipeline_model_parallel_size=3,
        pipeline_layout=(3, 0, 58),
        stage_recompute=("none", "full", "selective"),
        chunks=(1, 8, 4),
    )
    assert global_recompute(model, decision) is Recompute.SELECTIVE
    assert global_chunks(model, decision) == 4
    assert refusals(MEGATRON, model=model, decision=decision) == ()


def test_an_unknown_target_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownTargetError, match=r"'megatron'; there are reference, .*slurm"):
        intersection(["reference", "megatron"])


def test_a_wrapper_limits_nothing_but_brings_a_program() -> None:
    assert programs(["slurm", "megatron-lm", "slurm"]) == ("megatron-lm",)
    assert programs(["slurm"]) == ("reference",)
    with_wrapper = intersection(["megatron-lm", "slurm"])
    assert with_wrapper.parts == (MEGATRON, TARGETS["slurm"])
    assert with_wrapper.chunks_need == MEGATRON.chunks_need


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
        mtp_num_layers=draw(st.sampled_from([0, 1])),
    )


@given(decision=_decisions(), pair=st.sampled_from(list(combinations(TARGETS, 2))))
@settings(deadline=None, max_examples=300)
def test_targets_together_refuse_what_any_of_them_refuses(
    decision: TrainDecision, pair: tuple[str, str]
) -> None:
    if set(pair) <= WRAPPERS:
        return
    both = intersection(pair)
    single = [refusals(TARGETS[name], model=TINY, decision=decision) for name in pair]
    assert set(refusals(both, model=TINY, decision=decision)) == {
        line for lines in single for line in lines
    }
    # The merged fields alone, which limit the search, say the same.
    merged = refusals(_without_parts(both), model=TINY, decision=decision)
    assert bool(merged) == any(single)
