"""Small files that decode to more than a machine holds."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profilers.errors import ProfileUnreadableError
from profilers.imports.aiconfigurator_columns import read_columns
from profilers.parquet import joined_texts, read_table, to_numbers


def _lists(values: int) -> pa.Table:
    numbers = pa.ListArray.from_arrays(
        pa.array([0, values], pa.int32()), pa.array(np.zeros(values))
    )
    return pa.table({"place": pa.array([1]), "times_s": numbers})


def _texts(rows: int, *, length: int) -> pa.Table:
    word = pa.array(np.zeros(rows, dtype="int32"))
    return pa.table({"name": pa.DictionaryArray.from_arrays(word, pa.array(["x" * length]))})


def test_small_files_that_decode_to_gigabytes_are_refused_before(tmp_path: Path) -> None:
    cases: dict[str, tuple[pa.Table, dict[str, Any], str]] = {
        # 20 million zeros weigh a kilobyte.
        "lists": (
            _lists(20_000_000),
            {"most_unpacked_bytes": 2**27},
            r"1 rows of 1600000\d\d bytes",
        ),
        "texts": (_texts(200_000, length=100_000), {}, "20000000000 bytes of text"),
        "within": (pa.table({"words": pa.array([["a"]])}), {}, "texts within"),
        "rows": (pa.table({"n": pa.array([1, 2, 3])}), {"most_rows": 2}, "3 rows of"),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, (table, limits, reason) in cases.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd", store_schema=False)
        assert path.stat().st_size < 20_000
        del table
        with pytest.raises(ValueError, match=reason):
            read_table(path, **limits)
    with pytest.raises(ProfileUnreadableError, match="of text are too many"):
        read_columns(tmp_path / "texts.parquet")
    # In KiB: what made the files is part of it.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [{"name": name, "n": n} for n, name in enumerate(("a", None, "", "ä", "a"))]
    path = tmp_path / "texts.parquet"
    for options in ({}, {"use_dictionary": False}, {"row_group_size": 2}):
        pq.write_table(pa.Table.from_pylist(rows), path, **options)
        assert joined_texts(read_table(path)).to_pylist() == rows


def test_numbers_become_arrays_without_pandas(tmp_path: Path) -> None:
    # pyarrow's own conversion imports it, and a Ctrl-C in that import is lost.
    kinds = ("int32", "int64", "float32", "float64")
    table = pa.table({kind: np.arange(5, dtype=kind) for kind in kinds})
    pq.write_table(table, tmp_path / "numbers.parquet", row_group_size=2)
    pq.write_table(table.slice(0, 0), tmp_path / "none.parquet")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from profilers.parquet import read_table, to_numbers\n"
        "numbers, none = (read_table(Path(f'{name}.parquet')) for name in ('numbers', 'none'))\n"
        f"for kind in {kinds}:\n"
        "    array = to_numbers(numbers.slice(1)[kind])\n"
        "    assert (array.tolist(), array.dtype.name) == ([1, 2, 3, 4], kind)\n"
        "    assert to_numbers(none[kind]).shape == (0,)\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert np.isnan(to_numbers(pa.array([1, None]))[1])
