from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.expect import refused
from tests.rows import Failures, each_row
from tuner.engines.reading.programs import refuse_unread, unread_command
from tuner.errors import SpecError
from tuner.estimate.registry import read_launch

COMMANDS: Mapping[str, str] = {
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm": "verl",
    "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --zero_stage 3": "OpenRLHF",
    "uv run examples/run_grpo_math.py --config c.yaml": "NeMo-RL",
    "python3 train.py --actor-num-nodes 1 --rollout-num-gpus 8": "slime",
    "nemo llm pretrain --factory llama3_8b": "NeMo",
    "python megatron_gpt_pretraining.py model.tensor_model_parallel_size=8": "NeMo",
    "automodel finetune llm -c x.yaml": "NeMo AutoModel",
    "torchrun pretrain_gpt.py --use-mc2 --tensor-model-parallel-size 8": "MindSpeed",
    "deepspeed pretrain_gpt.py --num-layers 2 --deepspeed-activation-checkpointing": (
        "Megatron-DeepSpeed"
    ),
    "accelerate launch -m axolotl.cli.train cfg.yml": "Axolotl",
    "litgpt finetune_lora m --devices 8": "LitGPT",
    "colossalai run --nproc_per_node 8 train.py": "Colossal-AI",
    "NPROC_PER_NODE=8 xtuner train x.py --deepspeed deepspeed_zero3": "XTuner",
    "python3 -m MaxText.train MaxText/configs/base.yml": "MaxText",
    "composer train/train.py yamls/mpt-7b.yaml": "llm-foundry",
    "tune run --nproc_per_node 4 full_finetune_distributed --config c": "torchtune",
    "bash run_mcore_qwen3.sh dsw A3B 1 8": "Pai-Megatron-Patch's wrapper",
    "trtllm-bench --model m throughput --tp 8": "trtllm-bench",
    "vllm bench latency --model m --tensor-parallel-size 8": "vllm bench",
    "python3 -m sglang.bench_one_batch --model-path m --tp 8": "SGLang's benchmark",
    "ollama run deepseek-r1:671b": "Ollama",
    "./build/bin/llama-server -m x.gguf -ngl 99": "llama.cpp",
    "python ktransformers/server/main.py --model_path x": "KTransformers",
    "python -m sglang.launch_server --model m --kt-num-gpu-experts 8": "KTransformers",
    "lmdeploy serve api_server m --tp 8": "LMDeploy",
    "python -m atom.entrypoints.openai_server --model m": "ATOM",
    "torchrun --nproc_per_node 8 train_fsdp2.py config.yaml": "MindSpeed",
    "text-generation-launcher --model-id m --num-shard 4": "Text Generation Inference",
    "python -m lightllm.server.api_server --tp 8": "LightLLM",
    "mistralrs serve -m x": "mistral.rs",
    "python3 /opt/NeMo-RL/examples/llm/run_dpo.py": "NeMo-RL",
    "bash scripts/training/train.sh --recipe llama3_8b": "a recipe of Megatron-Bridge",
    "srun -N 2 litgpt pretrain m": "LitGPT",
    "docker run --gpus all ollama/ollama": "Ollama",
    "deepspeed /w/Megatron-DeepSpeed/pretrain_gpt.py --num-layers 2": "Megatron-DeepSpeed",
    "cd /workspace/slime && python3 -m verl.trainer.main_ppo x=1": "verl",
}
BESIDE = (
    "conda activate verl",
    "cd /workspace/slime",
    "pip install unsloth",
    "sudo pip install unsloth",
    "uv pip install vllm verl",
    "echo verl",
    "cp run_train.py /x",
    "git clone https://github.com/OpenRLHF/OpenRLHF",
    "docker pull ollama/ollama",
    "source slime/bin/activate",
    "export PYTHONPATH=/w/MindSpeed",
    "composer install",
    "mkdir -p /runs/axolotl",
)
"""Commands beside a launch that only mention a program."""
FILES: Mapping[str, str] = {
    "actor_rollout_ref:\n  model: {path: m}\n": "verl",
    "base_model: m\nsequence_len: 4096\n": "Axolotl",
    "policy:\n  megatron_cfg: {enabled: true}\n": "NeMo-RL",
    "from unsloth import FastLanguageModel\n": "Unsloth",
    "import nemo_run as run\n": "NeMo",
    "distributed_type: FSDP\nnum_processes: 8\n": "accelerate's file",
    "parallelism:\n  dp: 2\n  pp_engine: 1f1b\n": "Nanotron",
}
READ = (
    "vllm serve m --tensor-parallel-size 8",
    "python -m sglang.launch_server --model m --tp 8",
    "trtllm-serve m --tp_size 8",
    "torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1",
    "torchrun -m torchtitan.train --module llama3 --config llama3_8b",
    "swift sft --deepspeed zero2 --output_dir /data/verl/run",
    "llamafactory-cli train x.yaml",
    "vllm serve unsloth/Qwen3 --tensor-parallel-size 8",
    "torchrun /data/nanotron/pretrain_gpt.py --tensor-model-parallel-size 2",
    "docker run --gpus all verlai/verl:latest torchrun pretrain_gpt.py --num-layers 2",
    "ollama pull m\nvllm serve m",
)


def test_programs_are_recognised_by_their_commands_and_files(failures: Failures) -> None:
    for texts, is_file in ((COMMANDS, False), (FILES, True)):
        for text, name in texts.items():
            with failures.of(text), pytest.raises(SpecError) as refusal:
                refuse_unread(text, source="run.sh", is_file=is_file)
            with failures.of(name):
                assert str(refusal.value).startswith(f"run.sh: {name} is not read; ")
    for text in READ:
        with failures.of(text):
            refuse_unread(text, source="run.sh")
            refuse_unread(f"{text}\nvllm bench serve --model m", source="run.sh")


@each_row("beside", BESIDE)
def test_commands_beside_a_launch_do_not_refuse_it(beside: Any) -> None:
    assert unread_command(beside.split()) is None
    for joint in ("\n", " && "):
        for read in READ:
            refuse_unread(f"{beside}{joint}{read}", source="run.sh")


def test_estimate_names_the_program_or_the_script(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for command, name in COMMANDS.items():
        script.write_text(command)
        for launch in (command, str(script)):
            with refused(SpecError, "is not read; ", name):
                read_launch(launch)
    for command in (
        "torchrun --nproc_per_node 8 my_train.py --bf16",
        "accelerate launch my_train.py",
    ):
        script.write_text(command)
        for launch in (command, str(script)):
            with pytest.raises(SpecError, match="which is no program whose launches"):
                read_launch(launch)
    for number, text in enumerate(FILES):
        suffix = ".py" if "import" in text else ".yaml"
        path = tmp_path / f"{number}{suffix}"
        path.write_text(text)
        with pytest.raises(SpecError, match="is not read; "):
            read_launch(str(path))
