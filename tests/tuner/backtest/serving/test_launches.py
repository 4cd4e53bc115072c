"""Rows read as the launches that they were."""

from collections.abc import Callable

import pytest

from tests.rows import each_row
from tuner.backtest.cells import MissingError
from tuner.backtest.serving.launches import OddError, PublishedLaunch, parse_launch
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
    assert launch.harness == "other"


@each_row(
    ("cells", "read"),
    [
        (("MiniMax-M2.5", "8", "1", "", "8"), (8, 1, 1, 8)),
        (("DeepSeek-V3", "8", "1", "", ""), (8, 1, 8, 1)),
        (("DeepSeek-V3", "1", "8", "1", "8"), (1, 8, 1, 8)),
        (("DeepSeek-V3", "2", "4", "2", "4"), (2, 4, 2, 4)),
        # Blank degrees of a dense model.
        (("Qwen3-32B", "2", "", "", ""), (2, 1, 2, 1)),
    ],
)
def test_degrees_are_those_of_the_columns(
    row: Row, cells: tuple[str, ...], read: tuple[int, ...]
) -> None:
    model, tensor, data, moe_tensor, expert = cells
    result = degrees(
        row(
            model_path=model,
            tp_size=tensor,
            attention_dp_size=data,
            moe_tp_size=moe_tensor,
            moe_ep_size=expert,
        )
    )
    assert result == read


def test_ranks_that_cannot_share_the_experts_are_refused(row: Row) -> None:
    cells = row(model_path="DeepSeek-V3", tp_size="4", moe_tp_size="4", moe_ep_size="4")
    with pytest.raises(OddError, match="moe_tp_size 4 \\* moe_ep_size 4 is not tp_size 4"):
        parse_launch(cells, number=1)


def test_settings_of_a_recipe_are_columns_and_blanks_are_the_engine_s(row: Row) -> None:
    plain = parse_launch(row(), number=1)
    assert (plain.harness, plain.length_ratio, plain.step_tokens) == ("other", 0.95, None)
    assert (plain.poll_steps, plain.stream_steps, plain.sequence_s) == (1, 0.0, 0.0)
    stated = {
        "harness": "ours",
        "length_ratio": "1",
        "step_tokens": "4096",
        "poll_steps": "10",
        "stream_steps": "2.5",
        "sequence_us": "40",
    }
    launch = parse_launch(row(**stated), number=1)
    assert (launch.harness, launch.length_ratio, launch.step_tokens) == ("ours", 1.0, 4096)
    assert (launch.poll_steps, launch.stream_steps, launch.sequence_s) == (10, 2.5, 40e-6)


@each_row(
    ("release", "waits"),
    [("0.12.0", True), ("", True), ("0.14.1", False), ("nightly-5b8c30", False)],
)
def test_vllm_pays_per_sequence_until_it_schedules_ahead(
    row: Row, release: str, waits: bool
) -> None:
    assert (parse_launch(row(backend_version=release), number=1).sequence_s > 0.0) is waits


@each_row(
    ("model", "precision", "stated", "read"),
    [
        ("Qwen3-32B", "", "", ("bf16", "bf16", "bf16")),
        ("Qwen3-32B", "fp8", "", ("fp8", "fp8_block", "bf16")),
        ("DeepSeek-V3", "fp8", "", ("fp8_block", "fp8_block", "bf16")),
        ("gpt-oss-120b", "mxfp4", "", ("bf16", "mxfp4", "bf16")),
        ("Kimi-K2", "fp4", "bf16/bf16/nvfp4/nvfp4/fp8", ("bf16", "nvfp4", "fp8")),
    ],
)
def test_formats_are_stated_or_those_of_the_precision(
    row: Row, model: str, precision: str, stated: str, read: tuple[str, ...]
) -> None:
    cells = row(model_path=model, precision=precision, formats=stated, tp_size="8", moe_tp_size="")
    formats = parse_launch(cells, number=1).formats
    assert (formats.attention, formats.experts, formats.kv) == read


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
        ("model_path", "someone/else", "name the one of its architecture"),
        ("backend", "llama.cpp", "none that is modelled"),
        ("precision", "fp3", "not known"),
        ("formats", "fp8", "are not four of bf16, fp8"),
        ("formats", "fp8/fp8/fp8/fp8/nvfp4", "one of bf16, fp8, joined by /"),
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
    with pytest.raises(OddError, match=r"72 .* 64 heads"):
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


def test_a_row_may_state_drafts_and_prefix_hits(row: Row) -> None:
    plain = parse_launch(row(), number=1)
    assert (plain.drafting, plain.prefix_ratio) == (None, 0.0)
    result = parse_launch(
        row(draft_tokens="2", draft_acceptance="0.7", draft_method="eagle", prefix_hit="0.4"),
        number=1,
    )
    assert result.prefix_ratio == 0.4
    assert result.drafting == Drafting(draft_tokens=2, acceptance=(0.7,), method=DraftMethod.EAGLE)
    with pytest.raises(MissingError, match="draft_method 'guess' is none that is modelled"):
        parse_launch(row(draft_tokens="2", draft_acceptance="1", draft_method="guess"), number=1)
