"""Backtests from a file or a data frame."""

from pathlib import Path

import pandas as pd
import pytest

from tuner.backtest import rows
from tuner.backtest.tables import backtest, backtest_serving
from tuner.errors import SpecError

RUNS = Path(__file__).parent / "runs.csv"


def test_a_data_frame_is_read_as_the_file_it_came_from() -> None:
    told = backtest(RUNS)
    for frame in (pd.read_csv(RUNS, dtype=str, keep_default_na=False), pd.read_csv(RUNS)):
        found = backtest(frame)
        assert found.rows == told.rows
        assert found.total == told.total


def test_ids_stay_texts_and_every_row_is_in_the_table() -> None:
    runs = pd.DataFrame({"id": ["007", "NA", ""], "gpu": ["H100", "none", None], "tp": [2, 0, 1]})
    table = backtest(runs).rows()
    assert table["id"].tolist() == ["007", "NA", "row-3"]
    assert table["reason"].notna().all()
    assert {"predicted", "measured", "band_low", "band_high"} <= set(table.columns)
    with pytest.raises(SpecError, match="names none of the columns"):
        backtest(pd.DataFrame({"x": [1]}))
    serving = pd.DataFrame({"id": ["a"], "silicon_ttft_ms": [1.0], "silicon_tpot_ms": [1.0]})
    assert backtest_serving(serving).rows()["id"].tolist() == ["a"]


def test_more_rows_than_a_table_has_are_refused_before_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_ROWS", 3)
    file = tmp_path / "runs.csv"
    file.write_text("tp\n" + "1\n\n" * 3)
    assert len(rows.read_rows(file)) == 3
    file.write_text("tp\n" + "1\n" * 4)
    with pytest.raises(SpecError, match="more than 3 rows; split it"):
        rows.read_rows(file)
