"""Adapters by hand: parameters, bytes of state, what is kept, seconds."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.expect import present
from tests.rows import Failures
from tests.tuner.models import MODELS, example_model
from tuner.backtest.columns import device_hardware
from tuner.config.columns import Strategies
from tuner.config.shapes import Stages, number
from tuner.config.tune_columns import NF4_BYTES, Stack, stack_of, tune_columns
from tuner.costs.train.adapters import adapter_counts, frozen_on_device, num_adapter_parameters
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import constants_of_family
from tuner.costs.train.step import price_step
from tuner.devices.catalogue import find_device
from tuner.engines.peft.lora import lora_config
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.lookups import Lookups, NotedPrices
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated
from tuner.spec.tune import Adapters

LLAMA = example_model("llama-3.1-8b")
MIXTRAL = example_model("mixtral-8x7b")
SHEET = find_device("h100-sxm")
HARDWARE = device_hardware(SHEET, GemmPrecision.BF16)
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
"""Matrices of a layer of Llama 3.1 8B."""


def strategy(tune: Adapters | None, stack: Stack, model: Any = LLAMA, **changes: Any) -> Strategies:
    usual = {"sequence": 4096.0, "micro_batch": 1.0, "num_microbatches": 4.0, "zero_stage": 1.0}
    return Strategies(**{**usual, **tune_columns(tune, model, stack), **changes})


def one_stage(model: Any) -> Stages:
    one = np.ones((1, 1))
    moe = float(model.num_moe_layers)
    return Stages(
        dense_SC=one * (model.num_layers - moe),
        moe_SC=one * moe,
        embedding_SC=one,
        head_SC=one,
        mtp_SC=0.0 * one,
    )


def memory(chosen: Strategies, model: Any = LLAMA, family: str = "") -> Any:
    software = Software.TRANSFORMERS if family else Software.MEGATRON_2026
    return price_memory(
        shape_of_model(model, mtp_layers=0),
        chosen,
        HARDWARE,
        one_stage(model),
        constants=constants_of_family(software, family),
    )


def step(chosen: Strategies, model: Any = LLAMA, software: Software = Software.TRANSFORMERS) -> Any:
    constants = uncalibrated(SHEET.generation, precision=GemmPrecision.BF16, software=software)
    shape = shape_of_model(model, mtp_layers=0)
    return price_step(shape, chosen, HARDWARE, constants, one_stage(model))


def lora(*targets: str, **fields: Any) -> Adapters:
    return Adapters(method=fields.pop("method", "lora"), rank=16, targets=targets, **fields)


LLAMA_SHAPE = shape_of_model(LLAMA, mtp_layers=0)


def test_an_adapter_has_rank_times_both_widths() -> None:
    separate = adapter_counts(LLAMA_SHAPE, strategy(lora("all-linear"), Stack.PYTORCH))
    # q and o 4096 x 4096, k and v 4096 x 1024; gate and up 4096 x 14336, down the other way.
    assert number(separate.attention) == 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert number(separate.dense) == 16 * 3 * (4096 + 14336)
    every = strategy(lora("all-linear"), Stack.PYTORCH, tensor=4.0)
    layer = number(separate.attention) + number(separate.dense)
    assert number(num_adapter_parameters(LLAMA_SHAPE, every)) == 32 * layer
    fused = adapter_counts(LLAMA_SHAPE, strategy(lora("all-linear"), Stack.MEGATRON))
    # One input of 4096 for q, k, v, and one for gate and up.
    assert number(separate.attention) - number(fused.attention) == 16 * 2 * 4096
    assert number(separate.dense) - number(fused.dense) == 16 * 4096
    titan = adapter_counts(LLAMA_SHAPE, strategy(lora("all-linear"), Stack.TORCHTITAN))
    assert number(titan.attention) == number(fused.attention)
    assert number(titan.dense) == number(separate.dense)


def test_torchtitan_keeps_an_original_of_every_frozen_weight() -> None:
    # Layers read 2 bytes; the original has 4, or 2 in bf16, over 8 ranks under ZeRO 2 and 3.
    for dtype, stage, expected in (
        (None, 0.0, 2.0 + 4.0),
        (None, 2.0, 2.0 + 4.0 / 8.0),
        (None, 3.0, 4.0 / 8.0),
        ("bf16", 3.0, 2.0 / 8.0),
    ):
        chosen = strategy(lora("attention", dtype=dtype), Stack.TORCHTITAN, zero_stage=stage)
        assert number(frozen_on_device(chosen, 2.0, ranks=8.0)) == expected, (dtype, stage)
        # Adapters multiply in bf16, whatever the optimizer updates.
        assert chosen.adapter_bytes == 2.0
    plain = strategy(lora("attention"), Stack.PYTORCH, zero_stage=3.0)
    assert number(frozen_on_device(plain, 2.0, ranks=8.0)) == 2.0 / 8.0


MIXTRAL_SHAPE = shape_of_model(MIXTRAL, mtp_layers=0)


def test_every_expert_has_adapters_of_its_own() -> None:
    chosen = strategy(lora("experts"), Stack.TRANSFORMERS, MIXTRAL)
    counts = adapter_counts(MIXTRAL_SHAPE, chosen)
    # 8 experts; gate and up share their input: 4096 -> 2 x 14336, and 14336 -> 4096.
    assert number(counts.experts) == 16 * 8 * (4096 + 2 * 14336 + 14336 + 4096)
    assert number(counts.attention) == 0.0
    half = adapter_counts(MIXTRAL_SHAPE, replace(chosen, expert=4.0))
    assert number(half.experts) == number(counts.experts) / 4


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    full = memory(strategy(None, Stack.MEGATRON, data=8.0))
    tuned = memory(strategy(lora("all-linear"), Stack.MEGATRON, data=8.0))
    adapters = 32 * 16 * (2 * 4096 + 2 * 4096 + 2 * 1024 + 3 * (4096 + 14336) - 4096)
    assert number(tuned.gradients_PC) == pytest.approx(4.0 * adapters, rel=0.01)
    # fp32 copies and two moments, shared by 8 ranks.
    assert number(tuned.optimizer_PC) == pytest.approx(12.0 * adapters / 8, rel=0.01)
    more = number(tuned.weights_PC) - number(full.weights_PC)
    assert more == pytest.approx(2.0 * adapters, rel=0.01)
    assert number(tuned.total_PC) < 0.5 * number(full.total_PC)


def test_nf4_covers_linear_layers_and_not_the_vocabulary() -> None:
    # 4 bits, an 8-bit scale of 64 values, an fp32 one of 256 such scales.
    assert pytest.approx(0.515869, rel=1e-5) == NF4_BYTES
    plain, small = (
        memory(
            strategy(lora("attention", method=method), Stack.TRANSFORMERS, zero_stage=0.0),
            family="transformers",
        )
        for method in ("lora", "qlora")
    )
    saved = number(plain.weights_PC) - number(small.weights_PC)
    assert saved == pytest.approx(32 * LAYER * (2.0 - NF4_BYTES), rel=0.001)


def test_sharding_divides_frozen_weights_and_adapters() -> None:
    alone, shared = (
        memory(
            strategy(lora("attention"), Stack.PYTORCH, zero_stage=3.0, data=ranks),
        )
        for ranks in (1.0, 8.0)
    )
    for part in ("weights_PC", "gradients_PC", "optimizer_PC"):
        assert number(getattr(alone, part)) == pytest.approx(8 * number(getattr(shared, part)))


def test_fp32_adapters_keep_copies_and_bf16_ones_share() -> None:
    kept = {
        dtype: number(
            memory(
                strategy(
                    lora("attention", dtype=dtype),
                    Stack.TRANSFORMERS,
                    zero_stage=0.0,
                    num_microbatches=1.0,
                ),
                family="transformers",
            ).activations_PC
        )
        for dtype in ("fp32", "bf16")
    }
    # fp32: 4 bytes of 4096 for each of four; bf16: 2 bytes once for q, k, v (o's is kept anyway,
    # but not as it is). Both keep their inner width of 16. The first layer's input needs neither.
    more = 32 * 4096 * (4 * 4 * 4096 - 2 * 4096 + 4 * 16 * (4 - 2))
    assert kept["fp32"] - kept["bf16"] == pytest.approx(more, rel=0.01)


def test_adapters_on_stacked_experts_keep_merged_weights_unless_recomputed() -> None:
    def peak(recompute: float) -> float:
        chosen = strategy(
            lora("experts"),
            Stack.TRANSFORMERS,
            MIXTRAL,
            zero_stage=0.0,
            num_microbatches=1.0,
            recompute_full=recompute,
        )
        return number(memory(chosen, MIXTRAL, "transformers").allocated_PC)

    merged = 2.0 * 8 * 3 * 4096 * 14336
    assert peak(0.0) - peak(1.0) > 30 * merged


def test_frozen_matrices_cost_no_weight_gradients() -> None:
    for software in (Software.MEGATRON_2026, Software.TORCH_FSDP):
        stack = stack_of(software)
        full = step(strategy(None, stack), software=software)
        tuned = step(strategy(lora("q_proj", "k_proj", "v_proj"), stack), software=software)
        ratio = number(tuned.step_s) / number(full.step_s)
        # Two of three GEMMs, and attention whole.
        assert 0.6 < ratio < 0.85


def test_a_larger_rank_and_more_targets_never_take_less() -> None:
    for stack in (Stack.TRANSFORMERS, Stack.PYTORCH):
        few = step(strategy(lora("attention"), stack))
        more = step(strategy(lora("attention", "mlp"), stack))
        wide = step(strategy(lora("attention", "mlp").model_copy(update={"rank": 256}), stack))
        assert number(few.step_s) < number(more.step_s) < number(wide.step_s)


def test_merged_experts_take_a_gemm_of_the_ranks_depth_and_two_in_the_backward_pass() -> None:
    lookups = Lookups()
    tune = strategy(lora("experts"), Stack.TRANSFORMERS, MIXTRAL)
    constants = uncalibrated(
        SHEET.generation, precision=GemmPrecision.BF16, software=Software.TRANSFORMERS
    )
    prices = NotedPrices(
        source=DatasheetPrices(hardware=HARDWARE, constants=constants), lookups=lookups
    )
    price_step(MIXTRAL_SHAPE, tune, HARDWARE, constants, one_stage(MIXTRAL), prices=prices)
    gemms = {
        sizes
        for series, counted in lookups.num_uses.items()
        if series.operation == "gemm"
        for sizes in counted
    }
    # 8 experts: gate and up [2 x 14336, 4096], down [4096, 14336]; rank 16.
    for outputs, inputs in ((8 * 2 * 14336, 4096), (8 * 4096, 14336)):
        assert {(outputs, inputs, 16), (outputs, 16, inputs), (inputs, 16, outputs)} <= gemms


def test_gradients_of_adapters_alone_are_reduced() -> None:
    shared = {"data": 8.0, "zero_stage": 0.0}
    full = step(strategy(None, Stack.MEGATRON, **shared), software=Software.MEGATRON_2026)
    tuned = step(
        strategy(lora("all-linear"), Stack.MEGATRON, **shared), software=Software.MEGATRON_2026
    )
    assert number(tuned.once_s) < 0.2 * number(full.once_s)


def test_columns_of_several_kinds_are_priced_as_each_alone() -> None:
    kinds = [
        strategy(None, Stack.MEGATRON),
        strategy(lora("all-linear"), Stack.MEGATRON),
        strategy(lora("attention"), Stack.TRANSFORMERS),
        strategy(lora("attention", method="qlora"), Stack.TRANSFORMERS),
    ]
    from tuner.config.shapes import stacked

    together = stacked(kinds)
    constants = uncalibrated(
        SHEET.generation, precision=GemmPrecision.BF16, software=Software.TRANSFORMERS
    )
    found = price_step(LLAMA_SHAPE, together, HARDWARE, constants, one_stage(LLAMA)).step_s
    assert np.asarray(found) == pytest.approx([number(step(one).step_s) for one in kinds])
    peaks = price_memory(
        LLAMA_SHAPE,
        together,
        HARDWARE,
        one_stage(LLAMA),
        constants=constants_of_family(Software.TRANSFORMERS, "transformers"),
    ).total_PC
    assert peaks[0] == pytest.approx(
        [number(memory(one, family="transformers").total_PC) for one in kinds]
    )


def test_what_peft_adapts_of_hybrids_is_what_is_counted() -> None:
    """PEFT adapts linear modules whose names end in a target (`check_target_module_exists`)."""
    import torch
    import transformers

    counted, adapted_by_peft = {}, {}
    for name, class_name, networks in (
        ("kimi-linear-48b-a3b", "KimiLinearForCausalLM", ()),
        # PEFT would take names of its networks for those of experts.
        ("qwen3-next-80b-a3b", "Qwen3NextForCausalLM", ()),
        ("qwen3.5-397b-a17b", "Qwen3_5MoeForCausalLM", ("gate_proj", "up_proj", "down_proj")),
        ("nemotron-3-nano", "NemotronHForCausalLM", ("up_proj", "down_proj")),
    ):
        model, tune = example_model(name), lora("attention", *networks)
        assert model.linear is not None
        config = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
        fields = dict(config.get("text_config", config))
        fields.pop("rope_scaling", None)
        model_class = getattr(transformers, class_name)
        with torch.device("meta"):
            built = model_class(model_class.config_class.from_dict(fields))
        targets = tuple(f".{target}" for target in lora_config(tune, model)["target_modules"])
        adapted_by_peft[name] = sum(
            tune.rank * (module.in_features + module.out_features)
            for path, module in built.named_modules()
            if isinstance(module, torch.nn.Linear) and path.endswith(targets)
        )
        shape = shape_of_model(model, mtp_layers=0)
        counts = adapter_counts(shape, strategy(tune, Stack.PYTORCH, model))
        dense = shape.dense_layers * counts.dense_layer(shape)
        counted[name] = number(dense + shape.moe_layers * counts.moe_layer(shape))
    # 7 layers of latent attention, 20 of KDA: q, k, v, o; f_a and g_a, f_b and g_b; b.
    softmax = 16 * (8448 + 2880 + 8704 + 6400)
    delta = 16 * (4 * (2304 + 4096) + 2 * (2304 + 128) + 2 * (128 + 4096) + 2304 + 32)
    assert adapted_by_peft["kimi-linear-48b-a3b"] == 7 * softmax + 20 * delta
    assert counted == pytest.approx(adapted_by_peft)


def test_megatron_has_one_adapter_of_all_that_linear_attention_projects_at_first(
    failures: Failures,
) -> None:
    for name, layers, inputs, values in (
        # Queries and keys 2 x 2048, values and gate 2 x 4096, two numbers of 32 heads.
        ("qwen3-next-80b-a3b", 36, 2048 + 12352, 4096 + 2048),
        # Gate and values 2 x 4096, B and C 2 x 1024, a time step of 64 heads.
        ("nemotron-3-nano", 23, 2688 + 10304, 4096 + 2688),
    ):
        model, (first, last) = example_model(name), LINEAR_TARGETS[name]
        tune = lora(*first, last)
        shape = shape_of_model(model, mtp_layers=0)
        count = num_adapter_parameters(shape, strategy(tune, Stack.MEGATRON, model))
        with failures.of(name):
            assert number(count) == pytest.approx(16 * layers * (inputs + values))


LINEAR_TARGETS = {
    "qwen3-next-80b-a3b": (("in_proj_qkvz", "in_proj_ba"), "out_proj"),
    "nemotron-3-nano": (("in_proj",), "out_proj"),
}


def test_adapters_of_linear_attention_take_time_and_keep_what_they_read(failures: Failures) -> None:
    for name, (first, last) in LINEAR_TARGETS.items():
        model = example_model(name)
        alone, read, written, both = (
            strategy(lora("o_proj", *targets), Stack.PYTORCH, model, num_microbatches=1.0)
            for targets in ((), first, (last,), (*first, last))
        )
        with failures.of(name):
            assert number(step(alone, model).step_s) < number(step(both, model).step_s)
            kept = [
                number(memory(one, model).activations_PC) for one in (alone, read, written, both)
            ]
            tokens, layers, width = 4096, model.num_linear_layers, 2
            # The norm's output, the scan's normed output, and inner widths of 16.
            normed = width * tokens * layers * (model.hidden_size + 16 * len(first))
            outputs = width * tokens * layers * (present(model.linear).value_dim + 16)
            assert kept[1] - kept[0] == pytest.approx(normed, rel=0.02)
            assert kept[2] - kept[0] == pytest.approx(outputs, rel=0.02)
            assert kept[3] - kept[0] == pytest.approx(normed + outputs, rel=0.02)
