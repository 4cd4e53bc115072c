from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tests.tuner.models import example_model
from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Hardware, ModelShape, Stages, stacked, taken
from tuner.costs.train.activations import activation_bytes
from tuner.costs.train.columns_of import StageLayers, shape_of_model, stages_of_layouts
from tuner.costs.train.fold import per_device
from tuner.costs.train.step import assemble, price_step
from tuner.costs.train.units import unit_costs
from tuner.devices.datasheet import Generation
from tuner.prices.ops import Op
from tuner.prices.train.constants import Constants, GemmPrecision, Software, uncalibrated
from tuner.prices.train.host_link import HOST_LINK_RATIO
from tuner.spec.accounting import forward_flop_per_token
from tuner.spec.model import ModelSpec

MACHINE = Hardware(
    matmul_flop_per_s=989e12,
    attention_flop_per_s=989e12,
    compute_units=132.0,
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    scale_up_bytes_per_s=450e9,
    domain=8.0,
    devices_per_node=8.0,
    scale_out_bytes_per_s=50e9,
)
GENERIC = uncalibrated(
    Generation.HOPPER, precision=GemmPrecision.BF16, software=Software.MEGATRON_2026
)
DENSE = ModelShape(
    hidden=4096.0,
    heads=32.0,
    kv_heads=8.0,
    head_dim=128.0,
    value_dim=128.0,
    dense_ffn=14336.0,
    vocab=128256.0,
    dense_layers=32.0,
)
MOE = replace(DENSE, dense_layers=0.0, moe_layers=32.0, experts=64.0, top_k=8.0, moe_ffn=2048.0)


def strategies(**changes: Numbers) -> Strategies:
    usual: dict[str, Numbers] = {
        "sequence": 4096.0,
        "micro_batch": 1.0,
        "num_microbatches": 16.0,
        "sequence_parallel": 1.0,
    }
    return Strategies(**{**usual, **changes})


def even(model: ModelShape, stages: int) -> Stages:
    share = np.full((stages, 1), 1.0 / stages)
    first, last = np.zeros((stages, 1)), np.zeros((stages, 1))
    first[0] = last[-1] = 1.0
    return Stages(
        dense_SC=share * model.dense_layers,
        moe_SC=share * model.moe_layers,
        embedding_SC=first,
        head_SC=last,
        mtp_SC=last * model.mtp_layers,
    )


def step_s(
    model: ModelShape = DENSE,
    hardware: Hardware = MACHINE,
    constants: Constants = GENERIC,
    **changes: Numbers,
) -> float:
    requested = strategies(**changes)
    stages = even(model, int(np.max(requested.pipeline * requested.virtual_pipeline)))
    price = price_step(model, requested, hardware, constants, stages)
    return float(np.asarray(price.step_s).ravel()[0])


class CountingPrices:
    """One second per operation of a matrix product, none for anything else."""

    def seconds(self, op: Op) -> Numbers:
        axes = op.axes
        match op.operation:
            case "gemm":
                return 2.0 * axes["m"] * axes["n"] * axes["k"]
            case "grouped_gemm":
                multiplied = axes["experts"] * axes["largest"] * axes["hidden"]
                return 2.0 * multiplied * (axes["inner"] + axes["ffn"])
            case "attention":
                passes = 1.0 if op.direction == "forward" else 2.0
                widths = axes["head_dim"] + axes["value_dim"]
                return passes * 2.0 * axes["pairs"] * axes["heads"] * widths
            case _:
                return 0.0 * axes["bytes"]


SILENT = replace(GENERIC, launch_s=0.0, collective_s=0.0, hop_s=0.0, far_hop_s=0.0)


@each_row("name", ["llama-3.1-8b", "deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b"])
@each_row("tensor", [1.0, 4.0])
def test_blocks_do_the_operations_that_the_model_has(name: str, tensor: float) -> None:
    model = example_model(name)
    shape = shape_of_model(model, mtp_layers=0)
    endless = replace(MACHINE, scale_up_bytes_per_s=1e30, scale_out_bytes_per_s=1e30)
    units = unit_costs(
        shape,
        strategies(tensor=tensor),
        endless,
        SILENT,
        prices=CountingPrices(),
    )
    counted = (
        np.asarray(units.dense.forward_s) * shape.dense_layers
        + np.asarray(units.moe.forward_s) * shape.moe_layers
        + np.asarray(units.head.forward_s)
    )
    expected = forward_flop_per_token(model, sequence_length=4096).total * 4096
    # MLA's down-projections and the router run on every rank's own tokens: nothing is done twice.
    assert float(counted) * tensor == pytest.approx(expected, rel=1e-6)


def test_one_tensor_rank_has_no_tensor_collectives() -> None:
    price = price_step(DENSE, strategies(), MACHINE, GENERIC, even(DENSE, 1))
    for part in (price.tensor_s, price.context_s, price.expert_s, price.bubble_s):
        assert float(np.max(part)) == pytest.approx(0.0, abs=1e-9)


def test_one_stage_works_through_its_micro_batches_in_turn() -> None:
    price = price_step(DENSE, strategies(), MACHINE, GENERIC, even(DENSE, 1))
    once = float(np.asarray(price.forward_s_SC + price.backward_s_SC).sum())
    expected = 16 * once + float(np.asarray(price.once_s).ravel()[0])
    assert float(np.asarray(price.step_s).ravel()[0]) == pytest.approx(expected)


def test_unequal_stages_follow_the_objective_of_the_layout_solver() -> None:
    # m max D + (sum D - max D): 16 x the slowest of four stages, and the others once.
    stages = even(DENSE, 4)
    free = replace(MACHINE, scale_out_bytes_per_s=1e30, scale_up_bytes_per_s=1e30)
    price = price_step(DENSE, strategies(pipeline=4.0), free, SILENT, stages)
    device = np.asarray(price.forward_s_SC + price.backward_s_SC)[:, 0]
    expected = 16 * device.max() + device.sum() - device.max() + np.asarray(price.once_s).max()
    assert float(np.asarray(price.step_s).ravel()[0]) == pytest.approx(float(expected))


def test_stages_fold_onto_the_devices_of_each_column() -> None:
    stage_SC = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 0.0], [4.0, 0.0]])
    requested = strategies(pipeline=np.array([2.0, 2.0]))
    assert per_device(stage_SC, requested) == pytest.approx(np.array([[4.0, 1.0], [6.0, 2.0]]))
    mixed = strategies(pipeline=np.array([4.0, 1.0]))
    expected = np.array([[1.0, 3.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]])
    assert per_device(stage_SC, mixed) == pytest.approx(expected)


@each_row(
    ("model", "changes"),
    [
        (DENSE, {"recompute_full": 1.0}),
        (DENSE, {"recompute_mlp": 1.0}),
        (DENSE, {"recompute_core_attention": 1.0}),
        (DENSE, {"recompute_layernorm": 1.0}),
        (DENSE, {"activation_offload": 1.0, "tensor": 1.0}),
        (DENSE, {"optimizer_offload": 1.0}),
        (MOE, {"recompute_moe": 1.0}),
        (MOE, {"recompute_moe_act": 1.0}),
        (MOE, {"chunks": 4.0}),
        (MOE, {"expert_imbalance": 1.5}),
    ],
)
def test_what_saves_memory_or_unbalances_costs_time(
    model: ModelShape, changes: dict[str, Any]
) -> None:
    assert step_s(model, **changes) >= step_s(model)


def test_a_slow_host_link_exposes_the_bytes_that_each_kind_of_layer_keeps() -> None:
    slow = replace(MACHINE, host_bytes_per_s=1e9)
    for model, kind in ((DENSE, "dense"), (MOE, "moe")):
        at = strategies(activation_offload=1.0)
        kept = getattr(activation_bytes(model, at, cp_output_copy_ratio=1.0), kind).saved
        price = price_step(model, at, slow, GENERIC, even(model, 1))
        expected_s = 32 * kept / (1e9 * HOST_LINK_RATIO)
        layers_s = float(price.forward_s_SC[0, 0])
        units = unit_costs(model, at, slow, GENERIC)
        ends_s = float(np.ravel(units.embedding.forward_s + units.head.forward_s)[0])
        assert layers_s - ends_s == pytest.approx(float(np.ravel(expected_s)[0]))


def test_a_fast_host_link_hides_offloading() -> None:
    fast = replace(MACHINE, host_bytes_per_s=1e13)
    assert step_s(hardware=fast, activation_offload=1.0) == step_s(hardware=fast)


def test_full_recomputation_adds_one_forward_pass_of_every_layer() -> None:
    plain = price_step(DENSE, strategies(), MACHINE, SILENT, even(DENSE, 1))
    whole = price_step(DENSE, strategies(recompute_full=1.0), MACHINE, SILENT, even(DENSE, 1))
    units = unit_costs(DENSE, strategies(), MACHINE, SILENT)
    added = np.asarray(whole.backward_s_SC - plain.backward_s_SC)
    assert added.ravel() == pytest.approx(32 * np.asarray(units.dense.forward_s).ravel())


def test_time_in_proportion_to_imbalance_is_the_experts() -> None:
    calm = unit_costs(MOE, strategies(expert=8.0, data=8.0), MACHINE, SILENT)
    stages = even(MOE, 1)
    loaded = replace(stages, load_SC=stages.moe_SC * 1.2)
    requested = strategies(expert=8.0, data=8.0)
    before = assemble(MOE, calm, requested, MACHINE, SILENT, stages)
    after = assemble(MOE, calm, requested, MACHINE, SILENT, loaded)
    added = np.asarray(after.forward_s_SC - before.forward_s_SC).ravel()
    assert added == pytest.approx(32 * 0.2 * np.asarray(calm.load_forward_s).ravel())
    assert float(np.max(added)) > 0.0


@each_row(
    ("model", "changes", "better"),
    [
        # A token is sent once per node, not every copy.
        (MOE, {"expert": 32.0, "data": 32.0}, {"is_deepep": 1.0}),
        (MOE, {"expert": 32.0, "data": 32.0}, {"is_hybridep": 1.0}),
        # The bubble shrinks.
        (DENSE, {"pipeline": 4.0}, {"virtual_pipeline": 4.0}),
        (DENSE, {"pipeline": 4.0}, {"zero_bubble": 1.0}),
    ],
)
def test_other_dispatchers_and_schedules_save_time(
    model: ModelShape, changes: dict[str, Any], better: dict[str, Any]
) -> None:
    assert step_s(model, **changes, **better) < step_s(model, **changes)


@each_row(
    ("better", "changes"),
    [
        ("a2a_overlap", {"expert": 8.0, "data": 8.0}),
        ("full_graph", {"expert": 8.0, "data": 8.0}),
        ("partial_graph", {"expert": 8.0, "data": 8.0}),
        ("overlap_tensor", {"tensor": 8.0}),
    ],
)
def test_overlap_and_graphs_never_cost_time(better: str, changes: dict[str, Any]) -> None:
    assert step_s(MOE, **(changes | {better: 1.0})) <= step_s(MOE, **changes)


def test_sharding_parameters_costs_gathers_between_nodes() -> None:
    slow = replace(MACHINE, scale_out_bytes_per_s=1e9)
    assert step_s(hardware=slow, data=64.0, zero_stage=3.0) > step_s(
        hardware=slow, data=64.0, zero_stage=1.0
    )
    # HSDP gathers inside the node alone.
    assert step_s(hardware=slow, data=64.0, zero_stage=3.0, shard_ranks=8.0) < step_s(
        hardware=slow, data=64.0, zero_stage=3.0
    )


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([name for name in MACHINE.__dataclass_fields__ if name.endswith("_per_s")]),
    st.floats(1.0, 3.0),
    st.sampled_from([DENSE, MOE]),
    st.sampled_from([1.0, 2.0, 8.0]),
    st.sampled_from([1.0, 4.0]),
)
def test_a_faster_part_never_makes_a_step_slower(
    name: str, factor: float, model: ModelShape, tensor: float, pipeline: float
) -> None:
    faster = replace(MACHINE, **{name: float(np.asarray(getattr(MACHINE, name))) * factor})
    # A faster product alone makes one more type's element; both peaks belong together.
    if name in ("matmul_flop_per_s", "attention_flop_per_s"):
        faster = replace(
            MACHINE,
            matmul_flop_per_s=989e12 * factor,
            attention_flop_per_s=989e12 * factor,
        )
    degrees: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "data": 8.0, "expert": 8.0}
    assert step_s(model, faster, **degrees) <= step_s(model, MACHINE, **degrees) * (1 + 1e-12)


def test_columns_are_priced_independently() -> None:
    parts = [
        strategies(tensor=t, pipeline=p, data=8.0, expert=e)
        for t, p, e in ((1.0, 4.0, 8.0), (2.0, 4.0, 4.0), (8.0, 4.0, 1.0))
    ]
    together = price_step(MOE, stacked(parts), MACHINE, GENERIC, even(MOE, 4))
    isolated = [price_step(MOE, part, MACHINE, GENERIC, even(MOE, 4)).step_s for part in parts]
    assert np.asarray(together.step_s) == pytest.approx(
        np.concatenate([np.ravel(a) for a in isolated])
    )


@each_row("name", ["expert", "chunks", "pipeline", "optimizer_offload", "data"])
def test_one_array_among_numbers_makes_columns(name: str) -> None:
    chosen: dict[str, Any] = {"data": 8.0, "expert": 4.0, name: np.array([1.0, 1.0, 1.0])}
    price = price_step(MOE, strategies(**chosen), MACHINE, GENERIC, even(MOE, 1))
    assert np.asarray(price.step_s).shape == (3,)


def test_gathered_unit_costs_price_like_those_from_scratch() -> None:
    distinct = stacked([strategies(tensor=t, data=8.0) for t in (1.0, 2.0)])
    chosen = np.array([1, 0, 1])
    units = unit_costs(DENSE, distinct, MACHINE, GENERIC).taken(chosen)
    columns = replace(taken(distinct, chosen), num_microbatches=np.array([4.0, 8.0, 16.0]))
    stages = even(DENSE, 1)
    gathered = assemble(DENSE, units, columns, MACHINE, GENERIC, stages)
    scratch = price_step(DENSE, columns, MACHINE, GENERIC, stages)
    assert np.asarray(gathered.step_s) == pytest.approx(np.asarray(scratch.step_s))


@each_row("changed", ["pipeline", "virtual_pipeline", "data", "num_microbatches", "zero_stage"])
def test_unit_costs_do_not_depend_on_what_the_stages_decide(changed: str) -> None:
    base = unit_costs(MOE, strategies(expert=4.0, data=8.0), MACHINE, GENERIC)
    other = unit_costs(
        MOE,
        strategies(**{"expert": 4.0, "data": 8.0, changed: 16.0}),
        MACHINE,
        GENERIC,
    )
    for field in fields(base.moe):
        assert np.asarray(getattr(base.moe, field.name)) == pytest.approx(
            np.asarray(getattr(other.moe, field.name))
        ), field.name


def test_old_softmax_runs_step_by_step_for_odd_numbers_of_heads() -> None:
    old = uncalibrated(
        Generation.AMPERE, precision=GemmPrecision.BF16, software=Software.MEGATRON_2021
    )
    small = replace(DENSE, heads=16.0, kv_heads=16.0, is_gated=0.0, hidden=2048.0)
    # 16 heads on 8 ranks: 2 matrices, no multiple of 4, against 4 with a micro-batch of 2.
    plain: dict[str, Any] = {"has_flash_attention": 0.0, "tensor": 8.0, "sequence": 1024.0}
    one = unit_costs(small, strategies(**plain), MACHINE, old)
    two = unit_costs(small, strategies(**plain, micro_batch=2.0), MACHINE, old)
    assert float(np.max(one.dense.forward_s)) > float(np.max(two.dense.forward_s))


def _layouts(model: ModelSpec) -> list[list[StageLayers]]:
    half = model.num_layers // 2
    return [
        [
            StageLayers(layers=half, embedding=True),
            StageLayers(layers=model.num_layers - half, head=True),
        ]
    ]


def test_a_spec_is_priced_from_end_to_end() -> None:
    model = example_model("mixtral-8x7b")
    stages = stages_of_layouts(model, _layouts(model))
    price = price_step(
        shape_of_model(model, mtp_layers=0),
        strategies(pipeline=2.0, data=8.0, expert=8.0, tensor=1.0),
        MACHINE,
        GENERIC,
        stages,
    )
    parts = [price.tensor_s, price.expert_s, price.recompute_s, price.host_s, price.bubble_s]
    assert all(float(np.min(part)) >= 0.0 for part in parts)
    assert sum(float(np.max(part)) for part in parts) < float(np.max(price.step_s))
