"""Seconds of expert layers against counts of operations and bytes made by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.rows import each_row
from tuner.config.columns import Numbers
from tuner.costs.place import (
    ExpertMachine,
    Reach,
    dispatch_combine_s,
    experts_s,
    grouped_gemms_s,
    layer_seconds,
    rest_s,
)
from tuner.costs.train.columns_of import PRECISION_OF, hardware_of_pool
from tuner.devices.catalogue import find_device
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.ops import Op
from tuner.prices.train.constants import Software, uncalibrated
from tuner.spec.accounting import forward_flop_per_token
from tuner.spec.cluster import Pool
from tuner.spec.huggingface.read import read_model

MODELS = Path(__file__).parents[3] / "examples" / "models"


def machine(*, name: str = "mixtral-8x7b", ranks: int = 8, nodes: int = 1) -> ExpertMachine:
    sheet = find_device("h100-sxm")
    pool = Pool(name="h", device="h100-sxm", nodes=nodes, devices_per_node=8)
    precision = PRECISION_OF["bf16"]
    constants = uncalibrated(sheet.generation, precision=precision, software=Software.MEGATRON_2026)
    hardware = hardware_of_pool(sheet, pool, precision=precision)
    return ExpertMachine(
        model=read_model(MODELS / name / "config.json"),
        prices=DatasheetPrices(hardware=hardware, constants=constants),
        hardware=hardware,
        constants=constants,
        ranks=ranks,
        element_bytes=2.0,
    )


def seconds(made: ExpertMachine, copies_G: list[float], *, reach: Reach | None = None) -> float:
    copies_PLG = np.array([[copies_G]])
    active_PLG = np.ones_like(copies_PLG)
    priced = layer_seconds(made, copies_PLG=copies_PLG, active_PLG=active_PLG, reach=reach)
    return float(priced.pass_P[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Prices that count something of one operation, and nothing of the others."""

    operation: str
    amount: Callable[[Mapping[str, Numbers]], Numbers]

    def seconds(self, op: Op) -> Numbers:
        return self.amount(op.axes) if op.operation == self.operation else 0.0


MOVED_BYTES = Counted(operation="memory_bound", amount=lambda axes: axes["bytes"])
GEMM_FLOP = Counted(operation="gemm", amount=lambda axes: 2.0 * axes["m"] * axes["n"] * axes["k"])
EXPERT_FLOP = Counted(
    operation="grouped_gemm",
    amount=lambda axes: (
        2.0 * axes["experts"] * axes["largest"] * axes["hidden"] * (axes["inner"] + axes["ffn"])
    ),
)
ATTENTION_FLOP = Counted(
    operation="attention",
    amount=lambda axes: (
        2.0 * axes["pairs"] * axes["heads"] * (axes["head_dim"] + axes["value_dim"])
    ),
)


SINGLE = machine(ranks=1)


def test_many_tokens_take_what_their_gemms_take() -> None:
    # 6 h f operations a copy at 989 TFLOP/s, half to all of the peak, and what moves on top.
    at_peak_s = 65_536 * 6 * 4096 * 14336 / 989e12
    assert at_peak_s < seconds(SINGLE, [65_536.0]) < 2.5 * at_peak_s


def test_few_tokens_take_what_reading_the_weights_takes() -> None:
    # 3 h f weights of 2 bytes at 3.35 TB/s.
    read_s = SINGLE.expert_bytes / 3.35e12
    assert SINGLE.expert_bytes == 3 * 4096 * 14336 * 2
    assert read_s < seconds(SINGLE, [4.0]) < 3.0 * read_s


def test_the_most_loaded_rank_sets_the_time() -> None:
    made = machine()
    even = seconds(made, [4096.0] * 8)
    uneven = seconds(made, [8192.0, *[3510.857] * 7])
    assert 1.6 < uneven / even < 2.4


def test_a_rank_with_more_active_experts_can_be_the_slowest() -> None:
    made = machine(name="qwen3-30b-a3b")
    copies_PLG = np.array([[[40.0, 32.0]]])
    few = layer_seconds(made, copies_PLG=copies_PLG, active_PLG=np.array([[[4.0, 4.0]]]))
    many = layer_seconds(made, copies_PLG=copies_PLG, active_PLG=np.array([[[4.0, 32.0]]]))
    assert many.experts_PL[0, 0] > 3.0 * few.experts_PL[0, 0]


def test_sending_a_token_once_costs_less_than_once_an_expert() -> None:
    made = machine(name="qwen3-30b-a3b", ranks=16, nodes=2)
    copies = [8192.0] * 16
    # Eight experts on at most two nodes.
    merged = seconds(made, copies, reach=Reach(ranks=6.5, domains=1.9))
    assert merged < 0.5 * seconds(made, copies)
    assert seconds(made, copies, reach=Reach(ranks=4.0, domains=1.2)) < merged


def test_one_rank_exchanges_nothing() -> None:
    priced = layer_seconds(SINGLE, copies_PLG=np.array([[[64.0]]]), active_PLG=np.array([[[8.0]]]))
    assert priced.all_to_all_PL[0, 0] == 0.0


@each_row("name", ["mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"])
def test_the_rest_of_a_pass_grows_with_context_and_tokens(name: str) -> None:
    made = machine(name=name)
    short = rest_s(made, tokens=512.0, context_tokens=1024.0, decodes=True)
    long = rest_s(made, tokens=512.0, context_tokens=65_536.0, decodes=True)
    prefill = rest_s(made, tokens=65_536.0, context_tokens=4096.0, decodes=False)
    assert 0.0 < short < long
    assert prefill > short


def test_a_model_without_experts_has_no_expert_layers() -> None:
    made = replace(machine(), model=read_model(MODELS / "llama-3.1-8b" / "config.json"))
    with pytest.raises(ValueError, match="no experts"):
        seconds(made, [1.0] * 8)


def test_a_rank_can_be_the_slowest_with_neither_most_copies_nor_most_experts() -> None:
    made = machine(name="qwen3-30b-a3b")
    copies_PLG = np.array([[[9000.0, 8000.0, 40.0]]])
    active_PLG = np.array([[[1.0, 30.0, 32.0]]])
    isolated = [
        layer_seconds(
            made,
            copies_PLG=copies_PLG[:, :, rank : rank + 1],
            active_PLG=active_PLG[:, :, rank : rank + 1],
        ).experts_PL[0, 0]
        for rank in range(3)
    ]
    together = layer_seconds(made, copies_PLG=copies_PLG, active_PLG=active_PLG)
    assert isolated[1] == max(isolated)
    assert together.experts_PL[0, 0] == pytest.approx(isolated[1])


def test_half_a_rank_takes_twice_as_long_for_its_gemms_and_no_longer_to_send() -> None:
    made = machine()
    copies_PLG, active_PLG = np.full((1, 1, 8), 4096.0), np.ones((1, 1, 8))
    even, halved = (
        layer_seconds(made, copies_PLG=copies_PLG, active_PLG=active_PLG, speed_G=speed_G)
        for speed_G in (None, np.array([0.5, *[1.0] * 7]))
    )
    assert halved.experts_PL[0, 0] == pytest.approx(2.0 * even.experts_PL[0, 0])
    assert halved.all_to_all_PL[0, 0] == even.all_to_all_PL[0, 0]


def test_an_average_of_active_experts_is_priced_between_whole_ones() -> None:
    made = machine(name="olmoe-1b-7b")
    for copies in (20.0, 300.0, 2000.0):
        two, mean, three = (
            grouped_gemms_s(made, copies=np.array([copies]), active=np.array([active]))[0]
            for active in (2.0, 2.25, 3.0)
        )
        assert mean == pytest.approx(0.75 * two + 0.25 * three)


def test_ranks_that_share_a_node_with_others_are_neighbours_of_fewer() -> None:
    made = machine(name="qwen3-30b-a3b", ranks=8, nodes=2)
    assert made.group.inside == 8.0
    assert replace(made, ranks_per_node=4).group.inside == 4.0


def test_latent_experts_read_compute_and_send_their_latent_width() -> None:
    """Nemotron-3 Super: two matrices of 1,024 x 2,688 beside a hidden size of 4,096."""
    made = machine(name="nemotron-3-super", ranks=16, nodes=2)
    assert made.expert_bytes == 2 * 1024 * 2688 * 2 == 11_010_048
    # Ultra: 2,048 x 5,120 beside 8,192.
    assert machine(name="nemotron-3-ultra").expert_bytes == 2 * 2048 * 5120 * 2
    copies, active = np.array([65_536.0]), np.array([32.0])
    computed = grouped_gemms_s(replace(made, prices=EXPERT_FLOP), copies=copies, active=active)
    assert computed == pytest.approx([65_536 * 2 * 2 * 1024 * 2688])
    # Six passes over the latent rows, and one over either side of the activation.
    factor = made.constants.moe_memory_factor / made.constants.memory_factor
    moved = experts_s(replace(made, prices=MOVED_BYTES), copies=copies, active=active)
    assert moved == pytest.approx([65_536 * 2 * (6 * 1024 + 2 * 2688) * factor])
    # Half of a million copies of 2 KiB leave the node at 50 GB/s, and as many come back: 41 ms.
    sent_s = float(dispatch_combine_s(made, max_copies=np.array([1e6]), reach=None)[0])
    assert 1.0 < sent_s / (2 * 5e5 * 2048 / 50e9) < 2.0


@each_row(
    "name",
    [
        "mixtral-8x7b",
        "deepseek-v2",
        "deepseek-v3.2",
        "deepseek-v4-flash",
        "gpt-oss-20b",
        "kimi-linear-48b-a3b",
        "nemotron-3-super",
    ],
)
def test_dense_gemms_of_a_pass_are_those_of_the_model(name: str) -> None:
    made = machine(name=name, ranks=1)
    flop = rest_s(replace(made, prices=GEMM_FLOP), tokens=64.0, context_tokens=4096.0, decodes=True)
    own = forward_flop_per_token(made.model, sequence_length=4096)
    latent = 4 * made.model.hidden_size * made.moe.latent_size * made.model.num_moe_layers
    wanted = own.attention_projections + own.dense_ffn + own.shared_experts + own.head + latent
    assert flop == pytest.approx(64 * wanted, rel=1e-9)


# Layers with attention of each kind, and what one token of a request reads between two contexts.
READ_BYTES = [
    # Twelve of 24 layers look back 128 tokens: they read no more than before.
    ("gpt-oss-20b", (32_768, 65_536), 12 * 32_768 * 2 * 8 * 64 * 2),
    # Chunks of 8,192 tokens, halfway full on average, in 36 of 48 layers.
    ("llama-4-scout", (32_768, 65_536), 12 * 32_768 * 2 * 8 * 128 * 2),
    ("llama-4-scout", (2048, 8192), 48 * (8192 - 2048) * 2 * 8 * 128 * 2),
    # 61 layers: an indexer's key of 128 bytes and a scale of four, and beyond 2,048 tokens no more
    # of the 576 elements of keys and values.
    ("deepseek-v3.2", (65_536, 131_072), 61 * 65_536 * 132),
    ("deepseek-v3.2", (1024, 2048), 61 * 1024 * (132 + 576 * 2)),
    # The same without an indexer: every token of the context.
    ("deepseek-v3", (65_536, 131_072), 61 * 65_536 * 576 * 2),
    # Eight layers of two key heads; states do not grow.
    ("nemotron-3-super", (32_768, 65_536), 8 * 32_768 * 2 * 2 * 128 * 2),
]


@each_row(("name", "contexts", "more"), READ_BYTES)
def test_decode_reads_what_the_layers_look_at(
    name: str, contexts: tuple[int, int], more: int
) -> None:
    made = replace(machine(name=name, ranks=1), prices=MOVED_BYTES)
    short, long = (
        rest_s(made, tokens=64.0, context_tokens=float(context), decodes=True)
        for context in contexts
    )
    assert long - short == pytest.approx(64 * more, rel=1e-9)


def test_every_sequence_has_states_of_its_own() -> None:
    """Nemotron-3 Super: 40 Mamba-2 layers, 8 of attention, 40 networks of experts."""
    made = replace(machine(name="nemotron-3-super", ranks=1), prices=MOVED_BYTES)
    moved = rest_s(made, tokens=64.0, context_tokens=1000.0, decodes=True)
    # 128 heads of 128 x 64 in fp32, and three past inputs of 10,240 channels, in and out.
    states = 40 * 2 * (128 * 128 * 64 * 4 + 3 * (8192 + 2 * 8 * 128) * 2)
    cached = 8 * 1000 * 2 * 2 * 128 * 2
    # A norm and a residual addition around each of the 88.
    around = 88 * 5 * 4096 * 2
    assert moved == pytest.approx(64 * (states + cached + around), rel=1e-9)


def test_prompts_compute_the_pairs_that_the_layers_look_at() -> None:
    def attention_flop(name: str) -> float:
        made = replace(machine(name=name, ranks=1), prices=ATTENTION_FLOP)
        return rest_s(made, tokens=8192.0, context_tokens=4096.0, decodes=False)

    # Two prompts of 4,096 tokens: half of all pairs in twelve layers, 128 a token in the others,
    # from the 128th on.
    pairs = 12 * 8192 * 4097 / 2 + 12 * 2 * (128 * 129 / 2 + (4096 - 128) * 128)
    assert attention_flop("gpt-oss-20b") == pytest.approx(2 * pairs * 64 * (64 + 64))
    # 64 heads of 128 score half of all pairs; 128 heads look at 2,048 tokens of 192 + 128 elements.
    scored = 2 * 8192 * 4097 / 2 * 64 * 128
    kept = 2 * 2 * (2048 * 2049 / 2 + 2048 * 2048) * 128 * (192 + 128)
    assert attention_flop("deepseek-v3.2") == pytest.approx(61 * (scored + kept))
