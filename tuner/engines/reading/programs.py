"""Programs whose launches are not read: how each is recognised, and what to give instead.

A command is recognised by the words that name its program (the program itself, what `-m` names, its
script) or by flags that no other program has, not by folders, packages and models that it mentions;
a file of settings by keys of its own. The names are those of the projects' own documentation and
console scripts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tuner.engines.reading.shell_words import shell_text
from tuner.errors import SpecError
from tuner.spec.files import shown_value

_ALSO: Final = r"(?=[\s\S]*^\s*"
"""Beginning of an expression for what a file also holds, further down."""
_STARTS: Final[Mapping[str, str]] = {
    "verl": r"\bverl\b|\bmain_(ppo|grpo|dapo|gspo)\b|fsdp_sft_trainer",
    "OpenRLHF": r"\bopenrlhf\b",
    "NeMo-RL": r"\bnemo_rl\b",
    "slime": r"\bslime\b",
    "ROLL, AReaL or SkyRL": r"\b(areal|skyrl_train|roll)\.(?!(py|sh)\b)"
    r"|start_rlvr_pipeline|\brealhf\b",
    "NeMo": r"\bnemo (llm|run)\b|\bnemo_?(run|launcher)\b|megatron_\w+_(pretraining|finetuning)",
    "NeMo AutoModel": r"(?<!\S)automodel\b|\bnemo_automodel\b",
    "a recipe of Megatron-Bridge": r"\brun_recipe\.py",
    "MindSpeed": r"\bmindspeed(_\w+)?\b|posttrain_gpt\.py|pretrain_(vlm|sora)\w*\.py",
    "Megatron-DeepSpeed": r"\bmegatron[-_]deepspeed\b",
    "Axolotl": r"\baxolotl\b",
    "Unsloth": r"\bunsloth\b",
    "LitGPT": r"\blitgpt\b",
    "Colossal-AI": r"\bcolossalai\b|\bcoati\b",
    "XTuner": r"\bxtuner\b",
    "Nanotron": r"\bnanotron\b|(?<!\S)run_train\.py",
    "MaxText": r"\bmaxtext\b",
    "llm-foundry": r"(?<!\S)composer \S+\.py|\bllm[-_]?foundry\b",
    "torchtune": r"(?<!\S)tune (run|cp)\b|\btorchtune\b",
    "Pai-Megatron-Patch's wrapper": r"run_mcore_\w+\.sh",
    "fairseq, Levanter or GPT-NeoX": r"\bfairseq|\blevanter\b|(?<!\S)deepy\.py",
    "trtllm-bench": r"\btrtllm-(bench|build)\b",
    "vllm bench": r"\bvllm (bench|chat|complete|run-batch)\b"
    r"|\bbenchmark_(serving|throughput|latency)\.py",
    "SGLang's benchmark": r"\bsglang\.bench\w*",
    "a load generator": r"(?<!\S)(genai-perf|aiperf|guidellm|inference-perf|evalscope|locust)\b",
    "Ray Serve": r"(?<!\S)serve (run|deploy)\b",
    "Xinference or FastChat": r"\bxinference\b|\bfastchat\.serve\b",
    "Triton Inference Server": r"\btritonserver\b|\blaunch_triton_server\b",
    "Ollama": r"(?<!\S)ollama\b",
    "llama.cpp": r"\bllama-(server|cli|bench|run)\b|\bllama_cpp\b|(?<!\S)koboldcpp",
    "KTransformers": r"\bktransformers\b|\bkt[-_]kernel\b",
    "LMDeploy": r"\blmdeploy\b",
    "ATOM": r"\batom\.entrypoints\b",
    "Text Generation Inference": r"\btext-generation-(launcher|server|inference)\b",
    "MLC LLM": r"\bmlc_llm\b",
    "MLX": r"\bmlx_(lm|vlm)\b",
    "mistral.rs": r"\bmistralrs(-\w+)?\b|\bmistral\.rs\b",
    "LightLLM": r"\blightllm\b",
    "DeepSpeed-MII": r"(?<!\S)mii(\.\w+)*\b",
    "Aphrodite": r"\baphrodite\b",
}
"""Words that name a program, joined by spaces, without folders."""
_SCRIPTS: Final[Mapping[str, str]] = {
    "verl": r"verl/trainer/\w+\.py",
    "OpenRLHF": r"openrlhf/(cli/)?\w+\.py",
    "NeMo-RL": r"examples/(\w+/)?run_(grpo|dpo|sft|rm|distillation)\w*\.py",
    "a recipe of Megatron-Bridge": r"scripts/training/\w+\.(sh|py)",
    "MindSpeed": r"mindspeed(-\w+)?/pretrain_\w+\.py|(^|/)train_fsdp2\.py",
    "Megatron-DeepSpeed": r"megatron-deepspeed/pretrain_\w+\.py",
    "MaxText": r"maxtext/train\w*\.py",
    "KTransformers": r"ktransformers/(server/main|local_chat)\.py",
    "LightLLM": r"lightllm/server/\w+\.py",
}
"""The end of a script's path, where its name alone is no mark."""
_FLAGS: Final[Mapping[str, str]] = {
    "verl": r"actor_rollout_ref\..*",
    "slime": r"rollout_num_gpus(_per_engine)?|actor_num_(nodes|gpus_per_node)",
    "MindSpeed": r"use_mc2|use_ascend_(mc2|coc)|use_cp_send_recv_overlap|swap_attention"
    r"|use_fused_(swiglu|rotary_pos_emb|moe_token_permute_and_unpermute)|ampipe_degree"
    r"|moe_(fb_overlap|zerc|alltoall_overlap_comm|allgather_overlap_comm)|reuse_fp32_param",
    "Megatron-DeepSpeed": r"deepspeed_activation_checkpointing|no_pipeline_parallel"
    r"|ds_sequence_parallel_size",
    "DeepSpeed-Chat": r"(actor|critic)_zero_stage",
    "KTransformers": r"kt_\w+",
}
"""A flag of no other program, without its dashes and with `_` for `-`."""
_TEXTS: Final[Mapping[str, str]] = {
    "verl": r"^actor_rollout_ref:",
    "NeMo-RL": rf"^policy:{_ALSO}(megatron_cfg|dtensor_cfg):)",
    "NeMo": r"from nemo\.collections|import nemo_run|^exp_manager:",
    "NeMo AutoModel": r"_target_:\s*nemo_automodel",
    "Axolotl": rf"^base_model:{_ALSO}(sequence_len|micro_batch_size|datasets):)",
    "Unsloth": r"^\s*(from|import) unsloth\b",
    "LitGPT": rf"^checkpoint_dir:{_ALSO}(train|precision|devices):)",
    "XTuner": r"^\s*(from|import) xtuner\b",
    "Nanotron": rf"^parallelism:{_ALSO}(pp_engine|expert_parallel_size|dp):)",
    "MaxText": r"^(ici|dcn)_\w+_parallelism:",
    "llm-foundry": r"^(device_train_microbatch_size|global_train_batch_size):",
    "torchtune": r"_component_:\s*torchtune",
    "LLaMA-Factory's v1": r"^(dist_config|model_class|train_dataset|init_config):",
    "accelerate's file": rf"^distributed_type:{_ALSO}(num_processes|mixed_precision):)",
}
"""A file of settings, or a program in Python."""
_AS_MEGATRON: Final = "give its parallelism and batch as Megatron-LM's flags"
_ACTOR: Final = "give the parallelism and batch of the trained model as Megatron-LM's flags"
_AS_RL: Final = "for both halves of a step state goal.kind: rl"
_TRAINER: Final = (
    "give its batch, length and sharding as a command of Transformers' Trainer, e.g. torchrun "
    "train.py --per_device_train_batch_size 1 --deepspeed zero3.json"
)
_MEASURED: Final = (
    "give the command of the server that it starts or measures: vllm serve, sglang.launch_server "
    "or trtllm-serve"
)
_INSTEAD: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        _STARTS, "its engine is not modelled; give a server of vLLM, SGLang or TensorRT-LLM"
    ),
    **dict.fromkeys(
        ("Ollama", "llama.cpp", "KTransformers"),
        "with experts in host memory llama.cpp is priced: state goal.engine.name llama.cpp and a"
        " GGUF file as model",
    ),
    "NVIDIA NIM": "its image chooses engine and flags: give the server's command that its log has",
    **dict.fromkeys(("Nanotron", "Colossal-AI", "fairseq, Levanter or GPT-NeoX"), _AS_MEGATRON),
    **dict.fromkeys(("slime", "ROLL, AReaL or SkyRL"), _ACTOR),
    **dict.fromkeys(("LitGPT", "XTuner", "llm-foundry"), _TRAINER),
    **dict.fromkeys(
        ("OpenRLHF", "DeepSpeed-Chat"),
        "give the DeepSpeed JSON of each model, with its batch sizes as numbers",
    ),
    **dict.fromkeys(
        ("NeMo AutoModel", "torchtune"),
        "it shards by FSDP2: give a torchtitan TOML with its degrees and batch",
    ),
    **dict.fromkeys(
        (
            "trtllm-bench",
            "vllm bench",
            "SGLang's benchmark",
            "a load generator",
            "Ray Serve",
            "Xinference or FastChat",
            "Triton Inference Server",
        ),
        _MEASURED,
    ),
    "verl": f"{_AS_RL}, {_ACTOR}, or the rollout's engine as its server's command",
    "NeMo-RL": f"{_AS_RL}, or give policy.megatron_cfg as Megatron-LM's flags",
    "NeMo": f"{_AS_MEGATRON} (model.tensor_model_parallel_size is --tensor-model-parallel-size), "
    "or a Megatron-Bridge file",
    "a recipe of Megatron-Bridge": "give what it resolves to: the ConfigContainer.yaml that"
    " --dryrun writes, or run_config.yaml of its checkpoint; or overrides, such as"
    " model.tensor_model_parallel_size=2, in a file overrides.txt",
    "MindSpeed": f"{_AS_MEGATRON} alone: how its own change memory is not known",
    "Megatron-DeepSpeed": f"{_AS_MEGATRON} of today, or the DeepSpeed JSON alone where it is ZeRO "
    "without them",
    "Axolotl": "micro_batch_size is per_device_train_batch_size, sequence_len max_length: "
    + _TRAINER,
    "Unsloth": "it replaces Transformers' layers on one device: plan with emit: transformers-peft",
    "MaxText": "it runs JAX, which no engine here stands for: plan with emit: megatron-lm",
    "Pai-Megatron-Patch's wrapper": "give the torchrun command that it prints, whose flags are "
    "Megatron-LM's",
    "LLaMA-Factory's v1": "give the YAML of llamafactory-cli without USE_V1",
    "accelerate's file": "it holds no batch: give the accelerate launch command that names it, the "
    "file beside it",
}
"""Advice on what to give in place of each program that is not read."""
_LAUNCHERS: Final = frozenset({"torchrun", "accelerate", "deepspeed", "python", "python3"})
_RUNNERS: Final = _LAUNCHERS | {"bash", "sh", "composer", "colossalai"}
"""Programs that run a module or script."""
_WRAPPERS: Final = frozenset(
    {"docker", "podman", "singularity", "apptainer", "enroot", "srun", "mpirun", "mpiexec", "ray"}
    | {"uv", "poetry", "env", "sudo", "nohup", "time", "timeout", "exec", "numactl", "nsys"}
    | {"nice", "taskset", "stdbuf", "setsid", "ssh"}
)
"""Programs that run the command that follows."""
_OF_WRAPPERS: Final = frozenset({"run", "exec", "job", "submit", "profile"})
_WITH_COMMANDS: Final = frozenset({"vllm", "nemo", "tune", "serve"})
"""Programs of which the command says what is run."""
_INSTALLERS: Final = frozenset(
    {"pip", "pip3", "apt", "apt-get", "git", "cp", "mv", "pull", "push", "build", "tag", "start"}
    | {"stop", "login", "sync", "add", "install"}
)
"""Words behind a wrapper that start nothing, as in `docker pull`."""
_MOST: Final = 8
"""First words of a command that may name its program."""
_TRAINS: Final = (
    r"pretrain_\w+\.py|torchtitan|^deepspeed\b|^llamafactory-cli|^(swift|megatron)\b|\bswift\.cli"
)
_READ: Final = (
    rf"{_TRAINS}|\bvllm serve|^vllm-|vllm\.entrypoints|sglang\.launch_server|^sglang$|^trtllm-serve"
    r"|\bdynamo\.(vllm|sglang|trtllm)"
)
_OF_MEGATRON: Final = re.compile(
    r"--(micro[-_]batch[-_]size|num[-_]layers|tensor[-_]model[-_]parallel)|pretrain_gpt"
    r"|\bprimus-cli\b|--\w+[-_]parallel"
)


def starts_megatron(text: str) -> bool:
    """Say whether a script has flags of Megatron-LM's models, or starts what starts it."""
    return _OF_MEGATRON.search(text) is not None


def unread_command(words: Sequence[str]) -> str | None:
    """Name the program that a command starts, where it is one that is not read."""
    if any("nvcr.io/nim/" in word for word in words):
        return "NVIDIA NIM"
    named, script = _naming_words(words)
    flags = [
        word.lstrip("-+").partition("=")[0].replace("-", "_")
        for word in words
        if word.startswith("--") or re.match(r"\+{0,2}[a-z_]+\.[\w.]+=", word)
    ]
    for name, pattern in _STARTS.items():
        if re.search(pattern, named):
            return name
    for name, pattern in _SCRIPTS.items():
        if re.search(rf"(^|/){pattern}$", script):
            return name
    for name, pattern in _FLAGS.items():
        if any(re.fullmatch(pattern, flag) for flag in flags):
            return name
    return None


def unread_program(commands: Sequence[Sequence[str]]) -> str | None:
    """Name the program that is not read among commands none of which is read."""
    names = [unread_command(words) for words in commands]
    if any(name is None and _is_read(words) for name, words in zip(names, commands, strict=True)):
        return None
    return next(filter(None, names), None)


def refuse_unread(text: str, *, source: str, is_file: bool = False) -> None:
    """Refuse a launch of a program that is not read, by its name, where nothing else is started.

    Args:
        text: a command, a script, a file of settings or a program in Python.
        source: what messages call it.
        is_file: the text is settings or Python.

    Raises:
        SpecError: it is such a launch.
    """
    if is_file:
        names: Iterator[str] = (
            name for name, pattern in _TEXTS.items() if re.search(pattern, text, re.MULTILINE)
        )
    else:
        names = filter(None, (unread_program(_commands(text)),))
    if name := next(iter(names), None):
        raise unread(name, source=source)


def unread(name: str, *, source: str) -> SpecError:
    """Return the refusal of a program."""
    return SpecError(f"{source}: {name} is not read; {_INSTEAD[name]}")


def starts_training(text: str) -> bool:
    """Say whether a text starts a program that trains and is read."""
    return any(_is_read(words, _TRAINS) for words in _commands(text))


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


def _commands(text: str) -> Sequence[Sequence[str]]:
    try:
        return [command.words for command in shell_text(text, source="").commands]
    except SpecError:
        return ()


def _is_read(words: Sequence[str], names: str = _READ) -> bool:
    """Return whether a command starts a program that is read."""
    return re.search(names, _naming_words(words)[0]) is not None or any(
        word.startswith(("--per_device_train_batch_size", "--deepspeed")) for word in words
    )


def _naming_words(words: Sequence[str]) -> tuple[str, str]:
    """Return what names a command's program, without folders, and its script with them."""
    start = _program_at(words)
    if start is None:
        return "", ""
    program = _base_name(words[start])
    named = [program]
    rest = words[start + 1 :]
    if program in _WITH_COMMANDS:
        named += rest[:1]
    script = words[start] if _is_script(words[start]) else ""
    if program.startswith("python") or program in _RUNNERS:
        for before, word in zip(("", *rest), rest, strict=False):
            is_module = before in ("-m", "--module")
            if is_module:
                named.append(word)
            elif _is_script(word):
                named.append(_base_name(word))
                script = word
            if _is_script(word) or (is_module and not word.startswith(("torch.", "accelerate."))):
                break
    return " ".join(named).lower(), script.lower()


def _program_at(words: Sequence[str]) -> int | None:
    """Return the place of a command's program, behind those that only run another one."""
    if not words or _base_name(words[0]) not in _WRAPPERS:
        return 0 if words else None
    for at, word in enumerate(words):
        if word in _INSTALLERS:
            return None
        if _base_name(word) in _RUNNERS | _WITH_COMMANDS:
            return at
    for at, word in enumerate(words[1:_MOST], start=1):
        is_value = words[at - 1].startswith("-") and "=" not in words[at - 1] != "--"
        is_own = _base_name(word) in _WRAPPERS | _OF_WRAPPERS or word.isdecimal()
        if not (word.startswith("-") or is_value or is_own or "=" in word):
            return at
    return None


def _is_script(word: str) -> bool:
    return word.endswith((".py", ".sh")) and not word.startswith("-")


def _base_name(word: str) -> str:
    return word.rpartition("/")[2]
