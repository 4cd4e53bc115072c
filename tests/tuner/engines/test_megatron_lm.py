"""Arguments against the flags of Megatron-LM's own parser, and against its configuration class."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tests.tuner.engines.testing import Recorders, sample_decision, sample_verified, write_emitted
from tests.tuner.models import example_model
from tuner.catalog.manifest import of_model
from tuner.config.train import TrainDecision
from tuner.engines.megatron_lm.core import Core
from tuner.engines.megatron_lm.write import arguments
from tuner.engines.targets import TARGETS
from tuner.engines.writers import emit
from tuner.spec.features import features
from tuner.spec.goal import Precision
from tuner.spec.model import ModelSpec
from tuner.spec.refusals import refusals

MODELS = Path(__file__).parents[3] / "examples" / "models"
FLAGS = json.loads((Path(__file__).parent / "megatron_flags.json").read_text(encoding="utf-8"))
"""Written from the parsers of the tags; every configuration below was also put through
`parse_args`, `validate_args` and `TransformerConfig` of each tag."""

RELEASES = {
    "megatron-lm": ("core_v0.18.0", "core_v0.19.0"),
    "megatron-lm-0.16": ("core_v0.16.1", "core_v0.17.1"),
}
CORES = {"megatron-lm": Core.V0_18, "megatron-lm-0.16": Core.V0_16}
VERDICTS = json.loads((Path(__file__).parent / "megatron_verdicts.json").read_text("utf-8"))
"""Decisions whose arguments were put through `parse_args`, `validate_args` and
`core_transformer_config_from_args` of each tag, and the tags that took them."""

NOT_BUILT = {
    "megatron-lm": {
        "olmoe-1b-7b": "norms over all heads",
        "minimax-m2": "norms over all heads",
        "kimi-linear-48b-a3b": "Kimi delta attention",
        "llama-4-scout": "attention inside chunks",
        "llama-4-maverick": "attention inside chunks",
        "deepseek-v4-flash": "entries that merge tokens",
        "longcat-flash": "zero-computation experts",
    }
}
NOT_BUILT["megatron-lm-0.16"] = NOT_BUILT["megatron-lm"] | dict.fromkeys(
    ("deepseek-v3.2", "glm-5"), "tokens that an indexer picks"
)
"""Models that a target's releases lack, and the word for it."""

BEYOND_THE_PARSER = (
    # Refused when a layer, an optimizer or a dispatcher is built.
    "optimizer_offload needs zero_stage 1",
    "MoE layers under tensor parallelism need sequence_parallel",
    "dispatcher deepep needs expert_model_parallel_size above 1",
    # Taken, and without effect.
    "more than one chunk needs recompute_modules moe",
    "activation_offload needs recompute none, selective",
    # Taken, and covered by no recipe.
    "zero_stage 3 needs pipeline_model_parallel_size 1",
    "a2a_overlap cannot recompute moe",
    "cuda_graph full_iteration with experts needs dispatcher hybridep",
    "cuda_graph full_iteration needs a model without experts",
    "a2a_overlap needs cuda_graph",
    # Refused by or without effect on layers, see capabilities.py.
    "with Mamba-2 layers",
    "with layers with the gated delta rule",
    "with feed-forward networks of two matrices",
    "no arguments are written for attention to the tokens that an indexer picks",
)
"""What this product refuses and the parsers take."""

ONE_STAGE: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "stage_recompute": ("selective",),
    "chunks": (1,),
}


def _one_stage(model: ModelSpec, **changes: Any) -> TrainDecision:
    return sample_decision(**{**ONE_STAGE, "pipeline_layout": (model.num_layers,), **changes})


def _options(
    model: ModelSpec, decision: TrainDecision, *, core: Core = Core.V0_18
) -> dict[str, list[str]]:
    found = arguments(model, sample_verified(model, decision).plan.goal, decision, core=core)
    assert len({flag for flag, *_ in found}) == len(found), "a flag is written twice"
    return {flag: values for flag, *values in found}


def test_every_flag_exists_in_every_release_or_the_model_is_refused_by_name() -> None:
    wrong: list[tuple[object, ...]] = []
    for target, name in product(RELEASES, sorted(path.name for path in MODELS.iterdir())):
        model = example_model(name)
        has_mtp = of_model(TARGETS[target], features(model)).mtp
        decision = _one_stage(model, mtp_num_layers=model.mtp_num_layers if has_mtp else 0)
        refused = refusals(TARGETS[target], model=model, decision=decision)
        word = NOT_BUILT[target].get(name)
        if refused or word:
            if not (word and any(word in line for line in refused)):
                wrong.append((target, name, refused))
            continue
        written = set(_options(model, decision, core=CORES[target]))
        for release in RELEASES[target]:
            unknown = written - set(FLAGS["releases"][release])
            if unknown:
                wrong.append((target, name, release, unknown))
    assert not wrong


def test_options_follow_the_release_of_the_core() -> None:
    flag = "--mlp-chunks-for-training"
    has = {release: flag in flags for release, flags in FLAGS["releases"].items()}
    assert [tag for tag, present in has.items() if present] == ["core_v0.18.0", "core_v0.19.0"]
    assert TARGETS["megatron-lm-0.16"].largest_chunks == 1
    model = example_model("deepseek-v3")
    old = _options(model, _one_stage(model, **GRAPHS), core=Core.V0_16)
    assert old["--cuda-graph-scope"] == ["attn", "moe_router", "moe_preprocess"]


def _pipeline(_model: ModelSpec, **changes: Any) -> TrainDecision:
    return sample_decision(**changes)


GRAPHS = {
    "stage_recompute": ("none",),
    "a2a_overlap": True,
    "dispatcher": "deepep",
    "cuda_graph": "partial",
}
INTERLEAVED = {
    "virtual_pipeline_model_parallel_size": 2,
    "stage_recompute": ("selective",) * 4,
    "chunks": (4,) * 4,
}


@each_row(
    ("name", "decide", "changes", "expected"),
    [
        # The engine would take 4 from the dense layers.
        (
            "mixtral-8x7b",
            _one_stage,
            {
                "tensor_model_parallel_size": 4,
                "sequence_parallel": True,
                "data_parallel_size": 4,
                "expert_data_parallel_size": 2,
            },
            {
                "--expert-tensor-parallel-size": ["1"],
                "--tensor-model-parallel-size": ["4"],
                "--sequence-parallel": [],
            },
        ),
        (
            "mixtral-8x7b",
            _pipeline,
            {},
            {
                "--mlp-chunks-for-training": ["4"],
                "--recompute-granularity": ["selective"],
                "--recompute-modules": ["moe"],
            },
        ),
        (
            "mixtral-8x7b",
            _one_stage,
            {"recompute": "full", "stage_recompute": ("full",)},
            {
                "--recompute-method": ["uniform"],
                "--recompute-num-layers": ["1"],
                "--recompute-modules": None,
            },
        ),
        # An uneven pipeline becomes a layout; an even one needs none.
        (
            "mixtral-8x7b",
            _pipeline,
            INTERLEAVED | {"pipeline_layout": (7, 9, 15, 1), "mtp_num_layers": 1},
            {
                "--pipeline-model-parallel-layout": ["Et*7|t*9|t*15|tmL"],
                "--num-virtual-stages-per-pipeline-rank": None,
            },
        ),
        (
            "mixtral-8x7b",
            _pipeline,
            INTERLEAVED | {"pipeline_layout": (8,) * 4},
            {
                "--num-virtual-stages-per-pipeline-rank": ["2"],
                "--pipeline-model-parallel-layout": None,
            },
        ),
        # Embedding and loss as layers: 63 over 16 is 4 on 15 ranks and 3 on one.
        (
            "deepseek-v3",
            _pipeline,
            {
                "pipeline_model_parallel_size": 16,
                "data_parallel_size": 8,
                "stage_recompute": ("none",) * 16,
                "recompute_modules": (),
                "chunks": (1,) * 16,
                "pipeline_layout": (3, *(4,) * 14, 2),
                "ends_as_layers": True,
                "mtp_num_layers": 1,
            },
            {"--pipeline-model-parallel-layout": [f"Et*3|{'|'.join(['t*4'] * 14)}|t*2mL"]},
        ),
        (
            "deepseek-v3",
            _one_stage,
            {},
            {
                "--q-lora-rank": ["1536"],
                "--kv-lora-rank": ["512"],
                "--qk-head-dim": ["128"],
                "--qk-pos-emb-head-dim": ["64"],
                "--v-head-dim": ["128"],
                "--num-query-groups": None,
                "--moe-shared-expert-intermediate-size": ["2048"],
                # A Python expression that the engine evaluates: three dense layers first.
                "--moe-layer-freq": ["([0]*3+[1]*58)"],
                "--moe-router-score-function": ["sigmoid"],
                "--moe-router-enable-expert-bias": [],
                "--moe-router-num-groups": ["8"],
                "--moe-router-group-topk": ["4"],
            },
        ),
        # The overlap runs dense feed-forward networks in turns, so no graph holds them.
        (
            "deepseek-v3",
            _one_stage,
            GRAPHS,
            {
                "--moe-token-dispatcher-type": ["flex"],
                "--moe-flex-dispatcher-backend": ["deepep"],
                "--overlap-moe-expert-parallel-comm": [],
                "--cuda-graph-impl": ["transformer_engine"],
                "--cuda-graph-modules": ["attn", "moe_router", "moe_preprocess"],
            },
        ),
        *(
            (
                "mixtral-8x7b",
                _one_stage,
                {"zero_stage": stage},
                {"--data-parallel-sharding-strategy": sharding, "--ckpt-format": checkpoint},
            )
            for stage, sharding, checkpoint in (
                (2, ["optim_grads"], ["fsdp_dtensor"]),
                (3, ["optim_grads_params"], ["fsdp_dtensor"]),
            )
        ),
        ("mixtral-8x7b", _one_stage, {}, {"--use-megatron-fsdp": None}),
        (
            "mixtral-8x7b",
            _pipeline,
            {
                "optimizer_offload": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "gradient_bytes": 2,
                "rank_order": "tp-cp-ep-pp-dp",
            },
            {
                "--optimizer-offload-fraction": ["1.0"],
                "--optimizer-cpu-offload": [],
                "--use-precision-aware-optimizer": [],
                "--overlap-grad-reduce": [],
                "--overlap-param-gather": [],
                "--grad-reduce-in-bf16": [],
                "--use-tp-pp-dp-mapping": [],
            },
        ),
        # Windows of 128 tokens, the current one among them, on every other layer from the first.
        (
            "gpt-oss-20b",
            _one_stage,
            {},
            {
                "--softmax-type": ["learnable"],
                "--window-size": ["127,0"],
                "--window-attn-skip-freq": [f"({'+'.join(['[1]*1+[0]*1'] * 12)})"],
                "--disable-bias-linear": None,
                "--quick-geglu": [],
                "--swiglu": None,
            },
        ),
        *(
            (
                "mixtral-8x7b",
                _one_stage,
                {"fp8_recipe": recipe},
                dict.fromkeys(("--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe"))
                | {f"--fp{bits}-format": [form], f"--fp{bits}-recipe": [word], "--bf16": []},
            )
            for recipe, bits, form, word in (
                ("fp8-delayed", 8, "hybrid", "delayed"),
                ("fp8-blockwise", 8, "e4m3", "blockwise"),
                ("mxfp8", 8, "e4m3", "mxfp8"),
                ("nvfp4", 4, "e2m1", "nvfp4"),
            )
        ),
    ],
)
def test_a_decision_becomes_flags(
    name: str,
    decide: Callable[..., TrainDecision],
    changes: dict[str, Any],
    expected: dict[str, list[str] | None],
) -> None:
    model = example_model(name)
    options = _options(model, decide(model, **changes))
    assert {flag: options.get(flag) for flag in expected} == expected


def test_stages_that_differ_are_refused_rather_than_flattened() -> None:
    decision = sample_decision(chunks=(4, 2))
    with pytest.raises(ValueError, match="the stages differ"):
        _options(example_model("mixtral-8x7b"), decision)


def test_the_script_hands_every_argument_to_the_program(
    tmp_path: Path, recorders: Recorders
) -> None:
    model = example_model("deepseek-v3")
    decision = _one_stage(model)
    verified = sample_verified(model, decision, emit=("megatron-lm",), devices_per_node=16)
    write_emitted(tmp_path, emit("megatron-lm", verified))
    ran = recorders.start(
        tmp_path / "run.sh", "--lr", "1e-4", cwd=Path("/"), MEGATRON_LM="/opt/megatron lm"
    )
    argv = ran.only("torchrun")
    start = argv.index("/opt/megatron lm/pretrain_gpt.py") + 1
    expected = [word for line in arguments(model, verified.plan.goal, decision) for word in line]
    assert argv[start:] == [*expected, "--lr", "1e-4"]


@pytest.mark.parametrize("target", RELEASES)
@each_row("row", VERDICTS)
def test_the_manifest_refuses_what_the_engine_refuses_and_every_flag_exists(
    target: str, row: Any
) -> None:
    models = {name: example_model(name) for name in {row["model"] for row in VERDICTS}}
    model, decision = models[row["model"]], sample_decision(**row["changes"])
    found = refusals(TARGETS[target], model=model, decision=decision)
    written = set() if found else set(_options(model, decision, core=CORES[target]))
    for release in RELEASES[target]:
        if release.removeprefix("core_v") in row["accepted"]:
            assert all(any(rule in line for rule in BEYOND_THE_PARSER) for line in found)
        else:
            assert found
        assert written <= set(FLAGS["releases"][release])


def test_the_precision_of_the_goal_holds_where_the_decision_names_none() -> None:
    model = example_model("mixtral-8x7b")
    decision = _one_stage(model)
    goal = sample_verified(model, decision).plan.goal
    goal = goal.model_copy(update={"precision": Precision.MXFP8})
    assert ("--fp8-recipe", "mxfp8") in arguments(model, goal, decision)


@each_row(("changes", "queues"), (({"zero_stage": 3}, "32"), ({}, "1")))
def test_sharded_parameters_are_not_started_on_one_hardware_queue(
    changes: dict[str, Any], queues: str
) -> None:
    model = example_model("mixtral-8x7b")
    verified = sample_verified(model, _one_stage(model, **changes), emit=("megatron-lm",))
    script = next(file.text for file in emit("megatron-lm", verified) if file.executable)
    assert f'"${{CUDA_DEVICE_MAX_CONNECTIONS:-{queues}}}"' in script


def test_what_is_recomputed_is_not_moved_to_host_memory() -> None:
    model = example_model("mixtral-8x7b")
    everything = _options(
        model, _one_stage(model, activation_offload=True, stage_recompute=("none",))
    )
    assert "moe_act" in everything["--offload-modules"]
    some = _options(model, _one_stage(model, activation_offload=True))
    assert some["--recompute-modules"] == ["moe"]
    assert not {"moe_act", "expert_fc1"} & set(some["--offload-modules"])


def test_a_graph_of_the_whole_step_says_that_it_drops_tokens() -> None:
    model = example_model("mixtral-8x7b")
    decision = _one_stage(
        model, dispatcher="hybridep", cuda_graph="full_iteration", stage_recompute=("none",)
    )
    verified = sample_verified(model, decision, emit=("megatron-lm",))
    assert all("are dropped" in file.text for file in emit("megatron-lm", verified))
    options = _options(model, decision)
    assert options["--moe-expert-rank-capacity-factor"] == ["1.5"]
    assert "--no-check-for-nan-in-loss-and-grad" in options
