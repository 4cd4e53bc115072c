"""Proposed lines of TOML and JSON launches do what was predicted, as those of Megatron-LM."""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.peft import read as trainer
from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.torchtitan import read as torchtitan
from tuner.estimate.configuration import build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.estimate import estimate, pricing_setup
from tuner.estimate.prices import price_configurations
from tuner.estimate.records import Change, Estimate
from tuner.spec.spec import Spec

LAUNCHES = Path(__file__).parent / "launches"
MakeSpec = Callable[..., Spec]
Nested = dict[str, Any]


def all_changes(result: Estimate) -> list[Change]:
    single = [result.smallest_change] if result.smallest_change else []
    return [*result.changes, *single, *([result.best_pair] if result.best_pair else [])]


def merged(values: Nested, more: Nested) -> Nested:
    both = dict(values)
    for key, value in more.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) else value
    return both


def without(values: Nested, name: str) -> Nested:
    section, _, rest = name.partition(".")
    if not rest:
        return {key: value for key, value in values.items() if key != section}
    return values | {section: without(values[section], rest)}


def toml_lines(values: Nested, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from toml_lines(value, f"{prefix}{key}.")
        else:
            # What JSON writes of texts, numbers, truth and lists is TOML as well.
            yield f"{prefix}{key} = {json.dumps(value)}"


def check(result: Estimate, spec: Spec, relaunch: Callable[[Change], LaunchSettings]) -> None:
    assert all_changes(result)
    setup = pricing_setup(spec, None)
    for change in all_changes(result):
        own, _ = build_configuration(relaunch(change), spec)
        assert to_decision(own, spec.model) == change.decision
        (again,) = price_configurations((own,), setup)
        assert again.step_s == pytest.approx(change.step_time_s, rel=1e-9)


@each_row(
    ("name", "model", "nodes"),
    [("llama3-70b.toml", "llama-3.1-70b", 8), ("deepseek-16b.toml", "deepseek-v2-lite", 2)],
)
def test_toml(spec_of: MakeSpec, name: str, model: str, nodes: int) -> None:
    text = (LAUNCHES / name).read_text()
    spec = spec_of(model, nodes=nodes)

    def relaunch(change: Change) -> LaunchSettings:
        values = tomllib.loads(text)
        for line in change.lines:
            if line.startswith("remove "):
                values = without(values, line.removeprefix("remove "))
            else:
                values = merged(values, tomllib.loads(line))
        return torchtitan.read("\n".join(toml_lines(values)), source=name)

    check(estimate(spec, torchtitan.read(text, source=name)), spec, relaunch)


def pasted(values: Nested, line: str) -> Nested:
    """Apply one line to JSON, or to arguments of a command or YAML."""
    plain = line.split("  #")[0]
    if plain.startswith("remove "):
        return without(values, plain.removeprefix("remove ").strip('"'))
    if plain.startswith('"'):
        return merged(values, json.loads("{" + plain + "}"))
    name, value = plain.replace(":", " ").split()
    return values | {name: value}


def test_json(spec_of: MakeSpec) -> None:
    plain: Nested = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2},
    }
    experts = {"enabled": True, "autoep_size": 4, "comm_backend": "deepep"}
    zero_3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    launches: list[tuple[str, int, Nested]] = [
        ("llama-3.1-8b", 8, json.loads((LAUNCHES / "zero3.json").read_text())),
        ("qwen3-30b-a3b", 8, plain),
        ("qwen3-30b-a3b", 8, plain | {"activation_checkpointing": {}}),
        ("qwen3-30b-a3b", 8, plain | {"expert_parallel": experts}),
        ("qwen3-30b-a3b", 8, plain | {"expert_parallel": {"autoep_size": 2}}),
        ("qwen3-30b-a3b", 8, plain | {"zero_optimization": zero_3}),
        ("mixtral-8x7b", 4, plain | {"data_types": {"grad_accum_dtype": "fp32"}}),
    ]
    shown = set()
    for model, nodes, values in launches:
        spec = spec_of(model, nodes=nodes, device="h200-sxm")

        def relaunch(change: Change, values: Nested = values) -> LaunchSettings:
            for line in change.lines:
                values = pasted(values, line)
            return deepspeed.read(json.dumps(values), source="ds.json")

        result = estimate(spec, deepspeed.read(json.dumps(values), source="ds.json"))
        check(result, spec, relaunch)
        shown |= {line for change in all_changes(result) for line in change.lines}
    assert any(line.startswith('"expert_parallel": {"enabled": true') for line in shown)
    assert '"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}' in shown


def test_replicas_of_the_trainer_are_told_of_fsdp_in_its_words(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    files = {
        "full.yaml": "model_name_or_path: m\nstage: sft\nfinetuning_type: full\nbf16: true\n"
        "per_device_train_batch_size: 1\ntorch_dtype: bfloat16\n",
    }
    files["pure.yaml"] = files["full.yaml"] + "pure_bf16: true\n"
    typed = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 1 --bf16 true"
    for command, line in (
        (typed, "--fsdp full_shard"),
        ("NNODES=1 NPROC_PER_NODE=8 llamafactory-cli train full.yaml", "fsdp: full_shard"),
        ("NNODES=1 NPROC_PER_NODE=8 llamafactory-cli train pure.yaml", "fsdp: full_shard"),
    ):
        result = estimate(spec, trainer.read(command, source="run.sh", beside=files.get))
        told = [change for change in all_changes(result) if change.lines == (line,)]
        assert told, command
        more = {name: f"{text}{line}\n" for name, text in files.items()}
        again = f"{command} {line}" if line.startswith("--") else command
        own = estimate(spec, trainer.read(again, source="run.sh", beside=more.get))
        assert own.step_time_s == pytest.approx(told[0].step_time_s, rel=1e-9), command
        assert own.decision == told[0].decision


@each_row(
    ("program", "arguments"),
    [
        ("train.py", {"--deepspeed": "zero.json", "--bf16": "true"}),
        (
            "train.py",
            {"--fsdp": "full_shard", "--bf16": "true", "--gradient_checkpointing": "true"},
        ),
        ("train.yaml", {"deepspeed": "zero.json", "bf16": "true", "finetuning_type": "full"}),
    ],
)
def test_arguments_of_a_trainer_and_the_json_beside_them(
    spec_of: MakeSpec, program: str, arguments: Nested
) -> None:
    auto: Nested = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"),
        "auto",
    )
    auto |= {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
    dashes = "--" if program.endswith(".py") else ""
    arguments = arguments | {
        f"{dashes}per_device_train_batch_size": "2",
        f"{dashes}gradient_accumulation_steps": "4",
    }

    def read(arguments: Nested, config: Nested) -> LaunchSettings:
        files = {"zero.json": json.dumps(config)}
        command = "torchrun --nproc_per_node 8 train.py"
        if dashes:
            command += "".join(f" {name} {value}" for name, value in arguments.items())
        else:
            yaml = [f"{name}: {value}" for name, value in arguments.items()]
            files["train.yaml"] = "\n".join([*yaml, "model_name_or_path: m"])
            command = "NNODES=1 NPROC_PER_NODE=8 llamafactory-cli train train.yaml"
        return trainer.read(command, source="run.sh", beside=files.get)

    def relaunch(change: Change) -> LaunchSettings:
        own, config = arguments, auto
        for line in change.lines:
            if line.startswith(('"', 'remove "')):
                config = pasted(config, line)
            else:
                own = pasted(own, line)
        return read(own, config)

    spec = spec_of("llama-3.1-8b", nodes=1, device="h200-sxm")
    result = estimate(spec, read(arguments, auto))
    check(result, spec, relaunch)
    assert all('"train_' not in line for change in all_changes(result) for line in change.lines)
