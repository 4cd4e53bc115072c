"""A calibration of runs whose constants were planted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.rows import each_row
from tuner.backtest.assumptions import with_assumptions
from tuner.backtest.columns import build_run, build_runs
from tuner.backtest.prices import build_pricer, run_regime
from tuner.backtest.rows import Row, read_rows
from tuner.calibrate.calibration import Calibration, build_problem, calibrate
from tuner.calibrate.fit import slopes
from tuner.calibrate.report import build_report
from tuner.calibrate.terms import TERMS, Level
from tuner.costs.train.calibration import (
    Correction,
    Residuals,
    Where,
    constants_of,
    read_residuals,
)
from tuner.errors import SpecError

RUNS = Path(__file__).parents[1] / "backtest" / "runs.csv"
PLANTED = {"matmul_ratio": 0.8, "attention_ratio": 1.3}


def _planted() -> tuple[Row, ...]:
    """Many variants of one dense run, with the times that the model gives to planted constants."""
    (base,) = (row for row in read_rows(RUNS) if row.id == "dense-a")
    variants: list[Row] = []
    for hidden in (2048, 4096, 8192):
        for sequence in (2048.0, 8192.0, 32768.0):
            for tensor in (1.0, 2.0):
                architecture = {**base.architecture, "hidden": hidden, "ffn": 4 * hidden}
                numbers = {**base.numbers, "seq": sequence, "tp": tensor}
                name = f"h{hidden}-s{sequence:g}-t{tensor:g}"
                variants.append(
                    replace(
                        base,
                        number=len(variants) + 1,
                        architecture=architecture,
                        numbers=numbers,
                        texts={**base.texts, "id": name, "group": name},
                    )
                )
    runs = [build_run(row) for row in variants]
    planted = Residuals(
        origin="planted",
        data_sha256="",
        rows=0,
        groups=0,
        stated_ratio=0.9,
        covered_ratio=None,
        corrections=(Correction(where=Where(), factors=PLANTED),),
        bands=(),
    )
    seconds = build_pricer(runs).step_s(constants_of([run_regime(run) for run in runs], planted))
    return tuple(
        replace(row, numbers={**row.numbers, "step_time_s": float(step_s)})
        for row, step_s in zip(variants, seconds, strict=True)
    )


@pytest.fixture(scope="module")
def rows() -> tuple[Row, ...]:
    return _planted()


@pytest.fixture(scope="module")
def made(rows: tuple[Row, ...]) -> Calibration:
    terms: dict[str, dict[Level, float]] = {
        "matmul_ratio": {("generation",): 1.0},
        "attention_ratio": {("generation",): 1.0},
    }
    return calibrate(rows, origin="test", data_sha256="0", terms=terms)


def test_planted_constants_are_recovered(made: Calibration) -> None:
    (correction,) = made.residuals.corrections
    assert correction.where == Where(generation="hopper")
    assert correction.factors == pytest.approx(PLANTED, rel=0.01)


def test_held_out_runs_are_predicted_as_well_as_seen_ones(made: Calibration) -> None:
    for name in ("group", "cell", "hidden"):
        assert np.abs(made.held_out[name]).max() < 0.02


def test_the_report_counts_what_was_left_out(rows: tuple[Row, ...], made: Calibration) -> None:
    report = build_report(made, num_rows=len(rows) + 3)
    assert report.skipped == 3
    result = report.cross_validation["group"].sources["lab"]
    assert result.rows == len(rows)
    assert (result.median_ape or 0.0) < 0.02


@pytest.mark.slow
def test_the_same_rows_give_the_same_residuals(rows: tuple[Row, ...]) -> None:
    few = rows[::3]
    first = calibrate(few, origin="test", data_sha256="0").residuals
    assert first.corrections
    assert calibrate(few, origin="test", data_sha256="0").residuals == first


def test_derivatives_are_the_same_priced_side_by_side_and_one_by_one() -> None:
    read = with_assumptions(build_runs(read_rows(RUNS))[0])
    runs = tuple(run for run in read if run.measured_s is not None)
    problem, offsets = build_problem(runs, tuple(map(run_regime, runs)), TERMS)
    assert problem.price_side_by_side is not None
    alone = replace(problem, price_side_by_side=None)
    offset_P = np.random.default_rng(7).normal(0.0, 0.1, len(offsets))
    together_CP, alone_CP = slopes(problem, offset_P), slopes(alone, offset_P)
    assert np.abs(alone_CP).max() > 0.1
    assert together_CP == pytest.approx(alone_CP, abs=1e-12)


def test_residuals_survive_their_file(tmp_path: Path, made: Calibration) -> None:
    path = tmp_path / "residuals.json"
    path.write_text(made.residuals.model_dump_json())
    assert read_residuals(path) == made.residuals
    assert read_residuals(tmp_path) == made.residuals


@each_row(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "origin: Field required"),
        (json.dumps({"schema_version": 9}), "schema_version"),
    ],
)
def test_damaged_residuals_are_one_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "residuals.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read_residuals(path)


def test_too_few_rows_are_one_error(rows: tuple[Row, ...]) -> None:
    with pytest.raises(SpecError, match="1 of 1 rows can be predicted and have a measured time"):
        calibrate(rows[:1], origin="test", data_sha256="0")


def test_one_recipe_alone_sets_no_constant(rows: tuple[Row, ...]) -> None:
    # Two recipes of `lab` share its constants; the one of another software has its own to itself.
    other = replace(rows[2], texts={**rows[2].texts, "release": "torchtitan-0.1"})
    made = calibrate((*rows[:2], other), origin="test", data_sha256="0")
    alone = made.regimes[-1].family
    assert alone != made.regimes[0].family
    result = {offset.where.family for offset in made.offsets}
    assert made.regimes[0].family in result
    assert alone not in result


def test_rows_of_one_recipe_are_one_error(rows: tuple[Row, ...]) -> None:
    alike = [replace(row, texts={**row.texts, "group": "one"}) for row in rows]
    with pytest.raises(SpecError, match="18 rows of 1 recipes share no constant; one is fitted to"):
        calibrate(alike, origin="test", data_sha256="0")
