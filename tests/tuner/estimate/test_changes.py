"""Changes that are proposed can be launched, and then do what was predicted."""

import json
import shlex
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rows import each_row
from tuner.devices.datasheet import Generation
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.peft import read as trainer
from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.targets import programs
from tuner.engines.torchtitan import read as torchtitan
from tuner.errors import SpecError
from tuner.estimate.changes import MOST_KNOBS
from tuner.estimate.configuration import build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.estimate import estimate, pricing_setup, shipped_residuals
from tuner.estimate.knobs import knob_changes
from tuner.estimate.legality import broken_rules
from tuner.estimate.prices import price_configurations
from tuner.estimate.records import Estimate, TrainingChange
from tuner.estimate.registry import read_text
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.search.train.search import search
from tuner.spec.cluster import Cluster
from tuner.spec.spec import Spec

MakeSpec = Callable[..., Spec]
Flags = dict[str, str]

COMMON: Flags = {
    "--micro-batch-size": "1",
    "--global-batch-size": "256",
    "--seq-length": "4096",
    "--bf16": "",
    "--hidden-dropout": "0",
    "--attention-dropout": "0",
    "--moe-token-dispatcher-type": "alltoall",
}
LAUNCHES = st.fixed_dictionaries(
    {
        "--tensor-model-parallel-size": st.sampled_from(["1", "2", "4"]),
        "--pipeline-model-parallel-size": st.sampled_from(["1", "2", "4"]),
        "--expert-model-parallel-size": st.sampled_from(["1", "4", "8"]),
        "--sequence-parallel": st.just(""),
    },
    optional={
        "--expert-tensor-parallel-size": st.just("1"),
        "--context-parallel-size": st.just("2"),
        "--num-layers-per-virtual-pipeline-stage": st.sampled_from(["1", "2", "4"]),
        "--micro-batch-size": st.sampled_from(["2", "4"]),
        "--use-distributed-optimizer": st.just(""),
        "--overlap-grad-reduce": st.just(""),
        "--recompute-activations": st.just(""),
        "--external-cuda-graph": st.just(""),
        "--moe-enable-deepep": st.just(""),
        "--overlap-moe-expert-parallel-comm": st.just(""),
        "--num-distributed-optimizer-instances": st.just("2"),
    },
)


def read(flags: Flags) -> LaunchSettings:
    text = " ".join(f"{flag} {value}" for flag, value in flags.items())
    return megatron.read(text, source="args")


def read_and_estimate(flags: Flags, spec: Spec) -> Estimate:
    return estimate(spec, read(flags))


def changed(flags: Flags, lines: Iterable[str]) -> Flags:
    """Edit a launch as the lines say."""
    result = dict(flags)
    for line in lines:
        first, *rest = shlex.split(line)
        if first == "remove":
            del result[rest[0]]
            continue
        value = " ".join(rest)
        result[first] = f"'{value}'" if "|" in value or "(" in value else value
    return result


def all_changes(result: Estimate) -> list[TrainingChange]:
    single = [result.smallest_change] if result.smallest_change else []
    return [*result.changes, *single, *([result.best_pair] if result.best_pair else [])]


@given(flags=LAUNCHES)
@settings(
    deadline=None,
    max_examples=6,
    # Every example prices thousands of configurations; shrinking would take minutes.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_change_is_launched_by_its_lines_and_brings_what_it_promised(
    spec_of: MakeSpec, flags: Flags
) -> None:
    spec = spec_of("mixtral-8x7b", nodes=4)
    launch = COMMON | flags
    if "--moe-enable-deepep" in flags:
        launch["--moe-token-dispatcher-type"] = "flex"
    try:
        result = read_and_estimate(launch, spec)
    except SpecError:
        return
    setup = pricing_setup(spec, None)
    for change in all_changes(result):
        settings_again = read(changed(launch, change.lines))
        own, _ = build_configuration(settings_again, spec)
        assert next(broken_rules(own, spec.model, name=settings_again.name), None) is None
        assert to_decision(own, spec.model) == change.decision, change
        (again,) = price_configurations((own,), setup)
        assert again.step_s == pytest.approx(change.step_time_s, rel=1e-9)
        assert again.peak_bytes_P.max() == pytest.approx(change.peak_memory_bytes, rel=1e-9)
        assert change.peak_memory_bytes <= result.memory_limit_bytes


EXPERTS = COMMON | {"--expert-model-parallel-size": "8", "--use-distributed-optimizer": ""}


def test_deepep_is_not_proposed_where_it_does_not_run(spec_of: MakeSpec) -> None:
    on_a100 = read_and_estimate(EXPERTS, spec_of("mixtral-8x7b", nodes=8, device="a100-80gb"))

    assert all(one.decision.dispatcher == "alltoall" for one in all_changes(on_a100))


def test_what_the_manifest_refuses_is_not_proposed(spec_of: MakeSpec) -> None:
    flags = COMMON | {
        "--pipeline-model-parallel-size": "4",
        "--expert-model-parallel-size": "8",
        "--use-distributed-optimizer": "",
    }
    for change in all_changes(read_and_estimate(flags, spec_of("mixtral-8x7b", nodes=8))):
        decision = change.decision
        # Overlap in a pipeline needs interleaving, in the engine and so in every proposal.
        overlaps = decision.a2a_overlap and decision.pipeline_model_parallel_size > 1
        assert not overlaps or decision.virtual_pipeline_model_parallel_size > 1


def test_a_hopeless_launch_reports_that_no_small_change_helps(spec_of: MakeSpec) -> None:
    flags = COMMON | {"--micro-batch-size": "8", "--global-batch-size": "64"}
    result = read_and_estimate(flags, spec_of("llama-3.1-405b", nodes=1))

    assert not result.fits
    assert result.smallest_change is None
    assert result.changes == ()
    assert result.num_tried > 10


def test_the_same_launch_gives_the_same_estimate(spec_of: MakeSpec) -> None:
    spec = spec_of("mixtral-8x7b", nodes=2)

    assert read_and_estimate(EXPERTS, spec) == read_and_estimate(EXPERTS, spec)


def test_examples_in_the_tree_are_launches(spec_of: MakeSpec) -> None:
    folder = Path(__file__).parents[3] / "examples" / "worked"
    names = {
        "mixtral-8x7b-64-a100": ("mixtral-8x7b", 8, "a100-80gb"),
        "qwen3-30b-a3b-16-h100": ("qwen3-30b-a3b", 2, "h100-sxm"),
    }
    for name, (model, nodes, device) in names.items():
        text = (folder / name / "public.sh").read_text()
        result = estimate(
            spec_of(model, nodes=nodes, device=device), megatron.read(text, source="public.sh")
        )
        assert result.devices == 8 * nodes


# How sure a change is to beat a launch, and which release both are priced for.

LAUNCH = Path(__file__).parent / "launches" / "mixtral.sh"


def _estimated(spec: Spec) -> Estimate:
    launch = megatron.read(LAUNCH.read_text(), source=LAUNCH.name)
    return estimate(spec, launch, residuals=shipped_residuals())


def _changes(result: Estimate) -> list[TrainingChange]:
    both = [one for one in (result.smallest_change, result.best_pair) if one is not None]
    return [*result.changes, *both]


def test_every_change_has_a_band_of_its_ratio_narrower_than_a_time_s(spec_of: MakeSpec) -> None:
    result = _estimated(spec_of("mixtral-8x7b", nodes=8))
    low, high = result.step_time_s_band
    wrong = []
    for one in _changes(result):
        lowest, highest = one.ratio_band
        holds = lowest < 1.0 - one.gain_ratio < highest
        is_narrow = highest / lowest < (high / low) ** 0.5
        is_tuned = one.within_band == (lowest <= 1.0 <= highest)
        if not (holds and is_narrow and is_tuned):
            wrong.append(one)
    assert result.changes
    assert not wrong


def test_the_release_that_the_goal_names_is_priced_and_said(spec_of: MakeSpec) -> None:
    plain = _estimated(spec_of("mixtral-8x7b", nodes=8))
    named = _estimated(
        spec_of("mixtral-8x7b", nodes=8, engine={"name": "nemo", "version": "25.11"})
    )
    assert any("on all published releases of nemo" in note for note in plain.notes)
    assert any("priced as nemo 25.11" in note for note in named.notes)
    with pytest.raises(ValidationError, match="in quotes"):
        spec_of("mixtral-8x7b", nodes=8, engine={"name": "nemo", "version": 26.04})
    assert named.step_time_s != plain.step_time_s
    with pytest.raises(SpecError, match=r"goal\.engine\.version: '1\.0' is no release"):
        _estimated(spec_of("mixtral-8x7b", nodes=8, engine={"name": "nemo", "version": "1.0"}))


# A launch that does not fit is told what would, wherever the search of plans finds anything.

MEGATRON: Final = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 256"
    " --seq-length 4096 --bf16 --hidden-dropout 0 --attention-dropout 0"
    " --moe-token-dispatcher-type alltoall"
)
TORCHTITAN: Final = (
    'training.local_batch_size = 8\ntraining.seq_len = 4096\nactivation_checkpoint.mode = "none"'
)
SEARCHED: Final = (
    ("llama-3.1-8b", 1, "a100-40gb", "megatron", MEGATRON),
    ("qwen2.5-32b", 1, "h100-sxm", "torchtitan", TORCHTITAN),
    (
        "llama-3.1-405b",
        16,
        "h100-sxm",
        "megatron",
        MEGATRON.replace("torchrun", "torchrun --nnodes 16"),
    ),
)
"""Launches that do not fit, of models that are planned in a few seconds."""


def read_launch_text(text: str, engine: str = "megatron") -> LaunchSettings:
    return read_text(text, format_name=engine, source="launch")


def told(spec: Spec, text: str, engine: str = "megatron") -> Estimate:
    result = estimate(spec, read_launch_text(text, engine), residuals=shipped_residuals())
    assert not result.fits
    return result


def finds_a_plan(spec: Spec) -> bool:
    problem = build_problem(spec, price_pool(spec.cluster.pools[0], residuals=shipped_residuals()))
    settings = SearchSettings(top=1, time_limit_s=60.0, clock=time.perf_counter)
    return search(problem, settings).solutions is not None


@each_row(("model", "nodes", "device", "engine", "text"), SEARCHED)
def test_a_change_fits_wherever_a_plan_does(
    spec_of: MakeSpec, model: Any, nodes: Any, device: Any, engine: Any, text: Any
) -> None:
    targets = {"megatron": "megatron-lm", "torchtitan": "torchtitan"}
    spec = spec_of(model, nodes=nodes, device=device)
    spec = spec.model_copy(update={"programs": programs((targets[engine],))})
    result = told(spec, text, engine)
    change = result.smallest_change
    assert finds_a_plan(spec), model
    assert change is not None, model
    assert change.peak_memory_bytes <= result.memory_limit_bytes
    assert len(change.what) <= MOST_KNOBS


def test_knobs_are_added_until_a_launch_fits(spec_of: MakeSpec) -> None:
    # 141 B parameters on 32 devices of 40 GB: state alone is 79 GB a device, even if all is split.
    spec = spec_of("mixtral-8x22b", nodes=4, device="a100-40gb")
    result = told(spec, MEGATRON.replace("torchrun", "torchrun --nnodes 4"))

    assert result.smallest_change is not None
    assert len(result.smallest_change.what) > 2
    assert result.smallest_change.peak_memory_bytes <= result.memory_limit_bytes
    assert result.best_pair is None


@each_row(("memory_gib", "fills"), ((7.0, False), (6.88, True), (6.0, None)))
def test_a_change_that_fills_the_devices_is_named_where_none_leaves_as_much_as_a_plan(
    spec_of: MakeSpec, memory_gib: float, fills: bool | None
) -> None:
    spec, gib = spec_of("llama-3.1-8b", nodes=1), 2**30
    (pool,) = spec.cluster.pools
    pool = pool.model_copy(update={"memory_per_device": int(memory_gib * gib)})
    result = told(spec.model_copy(update={"cluster": Cluster(pools=(pool,))}), MEGATRON)
    change = result.smallest_change
    assert (change is None) is (fills is None), memory_gib
    if change is not None:
        assert (change.peak_memory_bytes > result.memory_limit_bytes) is fills, memory_gib
        assert change.peak_memory_bytes <= result.memory_capacity_bytes


def test_cheap_changes_are_named_before_dear_ones(spec_of: MakeSpec) -> None:
    # Qwen3-30B-A3B ran out of memory on 8 x 80 GB with EP 8; offloading the optimizer, sums in bf16
    # with recomputation, or FSDP make it fit (NVIDIA/Megatron-LM issue 2762).
    spec = spec_of("qwen3-30b-a3b", nodes=1)
    launch = (
        f"{MEGATRON} --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
        " --use-distributed-optimizer"
    )
    result = told(spec, launch)

    assert result.smallest_change is not None
    assert result.smallest_change.lines == (
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
    )
    assert "GiB a node" in result.smallest_change.what[0]
    assert -0.15 < result.smallest_change.gain_ratio < -0.05
    flags = [set(" ".join(one.lines).split()) for one in result.changes]
    assert any({"--grad-reduce-in-bf16", "--recompute-granularity"} <= one for one in flags)
    assert any("--use-megatron-fsdp" in one for one in flags)


def test_bf16_is_advised_where_its_flag_is_missing(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1, device="a100-40gb")
    launch = MEGATRON.replace(" --bf16", "") + " --tensor-model-parallel-size 8 --sequence-parallel"
    result = estimate(spec, read_launch_text(launch), residuals=shipped_residuals())
    changes = [one for one in (result.smallest_change, *result.changes) if one]

    assert any("--bf16" in one.lines for one in changes)


def test_a_launch_that_fits_is_not_told_to_sum_gradients_in_bf16_or_to_offload(
    spec_of: MakeSpec,
) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    text = f"{MEGATRON} --tensor-model-parallel-size 2 --sequence-parallel"
    result = estimate(
        spec,
        read_launch_text(f"{text} --use-distributed-optimizer"),
        residuals=shipped_residuals(),
    )
    assert result.fits
    pair = (result.best_pair,) if result.best_pair else ()
    lines = [line for one in (*result.changes, *pair) for line in one.lines]

    assert not {"--grad-reduce-in-bf16", "--optimizer-cpu-offload"} & set(lines)


@each_row(
    ("optimizer", "shards"),
    (
        ("adam", True),
        ("lion", True),
        ("muon", False),
        ("dist_muon", False),
    ),
)
def test_an_optimizer_that_does_not_shard_is_not_told_to(
    *, spec_of: MakeSpec, optimizer: str, shards: bool
) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    own, _ = build_configuration(read_launch_text(f"{MEGATRON} --optimizer {optimizer}"), spec)
    changes = knob_changes(own, spec.model, Generation.HOPPER)
    told_to_shard = any(change.apply(own).zero_stage > own.zero_stage for change in changes)
    assert told_to_shard == shards, optimizer


# Proposed lines of TOML and JSON launches do what was predicted, as those of Megatron-LM.

FOLDER = Path(__file__).parent / "launches"
Nested = dict[str, Any]


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


def check(
    result: Estimate, spec: Spec, relaunch: Callable[[TrainingChange], LaunchSettings]
) -> None:
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
    text = (FOLDER / name).read_text()
    spec = spec_of(model, nodes=nodes)

    def relaunch(change: TrainingChange) -> LaunchSettings:
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
        ("llama-3.1-8b", 8, json.loads((FOLDER / "zero3.json").read_text())),
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

        def relaunch(change: TrainingChange, values: Nested = values) -> LaunchSettings:
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

    def relaunch(change: TrainingChange) -> LaunchSettings:
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
