"""Programs whose launches are not read: how each is recognised, and what to give instead.

A command is recognised by the words that name its program (the first words, what `-m` names, its
script) or by flags that no other program has; a file of settings by keys of its own. The names are
those of the projects' own documentation and console scripts.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tuner.engines.reading.shell_words import shell_text
from tuner.errors import SpecError
from tuner.spec.files import shown_value


class UnreadProgram(NamedTuple):
    """A program that is recognised by name."""

    name: str
    instead: str
    """What to give in its place."""
    starts: str = ""
    """Pattern of the words that name the program, joined by spaces."""
    flags: str = ""
    """Pattern of one flag, without its dashes and with `_` for `-`."""
    text: str = ""
    """Pattern of a file of settings, or of a program in Python."""


_FLAGS: Final = "give its parallelism and batch as Megatron-LM's flags"
_ACTOR: Final = "give the parallelism and batch of the trained model as Megatron-LM's flags"
_JSON: Final = "give the DeepSpeed JSON of each model, with its batch sizes as numbers"
_TRAINER: Final = (
    "give its batch, length and sharding as a command of Transformers' Trainer, e.g. torchrun "
    "train.py --per_device_train_batch_size 1 --deepspeed zero3.json"
)
_TITAN: Final = "it shards by FSDP2: give a torchtitan TOML with its degrees and batch"
_MEASURED: Final = (
    "give the command of the server that it measures: vllm serve, sglang.launch_server or "
    "trtllm-serve"
)
_SERVER: Final = (
    "its engine is not modelled; give the command of vLLM, SGLang or TensorRT-LLM for the model"
)
_MINDSPEED: Final = "|".join(
    (
        "use_mc2",
        "use_ascend_(mc2|coc)",
        "use_fused_(swiglu|rotary_pos_emb|moe_token_permute_and_unpermute)",
        "use_cp_send_recv_overlap",
        "moe_(fb_overlap|zerc|alltoall_overlap_comm|allgather_overlap_comm)",
        "swap_attention|ampipe_degree|reuse_fp32_param|schedules_method|noop_layers",
    )
)

_TRAINING: Final = (
    UnreadProgram(
        "verl",
        f"{_ACTOR}, or the rollout's engine as its server's command",
        starts=r"\bverl\b|\bmain_(ppo|grpo|dapo|gspo)\b|fsdp_sft_trainer",
        flags=r"actor_rollout_ref\..*",
        text=r"^actor_rollout_ref:",
    ),
    UnreadProgram("OpenRLHF", _JSON, starts=r"\bopenrlhf\b"),
    UnreadProgram(
        "NeMo-RL",
        "give policy.megatron_cfg as Megatron-LM's flags",
        starts=r"\bnemo_rl\b|(?<!\S)examples/(\w+/)?run_(grpo|dpo|sft|rm|distillation)\w*\.py",
        text=r"^policy:(?=[\s\S]*^\s+(megatron_cfg|dtensor_cfg):)",
    ),
    UnreadProgram(
        "slime",
        _ACTOR,
        starts=r"\bslime\b",
        flags=r"rollout_num_gpus(_per_engine)?|actor_num_(nodes|gpus_per_node)",
    ),
    UnreadProgram(
        "ROLL, AReaL or SkyRL",
        _ACTOR,
        starts=r"\b(areal|skyrl_train|roll)\.|start_rlvr_pipeline|\brealhf\b",
    ),
    UnreadProgram(
        "NeMo",
        f"{_FLAGS} (model.tensor_model_parallel_size is --tensor-model-parallel-size), or a "
        "Megatron-Bridge file",
        starts=r"\bnemo (llm|run)\b|\bnemo_?run\b|megatron_\w+_(pretraining|finetuning)"
        r"|\bnemo_launcher\b",
        text=r"from nemo\.collections|import nemo_run|^exp_manager:",
    ),
    UnreadProgram(
        "NeMo AutoModel",
        _TITAN,
        starts=r"(?<!\S)automodel\b|\bnemo_automodel\b",
        text=r"_target_:\s*nemo_automodel",
    ),
    UnreadProgram(
        "MindSpeed",
        f"{_FLAGS} alone: how its own change memory is not known",
        starts=r"\bmindspeed(_\w+)?\b|posttrain_gpt\.py|pretrain_(vlm|sora)\w*\.py",
        flags=_MINDSPEED,
    ),
    UnreadProgram(
        "Megatron-DeepSpeed",
        f"{_FLAGS} of today, or the DeepSpeed JSON alone where it is ZeRO without them",
        starts=r"\bmegatron[-_]deepspeed\b",
        flags=r"deepspeed_activation_checkpointing|no_pipeline_parallel|moe_expert_parallel_size"
        r"|ds_sequence_parallel_size",
    ),
    UnreadProgram("DeepSpeed-Chat", _JSON, flags=r"(actor|critic)_zero_stage"),
    UnreadProgram(
        "Axolotl",
        f"micro_batch_size is per_device_train_batch_size, sequence_len max_length: {_TRAINER}",
        starts=r"\baxolotl\b",
        text=r"^base_model:(?=[\s\S]*^(sequence_len|micro_batch_size|datasets):)",
    ),
    UnreadProgram(
        "Unsloth",
        "it replaces Transformers' layers on one device: plan with emit: transformers-peft",
        starts=r"\bunsloth\b",
        text=r"^\s*(from|import) unsloth\b",
    ),
    UnreadProgram(
        "LitGPT",
        _TRAINER,
        starts=r"\blitgpt\b",
        text=r"^checkpoint_dir:(?=[\s\S]*^(train|precision|devices):)",
    ),
    UnreadProgram("Colossal-AI", _FLAGS, starts=r"\bcolossalai\b|\bcoati\b"),
    UnreadProgram("XTuner", _TRAINER, starts=r"\bxtuner\b", text=r"^\s*(from|import) xtuner\b"),
    UnreadProgram(
        "Nanotron",
        _FLAGS,
        starts=r"\bnanotron\b|(?<!\S)(\S*/)?run_train\.py",
        text=r"^parallelism:(?=[\s\S]*^\s+(pp_engine|expert_parallel_size|dp):)",
    ),
    UnreadProgram(
        "MaxText",
        "it runs JAX, which no engine here stands for: plan with emit: megatron-lm",
        starts=r"\bmaxtext\b",
        text=r"^(ici|dcn)_\w+_parallelism:",
    ),
    UnreadProgram(
        "llm-foundry",
        _TRAINER,
        starts=r"(?<!\S)composer\b|\bllm[-_]?foundry\b",
        text=r"^(device_train_microbatch_size|global_train_batch_size):",
    ),
    UnreadProgram(
        "torchtune",
        _TITAN,
        starts=r"(?<!\S)tune (run|cp)\b|\btorchtune\b",
        text=r"_component_:\s*torchtune",
    ),
    UnreadProgram(
        "Pai-Megatron-Patch's wrapper",
        "give the torchrun command that it prints, whose flags are Megatron-LM's",
        starts=r"run_mcore_\w+\.sh",
    ),
    UnreadProgram(
        "LLaMA-Factory's v1",
        "give the YAML of llamafactory-cli without USE_V1",
        text=r"^(dist_config|model_class|train_dataset|init_config):",
    ),
    UnreadProgram(
        "accelerate's file",
        "it holds no batch: give the accelerate launch command that names it, the file beside it",
        text=r"^distributed_type:(?=[\s\S]*^(num_processes|mixed_precision):)",
    ),
    UnreadProgram(
        "fairseq, Levanter or GPT-NeoX", _FLAGS, starts=r"\bfairseq|\blevanter\b|(?<!\S)deepy\.py"
    ),
)
_MEASURING: Final = {
    "trtllm-bench": r"\btrtllm-(bench|build)\b",
    "vllm bench": r"\bvllm (bench|chat|complete|run-batch)\b"
    r"|\bbenchmark_(serving|throughput|latency)\.py",
    "SGLang's benchmark": r"\bsglang\.bench\w*",
    "a load generator": r"(?<!\S)(genai-perf|aiperf|guidellm|inference-perf|evalscope|locust)\b",
    "Ray Serve": r"(?<!\S)serve (run|deploy)\b",
    "Xinference or FastChat": r"\bxinference\b|\bfastchat\.serve\b",
    "Triton Inference Server": r"\btritonserver\b|\blaunch_triton_server\b",
}
_SERVERS: Final = {
    "Ollama": r"(?<!\S)(\S*/)?ollama\b",
    "llama.cpp": r"\bllama-(server|cli|bench|run)\b|\bllama_cpp\b|(?<!\S)(\S*/)?koboldcpp",
    "KTransformers": r"\bktransformers\b|\bkt[-_]kernel\b",
    "LMDeploy": r"\blmdeploy\b",
    "Text Generation Inference": r"\btext-generation-(launcher|server|inference)\b",
    "MLC LLM": r"\bmlc_llm\b",
    "MLX": r"\bmlx_(lm|vlm)\b",
    "mistral.rs": r"\bmistralrs(-\w+)?\b|\bmistral\.rs\b",
    "LightLLM": r"\blightllm\b",
    "DeepSpeed-MII": r"(?<!\S)mii(\.\w+)*\b",
    "Aphrodite": r"\baphrodite\b",
}
PROGRAMS: Final = (
    *_TRAINING,
    *(UnreadProgram(name, _MEASURED, starts=starts) for name, starts in _MEASURING.items()),
    *(UnreadProgram(name, _SERVER, starts=starts) for name, starts in _SERVERS.items()),
)
"""Programs of training and serving."""
_LAUNCHERS: Final = frozenset({"torchrun", "accelerate", "deepspeed", "python", "python3"})
_MOST: Final = 8
"""First words of a command that may name its program."""
_OF_MEGATRON: Final = re.compile(
    r"--(micro[-_]batch[-_]size|num[-_]layers|tensor[-_]model[-_]parallel)|pretrain_gpt"
)


def unread_command(
    words: Sequence[str], programs: Iterable[UnreadProgram] = PROGRAMS
) -> UnreadProgram | None:
    """Return the program that a command starts, where it is one that is not read."""
    named = " ".join(_naming_words(words)).lower()
    flags = [
        word.lstrip("-+").partition("=")[0].replace("-", "_")
        for word in words
        if word.startswith("--") or re.match(r"\+{0,2}[a-z_]+\.[\w.]+=", word)
    ]
    for program in programs:
        if program.starts and re.search(program.starts, named):
            return program
        if program.flags and any(re.fullmatch(program.flags, flag) for flag in flags):
            return program
    return None


def refuse_unread(text: str, *, source: str, is_file: bool = False) -> None:
    """Refuse a launch of a program that is not read, by its name.

    Args:
        text: a command, a script, a file of settings or a program in Python.
        source: what messages call it.
        is_file: the text is settings or Python.

    Raises:
        SpecError: it is such a launch.
    """
    if is_file:
        matches = (one for one in PROGRAMS if one.text and re.search(one.text, text, re.MULTILINE))
    else:
        seen = (unread_command(words) for words in _commands(text))
        matches = (one for one in seen if one is not None)
    if found := next(matches, None):
        raise unread(found, source=source)


def unread(program: UnreadProgram, *, source: str) -> SpecError:
    """Return the refusal of a program."""
    return SpecError(f"{source}: {program.name} is not read; {program.instead}")


def unknown_script(text: str) -> str | None:
    """Return the script that a launcher starts without any flag of Megatron-LM's models."""
    if _OF_MEGATRON.search(text):
        return None
    for words in _commands(text):
        if _LAUNCHERS & {word.rpartition("/")[2] for word in words[:_MOST]}:
            for word in words:
                if word.endswith(".py") and not word.startswith("-"):
                    return shown_value(word)
    return None


def _commands(text: str) -> Iterable[Sequence[str]]:
    try:
        return [command.words for command in shell_text(text, source="").commands]
    except SpecError:
        return ()


def _naming_words(words: Sequence[str]) -> list[str]:
    """Return the first words, what `-m` names, and the script, without values of flags."""
    first: list[str] = []
    after_flag = False
    for at, word in enumerate(words):
        is_module = at > 0 and words[at - 1] in ("-m", "--module")
        is_script = word.endswith((".py", ".sh")) and not word.startswith("-")
        if is_module or is_script or (at < _MOST and not word.startswith("-") and not after_flag):
            first.append(word)
        if is_script or (is_module and not word.startswith(("torch.", "accelerate."))):
            break
        after_flag = word.startswith("-") and "=" not in word and word not in ("-m", "--")
    return first
