"""Seconds of expert layers against counts of operations and bytes made by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.rows import each_row
from tuner.costs.place.expert_layer import (
    ExpertMachine,
    Reach,
    grouped_gemms_s,
    layer_seconds,
    rest_s,
)
from tuner.costs.prices.datasheet import DatasheetPrices
from tuner.costs.train.columns_of import PRECISION_OF, hardware_of_pool
from tuner.costs.train.constants import Software, uncalibrated
from tuner.devices.catalogue import find_device
from tuner.spec.cluster import Pool
from tuner.spec.huggingface.read import read_model

MODELS = Path(__file__).parents[4] / "examples" / "models"


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


def test_many_tokens_take_what_their_gemms_take() -> None:
    made = machine(ranks=1)
    # 6 h f operations a copy at 989 TFLOP/s, half to all of the peak, and what moves on top.
    at_peak_s = 65_536 * 6 * 4096 * 14336 / 989e12
    assert at_peak_s < seconds(made, [65_536.0]) < 2.5 * at_peak_s


def test_few_tokens_take_what_reading_the_weights_takes() -> None:
    made = machine(ranks=1)
    # 3 h f weights of 2 bytes at 3.35 TB/s.
    read_s = made.expert_bytes / 3.35e12
    assert made.expert_bytes == 3 * 4096 * 14336 * 2
    assert read_s < seconds(made, [4.0]) < 3.0 * read_s


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
    closer = seconds(made, copies, reach=Reach(ranks=4.0, domains=1.2))
    assert closer < merged


def test_one_rank_exchanges_nothing() -> None:
    made = machine(ranks=1)
    priced = layer_seconds(made, copies_PLG=np.array([[[64.0]]]), active_PLG=np.array([[[8.0]]]))
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
