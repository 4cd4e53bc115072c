"""Rows read as the launches that they were."""

from collections.abc import Callable

import pytest

from tests.rows import each_row
from tuner.backtest.serving.launches import (
    Harness,
    MissingError,
    OddError,
    PublishedLaunch,
    parse_launch,
)
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.speculative import Drafting, DraftMethod

Row = Callable[..., dict[str, str]]


def degrees(cells: dict[str, str]) -> tuple[int, ...]:
    result = parse_launch(cells, number=1).sides[0].degrees
    return result.attention_tensor, result.attention_data, result.moe_tensor, result.expert


def test_a_plain_row_by_hand(row: Row) -> None:
    launch = parse_launch(row(), number=1)
    assert launch.sides[0].degrees == InstanceDegrees(attention_tensor=4, moe_tensor=4)
    assert (launch.concurrency, launch.devices, launch.source) == (8, 4, "h200_sxm|vllm|agg")
    assert launch.ttft_s == pytest.approx(0.0805)
    assert launch.tpot_s == pytest.approx(0.01125)
    assert launch.harness is Harness.INFERENCEX
    assert launch.formats.kv == "fp8"


@each_row(
    ("cells", "read"),
    [
        # The columns state the product of both expert degrees as the devices.
        (("sglang", "DeepSeek-R1", "64", "1", "8", "8"), (8, 1, 1, 8)),
        (("sglang", "Qwen3-235B-A22B-FP8", "16", "1", "4", "4"), (4, 1, 1, 4)),
        (("trtllm", "DeepSeek-R1", "1", "64", "8", "8"), (1, 8, 1, 8)),
        # Both kinds of attention parallelism with their product for the experts.
        (("vllm", "Qwen3-235B-A22B-FP8", "4", "4", "1", "16"), (4, 1, 1, 4)),
        # Recipes that give every rank whole experts.
        (("vllm", "MiniMax-M2.5", "8", "1", "8", "1"), (8, 1, 1, 8)),
        (("trtllm", "DeepSeek-V3", "8", "1", "8", "1"), (8, 1, 1, 8)),
        (("sglang", "DeepSeek-V3", "8", "1", "8", "1"), (8, 1, 8, 1)),
        # Ranks that attend to different sequences have whole experts.
        (("sglang", "DeepSeek-V3", "1", "8", "8", "1"), (1, 8, 1, 8)),
        # Blank degrees of a dense model.
        (("vllm", "Qwen3-32B", "2", "", "", ""), (2, 1, 2, 1)),
    ],
)
def test_what_recipes_write_is_read_as_what_runs(
    row: Row, cells: tuple[str, ...], read: tuple[int, ...]
) -> None:
    engine, model, tensor, data, moe_tensor, expert = cells
    result = degrees(
        row(
            backend=engine,
            model_path=model,
            tp_size=tensor,
            attention_dp_size=data,
            moe_tp_size=moe_tensor,
            moe_ep_size=expert,
        )
    )
    assert result == read


@each_row(
    ("column", "cell", "reason"),
    [
        ("silicon_data_source", "a.csv", "silicon_concurrency"),
        ("tp_size", "", "tp_size is blank"),
        ("tp_size", "two", "not a number"),
        ("isl", "0.5", "not a whole number"),
        ("osl", "-3", "not above 0"),
        ("isl", "99999999", "is more than 1048576"),
        ("silicon_data_source", "a; silicon_concurrency=9999999", "of 1 to 65536"),
        ("silicon_tpot_ms", "nan", "not above 0"),
        ("system", "tpu", "not known"),
        ("model_path", "someone/else", "not known"),
        ("backend", "llama.cpp", "none that is modelled"),
        ("precision", "fp3", "not known"),
        ("attention_dp_size", "x", "not a number"),
        ("prefix_hit", "1.5", "not a share of 0 to 1"),
        ("draft_tokens", "2", "draft_acceptance is blank"),
        ("draft_tokens", "99", "is more than 16"),
    ],
)
def test_a_row_that_lacks_something_is_refused_by_name(
    row: Row, column: str, cell: str, reason: str
) -> None:
    with pytest.raises(MissingError, match=reason) as caught:
        parse_launch(row(**{column: cell}), number=1)
    assert not isinstance(caught.value, OddError)


def test_a_blank_attention_data_degree_follows_from_the_ranks_of_experts(row: Row) -> None:
    qwen = {
        "model_path": "Qwen/Qwen3-235B-A22B-FP8",
        "system": "h200_sxm",
        "precision": "fp8",
        "attention_dp_size": "",
    }
    for tensor, sliced, whole, data in (("1", "1", "8", 8), ("2", "1", "8", 4), ("8", "2", "4", 1)):
        cells = qwen | {"tp_size": tensor, "moe_tp_size": sliced, "moe_ep_size": whole}
        side = parse_launch(row(**cells), number=1).sides[0]
        assert side.degrees.attention_data == data, tensor
        assert side.degrees.devices == 8
    with pytest.raises(OddError, match="8 ranks of experts are no multiple of tp_size 3"):
        parse_launch(
            row(**qwen | {"tp_size": "3", "moe_tp_size": "1", "moe_ep_size": "8"}), number=1
        )


def test_weights_that_no_device_holds_are_refused(row: Row) -> None:
    # 235e9 parameters of a byte on one device of 141 GiB.
    cells = {
        "model_path": "Qwen/Qwen3-235B-A22B-FP8",
        "system": "h200_sxm",
        "precision": "fp8",
        "tp_size": "1",
        "moe_tp_size": "1",
        "moe_ep_size": "1",
    }
    for data in ("", "1"):
        with pytest.raises(OddError, match=r"220 GiB of weights a device, h200_sxm has 141 GiB"):
            parse_launch(row(**cells | {"attention_dp_size": data}), number=1)


def test_heads_that_cannot_be_split_are_refused_as_odd(row: Row) -> None:
    with pytest.raises(OddError, match="72 does not divide 64 heads"):
        parse_launch(row(tp_size="72"), number=1)


def test_a_disaggregated_row_needs_its_workers(row: Row) -> None:
    sides = {
        f"{role}_{name}": cell
        for role, tensor in (("prefill", "4"), ("decode", "8"))
        for name, cell in (("tp_size", tensor), ("pp_size", "1"), ("num_workers", "2"))
    }
    launch = parse_launch(row(mode="disagg", **sides), number=1)
    assert isinstance(launch, PublishedLaunch)
    assert launch.devices == 24
    with pytest.raises(MissingError, match="decode_num_workers is blank"):
        parse_launch(row(mode="disagg", **{**sides, "decode_num_workers": ""}), number=1)


def test_one_model_has_three_names(row: Row) -> None:
    names = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3", "nvidia/DeepSeek-V3.1-NVFP4")
    result = {
        parse_launch(row(model_path=name, tp_size="8"), number=1).decoder.name for name in names
    }
    assert result == {"deepseek-v3"}


def test_a_blank_precision_is_bf16(row: Row) -> None:
    launch = parse_launch(row(model_path="Qwen/Qwen3-32B", precision=""), number=1)
    assert launch.formats.ffn == "bf16"
    assert launch.formats.kv == "bf16"


def test_a_row_may_state_drafts_and_prefix_hits(row: Row) -> None:
    plain = parse_launch(row(), number=1)
    assert (plain.drafting, plain.prefix_ratio) == (None, 0.0)
    result = parse_launch(
        row(draft_tokens="2", draft_acceptance="0.7", draft_method="eagle", prefix_hit="0.4"),
        number=1,
    )
    assert result.prefix_ratio == 0.4
    assert result.drafting == Drafting(draft_tokens=2, acceptance=0.7, method=DraftMethod.EAGLE)
    with pytest.raises(MissingError, match="draft_method 'guess' is none that is modelled"):
        parse_launch(row(draft_tokens="2", draft_acceptance="1", draft_method="guess"), number=1)
