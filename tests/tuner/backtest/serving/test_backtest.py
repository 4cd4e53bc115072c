"""The whole way from rows to errors, on datasheets alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.decoders import LLAMA_70B
from tuner.backtest.serving.backtest import backtest_serving, predict_pairs
from tuner.backtest.serving.tables import DATASHEET, build_machines
from tuner.costs.serve.bands import bands_of
from tuner.errors import SpecError
from tuner.spec.serving.goal import Mode

Row = Callable[..., dict[str, str]]


def test_a_device_without_tables_is_predicted_from_its_datasheet_and_marked(row: Row) -> None:
    judged = backtest_serving([row()])
    (only,) = judged.rows
    assert judged.tables == {"h200_sxm": DATASHEET}
    assert 0.3 < present(only.predicted_tpot_s) / 0.01125 < 2.0
    assert "gemm fp8" in only.estimated
    assert judged.tpot.sources["h200_sxm|vllm|agg"].predicted == 1


def test_what_is_refused_is_counted_with_its_reason(row: Row) -> None:
    rows = [
        row(),
        row(id="odd", tp_size="72", silicon_ttft_ms="1"),
        row(id="blank", isl="", silicon_ttft_ms="2"),
        row(id="unmeasured", silicon_ttft_ms=""),
    ]
    judged = backtest_serving(rows)
    assert judged.tpot.rows == 4
    assert judged.tpot.predicted == 1
    assert [one.reason for one in judged.rows if one.reason] == [
        "tp_size 72 does not divide 64 heads",
        "isl is blank",
        "silicon_ttft_ms is blank",
    ]


def test_strategies_are_ordered_at_equal_load(row: Row) -> None:
    # More devices are faster, measured and predicted.
    rows = [
        row(id=f"tp{tensor}", tp_size=str(tensor), moe_tp_size="", silicon_tpot_ms=str(40 / tensor))
        for tensor in (1, 2, 4)
    ]
    judged = backtest_serving(rows)
    assert judged.tpot.rank_correlation == pytest.approx(1.0)
    assert judged.tpot.choice_regret == 0.0
    order = judged.tpot.order["hopper"]
    assert (order.pairs, order.ordered_ratio, order.equal_pairs) == (3, 1.0, 0)


def test_a_disaggregated_launch_is_predicted(row: Row) -> None:
    sides = {
        f"{role}_{name}": cell
        for role in ("prefill", "decode")
        for name, cell in (("tp_size", "4"), ("pp_size", "1"), ("num_workers", "1"))
    }
    (pair,) = predict_pairs([row(mode="disagg", **sides)]).pairs
    assert 0.0 < pair.latency.tpot_s < 0.1
    assert pair.latency.ttft_s > pair.latency.tpot_s


def test_a_folder_that_is_nothing_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="neither a stored profile nor a folder of tables"):
        build_machines(["h200_sxm"], [tmp_path])


def test_the_same_table_gives_the_same_predictions(row: Row) -> None:
    assert backtest_serving([row()]) == backtest_serving([row()])


@each_row("mode", ["agg", "disagg"])
def test_stated_drafts_and_prefix_hits_are_priced(row: Row, mode: str) -> None:
    sides = {
        f"{role}_{name}": cell
        for role in ("prefill", "decode")
        for name, cell in (("tp_size", "4"), ("num_workers", "1"))
    }
    rows = [
        row(mode=mode, **sides),
        row(mode=mode, **sides, silicon_ttft_ms="81", draft_tokens="2", draft_acceptance="0.8"),
        row(mode=mode, **sides, silicon_ttft_ms="82", prefix_hit="0.9"),
    ]
    plain, drafted, cached = backtest_serving(rows).rows
    # 2.44 tokens a step, of which checks and drafts take a part back.
    assert 1.5 < present(plain.predicted_tpot_s) / present(drafted.predicted_tpot_s) < 2.44
    assert present(cached.predicted_ttft_s) < present(plain.predicted_ttft_s)


@each_row(("mode", "kind"), [("agg", "aggregated"), ("disagg", "disaggregated")])
def test_a_row_lies_in_the_band_of_its_mode_and_of_where_its_kernels_come_from(
    row: Row, mode: str, kind: Mode
) -> None:
    sides = {
        f"{role}_{name}": cell
        for role in ("prefill", "decode")
        for name, cell in (("tp_size", "4"), ("num_workers", "1"))
    }
    (only,) = backtest_serving([row(mode=mode, **sides)]).rows
    assert only.estimated
    around = bands_of(
        "vllm",
        release="0.18.0",
        generation="hopper",
        mode=kind,
        has_kernels=False,
        decoder=LLAMA_70B,
    )
    assert bool(around.note) is (kind == "disaggregated")
    assert only.is_new_pair is around.is_new is (kind == "disaggregated")
    assert only.ttft_band == around.ttft.around(present(only.predicted_ttft_s))
    assert only.tpot_band == around.tpot.around(present(only.predicted_tpot_s))
