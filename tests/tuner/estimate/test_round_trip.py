"""Every line of advice, pasted into its launch, is obeyed: the promised decision and figures."""

import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pytest

from tests.frozen.drawn import Dice
from tests.tuner.estimate.test_changes import merged, toml_lines
from tuner.engines.reading.launch import LaunchSettings
from tuner.estimate.changes import manifest_refusals, with_dependent_knobs
from tuner.estimate.configuration import Configuration, build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.estimate import pricing_setup
from tuner.estimate.flag_lines import flag_lines
from tuner.estimate.knobs import KnobChange, knob_changes
from tuner.estimate.legality import broken_rules
from tuner.estimate.prices import PricingSetup, price_configurations
from tuner.estimate.registry import read_text
from tuner.spec.spec import Spec

PAIRS: Final = 40
"""Of each launch, beside all single changes."""

MEGATRON: Final = (
    "--micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --hidden-dropout 0"
    " --attention-dropout 0 --moe-token-dispatcher-type alltoall"
)
MEGATRON_LAUNCHES: Final = {
    "plain": ("qwen3-30b-a3b", 1, f"{MEGATRON} --expert-model-parallel-size 8 --bf16"),
    "fp32": ("llama-3.1-8b", 1, f"{MEGATRON} --tensor-model-parallel-size 2 --sequence-parallel"),
    "sharded": (
        "mixtral-8x7b",
        4,
        f"{MEGATRON} --bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
        " --expert-model-parallel-size 8 --recompute-activations --overlap-grad-reduce"
        " --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
    ),
    "offloaded": (
        "qwen3-30b-a3b",
        1,
        f"{MEGATRON} --bf16 --use-distributed-optimizer --expert-model-parallel-size 8"
        " --optimizer-cpu-offload --optimizer-offload-fraction 0.5"
        " --use-precision-aware-optimizer --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1",
    ),
    "fraction": (
        "qwen3-30b-a3b",
        1,
        f"{MEGATRON} --bf16 --optimizer-offload-fraction 0.5 --expert-model-parallel-size 8",
    ),
    "gradients": (
        "llama-3.1-8b",
        2,
        f"{MEGATRON} --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    ),
    "ends": (
        "glm-4.5-air",
        8,
        f"{MEGATRON} --bf16 --use-distributed-optimizer --expert-model-parallel-size 8"
        " --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split"
        " --account-for-loss-in-pipeline-split",
    ),
    "custom": ("llama-3.1-8b", 2, f"{MEGATRON} --bf16 --use-torch-fsdp2"),
}
TORCHTITAN: Final = """
[training]
local_batch_size = 8
seq_len = 4096
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
TORCHTITAN_LAUNCHES: Final = {
    "default": ("deepseek-v2-lite", 1, TORCHTITAN),
    "fp32": (
        "llama-3.1-8b",
        1,
        f"{TORCHTITAN}\n[parallelism]\ndata_parallel_shard_degree = 8\n[debug]\nseed = 1\n".replace(
            "seq_len = 4096", 'seq_len = 4096\nmixed_precision_param = "float32"'
        ),
    ),
    "replicated": (
        "llama-3.1-8b",
        1,
        f"{TORCHTITAN}\n[parallelism]\ndata_parallel_replicate_degree = 8\n"
        "data_parallel_shard_degree = 1\n",
    ),
    "hybrid": (
        "llama-3.1-8b",
        2,
        f"{TORCHTITAN}\n[parallelism]\ndata_parallel_replicate_degree = 2\n"
        'data_parallel_shard_degree = 8\nfsdp_reshard_after_forward = "never"\n',
    ),
    "pipeline": (
        "llama-3.1-70b",
        4,
        f"{TORCHTITAN}\n[parallelism]\npipeline_parallel_degree = 2\ntensor_parallel_degree = 4\n",
    ),
}


def megatron_with(text: str, lines: Iterable[str]) -> str:
    """Edit a command as its user would: flags that are there are replaced."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in shlex.split(text):
        if word.startswith("--"):
            name, values[word] = word, []
        else:
            values[name].append(word)
    for line in lines:
        first, *rest = shlex.split(line)
        if first == "remove":
            del values[rest[0]]
        else:
            values[first] = rest
    return " ".join(f"{name} {shlex.join(words)}" for name, words in values.items())


def torchtitan_with(text: str, lines: Iterable[str]) -> str:
    values = tomllib.loads(text)
    for line in lines:
        if not line.startswith("remove "):
            values = merged(values, tomllib.loads(line))
            continue
        *sections, key = line.removeprefix("remove ").split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        del inner[key]
    return "\n".join(toml_lines(values))


EDITORS: Final[dict[str, Callable[[str, Iterable[str]], str]]] = {
    "megatron": megatron_with,
    "torchtitan": torchtitan_with,
}


def applied(own: Configuration, changes: Iterable[KnobChange]) -> Configuration:
    for change in changes:
        own = with_dependent_knobs(change.apply(own))
    return own


def groups(own: Configuration, spec: Spec, setup: PricingSetup) -> Iterator[tuple[KnobChange, ...]]:
    every = tuple(knob_changes(own, spec.model, setup.sheet.generation))
    yield from ((change,) for change in every)
    dice = Dice(8)
    for _ in range(PAIRS):
        first, second = dice.one(every), dice.one(every)
        if first.limit != second.limit:
            yield first, second


def is_proposed(after: Configuration, before: Configuration, setup: PricingSetup) -> bool:
    """Say whether the search could propose it."""
    if after == before or not after.data or after.data % after.replicas:
        return False
    if after.global_batch % (after.micro_batch * after.data * after.rounds):
        return False
    if next(broken_rules(after, setup.model, name=str), None) is not None:
        return False
    return set(manifest_refusals(after, setup)) <= set(manifest_refusals(before, setup))


def differences(
    launch: LaunchSettings, text: str, spec: Spec, edit: Callable[[str, Iterable[str]], str]
) -> Iterator[str]:
    setup = pricing_setup(spec, None)
    before, _ = build_configuration(launch, spec)
    obeyed: dict[str, tuple[Configuration, Configuration]] = {}
    for group in groups(before, spec, setup):
        after = applied(before, group)
        if not is_proposed(after, before, setup):
            continue
        lines = flag_lines(launch, before, after)
        said = f"{[change.words for change in group]} by {lines}"
        again = read_text(edit(text, lines), format_name=str(launch.engine), source="launch")
        own, _ = build_configuration(again, spec)
        if to_decision(own, spec.model) != to_decision(after, spec.model):
            yield f"{said}: {to_decision(own, spec.model)}, not {to_decision(after, spec.model)}"
            continue
        obeyed[said] = after, own
    afters, owns = (
        price_configurations(side, setup) for side in zip(*obeyed.values(), strict=True)
    )
    for said, promised, found in zip(obeyed, afters, owns, strict=True):
        if found.step_s != pytest.approx(promised.step_s, rel=1e-9):
            yield f"{said}: {found.step_s} s, not {promised.step_s}"
        if found.peak_bytes_P.max() != pytest.approx(promised.peak_bytes_P.max(), rel=1e-9):
            yield f"{said}: {found.peak_bytes_P.max()} bytes, not {promised.peak_bytes_P.max()}"


@pytest.mark.parametrize(
    ("engine", "launches"),
    [("megatron", MEGATRON_LAUNCHES), ("torchtitan", TORCHTITAN_LAUNCHES)],
)
def test_every_change_is_obeyed(
    spec_of: Callable[..., Spec], engine: str, launches: dict[str, tuple[str, int, str]]
) -> None:
    failures = []
    for name, (model, nodes, text) in launches.items():
        spec = spec_of(model, nodes=nodes)
        launch = read_text(text, format_name=engine, source="launch")
        found = differences(launch, text, spec, EDITORS[engine])
        failures += [f"{name}: {one}" for one in found]
    assert not failures, "\n".join(failures[:10]) + f"\n{len(failures)} failures"
