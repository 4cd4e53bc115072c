"""LoRA on the reference step: what its operations, its units and its memory are."""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from profilers.steps.config import StepConfig
from profilers.steps.layout import join
from profilers.steps.run import start
from profilers.steps.training import Training
from tests.benchmarks.fit_or_not import workload_and_decision
from tests.patience import patient_s
from tuner.costs.reference.memory import unit_state
from tuner.costs.reference.operations import layer_ops
from tuner.costs.reference.update import layer_units
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.costs.residuals import residual_for
from tuner.prices.profile import ProfilePrices
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import predict
from tuner.spec.tune import Adapters

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]

EVERYTHING = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "experts"),
)
TARGETS = (EVERYTHING, ("q_proj", "experts"), ("o_proj",), ("experts",), ("up_proj",))
STAGES: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "selective", "chunks": 2},
    {"recompute": "full"},
    {"recompute": "full", "chunks": 4},
)


def _lora(*targets: str) -> Adapters:
    return Adapters(method="lora", rank=4, targets=targets)


def _gemms(work: Workload, degrees: StepDegrees, layer: int) -> Counter[tuple[object, ...]]:
    outside, inside = layer_ops(work, degrees, layer=layer, chunks=1)
    return Counter(
        (op.kind, op.direction, *op.axes.values())
        for op in (*outside, *inside)
        if op.operation in ("gemm", "grouped_gemm")
    )


def test_the_layer_of_the_first_adapter_has_no_gradients_before_it(
    tiny_work: Make, cut: Cut
) -> None:
    # H = 64, 4 query and 2 key heads of 16, n = 128 tokens: qkv is 128 wide, o is 64 by 64.
    work = tiny_work(layers="mm", batch={"tune": _lora("o_proj")})
    frozen_qkv, frozen_output = ("frozen", "%", 128, 128, 64), ("frozen", "%", 128, 64, 64)
    first, second = (_gemms(work, cut(), layer) for layer in (0, 1))

    def count(found: Counter[tuple[object, ...]], op: tuple[object, ...], way: str) -> int:
        return found[tuple(way if part == "%" else part for part in op)]

    assert count(first, frozen_qkv, "forward") == count(second, frozen_qkv, "forward") == 1
    assert count(first, frozen_qkv, "backward") == 0
    assert count(second, frozen_qkv, "backward") == 1
    # Nothing before o is trained in the first layer, so that its inputs need no gradient.
    assert count(first, frozen_output, "backward") == 0
    assert count(second, frozen_output, "backward") == 1
    for found in (first, second):
        assert count(found, ("", "%", 128, 4, 64), "backward") == 1
        assert count(found, ("", "%", 128, 64, 4), "backward") == 1
        assert sum(n for op, n in found.items() if op[0] == "frozen" and len(op) == 7) == 2


def test_layers_before_the_first_adapter_have_no_backward_pass(tiny_work: Make, cut: Cut) -> None:
    work = tiny_work(layers="dmm", dense_ffn_size=128, batch={"tune": _lora("experts")})
    backward = [
        [op for part in layer_ops(work, cut(), layer=layer, chunks=1) for op in part]
        for layer in range(3)
    ]
    assert not any(op.in_backward for op in backward[0])
    kinds = [{op.kind for op in ops if op.operation == "grouped_gemm"} for ops in backward[1:]]
    assert kinds == [{"lora4-lowest"}, {"lora4"}]


def test_units_hold_adapters_and_frozen_weights_apart(tiny_work: Make, cut: Cut) -> None:
    # q: 4 (64 + 64), experts: 8 x 4 (2 x 64 + 3 x 128); frozen: see tests of all weights.
    work = tiny_work(layers="mm", batch={"tune": _lora("q_proj", "experts")})
    full = layer_units(tiny_work(layers="mm"), cut(), layer=0)
    units = layer_units(work, cut(), layer=0)
    assert [one.parameters for one in units] == [4 * 128, 8 * 4 * 512]
    assert [one.frozen for one in units] == [one.parameters for one in full]
    state, trained = unit_state(units, work, cut()), 4 * 128 + 8 * 4 * 512
    assert state.optimizer == 8 * trained
    assert state.gradients == 4 * trained
    assert state.parameters == 4 * trained + 2 * sum(one.frozen for one in units)
    sharded = cut(data=2, zero_stage=3)
    shared = unit_state(layer_units(work, sharded, layer=0), work, sharded)
    assert shared.parameters == state.parameters // 2


@pytest.fixture(autouse=True)
def _ends_its_group() -> Iterator[None]:
    """End the job that a test started in this process."""
    was_there = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_there:
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_step_keeps_the_bytes_that_are_predicted(precision: str) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "layers": ["dense", "moe", "moe"],
        "dense_ffn_size": 160,
        "num_experts": 4,
        "top_k": 2,
        "moe_ffn_size": 48,
        "shared_ffn_size": 40,
    }
    # Every stage with all adapters, and each other set of adapters at one of them; in fp32 what is
    # kept differs by the width of a number alone.
    every = [(TARGETS[0], stage) for stage in STAGES] if precision == "bf16" else []
    for targets, stage in (*every, *zip(TARGETS[1:], STAGES, strict=True)):
        config = StepConfig.model_validate(
            {
                "model": shape,
                "parallelism": {},
                "stages": [{"num_layers": 3, **stage}],
                "sequence_length": 32,
                "global_batch_size": 4,
                "micro_batch_size": 2,
                "precision": precision,
                "routing": {"mode": "forced", "balancing": "none"},
                "adapters": {"rank": 4, "alpha": 8.0, "targets": targets},
                "device": "cpu",
            }
        )
        device = torch.device("cpu")
        layout = (
            join(config.parallelism, device=device, timeout=timedelta(seconds=patient_s(60)))
            if dist.is_initialized()
            else start(config, device=device)
        )
        training = Training(config, layout)
        training.prepare(0)
        training.compute_gradients()
        training.update()
        meter = training.metered(0)
        work, degrees, decision = workload_and_decision(config)
        machine = PricedMachine(
            num_devices=1,
            memory_limit_bytes=2**40,
            prices=Free(curves={}),
            residual=residual_for("reference", device="", device_kind="cpu"),
        )
        predicted = predict(CandidateCosts(work=work, degrees=degrees, machine=machine), decision)
        case = (targets, stage)
        assert predicted.activation_bytes[0] == pytest.approx(meter.peak_bytes, rel=0.01), case
        (own,) = predicted.stages
        assert own.parameter_bytes == training.parameter_bytes(), case
        assert own.optimizer_bytes == training.optimizer_bytes(), case


class Free(ProfilePrices):
    """Prices of a machine that is not asked for times."""

    def seconds(self, op: object) -> float:
        return 1e-6
