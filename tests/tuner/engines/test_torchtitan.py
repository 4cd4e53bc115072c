"""The TOML against torchtitan's own dataclasses, and the program that hands it over."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from tests.rows import Failures, each_row
from tests.tuner.engines.testing import (
    Recorders,
    changed,
    sample_decision,
    sample_verified,
    texts_of,
    values_at,
    write_emitted,
)
from tests.tuner.models import example_model
from tests.tuner.real_torchtitan import run_with_torchtitan
from tuner.costs.reference.workload import Workload
from tuner.engines.targets import TARGETS, programs
from tuner.engines.torchtitan.write import emit
from tuner.estimate.registry import read_text
from tuner.plans.train import VerifiedPlan
from tuner.search.reference.space import enumerate_degrees
from tuner.spec.refusals import refusals
from tuner.spec.search import Search

CASES: dict[str, dict[str, Any]] = {
    "two stages": {},
    "no pipeline, whole layers recomputed": {
        "pipeline_model_parallel_size": 1,
        "recompute": "full",
        "stage_recompute": ("full",),
        "chunks": (1,),
        "pipeline_layout": (48,),
    },
    "zero bubble on uneven stages": {
        "virtual_pipeline_model_parallel_size": 2,
        "schedule": "zero_bubble",
        "stage_recompute": ("none",) * 4,
        "chunks": (1,) * 4,
        "pipeline_layout": (10, 13, 13, 12),
    },
    "tensor and context ranks under hybridep": {
        "pipeline_model_parallel_size": 1,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "data_parallel_size": 4,
        "expert_data_parallel_size": 2,
        "sequence_parallel": True,
        "dispatcher": "hybridep",
        "stage_recompute": ("none",),
        "chunks": (1,),
        "pipeline_layout": (48,),
    },
}


def _verified(name: str = "qwen3-30b-a3b", **changes: Any) -> VerifiedPlan:
    model = example_model(name)
    half = model.num_layers // 2
    plain = {
        "zero_stage": 3,
        "recompute": "none",
        "recompute_modules": (),
        "stage_recompute": ("none", "none"),
        "chunks": (1, 1),
        "pipeline_layout": (half, model.num_layers - half),
    }
    return sample_verified(model, sample_decision(**{**plain, **changes}), emit=("torchtitan",))


def _toml(verified: VerifiedPlan) -> dict[str, dict[str, Any]]:
    return tomllib.loads(texts_of(emit(verified))["torchtitan.toml"])


def test_torchtitans_own_classes_take_the_sections(failures: Failures) -> None:
    reason = "torchtitan is not installed (extra: engines)"
    config = pytest.importorskip("torchtitan.config", reason=reason)
    for case, changes in CASES.items():
        written = _toml(_verified(**changes))
        with failures.of(case):
            parallelism = config.ParallelismConfig(**written["parallelism"])
            training = config.TrainingConfig(**written["training"])
            assert dataclasses.asdict(parallelism).items() >= written["parallelism"].items()
            assert training.global_batch_size == 1536


@each_row(("case", "changes"), CASES.items())
def test_the_degrees_multiply_to_the_devices(case: Any, changes: Any) -> None:
    verified = _verified(**changes)
    degrees = _toml(verified)["parallelism"]
    required = (
        degrees["data_parallel_replicate_degree"]
        * degrees["data_parallel_shard_degree"]
        * degrees["context_parallel_degree"]
        * degrees["tensor_parallel_degree"]
        * degrees["pipeline_parallel_degree"]
    )
    assert required == verified.decision.num_devices, (case, required)


def test_stages_hold_the_layers_of_the_plan() -> None:
    written = _toml(_verified(**CASES["zero bubble on uneven stages"]))["parallelism"]
    assert written["pipeline_parallel_schedule"] == "InterleavedZeroBubble"
    stages = written["module_fqns_per_model_part"]
    assert stages[0][:2] == ["tok_embeddings", "layers.0"]
    assert stages[1][0] == "layers.10"
    assert stages[-1][-2:] == ["norm", "lm_head"]
    assert [name for stage in stages for name in stage if name.startswith("layers")] == [
        f"layers.{layer}" for layer in range(48)
    ]


WHOLE = "no pipeline, whole layers recomputed"
ALONE: dict[str, Any] = {"expert_model_parallel_size": 1, "expert_data_parallel_size": 8}


@each_row(
    ("name", "changes", "expected"),
    (
        # A pipeline takes the whole batch of a replica at once: 1536 sequences over 8.
        ("qwen3-30b-a3b", {}, {"training.local_batch_size": 192}),
        (
            "qwen3-30b-a3b",
            CASES[WHOLE],
            {"training.local_batch_size": 1, "activation_checkpoint.mode": "full"},
        ),
        # ZeRO stages are FSDP.
        *(
            (
                "qwen3-30b-a3b",
                {"zero_stage": stage, **ALONE},
                {
                    "parallelism.data_parallel_replicate_degree": replicas,
                    "parallelism.data_parallel_shard_degree": shards,
                    "parallelism.fsdp_reshard_after_forward": reshards,
                },
            )
            for stage, replicas, shards, reshards in (
                (0, 8, 1, "never"),
                (2, 1, 8, "never"),
                (3, 1, 8, "always"),
            )
        ),
        (
            "qwen3-30b-a3b",
            {"dispatcher": "deepep"},
            {
                "model.module": "qwen3",
                "model.flavor": "30B-A3B",
                "model.moe_comm_backend": "deepep",
            },
        ),
        (
            "mixtral-8x7b",
            {},
            {"model": {"attn_backend": "flex", "moe_comm_backend": "standard"}},
        ),
        # gpt-oss keeps the kernels of its release.
        *(
            (
                "gpt-oss-20b",
                {"context_parallel_size": context, "expert_data_parallel_size": context},
                {"model.attn_backend": kernels},
            )
            for context, kernels in ((1, "varlen"), (2, "flex"))
        ),
    ),
)
def test_a_decision_becomes_settings(
    name: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert values_at(_toml(_verified(name, **changes)), expected) == expected


def test_what_is_written_reads_back_and_what_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute selective"):
        emit(_verified(stage_recompute=("selective", "selective")))
    text = texts_of(emit(_verified()))["torchtitan.toml"]
    assert read_text(text, format_name="torchtitan", source="it").notes == ()


def test_a_model_that_is_not_shipped_must_be_named(tmp_path: Path, recorders: Recorders) -> None:
    verified = _verified("mixtral-8x7b")
    write_emitted(tmp_path, emit(verified))
    ran = recorders.run(tmp_path / "run.sh", cwd=Path("/"), MASTER_ADDR="head", NODE_RANK="0")
    assert "MODULE" in ran.stderr
    ran = recorders.start(
        tmp_path / "run.sh",
        cwd=Path("/"),
        MASTER_ADDR="head",
        NODE_RANK="0",
        MODULE="mine",
        CONFIG="mixtral",
    )
    assert ran.only("torchrun")[-4:] == ["--module", "moetune_plan", "--config", "plan"]


OWN: Final = """
from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b
from torchtitan.models.qwen3 import model_registry

def whole(moe_comm_backend, attn_backend):
    config = qwen3_30b_a3b()
    config.model_spec = model_registry("30B-A3B", attn_backend, moe_comm_backend)
    return config

def plain():
    return qwen3_30b_a3b()
"""
PRINTS: Final = """
import contextlib, io, json, os, sys, torch
import moetune_plan
try:
    moetune_plan.plan()
    made = "made"
except SystemExit as error:
    made = str(error)
torch.distributed.set_timeout = None
found = []
for environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        config = moetune_plan.plan()
    for name in environment:
        del os.environ[name]
    spec = config.model_spec
    backend = config.parallelism.spmd_backend
    found.append([backend, spec.flavor, repr(spec.model), errors.getvalue()])
print(json.dumps([made, found]))
"""
"""Every plan in one process, because importing torchtitan takes seconds."""


@pytest.mark.slow
def test_torchtitan_itself_takes_the_plan_and_says_which_torch_it_needs(tmp_path: Path) -> None:
    write_emitted(tmp_path, emit(_verified(dispatcher="deepep")))
    (tmp_path / "own.py").write_text(OWN)
    cases: list[tuple[dict[str, str], str, str]] = [
        ({}, "FlexAttention", ""),
        ({"ATTENTION": "varlen"}, "VarlenAttention", ""),
        ({"MODULE": "own", "CONFIG": "whole", "ATTENTION": "varlen"}, "VarlenAttention", ""),
        (
            {"MODULE": "own", "CONFIG": "plain"},
            "FlexAttention",
            "no moe_comm_backend; the plan has",
        ),
    ]
    environments = json.dumps([environment for environment, *_ in cases])
    said, errors = run_with_torchtitan(tmp_path, PRINTS, environments)
    assert said, errors
    made, found = json.loads(said.splitlines()[-1])
    assert made == "made" or "has no torch.distributed.set_timeout" in made
    for (environment, kernels, warned), (backend, flavor, model, warnings) in zip(
        cases, found, strict=True
    ):
        assert (backend, flavor) == ("spmd_types", "30B-A3B")
        assert kernels in model, environment
        # The plan's dispatcher, where the module takes one.
        assert ("DeepEP" in model) == (not warned), environment
        assert warned in warnings


@pytest.mark.slow
def test_torchtitan_itself_builds_qwen3_5_with_its_vision_tower(tmp_path: Path) -> None:
    verified = _verified("qwen3.5-397b-a17b", dispatcher="deepep")
    write_emitted(tmp_path, emit(verified))
    assert _toml(verified)["parallelism"]["module_fqns_per_model_part"][0][:2] == [
        "vision_encoder",
        "tok_embeddings",
    ]
    said, errors = run_with_torchtitan(tmp_path, PRINTS, json.dumps([{}]))
    assert said, errors
    _, ((_, flavor, model, _),) = json.loads(said.splitlines()[-1])
    assert flavor == "397B-A17B"
    assert "DeepEP" in model
    assert model.count("GatedDeltaNet.Config(") == 45


WORK = Workload(
    model=example_model("tiny-moe"), sequence_length=256, global_batch_size=8, precision="bf16"
)


def test_tensor_ranks_that_would_split_experts_are_not_planned() -> None:
    # torchtitan 0.3.0, models/common/moe_sharding.py: without expert parallelism they do.
    found = enumerate_degrees(
        WORK,
        num_devices=2,
        capabilities=programs(("torchtitan",)).launchable(model=WORK.model, precision="bf16"),
        search=Search(),
    )
    legal = {(degrees.tensor, degrees.expert) for degrees in found.legal}
    assert (2, 2) in legal
    assert (2, 1) not in legal
    assert found.illegal["the target needs expert parallelism beside tensor parallelism"] > 0
    changes = CASES[WHOLE] | {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 1,
        "expert_data_parallel_size": 16,
        "sequence_parallel": True,
    }
    said = refusals(
        TARGETS["torchtitan"],
        model=example_model("qwen3-30b-a3b"),
        decision=sample_decision(**{"zero_stage": 3, "recompute_modules": (), **changes}),
    )
    assert any("needs expert_model_parallel_size above 1" in line for line in said)


def test_another_module_can_start_the_training(tmp_path: Path, recorders: Recorders) -> None:
    write_emitted(tmp_path, emit(_verified()))
    for environment, module in (({}, "torchtitan.train"), ({"TRAIN_FILE": "mine"}, "mine")):
        ran = recorders.start(
            tmp_path / "run.sh", cwd=Path("/"), MASTER_ADDR="head", NODE_RANK="0", **environment
        )
        words = ran.only("torchrun")
        assert words[words.index("-m") + 1] == module


def test_processors_get_neither_a_pipeline_nor_what_their_torch_lacks() -> None:
    able = programs(("torchtitan",)).launchable(
        model=WORK.model, precision="bf16", device_kind="cpu"
    )
    assert not able.pipeline
    assert not able.context_parallel
    assert able.dispatchers == {"alltoall"}
    found = enumerate_degrees(WORK, num_devices=2, capabilities=able, search=Search())
    assert {degrees.pipeline for degrees in found.legal} == {1}
    assert found.illegal["the target has no pipeline parallelism"] > 0
    staged = sample_decision(zero_stage=3)
    said = refusals(able, model=WORK.model, decision=staged)
    assert any("pipeline_model_parallel_size must be 1" in line for line in said)

    plain = _verified("mixtral-8x7b")
    on_processors = changed(plain, {"plan.provenance.device_kind": {"here": "cpu"}})
    for verified, attention, backend in (
        (plain, "flex", "spmd_types"),
        (on_processors, "sdpa", "partial_dtensor"),
    ):
        expected = {"model.attn_backend": attention, "parallelism.spmd_backend": backend}
        assert values_at(_toml(verified), expected) == expected
