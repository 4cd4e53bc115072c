"""Distribution of a model over the Trainer's processes: replicas, FSDP or DeepSpeed, and how many.

The Trainer's own `--deepspeed` and `--fsdp` count before Accelerate's file or flags. Read from the
packages accelerate 1.15.0 (commands/launch.py, commands/config/config_args.py,
utils/dataclasses.py) and transformers 5.24.0; the files that TRL ships are those of trl 1.16.0
(accelerate_configs/).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final, Literal

from tuner.engines.peft.arguments import SWIFT_COMMAND, TrainerCommand, found_text
from tuner.engines.peft.swift import AUTO_BATCH, refuse_device_map, with_own_files
from tuner.engines.reading.options_file import Beside
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.yaml_text import parse_yaml
from tuner.units import parse_whole

_SHIPPED: Final[Mapping[str, Mapping[str, Any]]] = {
    "single_gpu": {"distributed_type": "NO", "num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "zero1": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
    "zero3": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
    "fsdp1": {"distributed_type": "FSDP"},
    "fsdp2": {"distributed_type": "FSDP"},
}
"""Files of TRL by the name that --accelerate_config takes; on eight devices, in bf16."""
_SHARDED: Final[Mapping[str, Literal[0, 2, 3]]] = {
    "no_shard": 0,
    "shard_grad_op": 2,
    "full_shard": 3,
    "true": 3,
    "false": 2,
    "1": 3,
    "2": 2,
    "3": 0,
}
"""FSDP's strategies, or whether FSDP2 frees parameters after the forward pass, as ZeRO stages."""

NAMING: Final = (
    "deepspeed",
    "deepspeed_config",
    "fsdp",
    "fsdp_config",
    "accelerate_config",
    "config_file",
    "num_processes",
    "num_machines",
    "ray_num_workers",
)
"""Arguments of the program that say how the model is distributed."""
_SLOTS: Final = re.compile(r"^\s*[^#\s]\S*\s+slots\s*=\s*([1-9]\d{0,3})\s*$", re.MULTILINE)
"""Devices of one node in DeepSpeed's file of hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Number of processes of a launch, and how they share the model."""

    devices: int | None = None
    devices_per_node: int | None = None
    mixed_precision: str = ""
    deepspeed: tuple[str, str] | None = None
    """Text and name of DeepSpeed's configuration."""
    zero_stage: Literal[0, 2, 3] = 0
    """Stage that replicas, or FSDP, stand for."""
    recompute: bool = False
    """FSDP itself checkpoints activations."""


def distribution(
    command: TrainerCommand,
    values: Mapping[str, Any],
    *,
    beside: Beside,
    environment: Mapping[str, str],
    devices: tuple[int | None, int | None],
    source: str,
) -> Distribution:
    """Return how a launch distributes the model.

    Args:
        command: the launch.
        values: arguments of its program.
        beside: gives the files that it names.
        environment: variables that it sets.
        devices: nodes and devices of a node that its launcher states.
        source: what messages call it.

    Raises:
        SpecError: a file is missing, or the distribution is not priced.
    """
    config = _accelerate_config(command, values, beside=beside, source=source)
    whole, per_node = _processes(command, config or {}, environment, devices, beside)
    if isinstance(workers := values.get("ray_num_workers"), int) and workers > 0:
        whole, per_node = workers, None
    shared = Distribution(
        devices=whole,
        devices_per_node=per_node,
        mixed_precision=str((config or {}).get("mixed_precision") or ""),
    )
    if command.script == SWIFT_COMMAND:
        refuse_device_map(command, environment, per_node, source=source)
        values = with_own_files(values, beside, source)
    if named := values.get("deepspeed_config") or values.get("deepspeed"):
        return replace(shared, deepspeed=_named_json(named, beside, source))
    if values.get("fsdp"):
        return _with_fsdp(shared, _trainer_fsdp(values, beside, source), source=source)
    if config is None:
        _check_configured(command, source=source)
        return shared
    kind = str(config.get("distributed_type", "MULTI_GPU")).upper()
    _refuse_parallelism(config, kind, source=source)
    if kind == "DEEPSPEED":
        plugin = _section(config, "deepspeed_config")
        return replace(shared, deepspeed=_plugin_json(plugin, beside, source))
    if kind == "FSDP":
        return _with_fsdp(shared, _section(config, "fsdp_config"), source=source)
    return shared


def _check_configured(command: TrainerCommand, *, source: str) -> None:
    """Refuse a launch that a file on its machine decides on."""
    is_accelerate = any(map(_is_accelerate, command.launcher))
    if is_accelerate or command.name == "trl":
        flag = "--config_file" if is_accelerate else "--accelerate_config"
        started = "accelerate launch of " * is_accelerate + command.name
        shipped = "" if is_accelerate else f", or one of {', '.join(_SHIPPED)}"
        raise SpecError(
            f"{source}: {started} names no {flag}, so its machine's own decides between replicas,"
            f" FSDP and DeepSpeed: put that file beside the launch and name it{shipped}"
        )


def _is_accelerate(word: str) -> bool:
    return PurePosixPath(word).name == "accelerate" or word.startswith("accelerate.")


def _accelerate_config(
    command: TrainerCommand, values: Mapping[str, Any], *, beside: Beside, source: str
) -> dict[str, Any] | None:
    """Return Accelerate's file with the flags that override it; None where there is neither."""
    flags = dict(command.launcher_flags)
    named = flags.get("config_file") or values.get("config_file") or values.get("accelerate_config")
    config: dict[str, Any] = {}
    if str(named) in _SHIPPED:
        config = {"num_processes": 8, "mixed_precision": "bf16", **_SHIPPED[str(named)]}
    elif named:
        text = found_text(str(named), beside, by="accelerate", source=source)
        read = parse_yaml(text, source=PurePosixPath(str(named)).name)
        config = dict(read) if isinstance(read, dict) else {}
    for flag, kind in (
        ("use_deepspeed", "DEEPSPEED"),
        ("use_fsdp", "FSDP"),
        ("use_megatron_lm", "MEGATRON_LM"),
        ("multi_gpu", "MULTI_GPU"),
    ):
        if flags.get(flag):
            config["distributed_type"] = kind
    if not config:
        return None
    for name in ("num_processes", "num_machines", "mixed_precision"):
        if (value := flags.get(name, values.get(name))) is not None:
            config[name] = value
    if config.get("distributed_type") == "FSDP":
        stated = {name: value for name, value in flags.items() if name.startswith("fsdp_")}
        config["fsdp_config"] = {**_section(config, "fsdp_config"), **stated}
    if config.get("distributed_type") == "DEEPSPEED":
        known = ("zero_stage", "offload_optimizer_device", "offload_param_device")
        stated = {name: flags[name] for name in (*known, "deepspeed_config_file") if name in flags}
        config["deepspeed_config"] = {**_section(config, "deepspeed_config"), **stated}
    return config


def _section(config: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    section = (config or {}).get(name)
    return dict(section) if isinstance(section, dict) else {}


def _processes(
    command: TrainerCommand,
    config: Mapping[str, Any],
    environment: Mapping[str, str],
    stated: tuple[int | None, int | None],
    beside: Beside,
) -> tuple[int | None, int | None]:
    """Return all devices and those of a node; None where the launch leaves them open."""
    whole, machines = config.get("num_processes"), config.get("num_machines") or 1
    if isinstance(whole, int) and isinstance(machines, int) and whole > 0 < machines:
        return whole, max(1, whole // machines)
    flags = command.launcher_flags
    if hosts := _included(str(flags.get("include") or "")):
        return sum(hosts), hosts[0]
    hostfile = beside(str(flags["hostfile"])) if flags.get("hostfile") else None
    if hosts := [int(slots) for slots in _SLOTS.findall(hostfile or "")]:
        return sum(hosts), hosts[0]
    if [PurePosixPath(word).name for word in command.launcher] in (["python"], ["python3"]):
        return 1, 1
    nodes, per_node = stated
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if per_node is None:
        per_node = parse_whole(environment.get("NPROC_PER_NODE", ""), digits=6) or None
    if per_node is None and visible and "$" not in visible:
        per_node = len(visible.split(","))
    if nodes is None:
        nodes = parse_whole(environment.get("NNODES", ""), digits=6) or None
    # Launchers start one node unless they are told of more.
    is_open = any(name in flags for name in ("nnodes", "num_nodes", "hostfile"))
    if nodes is None and not is_open and "NNODES" not in environment:
        nodes = 1
    if nodes is None or per_node is None:
        return None, None
    return nodes * per_node, per_node


def _included(text: str) -> list[int]:
    """Count the devices of every node in DeepSpeed's `--include host:0,1@host:2`."""
    hosts = [host.partition(":")[2] for host in text.split("@")]
    return [len(host.split(",")) for host in hosts] if all(hosts) else []


def _named_json(named: Any, beside: Beside, source: str) -> tuple[str, str]:
    if isinstance(named, dict):
        return json.dumps(named), source
    if isinstance(named, str) and named.lstrip().startswith("{"):
        return named, source
    if not isinstance(named, str):
        raise SpecError(
            f"{source}: --deepspeed names no JSON file, so the program's code decides: give its "
            "JSON with the batch sizes as numbers"
        )
    return found_text(named, beside, by="DeepSpeed", source=source), PurePosixPath(named).name


def _plugin_json(plugin: Mapping[str, Any], beside: Beside, source: str) -> tuple[str, str]:
    """Return what Accelerate's plugin writes: its default stage is 2 (DeepSpeedPlugin)."""
    if plugin.get("deepspeed_config_file"):
        return _named_json(plugin["deepspeed_config_file"], beside, source)
    zero: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        device = plugin.get(f"{name}_device")
        if device and device != "none":
            zero[name] = {"device": device}
    return json.dumps({**AUTO_BATCH, "zero_optimization": zero}), f"{source}, deepspeed_config"


def _trainer_fsdp(values: Mapping[str, Any], beside: Beside, source: str) -> dict[str, Any]:
    """Return the Trainer's own FSDP settings under Accelerate's names."""
    options = values["fsdp"]
    words = list(map(str, options)) if isinstance(options, list) else str(options).split()
    config = values.get("fsdp_config")
    if isinstance(config, str):
        text = found_text(config, beside, by="the Trainer", source=source)
        config = parse_yaml(text, source=PurePosixPath(config).name)
    stated = config if isinstance(config, dict) else {}
    strategy = next((word for word in words if "shard" in word), "full_shard")
    return {
        # FSDP2 goes by `reshard_after_forward`.
        **({} if "reshard_after_forward" in stated else {"fsdp_sharding_strategy": strategy}),
        "fsdp_offload_params": "offload" in words,
        **{f"fsdp_{str(name).removeprefix('fsdp_')}": value for name, value in stated.items()},
    }


def _with_fsdp(shared: Distribution, config: Mapping[str, Any], *, source: str) -> Distribution:
    """Return the distribution under FSDP.

    Raises:
        SpecError: a strategy that is not priced.
    """
    frees = config.get("fsdp_reshard_after_forward")
    strategy = config.get("fsdp_sharding_strategy", frees if frees is not None else "full_shard")
    stage = _SHARDED.get(str(strategy).lower())
    if stage is None:
        raise SpecError(
            f"{source}: FSDP's {shown_value(strategy)} is not priced; full_shard, shard_grad_op "
            "and no_shard are"
        )
    if _is_on(config.get("fsdp_offload_params")):
        raise SpecError(
            f"{source}: fsdp_offload_params keeps parameters and optimizer state in host memory, "
            "which is not priced under FSDP; price DeepSpeed's offload_optimizer, or leave it off"
        )
    recomputes = _is_on(config.get("fsdp_activation_checkpointing"))
    return replace(shared, zero_stage=stage, recompute=recomputes)


def _is_on(value: Any) -> bool:
    return str(value).lower() == "true"


def _refuse_parallelism(config: Mapping[str, Any], kind: str, *, source: str) -> None:
    if kind not in ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED"):
        raise SpecError(
            f"{source}: accelerate's distributed_type {shown_value(kind)} is not read; MULTI_GPU, "
            "FSDP and DEEPSPEED are (MEGATRON_LM: give its degrees as Megatron-LM's flags)"
        )
    degrees = _section(config, "parallelism_config")
    for name, value in degrees.items():
        is_degree = name.endswith(("tp_size", "cp_size", "sp_size", "replicate_size"))
        if is_degree and value not in (1, None):
            raise SpecError(
                f"{source}: {name} {shown_value(value)}: tensor, context and sequence parallelism "
                "of accelerate, and copies of FSDP's shards, are not priced; price it with 1"
            )
