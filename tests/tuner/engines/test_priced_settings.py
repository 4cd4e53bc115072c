"""Every setting that a price assumes is written, or is what the engine does without it."""

import ast
import dataclasses
import importlib
import importlib.util
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.tuner.engines.testing import sample_decision, sample_verified
from tests.tuner.models import example_model
from tuner.config.train import TrainDecision
from tuner.costs.train.state import VOCAB_MULTIPLE
from tuner.engines.megatron_lm.capabilities import refuses_delayed_gradients
from tuner.engines.priced_settings import (
    DEEPSPEED,
    FROM_RECIPE,
    MEGATRON,
    PARSER,
    TORCHTITAN,
    TRAINING,
    PricedSetting,
)
from tuner.engines.targets import TARGETS
from tuner.engines.writers import broken_rules, emit
from tuner.spec.model import ModelSpec

DEFAULTS = json.loads((Path(__file__).parent / "megatron_defaults.json").read_text("utf-8"))

CLASSES = {
    "TransformerConfig": "megatron.core.transformer:TransformerConfig",
    "OptimizerConfig": "megatron.core.optimizer:OptimizerConfig",
    "DistributedDataParallelConfig": "megatron.core.distributed:DistributedDataParallelConfig",
    "TrainingConfig": "torchtitan.config.configs:TrainingConfig",
    "CompileConfig": "torchtitan.config.configs:CompileConfig",
    "DeepSpeedZeroConfig": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
}
"""Where `read_from` lies in the packages."""

OFF = {
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
}

KNOBS: tuple[dict[str, Any], ...] = (
    {},
    {"a2a_overlap": True, "virtual": 2},
    {"a2a_overlap": True, "virtual": 2, "dispatcher": "deepep", "cuda_graph": "partial"},
    {"context_parallel_size": 2, "data_parallel_size": 4},
    {"overlap_grad_reduce": True, "overlap_param_gather": True, "gradient_bytes": 2},
    {"zero_stage": 3, "pipeline": 1},
    {"zero_stage": 0},
    {"optimizer_offload": True},
    {"fp8_recipe": "fp8-blockwise"},
    {"level": "full"},
)


def _decision(model: ModelSpec, **changes: Any) -> TrainDecision:
    level = changes.pop("level", "none")
    stages = changes.pop("pipeline", 2) * changes.get("virtual", 1)
    virtual = changes.pop("virtual", 1)
    each, rest = divmod(model.num_layers, stages)
    experts = 8 if model.num_moe_layers else 1
    return sample_decision(
        **{
            "pipeline_model_parallel_size": stages // virtual,
            "virtual_pipeline_model_parallel_size": virtual,
            "expert_model_parallel_size": experts,
            "expert_data_parallel_size": 8 // experts,
            "recompute": level,
            "recompute_modules": (),
            "stage_recompute": (level,) * stages,
            "chunks": (1,) * stages,
            "pipeline_layout": (each,) * (stages - 1) + (each + rest,),
            **changes,
        }
    )


def _cases(target: str) -> Iterator[tuple[ModelSpec, TrainDecision]]:
    for name in ("mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "llama-3.1-405b", "gpt-oss-20b"):
        model = example_model(name)
        for changes in KNOBS:
            try:
                decision = _decision(model, **changes)
            except ValueError:
                continue
            if (decision.fp8_recipe or "bf16") not in TARGETS[target].precisions:
                continue
            plan = sample_verified(model, decision, emit=(target,)).plan
            if not broken_rules(target, plan, decision):
                yield model, decision


def _written(target: str, model: ModelSpec, decision: TrainDecision) -> dict[str, Any]:
    """What the emitted files of a target state, by the last part of its name."""
    texts = {
        file.path.name: file.text
        for file in emit(target, sample_verified(model, decision, emit=(target,)))
    }
    if target.startswith("megatron-lm"):
        lines = [line.split() for line in texts["megatron_args.txt"].splitlines()]
        flags = {line[0]: line[1:] for line in lines if line and line[0].startswith("--")}
        found: dict[str, Any] = {
            flag.removeprefix("--").replace("-", "_"): " ".join(values) if values else True
            for flag, values in flags.items()
        }
        return found | {name: False for name, flag in OFF.items() if flag in flags}
    if target.startswith("megatron-bridge"):
        lines = [
            line.split("=", 1)
            for line in texts["overrides.txt"].splitlines()
            if not line.startswith("#")
        ]
        return {path.rpartition(".")[2]: {"true": True, "false": False}.get(value, value)
                for path, value in lines}  # fmt: skip
    if target == "torchtitan":
        sections = tomllib.loads(texts["torchtitan.toml"])
        return {name: value for section in sections.values() for name, value in section.items()}
    config = json.loads(texts["deepspeed.json"])
    return {**config, **config["zero_optimization"]}


ROWS: Mapping[str, tuple[PricedSetting, ...]] = {
    "megatron-lm": MEGATRON,
    "megatron-lm-0.16": MEGATRON,
    "torchtitan": TORCHTITAN,
    "deepspeed": DEEPSPEED,
}


def test_what_a_price_assumes_is_written_or_the_engines_default() -> None:
    wrong, num_cases = [], dict.fromkeys(ROWS, 0)
    for target in ROWS:
        for model, decision in _cases(target):
            num_cases[target] += 1
            written = _written(target, model, decision)
            for row in ROWS[target]:
                if not row.applies(model, decision):
                    continue
                value = written.get(row.name, row.default)
                if str(value) != str(row.priced):
                    wrong.append((target, model.name, row.name, value, row.priced))
    assert min(num_cases.values()) >= 4
    assert not wrong


def test_what_recipes_differ_in_is_always_overridden() -> None:
    wrong = []
    for target in ("megatron-bridge", "megatron-bridge-26.04", "megatron-bridge-26.02"):
        for model, decision in _cases(target):
            written = _written(target, model, decision)
            for row in MEGATRON:
                if row.name == "delay_wgrad_compute":
                    expected: Any = row.applies(model, decision)
                elif row.name in FROM_RECIPE and row.applies(model, decision):
                    expected = row.priced
                else:
                    continue
                if str(written.get(row.name)) != str(expected):
                    wrong.append((target, model.name, row.name, written.get(row.name), expected))
    assert not wrong


def test_the_table_has_the_defaults_of_megatrons_parsers() -> None:
    assert {row.name: row.default for row in MEGATRON} == DEFAULTS["defaults"]
    (row,) = (row for row in MEGATRON if row.name == "make_vocab_size_divisible_by")
    assert row.priced == VOCAB_MULTIPLE


def _written_default(package: str, path: str, name: str) -> Any:
    """Return the default of the one field of that name in a module's source."""
    found = present(importlib.util.find_spec(package))
    assert found.origin is not None
    tree = ast.parse((Path(found.origin).parent / path).read_text("utf-8"))
    values = [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and node.value is not None
        if isinstance(node.target, ast.Name) and node.target.id == name
    ]
    (value,) = values
    return value


def _default(path: str, name: str) -> Any:
    module, _, names = path.partition(":")
    owner: Any = importlib.import_module(module)
    for part in names.split("."):
        owner = getattr(owner, part)
    if dataclasses.is_dataclass(owner):
        (value,) = (field.default for field in dataclasses.fields(owner) if field.name == name)
    else:
        value = owner.model_fields[name].default
    return getattr(value, "name", value) if not str(value).startswith("torch.") else str(value)[6:]


@pytest.mark.parametrize(
    ("package", "rows"),
    [("megatron.core", MEGATRON), ("torchtitan", TORCHTITAN), ("deepspeed", DEEPSPEED)],
)
def test_the_table_has_the_defaults_of_the_installed_packages(
    package: str, rows: tuple[PricedSetting, ...]
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed (extra: engines)")
    wrong, num_read = [], 0
    for row in rows:
        # Megatron-LM's own parser is no part of the package.
        if row.read_from in (PARSER, TRAINING):
            continue
        num_read += 1
        if row.read_from == "MoE.Config":
            # Importing the models takes packages that the configuration does not need.
            found = _written_default(package, "models/common/moe.py", row.name)
        else:
            found = _default(CLASSES[row.read_from], row.name)
        if found != row.default:
            wrong.append((row.name, found, row.default))
    assert num_read >= 3
    assert not wrong


def test_biased_attention_in_a_partial_graph_is_refused_delayed_weight_gradients() -> None:
    model = example_model("gpt-oss-20b")
    plain = example_model("mixtral-8x7b")
    knobs = {"a2a_overlap": True, "virtual": 2, "cuda_graph": "partial"}
    assert refuses_delayed_gradients(model, _decision(model, **knobs))
    assert not refuses_delayed_gradients(plain, _decision(plain, **knobs))
    assert "delay_wgrad_compute" not in _written("megatron-lm", model, _decision(model, **knobs))
    assert _written("megatron-lm", plain, _decision(plain, **knobs))["delay_wgrad_compute"] is True
