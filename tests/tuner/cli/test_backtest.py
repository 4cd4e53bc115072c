"""Backtest and calibrate as commands."""

import json
from pathlib import Path

import pytest
from pandas import read_csv

from tests.printed import flat
from tests.rows import each_row
from tuner.backtest import layout
from tuner.backtest.serving import layout as serving_layout
from tuner.cli import app as frame
from tuner.cli import backtest, calibrate
from tuner.errors import SpecError

RUNS = Path(__file__).parents[1] / "backtest" / "runs.csv"


def test_the_help_lists_every_column() -> None:
    listed = backtest.command.__doc__ or ""
    assert all(f"\n{name}: " in listed for name in (*layout.COLUMNS, *serving_layout.COLUMNS))


def test_json_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    backtest.command(RUNS, uncalibrated=True, as_json=True)
    result = json.loads(capsys.readouterr().out)
    names = {
        "rows",
        "predicted",
        "median_ape",
        "mean_ape",
        "p90_ape",
        "bias",
        "rank_correlation",
        "choice_regret",
        "false_fits",
        "false_misfits",
    }
    for part in ("sources", "moe_only"):
        assert result[part]
        assert all(names <= set(errors) for errors in result[part].values())
    assert len(result["rows"]) == 14
    assert all({"id", "predicted", "measured", "reason"} <= set(row) for row in result["rows"])


def test_every_row_is_written_as_csv_and_what_was_not_predicted_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backtest.command(RUNS, uncalibrated=True, csv=tmp_path / "rows.csv")
    assert "no arch_json, and Mystery is not known ('no-arch')" in flat(capsys.readouterr().out)
    written = read_csv(tmp_path / "rows.csv")
    assert len(written) == 14
    assert written["id"][0] == "dense-a"
    assert (written["predicted"].isna() == written["reason"].notna()).all()


@each_row("as_json", [False, True])
@each_row("header", ["model,gpu,tp", "id,silicon_ttft_ms,silicon_tpot_ms"])
def test_a_header_alone_is_one_line_with_a_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str, *, as_json: bool
) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text(header + "\n")
    assert frame.run(["backtest", str(runs), *(["--json"] if as_json else [])]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert "no rows below the header; add one line per measured run" in line


def test_dropping_and_naming_residuals_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="give one of them"):
        backtest.command(RUNS, profile=[tmp_path], uncalibrated=True)


def test_a_calibration_is_written_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fitted.json"
    calibrate.command("datasheets", RUNS, out=out, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["residuals"]["rows"] == 5
    assert report["skipped"] == 9
    backtest.command(RUNS, profile=[out], as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["residuals"].startswith("fitted to runs.csv: bridge, lab")
    assert result["is_in_sample"]


def test_a_profile_that_is_none_is_one_error(tmp_path: Path) -> None:
    from profilers.errors import ProfilerError

    with pytest.raises((SpecError, ProfilerError)):
        calibrate.command(str(tmp_path / "none"), RUNS, out=tmp_path / "out")
