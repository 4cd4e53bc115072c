"""Tables as data frames: their types, and their text as CSV."""

import csv
import io
import subprocess
import sys

import pandas as pd
import pytest

from profilers.records import Record
from tuner.tables import Rows, typed_table
from tuner.verify.records import Verified

TYPES = {"name": "string", "seconds": "float64", "bytes": "Int64", "fits": "boolean"}
NAMES = ("007", "NA", "", "null", '=cmd|"x"', "a\nb\r", "ä,;\t'", "\x1b[2J", "\x00", " ", "1e5")


class Inner(Record):
    size: int


class Outer(Record):
    inner: Inner
    step_band: tuple[float, float] | None
    words: tuple[str, ...] = ()


class Holder(Record):
    rows: Rows[Outer]


def test_types_are_stated_and_hold_without_a_row() -> None:
    rows = [("a", 1.0, 2**62 + 1, True), (None, None, None, None)]
    for given in (rows, [dict(zip(TYPES, row, strict=True)) for row in rows], []):
        frame = typed_table(given, TYPES)
        assert {name: str(kind) for name, kind in frame.dtypes.items()} == TYPES
        assert frame.to_csv(index=False).splitlines()[0] == "name,seconds,bytes,fits"
        assert len(frame) == len(given)
    assert typed_table(rows, TYPES)["bytes"][0] == 2**62 + 1
    with pytest.raises(ValueError, match="4 columns passed, passed data had 2"):
        typed_table([("a", 1.0)], TYPES)


def test_texts_and_numbers_are_written_as_they_are() -> None:
    numbers = (0.1 + 0.2, 1e-7, 1e22, 5e300, float("inf"), -0.0, 40.0, 1 / 3, 2.0**60, 7.0, 1e16)
    rows = [
        (name, value, at, at % 2 == 0)
        for at, (name, value) in enumerate(zip(NAMES, numbers, strict=True))
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([tuple(TYPES), *rows])
    written = typed_table(rows, TYPES).to_csv(index=False)
    assert written == text.getvalue()
    read = pd.read_csv(io.StringIO(written), dtype=str, keep_default_na=False, lineterminator="\n")
    assert read["name"].tolist() == list(NAMES)


def test_records_are_a_tuple_and_called_a_frame() -> None:
    outer = [
        Outer(inner=Inner(size=1), step_band=(0.5, 2.0), words=("x",)),
        Outer(inner=Inner(size=2), step_band=None),
    ]
    held = Holder.model_validate_json(Holder(rows=outer).model_dump_json())
    assert held.rows == tuple(outer)
    frame = held.rows()
    assert frame["inner.size"].tolist() == [1, 2]
    assert frame["step_band_low"].dropna().tolist() == [0.5]
    assert frame["step_band_high"].isna().tolist() == [False, True]
    assert frame["words"].tolist() == [["x"], []]
    assert len(Holder(rows=()).rows()) == 0
    assert Holder.model_json_schema()["properties"]["rows"]["type"] == "array"
    assert Verified.model_json_schema()["properties"]["trials"]["title"] == "Trials"


def test_nothing_is_imported_before_a_frame_is_made() -> None:
    code = (
        "import sys, tuner.api, tuner.tables, tuner.plans.candidates, tuner.backtest.tables\n"
        "import tuner.cli.plan, tuner.cli.profile, tuner.cli.backtest\n"
        "print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
