"""Launches of verl and NeMo-RL as described steps, and what is refused of them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tuner.models import example_model
from tuner.costs.rl.packing import PackingRule
from tuner.engines.reading.rl_launch import RlLaunch, mistakes
from tuner.errors import SpecError
from tuner.estimate.rl.registry import read_rl_launch
from tuner.simulate.rl.step import RlPlacement

VERL = (
    "python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo"
    " actor_rollout_ref.actor.use_dynamic_bsz=True"
)


def test_a_script_of_verl_is_read_with_its_defaults(launches: Path) -> None:
    launch = read_rl_launch(str(launches / "verl.sh"))
    assert launch.framework == "verl 0.9"
    assert (launch.placement, launch.versions) == (RlPlacement.COLOCATED, 0.0)
    assert (launch.prompts, launch.samples, launch.samples_per_update) == (128, 8, 512)
    assert (launch.longest_prompt, launch.longest_response) == (1024, 3072)
    assert (launch.devices, launch.rollout_devices) == (32, 32)
    trainer = launch.trainer
    assert (trainer.tensor, trainer.expert, trainer.expert_tensor) == (2, 8, 1)
    assert (trainer.optimizer_offload_ratio, trainer.recompute_layers) == (0.5, 1)
    assert trainer.sequence_parallel
    assert trainer.gradient_bytes == 4
    assert launch.train_budget.rule is PackingRule.BALANCED
    assert launch.train_budget.size == launch.forward_budget.size == 4096
    # Old and reference log-probabilities; GRPO has no critic.
    assert (launch.forwards, launch.has_critic) == (2, False)
    assert launch.most_running == 256
    assert launch.offloads_reference
    assert "data.train_files = null" not in launch.ignored


def test_a_recipe_of_nemo_rl_is_read_over_its_defaults(launches: Path) -> None:
    launch = read_rl_launch(str(launches / "nemo_rl.yaml"))
    assert launch.framework == "NeMo-RL 0.7"
    assert (launch.placement, launch.versions) == (RlPlacement.DISAGGREGATED, 1.0)
    assert (launch.trainer.devices, launch.rollout_devices, launch.devices) == (16, 16, 32)
    assert (launch.prompts, launch.samples, launch.samples_per_update) == (64, 16, 512)
    assert (launch.train_budget.size, launch.forward_budget.size) == (4096, 8192)
    assert launch.train_budget.rule is PackingRule.FIRST_FIT
    assert (launch.trainer.pipeline, launch.trainer.expert, launch.trainer.recompute_layers) == (
        2,
        8,
        1,
    )
    assert launch.trainer.gradient_bytes == 2
    assert (launch.degrees.attention_tensor, launch.memory_ratio) == (2, 0.8)
    # A penalty of 0.01 is the default.
    assert launch.has_reference
    assert not launch.offloads_weights


def test_a_command_of_nemo_rl_names_its_configuration(launches: Path, tmp_path: Path) -> None:
    config = launches / "base.yaml"
    script = tmp_path / "run.sh"
    (tmp_path / "base.yaml").write_text(config.read_text())
    script.write_text(
        "uv run examples/run_grpo.py --config base.yaml grpo.num_prompts_per_step=32"
        " loss_fn.reference_policy_kl_penalty=0\n"
    )
    launch = read_rl_launch(str(script))
    assert (launch.prompts, launch.has_reference) == (32, False)
    assert (launch.placement, launch.offloads_optimizer) == (RlPlacement.COLOCATED, True)
    script.write_text("uv run examples/run_grpo.py --config absent.yaml\n")
    with pytest.raises(SpecError, match="is not beside it"):
        read_rl_launch(str(script))


def test_a_configuration_of_verl_is_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "data: {train_batch_size: 64}\n"
        "algorithm: {adv_estimator: gae}\n"
        "critic: {enable: null}\n"
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    strategy: megatron\n"
        "    use_dynamic_bsz: true\n"
        "    ppo_mini_batch_size: 32\n"
        "    megatron: {tensor_model_parallel_size: 4}\n"
        "  rollout:\n"
        "    n: 4\n"
        "    log_prob_use_dynamic_bsz:"
        " ${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 8}\n"
    )
    launch = read_rl_launch(str(file))
    assert (launch.samples_per_update, launch.trainer.tensor) == (128, 4)
    assert launch.forward_budget.rule is PackingRule.BALANCED
    # GAE needs values: old log-probabilities and values, no reference.
    assert (launch.has_critic, launch.has_reference, launch.forwards) == (True, False, 2)


def test_a_split_of_verl_has_devices_of_its_own() -> None:
    launch = read_rl_launch(
        f"{VERL} trainer.v1.trainer_mode=separate_async trainer.nnodes=2"
        " data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256"
        " actor_rollout_ref.rollout.nnodes=1"
        " actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
    )
    assert (launch.placement, launch.versions) == (RlPlacement.DISAGGREGATED, 1.0)
    assert (launch.trainer.devices, launch.rollout_devices) == (16, 8)


REFUSED: dict[str, Callable[[], str]] = {
    "PPO .* without critic": lambda: VERL.replace("=grpo", "=gae critic.enable=False"),
    "trainers other than megatron": lambda: VERL.replace("=megatron", "=fsdp"),
    "colocate_async is not covered": lambda: f"{VERL} trainer.v1.trainer_mode=colocate_async",
    "is not parameter_sync_step 4": lambda: (
        f"{VERL} trainer.v1.trainer_mode=separate_async data.train_batch_size=64"
        " actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
    ),
    "has no naive": lambda: f"{VERL} trainer.v1.trainer_mode=separate_async",
    "is missing; without it": lambda: VERL.replace("use_dynamic_bsz=True", "use_dynamic_bsz=False"),
    "max_model_len 'long' is not a whole": lambda: (
        f"{VERL} actor_rollout_ref.rollout.max_model_len=long"
    ),
    "optimizer-offload-fraction": lambda: (
        f"{VERL} +actor_rollout_ref.actor.optim.override_optimizer_config"
        ".optimizer_offload_fraction=2"
        " +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True"
    ),
    "no share above 0": lambda: f"{VERL} actor_rollout_ref.rollout.gpu_memory_utilization=60",
    "is not a whole number": lambda: f"{VERL} data.train_batch_size=many",
    "no launch of reinforcement learning": lambda: "vllm serve model",
}


def test_what_is_not_covered_is_refused_in_a_line() -> None:
    wrong = []
    for words, command in REFUSED.items():
        try:
            read_rl_launch(command())
            wrong.append((words, "read"))
        except SpecError as error:
            if not re.search(words, str(error)) or "\n" in str(error):
                wrong.append((words, str(error)))
    assert not wrong


def test_nemo_rl_refuses_what_is_not_covered(launches: Path, tmp_path: Path) -> None:
    base = (launches / "base.yaml").read_text()
    wrong = []
    for old, new, words in (
        ("grpo:", "ppo:", "ppo without critic"),
        ("backend: vllm", "backend: dynamo", "dynamo' is not covered"),
        ("    enabled: true\n    tensor", "    enabled: false\n    tensor", "trainers other than"),
        ("grpo:", "grpo:\n  use_dynamic_sampling: true", "discarded"),
        ("grpo:", "grpo:\n  async_grpo: {enabled: true}", "needs devices of its own"),
    ):
        file = tmp_path / "run.yaml"
        file.write_text(base.replace(old, new, 1))
        try:
            read_rl_launch(str(file))
            wrong.append((words, "read"))
        except SpecError as error:
            if words not in str(error):
                wrong.append((words, str(error)))
    assert not wrong


def mistakes_of(more: str) -> list[str]:
    launch: RlLaunch = read_rl_launch(f"{VERL} {more}")
    return [*mistakes(launch, example_model("qwen3-30b-a3b"))]


def test_mistakes_name_the_value_the_rule_and_the_nearest_that_works() -> None:
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    wrong = []
    for more, words in (
        (f"data.train_batch_size=32 {actor}ppo_mini_batch_size=64", "is more than"),
        (
            f"data.train_batch_size=100 {actor}ppo_mini_batch_size=64 {rollout}n=2",
            "not divisible by the 128 of an update",
        ),
        (
            f"data.train_batch_size=6 {actor}ppo_mini_batch_size=6 trainer.nnodes=1",
            "not divisible by 8 data-parallel ranks; the nearest multiple is 8",
        ),
        ("data.max_response_length=100000", "exceed the 40960 positions"),
        (f"data.max_response_length=3000 {rollout}max_model_len=2048", "exceed"),
        (f"{rollout}tensor_model_parallel_size=3", "3 does not divide 32 heads"),
        (f"{rollout}tensor_model_parallel_size=16", "not divisible by the 16 of an engine"),
        ("data.train_batch_size=131072", "more than the 65536 of a step"),
    ):
        found = mistakes_of(more)
        if not any(words in reason for reason in found):
            wrong.append((more, found))
    assert not wrong
    assert not mistakes_of("")
