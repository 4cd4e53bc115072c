"""Backtest and calibrate on a table of serving runs."""

import json
from pathlib import Path

import pytest

from tests.expect import contains
from tuner.cli import backtest, calibrate
from tuner.errors import SpecError

HEADER = (
    "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,"
    "tp_size,silicon_ttft_ms,silicon_tpot_ms"
)
LINE = "{id},db-dump/1; silicon_concurrency=4,vllm,0.18,{model},h200_sxm,fp8,agg,512,64,{tp},{ms},9"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    lines = [
        LINE.format(id="a", model="Llama-3.1-70B", tp=4, ms=50),
        LINE.format(id="b", model="Llama-3.1-8B", tp=1, ms=30),
        LINE.format(id="c", model="Llama-3.1-8B", tp="", ms=20),
    ]
    file = tmp_path / "runs.csv"
    file.write_text("\n".join([HEADER, *lines]) + "\n")
    return file


def test_json_keeps_its_contract(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backtest.command(runs, as_json=True)
    result = json.loads(capsys.readouterr().out)
    names = {"rows", "predicted", "median_ape", "mean_ape", "p90_ape", "bias"}
    names |= {"rank_correlation", "choice_regret"}
    for part in ("ttft", "tpot"):
        assert names <= set(result[part])
        assert result[part]["rows"] == 3
        assert names <= set(result[part]["sources"]["h200_sxm|vllm|agg"])
    assert [row["id"] for row in result["rows"]] == ["a", "b", "c"]


def test_text_names_reasons_and_what_came_from_datasheets(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backtest.command(runs)
    contains(
        capsys.readouterr().out,
        "TPOT by system|engine|mode",
        "1 of h200_sxm|vllm|agg: tp_size is blank ('c')",
        "from the datasheet, which no table holds: 2 of h200_sxm|vllm|agg",
    )


def test_factors_are_written_and_used(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "factors.json"
    calibrate.command("datasheets", runs, out=out)
    assert "without runs of the same model" in capsys.readouterr().out
    backtest.command(runs, profile=[out], as_json=True)
    assert json.loads(capsys.readouterr().out)["residuals"].startswith("fitted to runs.csv")


def test_factors_go_into_a_file(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"end it in \.json"):
        calibrate.command("datasheets", runs, out=tmp_path / "folder")


def test_damaged_factors_are_refused(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "factors.json"
    file.write_text('{"origin": 3}')
    with pytest.raises(SpecError, match=r"factors\.json"):
        backtest.command(runs, profile=[file])
