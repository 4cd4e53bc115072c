"""Experts without weights in training: copies, bytes and the layer of multi-token prediction."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tuner.models import example_model
from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware, ModelShape
from tuner.costs.train.activations import activation_bytes
from tuner.costs.train.columns_of import hardware_of_pool, shape_of_model
from tuner.costs.train.experts import moe_blocks
from tuner.costs.train.parts import BlockInputs
from tuner.costs.train.state import parameters
from tuner.costs.train.units import unit_costs
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.train.collectives import distinct_places, groups
from tuner.prices.train.constants import Constants, GemmPrecision, Software, uncalibrated
from tuner.spec.accounting import num_parameters
from tuner.spec.cluster import Pool

LONGCAT = example_model("longcat-flash")
SHAPE = shape_of_model(LONGCAT, mtp_layers=0)
PLAIN = replace(SHAPE, zero_experts=0.0)
"""As many copies, and a router over the experts with weights alone."""
ALL = replace(PLAIN, top_k=12.0)
ALONE = Strategies(sequence=4096.0, micro_batch=1.0, num_microbatches=1.0)
HARDWARE = hardware_of_pool(
    find_device("h200-sxm"),
    Pool(name="p", device="h200-sxm", devices_per_node=8),
    precision=GemmPrecision.BF16,
)
CONSTANTS = uncalibrated(
    Generation.HOPPER, precision=GemmPrecision.BF16, software=Software.MEGATRON_2026
)


def setting(
    model: ModelShape,
    strategies: Strategies,
    *,
    hardware: Hardware = HARDWARE,
    constants: Constants = CONSTANTS,
) -> BlockInputs:
    return BlockInputs(
        model=model,
        strategies=strategies,
        hardware=hardware,
        constants=constants,
        prices=DatasheetPrices(hardware=hardware, constants=constants),
        groups=groups(strategies, hardware),
    )


def test_a_shape_counts_computed_copies() -> None:
    assert (SHAPE.top_k, SHAPE.experts, SHAPE.router_outputs) == (8.0, 512.0, 768.0)


def test_one_device_holds_the_parameters_of_the_model() -> None:
    own = parameters(SHAPE, ALONE)
    total = 28.0 * (own.dense_mixer + own.dense_ffn) + 2.0 * own.vocab
    total += 28.0 * (own.moe_mixer + own.moe_outside + own.experts)
    assert float(total) == pytest.approx(num_parameters(LONGCAT), rel=1e-5)


SPREAD = replace(ALONE, expert=8.0, data=8.0)


def test_dispatch_and_experts_take_what_their_copies_do() -> None:
    of_eight, of_plain, of_all = (
        moe_blocks(setting(shape, SPREAD)) for shape in (SHAPE, PLAIN, ALL)
    )
    assert of_eight[1].forward_s == of_plain[1].forward_s
    assert of_eight[1].expert_s == of_plain[1].expert_s
    # Plain all-to-all sends 8 copies a token of 12, apart from its latency.
    assert of_eight[1].expert_s / of_all[1].expert_s == pytest.approx(8 / 12, rel=0.05)
    assert of_eight[1].forward_s < of_all[1].forward_s
    # The router scores half as many more, and the other copies are added on the token's own rank:
    # three passes over its hidden state.
    added_s = setting(SHAPE, SPREAD).memory_bound_s(3.0 * 2.0 * 4096 * 6144)
    more_s = float(of_eight[0].forward_s - of_plain[0].forward_s)
    routed_s = setting(SHAPE, SPREAD).memory_bound_s(40.0 * 4096 * 256)
    assert more_s > float(added_s + routed_s)
    assert more_s < 2.0 * float(added_s + routed_s)


def test_kept_bytes_follow_the_copies() -> None:
    kept, plain, every = (
        activation_bytes(shape, ALONE, cp_output_copy_ratio=1.0).moe
        for shape in (SHAPE, PLAIN, ALL)
    )
    # Scores of 256 more experts for 4,096 tokens, in fp32 twice.
    per_score = (kept.saved - plain.saved) / (4096 * 256)
    assert 4.0 <= per_score <= 16.0
    # A copy keeps its input and two widths of 2,048 more for the activation, in bf16.
    per_copy = (every.saved - plain.saved) / (4096 * 4)
    assert per_copy == pytest.approx(2 * (6144 + 3 * 2048), rel=0.02)


def test_a_mean_of_copies_lies_between_whole_ones() -> None:
    seven, mean, eight = (float(distinct_places(8.0, 512.0, k)) for k in (7.0, 7.25, 8.0))
    assert mean == pytest.approx(seven + 0.25 * (eight - seven))
    # 12 of 768, a third of which reach no place: within 1.5 % of the mean number of copies.
    missed = np.prod([1.0 - 64 / (768 - chosen) for chosen in range(12)])
    assert eight == pytest.approx(8.0 * (1.0 - missed), rel=0.015)
    assert distinct_places(8.0, 512.0, np.array([7.0, 8.0])) == pytest.approx([seven, eight])


def test_its_prediction_layer_is_dense() -> None:
    shape = shape_of_model(LONGCAT, mtp_layers=1)
    dense, routed = (
        unit_costs(one, SPREAD, HARDWARE, CONSTANTS).mtp
        for one in (shape, replace(shape, mtp_is_dense=0.0))
    )
    # Attention, the network, what joins two hidden states; no experts and no all-to-all.
    attention = 6144 * 1536 + 1536 * 64 * 192 + 6144 * 576 + 512 * 64 * 256 + 64 * 128 * 6144
    counted = attention + 3 * 6144 * 12288 + 2 * 6144 * 6144
    assert float(dense.parameters) == pytest.approx(counted, rel=1e-3)
    assert float(dense.expert_parameters) == 0.0
    assert float(routed.expert_parameters) > 1e9
    assert float(dense.forward_s) < float(routed.forward_s)
