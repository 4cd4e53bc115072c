"""Arguments for Megatron-SWIFT: names that it has, adapters, what a default would undo."""

from typing import Any

from tests.rows import each_row
from tests.tuner.engines.testing import changed, sample_decision, sample_verified, texts_of
from tests.tuner.models import example_model
from tuner.config.train import TrainDecision
from tuner.engines.ms_swift.flags import NAMES, OLDER
from tuner.engines.ms_swift.write import emit, settings
from tuner.engines.writers import broken_rules
from tuner.plans.train import VerifiedPlan
from tuner.spec.tune import Adapters


def _verified(model: str, decision: TrainDecision, tune: Adapters | None = None) -> VerifiedPlan:
    verified = sample_verified(example_model(model), decision, emit=("ms-swift",))
    return changed(verified, {"plan.goal.tune": tune or "full"})


def _settings(verified: VerifiedPlan) -> dict[str, str]:
    found = list(settings(verified.plan.model, verified.plan.goal, verified.decision))
    assert len({name for name, _ in found}) == len(found), "a setting is made twice"
    return dict(found)


PLAIN = {"chunks": (1, 1), "pipeline_layout": (24, 24)}


def test_the_script_starts_what_the_command_starts_with_fields_of_the_release() -> None:
    decision = sample_decision(**PLAIN, optimizer_offload=True, gradient_bytes=2)
    found = _settings(_verified("qwen3-30b-a3b", decision))
    assert set(found) <= NAMES - set(OLDER)
    assert found["use_precision_aware_optimizer"] == "true"
    assert found["main_grads_dtype"] == "bf16"
    files = texts_of(emit(_verified("qwen3-30b-a3b", sample_decision(**PLAIN))))
    assert set(files) == {"swift_args.txt", "run.sh"}
    assert '"${LAUNCHER[@]}" -m swift.cli._megatron.sft "${ARGUMENTS[@]}"' in files["run.sh"]


def test_what_it_has_on_by_default_is_written_where_it_is_off() -> None:
    levels = {"recompute": "none", "recompute_modules": (), "stage_recompute": ("none", "none")}
    decision = sample_decision(**PLAIN, **levels, zero_stage=0)
    found = _settings(_verified("qwen3-30b-a3b", decision))
    assert found["use_distributed_optimizer"] == "false"
    assert found["recompute_granularity"] == "none"
    # The price takes the loss of Transformer Engine and one kernel for positions.
    assert (found["cross_entropy_fusion_impl"], found["apply_rope_fusion"]) == ("te", "true")


@each_row(
    ("targets", "said"),
    (
        (("all-linear",), "all-linear"),
        (("q_proj", "k_proj", "v_proj", "o_proj"), "linear_qkv linear_proj"),
        (("experts",), "linear_fc1 linear_fc2"),
    ),
)
def test_adapters_are_named_by_the_layers_that_hold_them(targets: Any, said: str) -> None:
    decision = sample_decision(**PLAIN)
    tune = Adapters(method="lora", rank=8, alpha=32.0, targets=targets, dtype="bf16")
    found = _settings(_verified("qwen3-30b-a3b", decision, tune))
    assert (found["tuner_type"], found["target_modules"]) == ("lora", said), (
        targets,
        found["target_modules"],
    )


def test_split_experts_with_adapters_and_graphs_are_refused() -> None:
    tune = Adapters(method="lora", rank=8, targets=("all-linear",), dtype="bf16")
    split = sample_decision(
        **PLAIN,
        tensor_model_parallel_size=2,
        data_parallel_size=4,
        expert_tensor_parallel_size=2,
        expert_model_parallel_size=4,
        sequence_parallel=True,
    )
    for decision, own in ((split, tune), (sample_decision(**PLAIN, cuda_graph="partial"), None)):
        verified = _verified("qwen3-30b-a3b", decision, own)
        assert broken_rules("ms-swift", verified.plan, decision)
    assert not broken_rules("ms-swift", _verified("qwen3-30b-a3b", split).plan, split)
