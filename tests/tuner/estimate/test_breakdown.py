"""The parts of a launch's step: disjoint, none negative, and room for the model's FLOPs."""

from collections.abc import Callable, Iterator

import pytest

from profilers.steps.config import Recompute
from tests.frozen.drawn import Dice
from tests.rows import each_row
from tuner.engines.megatron_lm import read as megatron
from tuner.errors import SpecError
from tuner.estimate.configuration import Configuration, build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.estimate import launch_utilisation, pricing_setup, shipped_residuals
from tuner.estimate.flop_counts import megatron_flop, model_flop, recomputed_flop
from tuner.estimate.legality import broken_rules
from tuner.estimate.prices import PricedConfiguration, PricingSetup, price_configurations
from tuner.estimate.registry import read_text
from tuner.spec.spec import Spec
from tuner.spec.tune import Adapters

MakeSpec = Callable[..., Spec]
ROUNDING = 1e-9
LAUNCHES = 60

MACHINES = (
    *(("mixtral-8x7b", 4, "h100-sxm"), ("qwen3-30b-a3b", 1, "h100-sxm")),
    *(("deepseek-v2-lite", 2, "a100-80gb"), ("deepseek-v3", 16, "b200")),
    *(("gpt-oss-20b", 1, "h200-sxm"), ("llama-3.1-8b", 1, "h100-sxm")),
    ("llama-3.1-70b", 4, "a100-80gb"),
)


def megatron_launch(dice: Dice) -> str:
    switches = {
        "--sequence-parallel": 0.9,
        "--bf16": 0.9,
        "--use-distributed-optimizer": 0.6,
        "--overlap-grad-reduce": 0.4,
        "--overlap-moe-expert-parallel-comm": 0.3,
        "--optimizer-cpu-offload": 0.2,
        "--use-flash-attn": 0.9,
        "--tp-comm-overlap": 0.3,
        "--cpu-offloading-num-layers 2": 0.1,
    }
    degrees = {
        "--tensor-model-parallel-size": (1, 1, 2, 4),
        "--pipeline-model-parallel-size": (1, 1, 2, 4),
        "--context-parallel-size": (1, 1, 1, 2),
        "--expert-model-parallel-size": (1, 2, 8, 8),
        "--expert-tensor-parallel-size": (1, 1, 2),
        "--micro-batch-size": (1, 1, 2),
    }
    words = [f"{flag} {dice.one(sizes)}" for flag, sizes in degrees.items()]
    words += [flag for flag, ratio in switches.items() if dice.chance(ratio)]
    modules = dice.one(("moe", "core_attn", "moe_act layernorm", "mlp", "shared_experts"))
    words.append(
        dice.one(
            (
                "",
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
                f"--recompute-granularity selective --recompute-modules {modules}",
            )
        )
    )
    words.append(dice.one(("", "", "--num-layers-per-virtual-pipeline-stage 2")))
    words.append(dice.one(("", "--moe-token-dispatcher-type alltoall", "--moe-enable-deepep")))
    words.append(f"--global-batch-size 128 --seq-length {dice.one((4096, 8192))}")
    return " ".join(words)


def torchtitan_launch(dice: Dice) -> str:
    parallelism = {
        "tensor_parallel_degree": dice.one((1, 1, 2, 4)),
        "pipeline_parallel_degree": dice.one((1, 1, 2)),
        "context_parallel_degree": dice.one((1, 1, 2)),
        "expert_parallel_degree": dice.one((1, 2, 8)),
    }
    lines = [f"parallelism.{name} = {value}" for name, value in parallelism.items()]
    lines.append(f"training.local_batch_size = {dice.one((1, 2, 8))}")
    lines.append(f'activation_checkpoint.mode = "{dice.one(("none", "full", "selective"))}"')
    option = dice.one(("op", "2"))
    return "\n".join([*lines, f'activation_checkpoint.selective_ac_option = "{option}"'])


def deepspeed_launch(dice: Dice) -> str:
    stage, micro = dice.one((0, 1, 2, 3, 3)), dice.one((1, 2, 4))
    checkpointing = '"activation_checkpointing": {"partition_activations": false}, '
    return (
        f'{{"train_batch_size": 128, "train_micro_batch_size_per_gpu": {micro}, '
        f"{checkpointing if dice.chance(0.5) else ''}"
        f'"bf16": {{"enabled": true}}, "zero_optimization": {{"stage": {stage}}}}}'
    )


WRITERS: dict[str, Callable[[Dice], str]] = {
    "megatron": megatron_launch,
    "torchtitan": torchtitan_launch,
    "deepspeed": deepspeed_launch,
}


def configurations(
    spec_of: MakeSpec, engine: str, dice: Dice
) -> Iterator[tuple[Configuration, Spec]]:
    tunes = ("full", "full", Adapters(method="lora", rank=16, targets=("o_proj",)))
    for _ in range(50 * LAUNCHES):
        model, nodes, device = dice.one(MACHINES)
        spec = spec_of(model, nodes=nodes, device=device, tune=dice.one(tunes))
        text = WRITERS[engine](dice)
        try:
            launch = read_text(text, format_name=engine, source="launch")
            own, _ = build_configuration(launch, spec)
        except SpecError:
            continue
        if next(broken_rules(own, spec.model, name=launch.name), None) is None:
            yield own, spec


def violations(one: PricedConfiguration, setup: PricingSetup) -> Iterator[str]:
    parts, step_s = one.step.by_cause(simulated_s=one.step_s), one.step_s
    if abs(sum(parts.values()) - step_s) > ROUNDING * step_s:
        yield f"parts add up to {sum(parts.values())} of {step_s}"
    for cause, seconds in parts.items():
        if seconds < -ROUNDING * step_s:
            yield f"{cause} takes {seconds}"
    use = launch_utilisation(one, setup)
    if use.mfu_ratio * step_s > parts["computation"] * (1.0 + ROUNDING):
        yield f"MFU {use.mfu_ratio} of {step_s} in {parts['computation']} of computation"
    config = one.configuration
    again_s = recomputed_flop(config, setup.model) / (use.peak_flop_per_s * config.devices)
    if again_s > parts["recompute"] * (1.0 + ROUNDING):
        yield f"recomputation takes {parts['recompute']} for {again_s} of FLOPs"


@pytest.mark.parametrize("engine", list(WRITERS))
def test_parts_are_disjoint_and_computation_holds_the_models_flops(
    spec_of: MakeSpec, engine: str
) -> None:
    drawn = configurations(spec_of, engine, Dice(54))
    failures = []
    for _, (own, spec) in zip(range(LAUNCHES), drawn, strict=False):
        setup = pricing_setup(spec, shipped_residuals())
        (one,) = price_configurations((own,), setup)
        failures += [
            f"{said}: {spec.model.name} {to_decision(own, spec.model)}"
            for said in violations(one, setup)
        ]
    assert next(drawn, None) is not None, "fewer launches than asked for"
    assert not failures, "\n".join(failures[:5]) + f"\n{len(failures)} failures"


def test_recomputation_takes_nothing_from_computation(spec_of: MakeSpec) -> None:
    spec = spec_of("qwen3-30b-a3b", nodes=1)
    setup = pricing_setup(spec, shipped_residuals())
    launch = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --expert-model-parallel-size 8 --bf16"
        " --micro-batch-size 1 --global-batch-size 256 --seq-length 4096"
    )
    flags = {
        "nothing": "",
        "layers": "--recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1",
        "experts": "--recompute-granularity selective --recompute-modules moe",
    }
    seconds = {}
    for name, own in flags.items():
        read = read_text(f"{launch} {own}", format_name="megatron", source="launch")
        (one,) = price_configurations((build_configuration(read, spec)[0],), setup)
        seconds[name] = one.step.by_cause(simulated_s=one.step_s)
    plain = seconds.pop("nothing")
    for parts in seconds.values():
        assert parts["computation"] == pytest.approx(plain["computation"])
        # Dispatch and combine run forward, backward and once more.
        assert parts["expert"] == pytest.approx(1.5 * plain["expert"])
        assert 0.0 < parts["recompute"] < plain["computation"] / 2.0


def configuration(spec: Spec, flags: str = "") -> Configuration:
    text = f"--micro-batch-size 1 --global-batch-size 16 --seq-length 4096 {flags}"
    return build_configuration(megatron.read(text, source="args"), spec)[0]


def test_megatron_counts_a_dense_model_as_its_papers_do(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=2)
    own = configuration(spec)
    # By hand, per token: 6 * (32 layers * (qkv and output 41,943,040 + FFN 3 * 4096 * 14336
    # + 4096 * 32 * 128 attended halves) + 4096 * 128256 of the head).
    layer = 41_943_040 + 3 * 4096 * 14336 + 4096 * 32 * 128
    expected = 6 * (32 * layer + 4096 * 128_256) * 16 * 4096

    assert megatron_flop(own, spec.model) == pytest.approx(expected, rel=1e-12)
    # Ours differs by the diagonal of attention alone: (S + 1) / 2 against S / 2.
    assert model_flop(own, spec.model) == pytest.approx(expected, rel=2e-4)


def test_multi_token_prediction_counts_where_it_is_trained(spec_of: MakeSpec) -> None:
    spec = spec_of("deepseek-v3", nodes=2)
    without = configuration(spec)
    with_mtp = configuration(spec, "--mtp-num-layers 1")
    tokens = 16 * 4096
    # A further layer (one of 58 identical ones), its joining projection and a second head.
    # Megatron-Bridge prints about 260 GFLOP a token with and 250 without it.
    added = (model_flop(with_mtp, spec.model) - model_flop(without, spec.model)) / tokens

    assert model_flop(without, spec.model) / tokens == pytest.approx(250e9, rel=0.02)
    assert added == pytest.approx(10e9, rel=0.2)
    assert megatron_flop(with_mtp, spec.model) / tokens == pytest.approx(260e9, rel=0.02)


@each_row(
    ("name", "mtp_layers", "published"),
    (
        ("nemotron-3-nano", 0, 22.28e9),
        ("nemotron-3.5-lightning", 2, 28.15e9),
        ("nemotron-3-super", 2, 84.73e9),
        ("nemotron-3-ultra", 2, 358.9e9),
    ),
)
def test_megatron_counts_hybrids_as_published(
    spec_of: MakeSpec, name: str, mtp_layers: int, published: float
) -> None:
    """TFLOP/s over tokens/s of Megatron-Bridge's performance summary, container 26.06 and 26.08."""
    spec = spec_of(name, nodes=2)
    own = configuration(spec).model_copy(update={"sequence": 8192, "mtp_layers": mtp_layers})
    printed = megatron_flop(own, spec.model) / (16 * 8192)
    assert printed == pytest.approx(published, rel=2e-4), name


def test_recomputed_operations_are_those_of_the_modules(spec_of: MakeSpec) -> None:
    spec = spec_of("mixtral-8x7b", nodes=2)
    own = configuration(spec)

    def again(*modules: str) -> float:
        chosen = own.model_copy(
            update={"recompute": Recompute.SELECTIVE, "recompute_modules": modules}
        )
        return recomputed_flop(chosen, spec.model)

    full = recomputed_flop(own.changed(recompute=Recompute.FULL, recompute_ratio=1.0), spec.model)
    assert recomputed_flop(own, spec.model) == 0.0
    assert again("layernorm", "moe_act") == 0.0
    assert 0.0 < again("core_attn") < again("moe") < full
    assert again("moe", "shared_experts") == again("moe")
    by_operation = own.model_copy(
        update={"recompute": Recompute.SELECTIVE, "recompute_by_op": True}
    )
    by_half = recomputed_flop(by_operation, spec.model)
    assert 0.0 < by_half < full / 2
    # In eager mode grouped GEMMs are repeated whole.
    eager = by_operation.model_copy(update={"compiled": frozenset({"loss"})})
    assert by_half + again("moe") / 3 < recomputed_flop(eager, spec.model) < full
    half = own.changed(recompute=Recompute.FULL, recompute_ratio=0.5)
    assert recomputed_flop(half, spec.model) == pytest.approx(full / 2)
