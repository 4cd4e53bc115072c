from collections.abc import Callable

import pytest

from profilers.steps.config import Recompute
from tuner.engines.megatron_lm import read as megatron
from tuner.estimate.configuration import Configuration, build_configuration
from tuner.estimate.flop_counts import megatron_flop, model_flop, recomputed_flop
from tuner.spec.spec import Spec

MakeSpec = Callable[..., Spec]


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
    printed = megatron_flop(with_mtp, spec.model) / tokens
    assert printed == pytest.approx(260e9, rel=0.02)


def test_megatron_counts_hybrids_as_published(spec_of: MakeSpec) -> None:
    """TFLOP/s over tokens/s of Megatron-Bridge's performance summary, container 26.06 and 26.08."""
    for name, mtp_layers, published in (
        ("nemotron-3-nano", 0, 22.28e9),
        ("nemotron-3.5-lightning", 2, 28.15e9),
        ("nemotron-3-super", 2, 84.73e9),
        ("nemotron-3-ultra", 2, 358.9e9),
    ):
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
