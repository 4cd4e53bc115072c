"""What is written and what is planned for Megatron-LM where the profile is of processors."""

from pathlib import Path

import pytest

from tests.expect import present
from tests.tuner.engines.testing import sample_decision, sample_verified
from tuner import api
from tuner.engines.targets import TARGETS, programs
from tuner.engines.writers import broken_rules, emit
from tuner.plans.train import Plan
from tuner.spec.huggingface.read import read_model

CHECKOUT = Path(__file__).parents[3]
MODEL = CHECKOUT / "examples" / "models" / "tiny-moe" / "config.json"
PROFILE = CHECKOUT / "examples" / "profiles" / "epyc-deepspeed" / "profile"
LAYOUT = {"pipeline_layout": (2, 2), "stage_recompute": ("none", "none"), "chunks": (1, 1)}


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_arguments_name_what_runs_on_the_device(device_kind: str) -> None:
    verified = sample_verified(
        read_model(MODEL),
        sample_decision(**LAYOUT),
        emit=("megatron-lm",),
        device_kind=device_kind,
        sequence_length=256,
        waived="a test",
    )
    text = {file.path.name: file.text for file in emit("megatron-lm", verified)}
    lines, on_cpu = text["megatron_args.txt"].splitlines(), device_kind == "cpu"
    for line in (
        "--transformer-impl local",
        "--distributed-backend gloo",
        "--no-rope-fusion",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-bias-swiglu-fusion",
        "--no-persist-layer-norm",
    ):
        assert (line in lines) == on_cpu, line
    for line in ("--moe-grouped-gemm", "--moe-permute-fusion"):
        assert (line in lines) != on_cpu, line
    assert ("TORCHDYNAMO_DISABLE" in text["run.sh"]) == on_cpu


def test_what_needs_cuda_is_refused_on_processors_alone() -> None:
    model, wrong = read_model(MODEL), []
    for changes in (
        {"context_parallel_size": 2, "data_parallel_size": 4},
        {"dispatcher": "deepep"},
        {"cuda_graph": "partial"},
        {"activation_offload": True},
    ):
        decision = sample_decision(**LAYOUT, **changes)
        refused = {
            kind: broken_rules("megatron-lm", _plan(device_kind=kind), decision)
            for kind in ("cpu", "cuda")
        }
        if not set(refused["cpu"]) - set(refused["cuda"]):
            wrong.append((changes, refused))
    assert not wrong
    assert model.moe is not None
    assert TARGETS["megatron-lm"] == programs(["megatron-lm"]).capabilities()
    assert not programs(["megatron-lm"]).capabilities(device_kind="cpu").context_parallel


def test_a_profile_of_processors_is_planned_within_their_limits(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"""
schema_version: 1
model: {MODEL}
cluster: {{pools: [{{name: here, profile: {PROFILE}, nodes: 1, devices_per_node: 2}}]}}
goal: {{kind: train, sequence_length: 256, global_batch_size: 16, precision: bf16}}
search: {{micro_batch_size: [4]}}
emit: [megatron-lm]
""",
        encoding="utf-8",
    )
    made = api.plan(spec, with_unlaunchable=False)
    api.write(tmp_path / "plan", made)
    assert isinstance(made.plan, Plan)
    assert not broken_rules("megatron-lm", made.plan, present(made.plan.decision))
    written = tmp_path / "plan" / "launch" / "megatron-lm" / "megatron_args.txt"
    assert "--transformer-impl local\n" in written.read_text(encoding="utf-8")


def _plan(*, device_kind: str) -> Plan:
    return sample_verified(
        read_model(MODEL),
        sample_decision(**LAYOUT),
        emit=("megatron-lm",),
        device_kind=device_kind,
    ).plan
