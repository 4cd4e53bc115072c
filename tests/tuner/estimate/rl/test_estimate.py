"""Estimates of launches of reinforcement learning."""

import json
from pathlib import Path

import pytest

from tests.tuner.cli.refusals import Captured, output, refusal
from tests.tuner.models import MODELS
from tuner.estimate.rl.records import RlEstimate
from tuner.goals.estimate import estimate_rl


@pytest.fixture(scope="module")
def colocated(rl_spec: Path, launches: Path) -> RlEstimate:
    return estimate_rl(rl_spec, launch=str(launches / "verl.sh"))


@pytest.fixture(scope="module")
def split(rl_spec: Path, launches: Path) -> RlEstimate:
    return estimate_rl(rl_spec, launch=str(launches / "nemo_rl.yaml"))


def test_phases_of_a_colocated_step_add_up(colocated: RlEstimate) -> None:
    assert colocated.step_time_s == pytest.approx(sum(colocated.phases_s.values()))
    low, high = colocated.step_time_s_band
    assert low < colocated.step_time_s < high
    assert colocated.bound in colocated.phases_s
    assert colocated.samples == 1024
    assert colocated.updates == 2


def test_the_slower_side_bounds_a_split_and_the_other_idles(split: RlEstimate) -> None:
    trainer_s = split.phases_s["forward"] + split.phases_s["train"]
    slower = max(trainer_s, split.phases_s["rollout"])
    assert split.step_time_s == pytest.approx(slower + split.phases_s["sync"])
    busiest = "train" if trainer_s > split.phases_s["rollout"] else "rollout"
    assert split.bound == busiest
    assert split.idle_ratio[busiest] < 0.3
    assert max(split.idle_ratio.values()) > split.idle_ratio[busiest]


def test_memory_has_three_moments_and_a_host(colocated: RlEstimate, split: RlEstimate) -> None:
    assert set(colocated.device_memory) == {"rollout", "train", "switch"}
    # Offloaded weights leave the rollout to the engine; the switch holds both.
    assert "trainer's weights" not in colocated.device_memory["rollout"]
    switch = colocated.device_memory["switch"]
    assert {"trainer's weights", "engine's weights", "buffer"} <= set(switch)
    assert "KV cache" not in switch
    assert colocated.host_memory is not None
    assert {"optimizer state and gradients", "reference"} <= set(colocated.host_memory.parts)
    assert "KV cache" not in split.device_memory["train"]


def test_changes_gain_and_fit(colocated: RlEstimate) -> None:
    assert colocated.fits
    gains = [change.gain_ratio for change in colocated.changes]
    assert gains == sorted(gains, reverse=True)
    assert all(gain >= 0.02 for gain in gains)
    assert colocated.num_tried > 8
    if colocated.changes:
        assert colocated.smallest_change == colocated.changes[0]
        assert all("=" in line for line in colocated.changes[0].lines)


V3 = """\
python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo \
 data.train_batch_size=96 data.max_prompt_length=2048 data.max_response_length=8192 \
 actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_mini_batch_size=32 \
 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240 actor_rollout_ref.actor.use_kl_loss=True \
 actor_rollout_ref.actor.megatron.param_offload=True \
 actor_rollout_ref.actor.megatron.optimizer_offload=True \
 actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
 +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1.0 \
 +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True \
 +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
 +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
 +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
 actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.enforce_eager=True \
"""
MINIMA = {
    "deepseek-v3": (
        12,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8"
        " actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=12"
        " actor_rollout_ref.actor.megatron.expert_model_parallel_size=8"
        " +actor_rollout_ref.actor.megatron.override_transformer_config"
        ".num_layers_in_last_pipeline_stage=6"
        " actor_rollout_ref.rollout.tensor_model_parallel_size=32"
        " actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    ),
    "qwen3-235b-a22b": (
        4,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
        " actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8"
        " actor_rollout_ref.actor.megatron.expert_model_parallel_size=4"
        " +actor_rollout_ref.actor.megatron.override_transformer_config"
        ".num_layers_in_first_pipeline_stage=11"
        " +actor_rollout_ref.actor.megatron.override_transformer_config"
        ".num_layers_in_last_pipeline_stage=11"
        " actor_rollout_ref.rollout.tensor_model_parallel_size=8"
        " actor_rollout_ref.rollout.gpu_memory_utilization=0.75",
    ),
}
"""Fewest nodes of eight H20 of 96 GB that verl publishes, with 1.5 to 1.6 TB of host memory
(docs/perf/dpsk.md)."""


def h20_spec(folder: Path, model: str, *, nodes: int, memory: str) -> Path:
    path = folder / f"{model}-{memory}.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / model}\n"
        "cluster:\n"
        f"  pools: [{{name: h20, device: h20-sxm, nodes: {nodes}, devices_per_node: 8,"
        f" host: {{memory: {memory}}}}}]\n"
        "goal:\n"
        "  kind: rl\n"
        "  prompt_tokens: 200\n"
        "  response_tokens: {kind: lognormal, mean: 2000, cv: 0.8}\n"
    )
    return path


@pytest.mark.parametrize("model", MINIMA)
def test_published_minima_fit_with_their_host_memory_and_not_with_less(
    tmp_path: Path, model: str
) -> None:
    nodes, layout = MINIMA[model]
    launch = f"{V3} {layout} trainer.nnodes={nodes}"
    for memory, fits in (("1.5TB", True), ("1.6TB", True), ("1TB", False)):
        spec = h20_spec(tmp_path, model, nodes=nodes, memory=memory)
        estimate = estimate_rl(spec, launch=launch)
        assert estimate.fits == fits, (memory, estimate.misfits)
        if not fits:
            assert all(reason.startswith("host:") for reason in estimate.misfits)


def test_the_published_step_of_the_largest_is_near(tmp_path: Path) -> None:
    """On 96 H20 a rollout takes 1,050 s and a step 1,700 s with 1,960 tokens a response."""
    nodes, layout = MINIMA["deepseek-v3"]
    spec = h20_spec(tmp_path, "deepseek-v3", nodes=nodes, memory="1.5TB")
    estimate = estimate_rl(spec, launch=f"{V3} {layout} trainer.nnodes={nodes}")
    assert estimate.phases_s["rollout"] == pytest.approx(1050.0, rel=0.25)
    assert estimate.step_time_s == pytest.approx(1700.0, rel=0.25)
    train = sum(estimate.device_memory["train"].values())
    assert train == pytest.approx(66e9, rel=0.2)


def test_a_person_reads_phases_memory_and_what_to_change(
    rl_spec: Path, launches: Path, capsys: Captured, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    log.write_text("step:1 - timing_s/gen:900.0 - timing_s/step:1000.0\n" * 3)
    command = ["estimate", rl_spec, "--launch", launches / "verl.sh", "--log", log]
    text = output(capsys, command, code=0)
    for words in ("seconds by phase", "switch", "host memory", "slower than the machine explains"):
        assert words in text
    found = json.loads(output(capsys, [*command, "--json"], code=0))
    assert {timer["phase"] for timer in found["timers"] if timer["is_off"]} >= {"rollout"}
    assert found["timed_steps"] == 3


def test_only_estimates_take_the_goal(
    rl_spec: Path, launches: Path, capsys: Captured, tmp_path: Path
) -> None:
    said = refusal(capsys, ["plan", rl_spec, "-o", tmp_path / "plan"])
    assert "goal.kind: 'rl' is not planned" in said
    missing = tmp_path / "absent.log"
    command = ["estimate", rl_spec, "--launch", launches / "verl.sh"]
    assert "absent.log" in refusal(capsys, [*command, "--log", missing])
    assert "--profile" in refusal(capsys, [*command, "--profile", tmp_path])
    launch = "python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo"
    said = refusal(
        capsys,
        [
            *("estimate", rl_spec, "--launch"),
            f"{launch} actor_rollout_ref.actor.use_dynamic_bsz=True trainer.nnodes=8",
        ],
    )
    assert "64 devices" in said
