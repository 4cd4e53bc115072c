"""Arguments against the flags of Megatron-LM's own parser, and against its configuration class."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from profilers.steps.config import LayerKind
from tuner.emit.megatron_lm import arguments
from tuner.emit.registry import emit
from tuner.emit.testing import Recorders, sample_decision, sample_verified, write_emitted
from tuner.plan import TrainDecision
from tuner.spec.capabilities import TARGETS, refusals
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

MODELS = Path(__file__).parents[3] / "examples" / "models"
FLAGS = json.loads((Path(__file__).parent / "megatron_flags.json").read_text(encoding="utf-8"))
"""Written from the parsers of the tags; every configuration below was also put through
`parse_args`, `validate_args` and `TransformerConfig` of each tag."""

RELEASES = {
    "megatron-lm": ("core_v0.18.0", "core_v0.19.0"),
    "megatron-lm-0.16": ("core_v0.16.1",),
}

ONE_STAGE: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "stage_recompute": ("selective",),
    "chunks": (1,),
}


def _model(name: str) -> ModelSpec:
    return read_model(MODELS / name / "config.json")


def _one_stage(model: ModelSpec, **changes: Any) -> TrainDecision:
    return sample_decision(**{**ONE_STAGE, "pipeline_layout": (model.num_layers,), **changes})


def _options(model: ModelSpec, decision: TrainDecision) -> dict[str, list[str]]:
    goal = sample_verified(model, decision).plan.goal
    found = arguments(model, goal, decision)
    assert len({flag for flag, *_ in found}) == len(found), "a flag is written twice"
    return {flag: values for flag, *values in found}


@pytest.mark.parametrize("target", RELEASES)
@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_every_flag_exists_in_every_release_of_the_target(target: str, name: str) -> None:
    model = _model(name)
    decision = _one_stage(model, mtp_num_layers=model.mtp_num_layers)
    if refusals(TARGETS[target], model=model, decision=decision):
        # gpt-oss and OLMoE, see test_capabilities.py; nothing is written for them.
        assert model.attention.has_sinks or name == "olmoe-1b-7b"
        return
    written = _options(model, decision)
    for release in RELEASES[target]:
        assert set(written) <= set(FLAGS["releases"][release])


def test_the_flag_of_the_chunks_begins_with_release_0_18() -> None:
    flag = "--mlp-chunks-for-training"
    has = {release: flag in flags for release, flags in FLAGS["releases"].items()}
    assert has == {"core_v0.16.1": False, "core_v0.18.0": True, "core_v0.19.0": True}
    assert TARGETS["megatron-lm-0.16"].largest_chunks == 1


def test_expert_tensor_parallelism_is_always_written() -> None:
    model = _model("mixtral-8x7b")
    # The engine would take 4 from the dense layers.
    decision = _one_stage(
        model,
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        data_parallel_size=4,
        expert_data_parallel_size=2,
    )
    options = _options(model, decision)
    assert options["--expert-tensor-parallel-size"] == ["1"]
    assert options["--tensor-model-parallel-size"] == ["4"]
    assert "--sequence-parallel" in options


def test_chunks_come_with_recomputation_of_the_moe_layer() -> None:
    options = _options(_model("mixtral-8x7b"), sample_decision())
    assert options["--mlp-chunks-for-training"] == ["4"]
    assert options["--recompute-granularity"] == ["selective"]
    assert options["--recompute-modules"] == ["moe"]


def test_full_recomputation_is_every_layer() -> None:
    model = _model("mixtral-8x7b")
    options = _options(model, _one_stage(model, recompute="full", stage_recompute=("full",)))
    assert options["--recompute-method"] == ["uniform"]
    assert options["--recompute-num-layers"] == ["1"]
    assert "--recompute-modules" not in options


def test_an_uneven_pipeline_becomes_a_layout() -> None:
    decision = sample_decision(
        virtual_pipeline_model_parallel_size=2,
        stage_recompute=("selective",) * 4,
        chunks=(4,) * 4,
        pipeline_layout=(7, 9, 15, 1),
        mtp_num_layers=1,
    )
    options = _options(_model("mixtral-8x7b"), decision)
    assert options["--pipeline-model-parallel-layout"] == ["Et*7|t*9|t*15|tmL"]
    assert "--num-virtual-stages-per-pipeline-rank" not in options


def test_an_even_interleaved_pipeline_needs_no_layout() -> None:
    decision = sample_decision(
        virtual_pipeline_model_parallel_size=2,
        stage_recompute=("selective",) * 4,
        chunks=(4,) * 4,
        pipeline_layout=(8,) * 4,
    )
    options = _options(_model("mixtral-8x7b"), decision)
    assert options["--num-virtual-stages-per-pipeline-rank"] == ["2"]
    assert "--pipeline-model-parallel-layout" not in options


def test_stages_that_differ_are_refused_rather_than_flattened() -> None:
    decision = sample_decision(chunks=(4, 2))
    with pytest.raises(ValueError, match="the stages differ"):
        _options(_model("mixtral-8x7b"), decision)


def test_latent_attention_shared_expert_and_leading_dense_layers_of_deepseek() -> None:
    model = _model("deepseek-v3")
    options = _options(model, _one_stage(model))
    assert options["--q-lora-rank"] == ["1536"]
    assert options["--kv-lora-rank"] == ["512"]
    assert options["--qk-head-dim"] == ["128"]
    assert options["--qk-pos-emb-head-dim"] == ["64"]
    assert options["--v-head-dim"] == ["128"]
    assert "--num-query-groups" not in options
    assert options["--moe-shared-expert-intermediate-size"] == ["2048"]
    assert options["--moe-layer-freq"] == ["([0]*3+[1]*58)"]
    assert options["--moe-router-score-function"] == ["sigmoid"]
    assert "--moe-router-enable-expert-bias" in options
    assert options["--moe-router-num-groups"] == ["8"]
    assert options["--moe-router-group-topk"] == ["4"]
    # Worked by hand: the pattern is a Python expression that the engine evaluates.
    pattern = [0] * 3 + [1] * 58
    assert [int(kind is LayerKind.MOE) for kind in model.layers] == pattern


def test_the_script_hands_every_argument_to_the_program(tmp_path: Path) -> None:
    model = _model("deepseek-v3")
    decision = _one_stage(model)
    verified = sample_verified(model, decision, emit=("megatron-lm",), devices_per_node=16)
    write_emitted(tmp_path, emit("megatron-lm", verified))
    recorders = Recorders(tmp_path / "recorders")
    ran = recorders.run(
        tmp_path / "run.sh", "--lr", "1e-4", cwd=Path("/"), MEGATRON_LM="/opt/megatron lm"
    )
    assert ran.code == 0, ran.stderr
    argv = ran.only("torchrun")
    start = argv.index("/opt/megatron lm/pretrain_gpt.py") + 1
    expected = [word for line in arguments(model, verified.plan.goal, decision) for word in line]
    assert argv[start:] == [*expected, "--lr", "1e-4"]


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
def test_megatron_core_accepts_the_degrees() -> None:
    from megatron.core.transformer import TransformerConfig  # type: ignore[import-not-found]  # optional

    model = _model("mixtral-8x7b")
    options = _options(model, _one_stage(model))
    TransformerConfig(
        num_layers=int(options["--num-layers"][0]),
        hidden_size=int(options["--hidden-size"][0]),
        num_attention_heads=int(options["--num-attention-heads"][0]),
        num_query_groups=int(options["--num-query-groups"][0]),
        num_moe_experts=int(options["--num-experts"][0]),
        expert_model_parallel_size=int(options["--expert-model-parallel-size"][0]),
        expert_tensor_parallel_size=int(options["--expert-tensor-parallel-size"][0]),
        recompute_granularity=options["--recompute-granularity"][0],
        recompute_modules=options["--recompute-modules"],
        add_bias_linear=False,
    )
