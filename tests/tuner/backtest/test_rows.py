"""Reading tables that strangers wrote."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.backtest import rows as module
from tuner.backtest.architecture import parse_shape
from tuner.backtest.layout import COLUMNS, OPTIONAL_COUNTS
from tuner.backtest.rows import read_rows
from tuner.errors import SpecError

RUNS = Path(__file__).parent / "runs.csv"


def _table(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "runs.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_every_line_becomes_a_row() -> None:
    rows = read_rows(RUNS)
    assert len(rows) == 14
    assert rows[0].id == "dense-a"
    assert rows[0].numbers["step_time_s"] == 14.0
    assert rows[0].architecture["hidden"] == 4096
    assert "surprise" not in rows[0].texts


@each_row(
    ("cell", "reason"),
    [
        ("tp\nabc", "tp 'abc' is not a number"),
        ("tp\n-2", "tp '-2' is not a whole number from 1 on"),
        ("tp\n2.5", "tp '2.5' is not a whole number from 1 on"),
        ("tp\n1e300", "tp '1e300' is not a whole number from 1 on"),
        ("step_time_s\nnan", "step_time_s 'nan' is not finite"),
        ("step_time_s\n-inf", "step_time_s '-inf' is not finite"),
        ("step_time_s\n0", "step_time_s '0' is not above 0"),
        ("a2a_overlap\nmaybe", "a2a_overlap 'maybe' is neither true nor false"),
        ("arch_json\n[1]", "arch_json '[1]' is not a JSON object"),
        ("arch_json\n{", "arch_json '{' is not JSON"),
        ('arch_json\n"{""hidden"": NaN}"', """arch_json '{"hidden": NaN}' is not JSON"""),
        ("tp,pp\n1,2,3", "3 cells under 2 columns"),
    ],
)
def test_a_bad_cell_spoils_its_row_alone(tmp_path: Path, cell: str, reason: str) -> None:
    (row,) = read_rows(_table(tmp_path, cell + "\n"))
    assert row.reason == reason


def test_a_deeply_nested_architecture_is_no_crash(tmp_path: Path) -> None:
    (row,) = read_rows(_table(tmp_path, "arch_json\n" + "[" * 50_000 + "\n"))
    assert "is not JSON" in row.reason


def test_a_number_beyond_any_float_is_no_crash(tmp_path: Path) -> None:
    cell = '"{""hidden"": 1' + "0" * 400 + '}"'
    (row,) = read_rows(_table(tmp_path, f"arch_json\n{cell}\n"))
    with pytest.raises(ValueError, match="arch_json: hidden is not a finite number"):
        parse_shape(row)


@each_row(
    ("content", "message"),
    [
        ("", "names none of the columns"),
        ("a,b\n1,2\n", "names none of the columns"),
        ("tp,tp\n1,2\n", "column 'tp' appears twice"),
        ("tp,pp\n\n", "no rows below the header; add one line per measured run"),
        (b"tp\n\xff\n", "byte 3 is not UTF-8"),
        ('tp\n"1\n', "unexpected end of data"),
        ("tp\n" + "1" * 200_000 + "\n", "field larger than field limit"),
    ],
)
def test_an_unusable_file_is_one_error(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_rows(_table(tmp_path, content))


def test_a_file_is_read_no_further_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST_BYTES", 10)
    with pytest.raises(SpecError, match="is larger than"):
        read_rows(_table(tmp_path, "tp\n" + "1\n" * 20))


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read"):
        read_rows(tmp_path / "none.csv")


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=50)
def test_no_cell_makes_the_reader_fail(text: str) -> None:
    for column in COLUMNS:
        row = module.parse_row([column], [text], number=1)
        assert "\n" not in row.reason
        assert all(value > 0.0 or name in OPTIONAL_COUNTS for name, value in row.numbers.items())
