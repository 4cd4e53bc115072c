"""Overrides for Megatron-Bridge: their form, the recipe they start from, what they leave off."""

import ast
from pathlib import Path
from typing import Any

from tests.rows import each_row
from tests.tuner.engines.testing import Recorders, sample_decision, sample_verified, write_emitted
from tests.tuner.models import example_model
from tuner.config.train import TrainDecision
from tuner.engines.megatron_bridge.write import emit, emit_26_02, overrides
from tuner.engines.megatron_lm.core import Core
from tuner.plans.train import VerifiedPlan


def _verified(name: str, **changes: Any) -> VerifiedPlan:
    model = example_model(name)
    half = model.num_layers // 2
    fields = {"pipeline_layout": (model.num_layers - half, half), **changes}
    return sample_verified(model, sample_decision(**fields), emit=("megatron-bridge",))


def _set(verified: VerifiedPlan, *, core: Core = Core.V0_18) -> dict[str, Any]:
    found = overrides(verified.plan.model, verified.plan.goal, verified.decision, core=core)
    assert len({path for path, _ in found}) == len(found), "a field is set twice"
    return dict(found)


@each_row(
    ("name", "recipe"),
    {
        "deepseek-v3": "deepseek_v3_pretrain_config",
        "kimi-k2": "kimi_k2_pretrain_config",
        "qwen3-235b-a22b": "qwen3_235b_a22b_pretrain_config",
        "llama-3.1-405b": "llama31_405b_pretrain_config",
        "gpt-oss-120b": "gpt_oss_120b_pretrain_config",
        "mixtral-8x7b": "vanilla_gpt_pretrain_config",
    }.items(),
)
def test_a_model_is_built_by_its_recipe(name: str, recipe: str) -> None:
    dense = {"expert_model_parallel_size": 1, "expert_data_parallel_size": 8}
    changes = {} if example_model(name).num_moe_layers else dense
    verified = _verified(name, stage_recompute=("none", "none"), chunks=(1, 1), **changes)
    script = next(file.text for file in emit(verified) if file.path.name == "run.sh")
    assert f'RECIPE="${{RECIPE:-{recipe}}}"' in script
    assert ("model.num_layers" in _set(verified)) == (recipe == "vanilla_gpt_pretrain_config")


def test_a_plain_model_has_no_recipe_in_the_oldest_container() -> None:
    verified = _verified("mixtral-8x7b", chunks=(1, 1))
    script = next(file.text for file in emit_26_02(verified) if file.path.name == "run.sh")
    assert '"${RECIPE:?must name a recipe}"' in script


@each_row(
    ("name", "changes", "expected"),
    (
        # What is off is said, because a recipe may have it on.
        (
            "deepseek-v3",
            {"stage_recompute": ("none", "none"), "chunks": (1, 1)},
            {
                "model.recompute_granularity": None,
                "model.virtual_pipeline_model_parallel_size": None,
                "model.moe_flex_dispatcher_backend": None,
                "model.mtp_num_layers": None,
                "comm_overlap": None,
                "model.overlap_moe_expert_parallel_comm": False,
                "model.cuda_graph_impl": "none",
                "model.pipeline_model_parallel_layout": "Et*31|t*30L",
            },
        ),
        (
            "mixtral-8x7b",
            {"zero_stage": 3},
            {
                "ddp.use_megatron_fsdp": True,
                "ddp.data_parallel_sharding_strategy": "optim_grads_params",
            },
        ),
        (
            "mixtral-8x7b",
            {"optimizer_offload": True, "rank_order": "tp-cp-ep-pp-dp"},
            {
                "optimizer.use_precision_aware_optimizer": True,
                "dist.use_tp_pp_dp_mapping": True,
            },
        ),
    ),
)
def test_a_decision_becomes_overrides(
    name: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    decided = _set(_verified(name, **changes))
    assert {path: decided[path] for path in expected} == expected


def test_every_line_is_one_override_that_needs_no_shell(tmp_path: Path) -> None:
    verified = _verified("deepseek-v3", mtp_num_layers=1)
    (text,) = (file.text for file in emit(verified) if file.path.name == "overrides.txt")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.count("=") == 1 and " " not in line for line in lines)
    assert "model.pipeline_model_parallel_layout='Et*31|t*30mL'" in lines
    assert "model.recompute_modules=[moe]" in lines
    write_emitted(tmp_path, emit(verified))
    ran = Recorders(tmp_path / "recorders").run(
        tmp_path / "run.sh", "train.train_iters=5", cwd=Path("/"), MASTER_ADDR="head", NODE_RANK="0"
    )
    assert ran.code == 0, ran.stderr
    assert ran.only("torchrun")[-2:] == [f"{tmp_path}/train.py", "train.train_iters=5"]


@each_row(
    ("changes", "expected"),
    [
        ({"gradient_bytes": 2}, 'get_mixed_precision_config("bf16_mixed")'),
        ({"fp8_recipe": "mxfp8"}, 'get_mixed_precision_config("bf16_with_mxfp8_mixed")'),
    ],
)
def test_the_precision_is_a_value_before_overrides_reach_it(
    changes: dict[str, Any], expected: str
) -> None:
    program = next(
        file.text
        for file in emit(_verified("mixtral-8x7b", **changes))
        if file.path.suffix == ".py"
    )
    ast.parse(program)
    assert expected in program
    assert f"grad_reduce_in_fp32 = {'gradient_bytes' not in changes}" in program


def test_an_older_core_has_no_chunks_and_calls_graphs_otherwise() -> None:
    decision: TrainDecision = _verified("mixtral-8x7b", cuda_graph="partial").decision
    verified = _verified(
        "mixtral-8x7b",
        cuda_graph="partial",
        chunks=(1, 1),
        stage_recompute=("none", "none"),
    )
    assert decision.chunks == (4, 4)
    old, new = _set(verified, core=Core.V0_16), _set(verified)
    assert old["model.cuda_graph_scope"] == new["model.cuda_graph_modules"]
    assert "model.mlp_chunks_for_training" not in old
