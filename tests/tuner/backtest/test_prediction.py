"""Predictions of a small table, whole."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.backtest.assumptions import with_assumptions
from tuner.backtest.columns import PublishedRun, build_run
from tuner.backtest.prediction import ResidualSet, backtest, predictions
from tuner.backtest.rows import Row, read_rows
from tuner.costs.train.calibration import Band, Correction, Residuals, Where

RUNS = Path(__file__).parent / "runs.csv"


@pytest.fixture(scope="module")
def rows() -> tuple[Row, ...]:
    return read_rows(RUNS)


def _residuals(**factors: float) -> Residuals:
    return Residuals(
        origin="test",
        data_sha256="",
        rows=1,
        groups=1,
        stated_ratio=0.9,
        covered_ratio=None,
        corrections=(Correction(where=Where(generation="hopper"), factors=factors),),
        bands=(
            Band(where=Where(), low=0.5, high=2.0, groups=1, rows=1),
            Band(where=Where(generation="hopper"), low=0.8, high=1.25, groups=1, rows=1),
        ),
    )


def test_all_rows_are_counted_and_none_is_dropped(rows: tuple[Row, ...]) -> None:
    result = backtest(rows, residual_set=ResidualSet())
    assert len(result.rows) == len(rows) == result.total.rows
    assert result.total.predicted == 6
    assert sum(row.reason is not None for row in result.rows) == 8
    assert all((row.predicted is None) == (row.reason is not None) for row in result.rows)
    assert result.moe_total.rows == 2
    assert set(result.moe_only) == {"bridge"}
    assert set(result.generations) == {"hopper", "blackwell"}


def test_predictions_are_of_the_right_size(rows: tuple[Row, ...]) -> None:
    for row in backtest(rows, residual_set=ResidualSet()).rows:
        if row.predicted is not None and row.measured is not None:
            assert 0.4 < row.predicted / row.measured < 2.5


def test_what_ran_out_of_memory_is_said_not_to_fit(rows: tuple[Row, ...]) -> None:
    result = backtest(rows, residual_set=ResidualSet())
    (too_big,) = [row for row in result.rows if row.id == "too-big"]
    assert too_big.fits is False
    assert result.sources["lab"].false_fits == 0
    assert result.total.false_misfits == 0


def test_corrections_and_bands_hold_where_they_say(rows: tuple[Row, ...]) -> None:
    plain = backtest(rows, residual_set=ResidualSet()).rows
    slower = backtest(rows, residual_set=ResidualSet(default=_residuals(matmul_ratio=0.5))).rows
    for before, after in zip(plain, slower, strict=True):
        if before.predicted is None or after.predicted is None or after.band is None:
            continue
        if "h100" in after.regime:
            assert after.predicted > 1.2 * before.predicted
            assert after.band[1] == pytest.approx(1.25 * after.predicted)
        else:
            assert after.predicted == before.predicted
            assert after.band[1] == pytest.approx(2.0 * after.predicted)


def test_a_profiles_residuals_hold_for_its_device_alone(rows: tuple[Row, ...]) -> None:
    own = ResidualSet(by_device={"h100-sxm": _residuals(matmul_ratio=0.5)})
    plain = {row.id: row.predicted for row in backtest(rows, residual_set=ResidualSet()).rows}
    result = {row.id: row.predicted for row in backtest(rows, residual_set=own).rows}
    assert result["moe-a"] == plain["moe-a"]
    assert (result["dense-a"] or 0.0) > (plain["dense-a"] or math.inf)


def _unknown(rows: tuple[Row, ...], *, release: str, **numbers: float) -> PublishedRun:
    """Return the run of a row that does not say what it recomputes."""
    row = next(row for row in rows if row.id == "dense-c")
    texts = {name: text for name, text in row.texts.items() if name != "recompute"}
    return build_run(
        replace(row, texts={**texts, "release": release}, numbers={**row.numbers, **numbers})
    )


LARGE = {"seq": 65536.0, "mbs": 4.0, "gbs": 8.0}
"""Four sequences of 64 Ki tokens in one micro-batch keep far more than 80 GiB."""


def test_unknown_recomputation_is_nothing_where_that_fits(rows: tuple[Row, ...]) -> None:
    (kept,) = with_assumptions((_unknown(rows, release="megatron-lm-0.14"),))
    assert kept.strategy.recompute_full == kept.strategy.activation_offload == 0.0
    assert "recompute" in kept.assumed


def test_a_pipeline_cannot_offload_and_recomputes(rows: tuple[Row, ...]) -> None:
    run = _unknown(rows, release="megatron-lm-0.14", tp=2.0, pp=2.0, **LARGE)
    (changed,) = with_assumptions((run,))
    assert changed.strategy.recompute_full == 1.0
    assert changed.strategy.activation_offload == 0.0


def test_software_without_offload_recomputes(rows: tuple[Row, ...]) -> None:
    (changed,) = with_assumptions((_unknown(rows, release="llm-foundry-0.1", **LARGE),))
    assert changed.strategy.recompute_full == 1.0
    assert changed.strategy.activation_offload == 0.0


def test_offload_is_chosen_where_the_link_to_the_host_is_fast_enough(
    rows: tuple[Row, ...],
) -> None:
    # At 64 Ki tokens a layer computes longer than its activations take to the host; over a link a
    # thousand times slower they would be waited for.
    run = _unknown(rows, release="megatron-lm-0.14", **LARGE)
    slow = replace(run, hardware=replace(run.hardware, host_bytes_per_s=50e6))
    offloaded, recomputed = with_assumptions((run, slow))
    assert offloaded.strategy.activation_offload > 0.0
    assert offloaded.strategy.recompute_full == 0.0
    assert "cpu_offload_layers" in offloaded.assumed
    assert recomputed.strategy.recompute_full == 1.0


def test_what_is_too_large_is_sharded_before_it_recomputes(rows: tuple[Row, ...]) -> None:
    # 70 GB of weights and gradients on each of 64 devices of 80: no recomputation makes room.
    run = _unknown(
        rows, release="llm-foundry-0.1", num_gpus=64.0, tp=1.0, seq=1024.0, mbs=1.0, gbs=64.0
    )
    shape = replace(run.shape, hidden=8192.0, dense_layers=80.0, dense_ffn=28672.0, heads=64.0)
    wide = replace(run, shape=shape, counts=(80,), strategy=replace(run.strategy, zero_stage=1.0))
    (changed,) = with_assumptions((wide,))
    assert changed.strategy.zero_stage == 3.0
    assert changed.strategy.recompute_full == 0.0
    assert "zero_or_fsdp" in changed.assumed


def test_nothing_to_predict_is_nothing_predicted() -> None:
    assert predictions((), residual_set=ResidualSet()) == ()
    assert backtest((), residual_set=ResidualSet()).total.predicted == 0
