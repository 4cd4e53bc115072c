"""Hybrids, the gated delta rule and sparse attention: emitted, restricted and read back."""

from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from tests.expect import present, refused
from tests.rows import Failures, each_row
from tests.tuner.engines.testing import sample_decision, sample_verified, write_emitted
from tests.tuner.models import example_model
from tuner.catalog.manifest import of_model
from tuner.config.train import TrainDecision
from tuner.engines.megatron_bridge.write import overrides
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.megatron_lm.core import Core
from tuner.engines.megatron_lm.write import arguments, program
from tuner.engines.targets import TARGETS, programs
from tuner.engines.writers import broken_rules, emit
from tuner.errors import SpecError
from tuner.estimate.configuration import build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.registry import read_launch
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.features import ModelFeature, features
from tuner.spec.model import ModelSpec
from tuner.spec.refusals import refusals
from tuner.spec.spec import Spec

SUPER, DENSE, DELTA, SPARSE = (
    "nemotron-3-super",
    "nemotron-h-56b",
    "qwen3.5-397b-a17b",
    "deepseek-v3.2",
)
CONTEXT: Final = {"context_parallel_size": 2, "expert_data_parallel_size": 2}
FILES: Final = {
    "megatron-lm": ("megatron_args.txt", "run.sh"),
    "megatron-lm-0.16": ("megatron_args.txt", "run.sh"),
    "megatron-bridge": ("overrides.txt", "run.sh"),
    "megatron-bridge-26.04": ("overrides.txt", "run.sh"),
    "megatron-bridge-26.02": ("overrides.txt", "run.sh"),
}


def _decision(model: ModelSpec, *layout: int, ranks: int = 1, **changes: Any) -> TrainDecision:
    """Return stages of so many layers, without recomputation."""
    stages = layout or (model.num_layers,)
    dense = {"expert_model_parallel_size": 1, "expert_data_parallel_size": 8}
    fields = {
        "pipeline_model_parallel_size": ranks,
        "virtual_pipeline_model_parallel_size": len(stages) // ranks,
        "pipeline_layout": stages,
        "recompute": "none",
        "recompute_modules": (),
        "stage_recompute": ("none",) * len(stages),
        "chunks": (1,) * len(stages),
        **({} if model.num_moe_layers else dense),
        **changes,
    }
    return sample_decision(**fields)


def _options(
    model: ModelSpec, decision: TrainDecision, *, core: Core = Core.V0_18
) -> dict[str, list[str]]:
    goal = sample_verified(model, decision).plan.goal
    return {flag: values for flag, *values in arguments(model, goal, decision, core=core)}


# The published pattern (config.json, hybrid_override_pattern).
PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
MTP: Final = {"mtp_num_layers": 1}
QWEN = "qwen3-next-80b-a3b"


@each_row(
    ("name", "layout", "changes", "expected"),
    (
        (
            SUPER,
            (),
            MTP,
            {
                # And one MTP layer.
                "--hybrid-layer-pattern": [f"{PATTERN}/*E"],
                "--num-layers": ["88"],
                "--moe-latent-size": ["1024"],
                "--mamba-num-heads": ["128"],
                "--mamba-state-dim": ["128"],
                "--position-embedding-type": ["none"],
                "--squared-relu": [],
                "--no-bias-gelu-fusion": [],
                "--rotary-base": None,
                "--moe-layer-freq": None,
                "--swiglu": None,
            },
        ),
        (
            SUPER,
            (20, 30, 30, 8),
            {"ranks": 2, **MTP},
            {
                "--hybrid-layer-pattern": [
                    f"{PATTERN[:20]}|{PATTERN[20:50]}|{PATTERN[50:80]}|{PATTERN[80:]}/*E"
                ],
                "--pipeline-model-parallel-layout": None,
                "--num-virtual-stages-per-pipeline-rank": None,
            },
        ),
        # core 0.16 cuts the letters itself.
        (
            SUPER,
            (44, 44),
            {"ranks": 2, "core": Core.V0_16},
            {
                "--hybrid-override-pattern": [PATTERN],
                "--hybrid-layer-pattern": None,
                "--spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
            },
        ),
        # Every fourth layer has attention, with a gate.
        (
            QWEN,
            (24, 24),
            {"ranks": 2},
            {
                "--experimental-attention-variant": ["gated_delta_net"],
                "--linear-attention-freq": [f"({'+'.join(['[1]*3+[0]*1'] * 12)})"],
                "--linear-num-key-heads": ["16"],
                "--linear-num-value-heads": ["32"],
                "--attention-output-gate": [],
                "--moe-shared-expert-gate": [],
                "--swiglu": [],
            },
        ),
        (
            SPARSE,
            (),
            {},
            {
                "--experimental-attention-variant": ["dsa"],
                "--dsa-indexer-topk": ["2048"],
                "--multi-latent-attention": [],
                "--no-rope-fusion": [],
            },
        ),
        # Mamba layers have graphs of their own.
        *(
            (name, (), {"cuda_graph": "partial"}, {"--cuda-graph-modules": modules})
            for name, modules in (
                (SUPER, ["attn", "mamba", "moe_router", "moe_preprocess"]),
                (DENSE, ["attn", "mamba", "mlp"]),
                (DELTA, ["attn", "moe_router", "moe_preprocess"]),
            )
        ),
    ),
)
def test_models_become_options(
    name: str, layout: tuple[int, ...], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    model, core = example_model(name), changes.get("core", Core.V0_18)
    fields = {field: value for field, value in changes.items() if field != "core"}
    options = _options(model, _decision(model, *layout, **fields), core=core)
    assert {flag: options.get(flag) for flag in expected} == expected


def test_each_release_starts_its_own_program_of_hybrids(tmp_path: Path) -> None:
    programs = {
        ("megatron-lm", SUPER): "pretrain_hybrid.py",
        ("megatron-lm-0.16", SUPER): "pretrain_mamba.py",
        ("megatron-lm", DELTA): "pretrain_gpt.py",
        ("megatron-lm", SPARSE): "pretrain_gpt.py",
    }
    for (target, name), expected in programs.items():
        model = example_model(name)
        verified = sample_verified(model, _decision(model), emit=(target,))
        script = next(str(file.text) for file in emit(target, verified) if file.executable)
        assert f'"$MEGATRON_LM/{expected}"' in script
        core = Core.V0_16 if target.endswith("0.16") else Core.V0_18
        assert program(model, core=core) == expected


def test_sparse_attention_says_what_its_price_needs() -> None:
    model = example_model(SPARSE)
    files = emit("megatron-lm", sample_verified(model, _decision(model), emit=("megatron-lm",)))
    assert all("--dsa-kernel-backend" in file.text for file in files)


GROUPS = "heads of linear attention and share its 8 groups"


def _shared(tensor: int, context: int) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "sequence_parallel": tensor > 1,
        "expert_data_parallel_size": tensor * context,
    }


@each_row(
    ("target", "name", "layout", "changes", "rule"),
    [
        ("megatron-lm", SUPER, (), {"a2a_overlap": True}, "is not offered, with Mamba-2"),
        ("megatron-lm", SUPER, (), {"activation_offload": True}, "not offered, with Mamba-2"),
        ("megatron-lm", SUPER, (), {"zero_stage": 3}, "3 is not one of 0, 1, 2, with Mamba"),
        (
            "megatron-lm",
            SUPER,
            (),
            {"cuda_graph": "full_iteration", "dispatcher": "hybridep"},
            "without experts, with feed-forward networks of two matrices",
        ),
        ("megatron-lm-0.16", SUPER, (), MTP, "must be 0, with Mamba-2 layers"),
        ("megatron-lm", SPARSE, (), CONTEXT, "must be 1, with attention to the tokens"),
        ("megatron-lm-0.16", DELTA, (), CONTEXT, "must be 1, with layers with the gated delta"),
        ("torchtitan", DELTA, (), CONTEXT | {"zero_stage": 3}, "must be 1, with layers with the"),
        ("megatron-bridge", SPARSE, (), {}, "no arguments are written for attention to the"),
        # Older releases have equal stages.
        ("megatron-lm-0.16", SUPER, (40, 48), {"ranks": 2}, "same number of layers"),
        ("megatron-lm", SUPER, (40, 48), {"ranks": 2}, ""),
        ("megatron-lm-0.16", SUPER, (22,) * 4, {"ranks": 2}, "no interleaved pipeline"),
        ("megatron-lm", SUPER, (22,) * 4, {"ranks": 2}, ""),
        # 128 heads in 8 groups: a tensor rank has whole groups, context ranks may share one.
        *(
            ("megatron-lm", SUPER, (), _shared(tensor, context), "" if is_legal else GROUPS)
            for tensor, context, is_legal in (
                (8, 1, True),
                (8, 2, True),
                (16, 1, False),
                (2, 8, True),
                (1, 3, False),
                (8, 32, False),
            )
        ),
        *(
            ("megatron-lm", DELTA, (), _shared(8, context), rule)
            for context, rule in ((1, ""), (2, ""), (4, "linear attention"))
        ),
    ],
)
def test_a_restriction_names_its_feature(
    target: str, name: str, layout: tuple[int, ...], changes: dict[str, Any], rule: str
) -> None:
    model = example_model(name)
    lines = refusals(TARGETS[target], model=model, decision=_decision(model, *layout, **changes))
    assert bool(lines) == bool(rule)
    assert all(line.startswith(f"{target}: ") for line in lines)
    assert any(rule in line for line in lines) or not rule


def test_the_search_gets_what_the_targets_can_express_of_its_model() -> None:
    able = programs(("megatron-lm", "slurm")).launchable(
        model=example_model(SUPER), precision="bf16"
    )
    assert able.a2a_overlap is None
    assert able.zero_stages == {0, 1, 2}
    assert (
        programs(("megatron-lm",))
        .launchable(model=example_model("mixtral-8x7b"), precision="bf16")
        .a2a_overlap
    )
    # In either order: what both can express of a model.
    for name in (SUPER, DELTA, SPARSE, "mixtral-8x7b"):
        present = features(example_model(name))
        both = of_model(programs(("megatron-lm", "torchtitan")).capabilities(), present)
        each = [of_model(TARGETS[one], present) for one in ("megatron-lm", "torchtitan")]
        assert both.parts == tuple(each)
        assert both.context_parallel == all(one.context_parallel for one in each)


def test_mamba_layers_of_another_shape_are_refused_by_name() -> None:
    model = example_model(SUPER)
    linear = present(model.linear).model_copy(update={"conv_kernel": 2})
    other = model.model_copy(update={"linear": linear})
    assert ModelFeature.MAMBA2_VARIANT in features(other) - features(model)
    (line,) = refusals(TARGETS["megatron-lm"], model=other, decision=_decision(other))
    assert "kernel, chunks or biases are not Nemotron's" in line


def _spec(model: ModelSpec, decision: TrainDecision) -> Spec:
    pool = Pool(name="pool", device="h100-sxm", nodes=decision.num_devices // 8, devices_per_node=8)
    return Spec(
        path=Path("spec.yaml"),
        model_path=Path("config.json"),
        model=model,
        cluster=Cluster(pools=(pool,)),
        goal=sample_verified(model, decision).plan.goal,
        programs=programs(("megatron-lm",)),
    )


def _decisions(model: ModelSpec) -> dict[str, TrainDecision]:
    layers = model.num_layers
    half, quarter = layers // 2, layers // 4
    interleaved = (quarter, quarter, quarter, layers - 3 * quarter)
    return {
        "one stage": _decision(model),
        "two stages": _decision(model, half, layers - half, ranks=2),
        "uneven": _decision(model, half - 3, layers - half + 3, ranks=2),
        "a stage without layers": _decision(model, layers, 0, ranks=2),
        "interleaved": _decision(model, *interleaved, ranks=2),
        "MTP": _decision(model, half, layers - half, ranks=2, mtp_num_layers=1),
        "graphs": _decision(model, cuda_graph="partial"),
    }


NEW: Final = (
    *("nemotron-3-nano", "nemotron-3.5-lightning", SUPER, "nemotron-3-ultra", DENSE),
    *("qwen3-next-80b-a3b", DELTA, SPARSE, "glm-5", "minimax-m2", "kimi-k2.5", "qwen2.5-7b"),
)


@pytest.mark.parametrize("target", FILES)
def test_what_is_emitted_for_new_models_reads_back(target: str, tmp_path: Path) -> None:
    failures, num_read = Failures(), 0
    for name in NEW:
        model = example_model(name)
        for case, decision in _decisions(model).items():
            verified = sample_verified(model, decision, emit=(target,))
            if broken_rules(target, verified.plan, decision):
                continue
            folder = tmp_path / name / case.replace(" ", "-")
            write_emitted(folder, emit(target, verified))
            for file in FILES[target]:
                with failures.of(name, case, file):
                    launch = read_launch(str(folder / file))
                    own, _ = build_configuration(launch, _spec(model, decision))
                    found = to_decision(own, model)
                    for field in (
                        "pipeline_model_parallel_size",
                        "virtual_pipeline_model_parallel_size",
                        "pipeline_layout",
                        "mtp_num_layers",
                        "cuda_graph",
                    ):
                        assert getattr(found, field) == getattr(decision, field), field
                    num_read += 1
    failures.check()
    assert num_read >= 60


LEAST = "--micro-batch-size 1 --hidden-size 4096 --num-attention-heads 32 --hybrid-layer-pattern "


@each_row(
    ("text", "words"),
    [
        ("MEMX", "'X' is no layer; the letters are M (Mamba-2)"),
        ("/*E", "must hold 1 to 1000 layers"),
        ("M" * 1001, "must hold 1 to 1000 layers"),
        ("ME/*E|*E", "every | must precede the first /"),
        ("ME/*E/**", "all patterns after / must be the same"),
    ],
)
def test_a_pattern_that_is_none_is_one_line(text: str, words: str) -> None:
    with refused(SpecError, words):
        megatron.read(f"pretrain_hybrid.py {LEAST}{text}", source="run.sh")


def _refused(model: ModelSpec, text: str) -> str:
    launch = megatron.read(text, source="run.sh")
    with pytest.raises(SpecError) as caught:
        build_configuration(launch, _spec(model, _decision(model)))
    return str(caught.value)


def test_the_pattern_of_another_model_is_refused() -> None:
    model = example_model(SUPER)
    decision = _decision(model, mtp_num_layers=1)
    goal = sample_verified(model, decision).plan.goal
    text = " ".join(word for line in arguments(model, goal, decision) for word in line)
    assert "layer 1 is *, but of nemotron-3-super it is M" in _refused(
        model, text.replace("-pattern M", "-pattern *")
    )
    assert "holds 87 layers" in _refused(model, text.replace("-pattern M", "-pattern "))
    assert "predicts tokens with '**'" in _refused(model, text.replace("/*E", "/**"))
    assert "--mamba-num-heads 64" in _refused(model, text.replace("heads 128 ", "heads 64 "))
    three = text.replace("-pattern MEM", "-pattern M|E|M")
    two_ranks = three.replace("pipeline-model-parallel-size 1", "pipeline-model-parallel-size 2")
    assert "3 stages, not divisible by --pipeline-model-parallel-size 2" in _refused(
        model, two_ranks
    )
    assert "both say how layers are cut" in _refused(
        model,
        text.replace("-pattern M", "-pattern M|") + " --num-layers-per-virtual-pipeline-stage 4",
    )
    delta = example_model(DELTA)
    goal = sample_verified(delta, _decision(delta)).plan.goal
    text = " ".join(word for line in arguments(delta, goal, _decision(delta)) for word in line)
    plain = text.replace("--experimental-attention-variant gated_delta_net", "")
    assert "no --experimental-attention-variant" in _refused(delta, plain)


def test_patterns_of_layers_with_a_network_are_read_as_the_models_layers() -> None:
    model = example_model("qwen3-next-80b-a3b")
    letters = "GEGEGE*E" * 12
    text = (
        "pretrain_hybrid.py --micro-batch-size 1 --num-experts 512 --swiglu --attention-output-gate"
        " --group-query-attention --num-query-groups 2 --num-attention-heads 16"
        " --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2"
        f" --hybrid-layer-pattern {letters[:32]}|{letters[32:]}"
    )
    spec = _spec(model, _decision(model))
    own, _ = build_configuration(megatron.read(text, source="run.sh"), spec)
    assert [stage.layers for stage in own.stages] == [16, 32]
    cut = text.replace("|", "").replace("GEGEGE*E", "G|EGEGE*E", 1)
    assert "stage 1 ends between the mixer and the network" in _refused(model, cut)


@each_row(
    ("target", "name", "recipe"),
    (
        ("megatron-bridge", SUPER, "nemotron_3_super"),
        ("megatron-bridge-26.04", SUPER, "nemotron_3_super"),
        ("megatron-bridge-26.02", SUPER, "nemotron_3_nano"),
        ("megatron-bridge", "nemotron-3-ultra", "nemotron_3_super"),
        ("megatron-bridge", DENSE, "nemotronh_56b"),
        ("megatron-bridge", "qwen3-next-80b-a3b", "qwen3_next_80b_a3b"),
        ("megatron-bridge", DELTA, "qwen3_next_80b_a3b"),
    ),
)
def test_bridge_starts_from_the_recipes_of_its_release(target: str, name: Any, recipe: str) -> None:
    model = example_model(name)
    verified = sample_verified(model, _decision(model), emit=(target,))
    script = next(file.text for file in emit(target, verified) if file.path.name == "run.sh")
    assert f'"${{RECIPE:-{recipe}_pretrain_config}}"' in script, (target, name)


def test_bridge_calls_the_pattern_by_its_releases_name() -> None:
    model = example_model(SUPER)
    decision = _decision(model, 44, 44, ranks=2)
    goal = sample_verified(model, decision).plan.goal
    for core, field in product(Core, ("hybrid_layer_pattern", "hybrid_override_pattern")):
        found = dict(overrides(model, goal, decision, core=core))
        is_old = core is Core.V0_16
        assert (f"model.{field}" in found) == (is_old == (field == "hybrid_override_pattern"))
        # A recipe that runs one MTP layer twice would change the pattern.
        assert ("model.mtp_use_repeated_layer" in found) is not is_old
    verified = sample_verified(model, decision, emit=("megatron-bridge",))
    (text,) = (
        file.text for file in emit("megatron-bridge", verified) if file.path.name == "overrides.txt"
    )
    assert "model.hybrid_layer_pattern='MEMEMEM*E" in text
